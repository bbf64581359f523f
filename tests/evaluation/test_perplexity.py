"""Sliding-window perplexity: every token once, sums not means, the same numbers however windows are
batched.
"""

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from longctx.data.dataset import EncodedDocument
from longctx.data.tokenizer import train
from longctx.evaluation.load import round_matrices
from longctx.evaluation.perplexity import Score, perplexity
from longctx.evaluation.score import Scorer
from longctx.evaluation.windows import spans
from longctx.hf.export import export
from longctx.model import GPT, GPTConfig
from longctx.training.positions import FEWEST, LossByPosition, error_of_ratio
from tests.evaluation.conftest import SHAPE

V = 64


def documents(*lengths: int) -> list[EncodedDocument]:
    rng = np.random.default_rng(0)
    return [EncodedDocument(f"d{n}", rng.integers(V, size=n), 4 * n) for n in lengths]


def nats(model: GPT, ids: np.ndarray) -> Tensor:
    """Return -ln p of each token but the first, (tokens - 1,) fp64, given all tokens before."""
    with torch.no_grad():
        logp = model(torch.from_numpy(ids)[None])[0].double().log_softmax(-1)
    return -logp[:-1].gather(1, torch.from_numpy(ids)[1:, None])[:, 0]


def test_windows_agree_with_the_recipe_of_transformers(model, tmp_path):
    """https://huggingface.co/docs/transformers/perplexity, on the exported model, every token."""
    transformers = pytest.importorskip("transformers")
    train(["a rose"], 300).save(tmp_path / "tokenizer.json")
    export(model, tmp_path, tmp_path / "out", context=256)
    reader = transformers.AutoModelForCausalLM
    llama = reader.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    # A window of `length` tokens there shows at most length - 1 of them, the context here.
    for length, stride, size in [(33, 16, 100), (33, 16, 65), (33, 32, 34), (21, 1, 33)]:
        (document,) = documents(size)
        ids, total, scored, previous = torch.from_numpy(document.ids)[None], 0.0, 0, 0
        for begin in range(0, size, stride):
            end = min(begin + length, size)
            labels = ids[:, begin:end].clone()
            labels[:, : previous - begin if previous else 0] = -100
            with torch.no_grad():
                mean = llama(ids[:, begin:end], labels=labels).loss
            count = int((labels[:, 1:] != -100).sum())
            total, scored, previous = total + mean.item() * count, scored + count, end
            if end == size:
                break
        ours = perplexity(Scorer(model), [document], context=length - 1, stride=stride).total
        assert ours.tokens == scored == size - 1
        assert ours.row()["perplexity"] == pytest.approx(math.exp(total / scored), rel=1e-6)


def test_totals_are_sums_and_not_means(model):
    result = perplexity(Scorer(model), documents(60, 4, 1), context=20)
    total = result.total.row()
    assert (total["tokens"], total["bytes"]) == (59 + 3, 4 * 64)
    assert total["nats"] == pytest.approx(sum(score.nats for score in result.documents))
    assert total["perplexity"] == pytest.approx(math.exp(total["nats"] / 62))
    assert total["bits_per_byte"] == pytest.approx(total["nats"] / math.log(2) / 256)
    assert result.documents[2].tokens == 0
    assert math.isnan(result.documents[2].row()["perplexity"])
    assert Score("x", tokens=1, n_bytes=1, nats=1e4).row()["perplexity"] == math.inf
    assert math.isnan(Score("x", tokens=1, n_bytes=1, nats=math.nan).row()["perplexity"])


@pytest.mark.parametrize("lengths", [(), (1, 1), (0,)])
def test_nothing_to_score_is_refused(model, lengths):
    with pytest.raises(ValueError, match="documents:"):
        perplexity(Scorer(model), documents(*lengths), context=10)


def test_matrices_rounded_once_equal_autocast(model):
    rounded = copy.deepcopy(model)
    round_matrices(rounded, torch.bfloat16)
    assert rounded.embed.weight.dtype == torch.float32
    assert rounded.blocks[0].mlp.down.weight.dtype == torch.bfloat16
    scorers = Scorer(model, torch.bfloat16), Scorer(rounded, torch.bfloat16), Scorer(model)
    one, other, exact = (perplexity(x, documents(80, 9), 40).total.nats for x in scorers)
    assert exact != one == other == pytest.approx(exact, rel=0.02)


def test_the_same_tokens_are_scored_at_every_context(model):
    """Against one forward per target and context over exactly the tokens that it may see."""
    docs, contexts = documents(100, 33, 32, 70), [8, 16, 32]
    result = perplexity(Scorer(model), docs, context=32, contexts=contexts, batch_size=3)
    rows = result.contexts.rows()
    assert [row["context"] for row in rows] == contexts
    assert result.contexts.documents == 3
    assert result.contexts.tokens == 4 * (3 + 1 + 2)  # half of 8 at the end of every 32 tokens
    ends = [(document.ids, end) for document in docs for end in range(32, len(document.ids), 32)]
    losses = {
        n: torch.cat([nats(model, ids[end - n : end + 1])[-4:] for ids, end in ends]).tolist()
        for n in contexts
    }
    for row in rows:
        assert row["nats"] == pytest.approx(sum(losses[row["context"]]), rel=1e-5)
    assert rows[0]["gain"] == 0
    assert rows[-1]["gain"] == pytest.approx(np.subtract(losses[8], losses[32]).mean(), abs=1e-5)
    alone = perplexity(Scorer(model), docs, context=32)
    assert result.total.nats == pytest.approx(alone.total.nats, rel=1e-6)


def test_loss_by_position_is_of_the_same_documents(model):
    docs = documents(40, 33, 32, *[90] * 8, 5)
    rows = perplexity(Scorer(model), docs, context=63).content()["by_position"]
    found = [(row["first"], row["last"], row["tokens"]) for row in rows]
    assert found == [(2**b, 2 ** (b + 1) - 1, 8 * 2**b) for b in range(6)]
    longest = [nats(model, document.ids) for document in docs if len(document.ids) == 90]
    for row in rows:
        expected = torch.stack([losses[row["first"] - 1 : row["last"]] for losses in longest])
        assert row["loss"] == pytest.approx(expected.mean().item(), rel=1e-5)


def test_longest_bucket_is_filled_by_enough_documents():
    few = LossByPosition()
    for count, targets in ((FEWEST - 1, 31), (1, 9), (4, 1), (3, 0)):
        for _ in range(count):
            few.add(np.ones(targets), np.ones(targets, dtype=bool))
    assert [row["tokens"] for row in few.rows()] == [FEWEST, 2 * FEWEST, 4 * FEWEST]
    assert all(row["loss"] == 1 for row in few.rows())
    one = LossByPosition()
    assert one.rows() == []
    one.add(np.arange(40.0), np.arange(40) != 20)  # counts up to its first token that is no target
    assert [row["nats"] for row in one.rows()] == [0, 1 + 2, 3 + 4 + 5 + 6, sum(range(7, 15))]


ROPES = {
    "plain": {},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        **{"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 32},
        **{"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 2.0, 4.0, 8.0]},
    },
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
def test_scores_do_not_depend_on_packing(rope, batch_size):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=V, rope_scaling=rope, context=40, **SHAPE), "naive").eval()
    docs = documents(150, 97, 33, 1, 2, 20, 100, 41)
    docs = [document._replace(name=str(n)) for n, document in enumerate([*docs, *docs])]
    result = perplexity(Scorer(model), docs, context=120, stride=60, batch_size=batch_size)
    for document, score in zip(docs, result.documents, strict=True):
        expected = 0.0
        for begin, end, first in spans(len(document.ids), 120, 60):
            shown = torch.from_numpy(document.ids[begin : end + 1])[None]
            with torch.no_grad():
                losses = model(shown[:, :-1], shown[:, 1:], reduction="none")[0]
            expected += float(losses[first - begin - 1 :].double().sum())
        assert score.nats == pytest.approx(expected, rel=1e-5)


def test_standard_error_is_of_the_mean():
    """Of equal documents it is the textbook one; and other draws differ by about as much."""
    rng = np.random.default_rng(0)
    values = rng.normal(3, 1, 400)
    error = error_of_ratio([(10 * x, 10) for x in values])
    assert error == pytest.approx(values.std(ddof=1) / 20, rel=1e-9)
    tokens = rng.integers(5, 500, (300, 60))
    nats = tokens * rng.normal(3, 0.5, (300, 60))
    errors = [error_of_ratio(pairs) for pairs in np.stack([nats, tokens], axis=-1).tolist()]
    means = nats.sum(axis=1) / tokens.sum(axis=1)
    assert np.mean(errors) == pytest.approx(means.std(), rel=0.15)
    assert math.isnan(error_of_ratio([(3.0, 2)]))


def test_one_document_has_an_error_over_windows(model):
    (document,) = documents(150)
    result = perplexity(Scorer(model), [document], context=40, stride=40)
    each = [nats(model, document.ids[first : first + 41])[:40] for first in range(0, 149, 40)]
    each = [(losses.sum().item(), len(losses)) for losses in each]
    assert result.standard_error == pytest.approx(error_of_ratio(each), rel=1e-4)
    assert math.isnan(perplexity(Scorer(model), [document], context=150).standard_error)
    several = perplexity(Scorer(model), documents(90, 70, 80), context=40)
    of_documents = [(score.nats, score.tokens) for score in several.documents]
    assert several.standard_error == error_of_ratio(of_documents)
