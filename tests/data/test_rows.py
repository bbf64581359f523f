"""From files to sequences: every token but a document's first is predicted exactly once, and never
from another document.
"""

from collections import Counter
from itertools import pairwise

import pytest
import torch

from longctx.data import load
from longctx.data.rows import IGNORED, PADDING_PIECE

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
    data = load(text_config(), seq_len)
    filled = 0
    for index in range(len(data.train)):
        row = data.train[index]
        padding = int(row.pop("padding"))
        assert all(x.shape == (seq_len,) and x.dtype == torch.int64 for x in row.values())
        of_padding = row["doc_ids"][seq_len - padding :]
        assert not padding or int(of_padding.bincount().max()) <= PADDING_PIECE
        assert of_padding[:1].tolist() != row["doc_ids"][: seq_len - padding][-1:].tolist()
        assert (row["targets"][seq_len - padding :] == IGNORED).all()
        filled += seq_len - padding
        assert row["doc_ids"][0] == 0
        assert set(row["doc_ids"].diff().tolist()) <= {0, 1}
    counts = data.summary()
    assert counts["train_tokens"] == int(data.lengths[data.split["train"]].sum())
    share = filled / (len(data.train) * seq_len)
    assert share == pytest.approx(counts["train_efficiency"], abs=1e-6)


@pytest.mark.parametrize(("fraction", "count"), [(0, 0), (1e-9, 1)])
def test_smallest_fractions_of_validation(text_config, fraction, count):
    data = load(text_config(val_fraction=fraction), 32)
    assert data.summary()["val_documents"] == len(list(data.documents("val"))) == count
    assert (len(data.val) > 0) == (count > 0)


def test_nothing_to_predict_is_refused(text_config, corpus):
    with pytest.raises(ValueError, match="seq_len=1"):
        load(text_config(), 1)
    for file in corpus.iterdir():
        file.write_text("")
    with pytest.raises(ValueError, match=r"data\.path=.*corpus: "):
        load(text_config(), 16)


def test_a_changed_file_is_read_again(text_config, corpus):
    before = load(text_config(), 16)
    (corpus / "00.txt").write_text("now something else entirely")
    after = load(text_config(), 16)
    assert before.fingerprint != after.fingerprint
    documents = [d for split in ("train", "val") for d in after.documents(split)]
    texts = [after.tokenizer.decode(d.ids[:-1]) for d in documents if d.name == "00.txt"]
    assert texts == ["now something else entirely"]
