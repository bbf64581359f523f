"""Properties that hold for whatever comes: masks, packing, words of a command line, run folders.

The examples are the same in every run; LONGCTX_FUZZ=1000 tries so many new ones of each property.
What they find becomes a test with a name of its own.
"""

import copy
import json
import os
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("hypothesis")  # of the extra `test`

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longctx import cli
from longctx.attention import Mask, attention
from longctx.cli import parse
from longctx.config.train_config import TrainConfig
from longctx.data.packing import pack
from longctx.report.compare import read_all, table_of
from longctx.runs import metrics
from tests.report.run_files import make

EXAMPLES = int(os.environ.get("LONGCTX_FUZZ", "0"))


def examples(count: int) -> Any:
    """Settings of a property that is tried on `count` examples."""
    return settings(
        max_examples=EXAMPLES or count,
        deadline=None,
        derandomize=not EXAMPLES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


# Masks

lengths = st.integers(1, 70)


@st.composite
def masks(draw: st.DrawFn) -> tuple[Mask, torch.Tensor]:
    """A mask of one row of Tq queries, and (Tq, Tk) bool as its definition says."""
    kind = draw(st.sampled_from(["causal", "documents", "intervals", "full"]))
    Tk = draw(lengths)
    Tq = Tk if kind == "documents" else draw(lengths)
    window = draw(st.none() | st.integers(1, 80))
    i, j = torch.arange(Tq)[:, None] + (Tk - Tq), torch.arange(Tk)[None]
    causal = (j <= i) & (j > i - (window or 10**6))
    if kind == "full":
        return Mask.full(), torch.ones(Tq, Tk, dtype=torch.bool)
    if kind == "causal":
        return Mask.causal(window), causal
    if kind == "documents":
        steps = draw(st.lists(st.sampled_from([0, 0, 0, 1, 5]), min_size=Tq, max_size=Tq))
        ids = torch.tensor(steps).cumsum(0)
        return Mask.documents(ids[None], window), causal & (ids[:, None] == ids[None])
    ends = [st.lists(st.integers(-2, Tk + 2), min_size=Tq, max_size=Tq) for _ in range(2)]
    first, last = (torch.tensor(sorted(draw(one))) for one in ends)
    first, last = first.clamp(0, Tk), last.clamp(-1, Tk - 1)
    visible = (j >= first[:, None]) & (j <= last[:, None])
    return Mask.intervals(first[None].int(), last[None].int()), visible


@given(masks(), st.integers(0, 2**31))
@examples(40)
def test_attention_is_its_definition_under_any_mask(case, seed):
    mask, visible = case
    Tq, Tk = visible.shape
    assert mask.pairs(1, Tq, Tk) == int(visible.sum())
    bound, i, j = mask.bind(1, Tq, Tk, "cpu"), torch.arange(Tq), torch.arange(Tk)
    assert torch.equal((bound.first.mT <= j) & (j <= bound.last.mT), visible)
    assert torch.equal((bound.qfirst.mT <= i) & (i <= bound.qlast.mT), visible.mT)
    for ends in (bound.first, bound.last, bound.qfirst, bound.qlast):
        assert ends.dtype == torch.int32 and (ends.diff() >= 0).all()
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(1, Tq, 2, 8, generator=g, requires_grad=True)
    k, v = (torch.randn(1, Tk, 1, 8, generator=g, requires_grad=True) for _ in range(2))
    scores = torch.einsum("qhd,kd->hqk", q[0], k[0, :, 0]) * 0.3
    scores = scores.masked_fill(~visible, -torch.inf)
    weights = torch.nan_to_num(scores.softmax(-1))
    expected = torch.einsum("hqk,kd->qhd", weights, v[0, :, 0])
    expected = torch.where(visible.any(-1)[:, None, None], expected, torch.zeros(()))
    for backend in ("naive", "flash"):
        out, lse = attention(q, k, v, mask, backend, scale=0.3, return_lse=True)
        torch.testing.assert_close(out[0], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[0], scores.logsumexp(-1), rtol=1e-4, atol=1e-5)
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
        assert all(torch.isfinite(x).all() for x in gradients)
        blind = ~visible.any(-1)
        assert not gradients[0][0, blind].any() and not out[0, blind].any()


# Packing


@given(st.lists(st.integers(0, 300), max_size=60), st.integers(2, 64))
@examples(100)
def test_packing_has_every_token_once_and_fits(sizes, seq_len):
    documents = np.arange(len(sizes), dtype=np.int64)
    packing = pack(np.asarray(sizes, dtype=np.int64), seq_len, documents)
    placed = [np.zeros(size, np.int64) for size in sizes]
    pieces = zip(packing.document, packing.start, packing.length, strict=True)
    for document, start, length in pieces:
        placed[document][start : start + length] += 1
    assert all((one == 1).all() for one in placed)
    assert (np.add.reduceat(packing.length, packing.bounds[:-1]) <= seq_len).all()


# Words of a command line

KEYS = sorted(field.name for field in fields(TrainConfig))
DEEPER = ["model.layers", "data.path", "data.mix.a.source", "wandb.notes", "optimizer.name"]
ODD = ["null", "-1", "1e999", "${oc.env:HOME}", "[", "{a:1}", "9" * 20, "é水", "", "~"]
values = st.sampled_from(ODD) | st.text(max_size=12) | st.integers().map(str) | st.floats().map(str)
keys = st.sampled_from([*KEYS, *DEEPER]) | st.text(max_size=10)
words = st.text(max_size=20) | st.builds("{}={}".format, keys, values)
words |= st.builds("+{}={}".format, keys, values) | st.builds("~{}".format, keys)


@given(st.lists(words, min_size=1, max_size=3))
@examples(80)
def test_any_words_are_a_configuration_or_one_line(words):
    try:
        assert isinstance(cli.compose("train", words).config, TrainConfig)
    except (ValueError, OSError) as error:  # what the commands make a line of
        if not str(error):
            raise


# Saved configurations

SAVED = yaml.safe_load((Path(__file__).parent / "fixtures/config.yaml").read_text())
PATHS = [(key,) for key in SAVED]
PATHS += [
    (key, inner) for key, value in SAVED.items() if isinstance(value, dict) for inner in value
]
plain = st.sampled_from([*ODD, -1, 0, 2**70, 1e308, [], {}, [[64, 1]], True, None, [None]])
plain |= st.integers() | st.floats() | st.text(max_size=6) | st.lists(st.integers(), max_size=2)
changes = st.lists(st.tuples(st.sampled_from(PATHS), plain), min_size=1, max_size=2)


@given(changes, st.sampled_from(["max_steps=9", "seq_len=64", "resume=."]))
@examples(20)
def test_any_saved_values_are_a_configuration_or_one_line(changed, override):
    saved = copy.deepcopy(SAVED)
    for (*outer, last), value in changed:
        inner = saved[outer[0]] if outer else saved
        if isinstance(inner, dict):
            inner[last] = value
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "config.yaml"
        file.write_text(yaml.safe_dump(saved, allow_unicode=True))
        try:
            composed = parse.from_file(file, parse.given_values(TrainConfig, [override]))
            assert isinstance(composed.config, TrainConfig)
        except (ValueError, OSError) as error:
            if not str(error):
                raise


# Run folders

PARTS = ["total", "context", "stride", "kinds", "accuracy", "lengths", "depths", "results", "loss"]
PARTS += ["checkpoint", "positions", "step", "val_loss_by_position/16", "x"]
PARTS += [metric.key for metric in metrics.METRICS]
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
names = st.sampled_from(PARTS)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=6)
)
lines = st.dictionaries(names, scalars, max_size=6).map(json.dumps) | json_values.map(json.dumps)
lines |= st.text(max_size=30)
texts = st.lists(lines, max_size=5).map("\n".join)
contents = texts.map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=30)
FILES = ["metrics.jsonl", "config.yaml", "kernel.lock.json", "eval/val-a.json"]


@given(st.sampled_from(FILES), contents, st.booleans())
@examples(200)
def test_any_file_of_a_run_is_shown_or_one_line(name, content, appends):
    with tempfile.TemporaryDirectory() as place:
        folder, other = make(Path(place) / "run"), make(Path(place) / "other")
        with open(folder / name, "ab" if appends else "wb") as file:
            file.write(content)
        runs, notes = read_all([folder, other], None)
        assert (folder in [run.folder for run in runs]) or "left out: " in notes[-1]
        assert not any("\n" in note for note in notes)
        assert table_of(runs, 2.5)
