"""On a GPU losses arrive while the next batch is computed: none is read too early, and a long text
costs no tokens × vocabulary memory.
"""

import copy

import numpy as np
import pytest
import torch

from longctx.evaluation.perplexity import perplexity
from longctx.evaluation.scorer import Scorer
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
    assert scores.speed.tokens_per_second


def test_memory_does_not_grow_with_vocabulary_times_tokens() -> None:
    gpu = model(50_000).cuda()
    ids = np.random.default_rng(0).integers(50_000, size=65_537)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    perplexity(Scorer(gpu, torch.bfloat16), [Document("x", ids, 9)], 65_536, 65_536)
    used = torch.cuda.max_memory_allocated() - before
    # All logits would be 13 GB in fp32, in which the loss reads them.
    assert used < 65_536 * 50_000 * 4 / 6
