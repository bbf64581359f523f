"""Documents by length: which are used, how often they are drawn, and how far their tokens look."""

from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from longctx.cli import main
from longctx.data import DataConfig, load
from longctx.data.selection import grouped
from tests.data.conftest import check_refused, prose

LENGTHS = {"-50": 1, "50-500": 4, "500-": 0.5}


@pytest.fixture
def config(text_config):
    return text_config(lengths=LENGTHS, val_fraction=0.02)


def test_a_sequence_has_documents_of_one_range(config):
    data, seen = load(config, 128), Counter()
    part = data.parts[""]
    packing, lengths = part.packings["train"], part.store.lengths
    for first, end in zip(packing.bounds, packing.bounds[1:], strict=False):
        inside = lengths[packing.document[first:end]]
        assert len(set(np.digitize(inside, [50, 500]).tolist())) == 1
    for document, length in zip(packing.document, packing.length, strict=True):
        seen[int(document)] += int(length)
    # None of their tokens is lost
    starts, stops = part.span("train")
    tokens = stops - starts - (stops < lengths[part.split["train"]])
    assert seen == dict(zip(part.split["train"].tolist(), tokens.tolist(), strict=True))


def test_ranges_are_drawn_by_their_weights(config):
    data = load(config, 128)
    counts = [count for count, _ in data.parts[""].groups()]
    assert len(counts) == 3 and sum(counts) == len(data.train)
    drawn = np.array(list(islice(data.order(3, 0, 1, 0), 20_000)))
    of_range = np.bincount(np.searchsorted(np.cumsum(counts), drawn, side="right"))
    wanted = np.array(counts) * [1, 4, 0.5]
    assert of_range / 20_000 == pytest.approx(wanted / wanted.sum(), abs=0.015)
    assert list(islice(data.order(3, 0, 1, 777), 500)) == drawn[777:1277].tolist()


def test_a_range_ends_before_its_second_number():
    config = DataConfig(lengths={"4-8": 2, "12-": 3})
    group, weights = grouped(config, np.array([3, 4, 7, 8, 11, 12]))
    assert (group.tolist(), weights.tolist()) == ([0, 1, 1, 0, 0, 2], [1, 2, 3])


def test_weights_of_one_range_change_no_order(text_config):
    plain, *others = (load(text_config(lengths=x), 64) for x in ({}, {"0-": 2}, {"1m-": 7}))
    orders = [list(islice(data.order(1, 0, 1, 0), 300)) for data in (plain, *others)]
    assert orders[0] == orders[1] == orders[2]
    assert plain.fingerprint not in [other.fingerprint for other in others]


def test_members_of_a_mix_have_their_own_weights(text_config, corpus):
    member = {"path": str(corpus)}
    mix = {"a": member | {"lengths": LENGTHS, "weight": 3}, "b": member}
    data = load(text_config(source="mix", path=None, mix=mix, val_fraction=0.02), 64)
    drawn = np.array(list(islice(data.order(1, 0, 1, 0), 8000)))
    assert (drawn < len(data.parts["a"].sequences("train"))).mean() == pytest.approx(0.75, abs=0.02)
    assert [len(part.groups()) for part in data.parts.values()] == [3, 1]


def test_shortest_and_longest_are_left_out(text_config):
    everything = load(text_config(), 64)
    lengths = dict(zip(names(everything), everything.lengths.tolist(), strict=True))
    limits = sorted(lengths.values())[5], sorted(lengths.values())[-5]
    data = load(text_config(min_tokens=limits[0], max_tokens=limits[1]), 64)
    kept = {name for name, length in lengths.items() if limits[0] <= length <= limits[1]}
    assert names(data) == [name for name in lengths if name in kept] and len(kept) > 9
    assert {d.name.split(" (")[0] for s in ("train", "val") for d in data.documents(s)} == kept
    for document in data.documents("train"):
        assert document.n_bytes > 0 and document.ids[-1] == data.tokenizer.eos_id
    assert "1 without text, 3 shorter than data.min_tokens" in data.summary()["left_out"]
    assert data.summary()["documents"] == len(kept)
    assert data.fingerprint != everything.fingerprint
    check_refused(text_config(min_tokens=10**6), "23 are shorter than data.min_tokens=1,000,000")


def names(data):
    store = data.parts[""].store
    return [store.name(number) for number in range(len(store))]


def test_gzip_leaves_out_the_extremes(text_config, tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(10):
        repeated = "over and over " * 200 + str(number)
        noise = "".join(map(chr, rng.integers(33, 1000, 2000)))
        texts = {"usual": prose(300, number), "repeated": repeated, "noise": noise}
        for name, text in texts.items():
            (folder / f"{name}{number}.txt").write_text(text)
    data = load(text_config(path=str(folder), filter="gzip"), 64)
    kinds = Counter(name.rstrip("0123456789.tx") for name in names(data))
    assert kinds == {"usual": 10, "repeated": 4, "noise": 4}
    assert data.summary()["left_out"] == "12 by data.filter=gzip"
    assert names(load(text_config(path=str(folder), filter="gzip"), 64)) == names(data)


@pytest.mark.parametrize("lengths", [{}, LENGTHS])
@pytest.mark.parametrize("seq_len", [64, 700])
def test_tokens_before_a_token_are_counted(config, seq_len, lengths):
    data = load(replace(config, lengths=lengths), seq_len)
    part = data.parts[""]
    packing, far, tokens = part.packings["train"], 0, 0
    # Each sequence once, or often enough for the weights
    for number in islice(data.order(1, 0, 1, 0), 4000 if lengths else len(data.train)):
        for length in packing.length[slice(*packing.bounds[number : number + 2])].tolist():
            tokens += length
            far += sum(position > 50 for position in range(length))
    assert part.share_beyond(50) == pytest.approx(far / tokens, abs=0.02 if lengths else 1e-9)


def test_documents_that_do_not_reach_are_mentioned(text_config):
    each = (load(text_config(), n).summary()["far_back"] for n in (64, 4096, 50_000))
    reached, first, missed = each
    assert "more than 2,048 of their own document" in first
    assert "hardly" not in reached and "more than 32 of their own document: " in reached
    assert "hardly reach half of seq_len=50,000" in missed and "32,768" in missed


def test_data_prints_shares_and_takes_lengths(corpus, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("data: {source: text, lengths: {8k-32k: 1, 128k-: 5}}\n")
    words = [f"data.path={corpus}", f"data.cache={tmp_path}", "seq_len=64", "data.vocab_size=400"]
    assert main(["data", str(tmp_path / "run.yaml"), *words, "data.lengths.-1k=3"]) == 0
    printed = capsys.readouterr().out
    assert "more than N tokens" in printed and "█" in printed
    assert "no document has 8,192 to 32,767, 131,072 and more tokens" in printed
    assert any(x.startswith("0 to 1,023") and "100.0%" in x for x in printed.splitlines())


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"8k": 1}, "data.lengths.8k=1: 8k is no range"),
        ({"-": 1}, "- is no range"),
        ({"8k-4k": 1}, "8k-4k is no range"),
        ({"4k-": 0}, "data.lengths.4k-=0: .*data.min_tokens"),
        ({"4k-": 1e308}, r"data.lengths.4k-=1e\+308: above 0 to 10\^6"),
        ({"4k-": "x"}, "data.lengths.4k-=x: must be a number"),
        ({"6k-": 2, "4k-8k": 1}, "two ranges have documents of 6,144 tokens"),
    ],
)
def test_a_wrong_range_is_one_line(text_config, lengths, message):
    check_refused(text_config(lengths=lengths), message)
    mix = {"a": {"source": "embedded", "lengths": lengths}}
    check_refused(text_config(source="mix", path=None, mix=mix), message)
