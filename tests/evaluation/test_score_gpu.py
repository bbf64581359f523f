"""On a GPU: losses arrive while the next batch is computed, a long text costs no tokens ×
vocabulary memory, and answers of several batches replay one CUDA graph.
"""

import copy

import numpy as np
import pytest
import torch

from longctx.evaluation.load import round_matrices
from longctx.evaluation.perplexity import perplexity
from longctx.evaluation.score import Scorer
from longctx.evaluation.windows import Document
from longctx.model import GPT, GPTConfig

pytestmark = pytest.mark.gpu


def model(vocab_size: int) -> GPT:
    torch.manual_seed(0)
    shape = {"layers": 2, "channels": 256, "heads": 4, "kv_heads": 2, "ffn": 512, "init_std": 0.1}
    return GPT(GPTConfig(vocab_size=vocab_size, **shape), "flash").eval()


def test_many_batches_agree_with_the_cpu() -> None:
    rng = np.random.default_rng(0)
    documents = [
        Document(str(n), rng.integers(1000, size=int(size)), 9)
        for n, size in enumerate(rng.integers(2, 700, 60))
    ]
    cpu = model(1000)
    gpu = copy.deepcopy(cpu).cuda()
    expected = perplexity(Scorer(cpu), documents, 256, 100, batch_size=4)
    for rows in (1, 3, 16):
        scores = perplexity(Scorer(gpu), documents, 256, 100, batch_size=rows)
        for a, b in zip(scores.documents, expected.documents, strict=True):
            assert a.nats == pytest.approx(b.nats, rel=2e-3)
    assert scores.tokens_per_second


def test_memory_holds_no_logits_of_all_tokens() -> None:
    gpu = model(50_000).cuda()
    ids = np.random.default_rng(0).integers(50_000, size=65_537)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    perplexity(Scorer(gpu, torch.bfloat16), [Document("x", ids, 9)], 65_536, 65_536)
    used = torch.cuda.max_memory_allocated() - before
    # All logits would be 13 GB in fp32, in which the loss reads them.
    assert used < 65_536 * 50_000 * 4 / 6


@pytest.mark.parametrize("tied", [True, False])
def test_a_reused_graph_answers_as_launches(tied: bool) -> None:
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
