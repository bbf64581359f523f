"""Forward passes of an evaluation: greedy answers of several prompts."""

import copy

import numpy as np
import pytest
import torch

from longctx.data.dataset import EncodedDocument
from longctx.evaluation.load import round_matrices
from longctx.evaluation.perplexity import perplexity
from longctx.evaluation.score import Scorer
from longctx.model import GPT, GPTConfig

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 9]]


def test_answers_are_greedy_and_end(model):
    expected = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    assert Scorer(model).answers(PROMPTS, 6, [63], 11) == expected
    end = expected[0][2]
    until = [row[: row.index(end)] if end in row else row for row in expected]
    assert Scorer(model).answers(PROMPTS, 6, [end], 11) == until


def test_batches_that_share_a_cache_do_not_see_one_another(model):
    scorer = Scorer(model)
    for prompts in (PROMPTS, [[6, 5], [4]], [[3, 2, 1], [8] * 5, [9, 1, 9, 1]], [*PROMPTS, [5]]):
        alone = [Scorer(model).answers([prompt], 6, [63], 11)[0] for prompt in prompts]
        assert scorer.answers(prompts, 6, [63], 11) == alone


def test_a_batch_stops_when_each_answer_has_ended(model):
    seen: list[tuple[int, int]] = []

    def has_ended(number: int, tokens: list[int]) -> bool:
        seen.append((number, len(tokens)))
        return len(tokens) == 2 + number

    answers = Scorer(model).answers([[1, 2], [7]], 9, [63], 11, has_ended)
    assert list(map(len, answers)) == [2, 3]
    assert max(count for _, count in seen) == 3


# On a GPU: losses arrive while the next batch is computed, a long text costs no tokens × vocabulary
# memory, and answers of several batches replay one CUDA graph


def wide(vocab_size: int) -> GPT:
    torch.manual_seed(0)
    shape = {"layers": 2, "channels": 256, "heads": 4, "kv_heads": 2, "ffn": 512, "init_std": 0.1}
    return GPT(GPTConfig(vocab_size=vocab_size, **shape), "flash").eval()


@pytest.mark.gpu
def test_many_batches_agree_with_the_cpu():
    rng = np.random.default_rng(0)
    documents = [
        EncodedDocument(str(n), rng.integers(1000, size=int(size)), 9)
        for n, size in enumerate(rng.integers(2, 700, 60))
    ]
    cpu = wide(1000)
    gpu = copy.deepcopy(cpu).cuda()
    expected = perplexity(Scorer(cpu), documents, 256, 100, batch_size=4)
    for rows in (1, 3, 16):
        scores = perplexity(Scorer(gpu), documents, 256, 100, batch_size=rows)
        for a, b in zip(scores.documents, expected.documents, strict=True):
            assert a.nats == pytest.approx(b.nats, rel=2e-3)


@pytest.mark.gpu
def test_memory_holds_no_logits_of_all_tokens():
    gpu = wide(50_000).cuda()
    ids = np.random.default_rng(0).integers(50_000, size=65_537)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    perplexity(Scorer(gpu, torch.bfloat16), [EncodedDocument("x", ids, 9)], 65_536, 65_536)
    used = torch.cuda.max_memory_allocated() - before
    # All logits would be 13 GB in fp32, in which the loss reads them.
    assert used < 65_536 * 50_000 * 4 / 6


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [True, False])
def test_a_reused_graph_answers_as_launches(tied):
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
