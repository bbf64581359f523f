"""Sliding-window perplexity: every token once, sums not means, the same numbers however windows are batched."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from longctx.evaluation.perplexity import Document, perplexity, spans
from longctx.model import GPT, GPTConfig

V = 53


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=V, layers=2, channels=32, heads=4, kv_heads=2, ffn=48, init_std=0.3)
    return GPT(config, "flash").eval()


def documents(*lengths: int) -> list[Document]:
    rng = np.random.default_rng(0)
    return [Document(f"d{n}", rng.integers(V, size=n), 4 * n) for n in lengths]


def nats(model: GPT, ids: np.ndarray) -> Tensor:
    """(tokens - 1,) fp64: -ln p of each token but the first, from the logits of all tokens before it."""
    with torch.no_grad():
        logp = model(torch.from_numpy(ids)[None])[0].double().log_softmax(-1)
    return -logp[:-1].gather(1, torch.from_numpy(ids)[1:, None])[:, 0]


def strided(model: GPT, ids: np.ndarray, length: int, stride: int) -> float:
    """transformers' recipe for perplexity: windows of `length` tokens, in which labels seen before are ignored."""
    total, previous = 0.0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + length, len(ids))
        window = nats(model, ids[begin:end])
        total += window[max(0, previous - begin - 1) if previous else 0 :].sum().item()
        previous = end
        if end == len(ids):
            break
    return total


@pytest.mark.parametrize("context", [1, 2, 5, 8, 64])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 8, 9, 10, 33, 64, 65, 66])
def test_every_token_is_scored_once_with_enough_context(tokens: int, context: int) -> None:
    for stride in range(1, context + 1):
        scored: list[int] = []
        for begin, end, first in spans(tokens, context, stride):
            assert 0 < end - begin <= context
            assert begin < first <= end < tokens
            assert begin == 0 or first - begin == context - stride + 1
            scored += range(first, end + 1)
        assert scored == list(range(1, tokens))


def test_one_window_is_the_whole_document_exactly(model: GPT) -> None:
    given = documents(150, 97, 2)
    result = perplexity(model, given, context=150)
    for score, document in zip(result.documents, given, strict=True):
        expected = nats(model, document.ids)
        assert score.tokens == len(document.ids) - 1
        assert score.perplexity == pytest.approx(math.exp(expected.mean().item()), rel=1e-5)
        assert score.nats == pytest.approx(expected.sum().item(), rel=1e-5)


@pytest.mark.parametrize(("length", "stride"), [(33, 16), (33, 32), (21, 1), (64, 40)])
def test_windows_agree_with_the_strided_recipe(model: GPT, length: int, stride: int) -> None:
    """A window of `length` tokens there shows at most length - 1 of them, the context here, to a prediction."""
    given = documents(100, 33, 34, 20)
    result = perplexity(model, given, context=length - 1, stride=stride)
    for score, document in zip(result.documents, given, strict=True):
        assert score.nats == pytest.approx(strided(model, document.ids, length, stride), rel=1e-6)


def test_context_helps_where_it_is_read(model: GPT) -> None:
    """Scores differ between windows, so that a mistake in which window scores a token cannot hide."""
    document = documents(100)
    assert perplexity(model, document, 8).total.nats != pytest.approx(
        perplexity(model, document, 99).total.nats, rel=1e-3
    )


@pytest.mark.parametrize("batch_size", [1, 2, 7, 100])
def test_batches_and_neighbours_change_nothing(model: GPT, batch_size: int) -> None:
    given = documents(70, 5, 1, 2, 11, 30, 3)
    together = perplexity(model, given, context=24, stride=10, batch_size=batch_size)
    for score, document in zip(together.documents, given, strict=True):
        if len(document.ids) > 1:
            alone = perplexity(model, [document], context=24, stride=10)
            assert score.nats == pytest.approx(alone.total.nats, rel=1e-6)


def test_totals_are_sums_and_not_means(model: GPT) -> None:
    result = perplexity(model, documents(60, 4, 1), context=20)
    total = result.total
    assert total.tokens == 59 + 3
    assert total.n_bytes == 4 * 64
    assert total.nats == pytest.approx(sum(score.nats for score in result.documents))
    assert total.perplexity == pytest.approx(math.exp(total.nats / 62))
    assert total.bits_per_byte == pytest.approx(total.nats / math.log(2) / 256)
    assert result.documents[2].tokens == 0
    assert math.isnan(result.documents[2].perplexity)


class Uniform(nn.Module):
    """Gives every byte the same probability, whatever comes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.anything = nn.Parameter(torch.zeros(1))

    def forward(self, tokens: Tensor, targets: Tensor, mask: object, reduction: str) -> Tensor:
        assert reduction == "none"
        assert not torch.is_grad_enabled()
        assert not self.training
        return torch.full(targets.shape, math.log(256), dtype=torch.float64) * (targets != -100)


def test_bits_per_byte_of_uniform_bytes_is_8() -> None:
    text = "naïve – 𝄞".encode()
    document = Document("bytes", np.frombuffer(text, dtype=np.uint8).astype(np.int64), len(text) - 1)
    result = perplexity(Uniform(), [document] * 3, context=4, stride=3)
    assert result.total.bits_per_byte == pytest.approx(8, rel=1e-15)
    assert result.total.perplexity == pytest.approx(256, rel=1e-12)


def test_the_model_is_left_as_it_was() -> None:
    model = Uniform().train()
    perplexity(model, documents(9), context=4)
    assert model.training


def test_documents_are_read_as_they_are_needed(model: GPT) -> None:
    read = 0

    def endless() -> Iterable[Document]:
        nonlocal read
        for document in documents(*[40] * 8):
            read += 1
            yield document
        raise AssertionError("read on after the last window")

    with pytest.raises(AssertionError):
        perplexity(model, endless(), context=10, batch_size=2)
    assert read == 8


@pytest.mark.parametrize("stride", [0, -1, 11])
def test_a_stride_that_leaves_tokens_out_is_refused(model: GPT, stride: int) -> None:
    with pytest.raises(ValueError, match=f"stride={stride}: from 1 to seq_len=10"):
        perplexity(model, documents(30), context=10, stride=stride)


@pytest.mark.parametrize("lengths", [(), (1, 1), (0,)])
def test_nothing_to_score_is_said(model: GPT, lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"none of the {len(lengths)} documents has 2 tokens"):
        perplexity(model, documents(*lengths), context=10)


def test_autocast_stays_near(model: GPT) -> None:
    exact = perplexity(model, documents(80), context=40).total
    rounded = perplexity(model, documents(80), context=40, dtype=torch.bfloat16).total
    assert rounded.nats != exact.nats
    assert rounded.nats == pytest.approx(exact.nats, rel=0.02)
