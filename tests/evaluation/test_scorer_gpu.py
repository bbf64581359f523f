"""On a GPU answers of several batches replay one CUDA graph, and are those of single launches."""

import pytest
import torch

from longctx.evaluation.scorer import Scorer
from longctx.evaluation.weights import round_matrices
from longctx.model import GPT, GPTConfig

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tied", [True, False])
def test_a_graph_of_an_earlier_batch_answers_as_single_launches(
    tied: bool,
) -> None:
    torch.manual_seed(0)
    sizes = {"layers": 2, "channels": 128, "heads": 4, "kv_heads": 2, "ffn": 256, "init_std": 0.2}
    model = GPT(GPTConfig(vocab_size=307, tied=tied, **sizes), "flash").cuda().eval()
    model.requires_grad_(False)
    round_matrices(model, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    batches = [
        [torch.randint(306, (n,), generator=generator).tolist() for n in lengths]
        for lengths in ((90, 13, 61), (80, 1, 33), (57,), (12, 88, 4))
    ]
    graph = Scorer(model, torch.bfloat16)
    ours = [graph.answers(prompts, 30, [306], 128) for prompts in batches]
    assert graph.decoder is not None
    assert graph.decoder.graph is not None
    plain = Scorer(model, torch.bfloat16)
    plain.graphs = False
    assert [plain.answers(prompts, 30, [306], 128) for prompts in batches] == ours
    assert plain.decoder is not None
    assert plain.decoder.graph is None
