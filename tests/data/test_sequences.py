"""From files to sequences: every token but a document's first is predicted exactly once, and never
from another document. The order of samples: shares by weight, every sequence once an epoch, the
same after a resume and on any number of ranks.
"""

from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest
import torch

from longctx.data import load
from longctx.data.packing import best_fit_decreasing
from longctx.data.sequences import IGNORED, PADDING_PIECE, SampleStream, permutation
from tests.data.conftest import check_refused

SEQ_LENS = (2, 7, 33, 256)


def pieces(row):
    """Yield (tokens, targets) of each piece of a sequence; the padding too, if there is any."""
    for number in range(int(row["doc_ids"][-1]) + 1):
        inside = row["doc_ids"] == number
        yield row["tokens"][inside].tolist(), row["targets"][inside].tolist()


@pytest.mark.parametrize("seq_len", SEQ_LENS)
@pytest.mark.parametrize("split", ["train", "val"])
def test_every_token_but_the_first_is_a_target(text_config, seq_len, split):
    data = load(text_config(), seq_len)
    rows, eos = getattr(data, split), data.tokenizer.eos_id
    scored, inputs, expected, present = Counter(), Counter(), Counter(), Counter()
    for document in data.documents(split):
        ids = document.ids.tolist()
        expected.update(pairwise(ids))
        present.update(ids)
    for index in range(len(rows)):
        for tokens, targets in pieces(rows[index]):
            scored.update((a, b) for a, b in zip(tokens, targets, strict=True) if b != IGNORED)
            if any(target != IGNORED for target in targets) or tokens == [eos]:
                inputs.update(tokens)
            following = zip(targets[:-1], tokens[1:], strict=True)
            assert all(target == token for target, token in following if target != IGNORED)
    assert scored == expected
    assert inputs - Counter({eos: inputs[eos]}) == present - Counter({eos: present[eos]})


@pytest.mark.parametrize("seq_len", SEQ_LENS)
def test_sequences_keep_their_contract(text_config, seq_len):
    data, filled = load(text_config(), seq_len), 0
    for row in (data.train[index] for index in range(len(data.train))):
        padding = int(row.pop("padding"))
        assert all(x.shape == (seq_len,) and x.dtype == torch.int64 for x in row.values())
        own, of_padding = row["doc_ids"].split([seq_len - padding, padding])
        assert not padding or int(of_padding.bincount().max()) <= PADDING_PIECE
        assert of_padding[:1].tolist() != own[-1:].tolist()
        assert (row["targets"][seq_len - padding :] == IGNORED).all()
        assert own[0] == 0 and set(row["doc_ids"].diff().tolist()) <= {0, 1}
        filled += len(own)
    counts = data.summary()
    assert counts["train_tokens"] == int(data.lengths[data.parts[""].split["train"]].sum())
    share = filled / (len(data.train) * seq_len)
    assert share == pytest.approx(counts["train_efficiency"], abs=1e-6)


@pytest.mark.parametrize(("fraction", "count"), [(0, 0), (1e-9, 1)])
def test_smallest_fractions_of_validation(text_config, fraction, count):
    data = load(text_config(val_fraction=fraction), 32)
    assert data.summary()["val_documents"] == len(list(data.documents("val"))) == count
    assert (len(data.val) > 0) == (count > 0)


def test_nothing_to_predict_is_refused(text_config, corpus):
    check_refused(text_config(), "seq_len=1", 1)
    for file in corpus.iterdir():
        file.write_text("")
    check_refused(text_config(), r"data\.path=.*corpus: ")


@pytest.mark.parametrize("sources", [([1], [1.0]), ([31], [1.0]), ([5, 13], [1.0, 2.5])])
@pytest.mark.parametrize("consumed", [0, 1, 30, 31, 1000, 7000])
@pytest.mark.parametrize("ranks", [1, 3, 8, 40])
def test_resumed_order_is_the_uninterrupted_one(sources, consumed, ranks):
    streams = [iter(SampleStream(*sources, 9, rank, ranks, consumed)) for rank in range(ranks)]
    together = [next(streams[sample % ranks]) for sample in range(120)]
    assert together == list(islice(SampleStream(*sources, 9), consumed + 120))[consumed:]


@pytest.mark.parametrize("rows", [1, 2, 13, 64])
def test_an_epoch_shows_every_sequence_once(rows):
    samples = list(islice(SampleStream([rows], [1.0], 3), 4 * rows))
    epochs = [samples[epoch * rows : (epoch + 1) * rows] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    if rows > 10:
        assert len({tuple(epoch) for epoch in epochs}) == 4
        assert epochs[0] != list(islice(SampleStream([rows], [1.0], 4), rows))


def test_weights_are_shares_of_sequences():
    rows = np.array(list(islice(SampleStream([5, 13, 400], [1.0, 2.5, 6.5], 0), 20_000)))
    shares = np.bincount(np.searchsorted([5, 18], rows, side="right")) / len(rows)
    assert shares == pytest.approx([0.1, 0.25, 0.65], abs=0.01)
    of_first = rows[rows < 5]
    epochs = of_first[: len(of_first) // 5 * 5].reshape(-1, 5)
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert set(rows.tolist()) == set(range(418))


def test_order_does_not_change_with_a_release():
    assert permutation(8, seed=0, epoch=0).tolist() == [4, 0, 1, 7, 6, 2, 5, 3]
    assert permutation(8, seed=1337, epoch=2).tolist() == [7, 6, 1, 2, 4, 5, 0, 3]
    mixed = islice(SampleStream([5, 13], [1.0, 2.5], 9), 8)
    assert list(mixed) == [17, 6, 14, 12, 1, 7, 13, 9]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("seq_len", [13, 100])
def test_packing_is_the_textbook_algorithm(seed, seq_len):
    lengths = np.random.default_rng(seed).integers(1, seq_len + 1, 150)
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [row for row, capacity in enumerate(rooms) if capacity >= length]
        if fitting:
            rooms[min(fitting, key=lambda row: rooms[row])] -= length
        else:
            rooms.append(seq_len - length)
    row_of, rows = best_fit_decreasing(lengths, seq_len)
    assert rows == len(rooms)
    filled = np.bincount(row_of, lengths).tolist()
    assert sorted(filled) == sorted(seq_len - capacity for capacity in rooms)
