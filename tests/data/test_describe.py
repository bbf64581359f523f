"""`longctx data`: the numbers it shows are right, and its overrides are checked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import yaml

from longctx import cli
from longctx.cli import main
from longctx.data import DataConfig, describe
from longctx.data.dataset import Data

CONFIGS = Path(__file__).parents[2] / "configs" / "data"


def test_histogram_and_shares_count_every_token(text_config) -> None:
    data = Data(text_config(), 64)
    lengths = data.store.lengths
    bins = describe.histogram(data)
    assert sum(one.documents for one in bins) == len(lengths)
    assert sum(one.tokens for one in bins) == lengths.sum()
    for one in bins:
        inside = (lengths >= one.low) & (lengths < 2 * one.low)
        assert (one.documents, one.tokens) == (inside.sum(), lengths[inside].sum())
    assert describe.share_in_longer(data, 0) == 1
    assert describe.share_in_longer(data, int(lengths.max())) == 0
    assert describe.share_in_longer(data, 100) == pytest.approx(
        lengths[lengths > 100].sum() / lengths.sum()
    )


def test_it_prints_and_draws(corpus, tmp_path, capsys) -> None:
    overrides = [
        "data=text",
        f"data.path={corpus}",
        "data.vocab_size=400",
        f"data.cache={tmp_path / 'c'}",
        "seq_len=64",
    ]
    out = tmp_path / "lengths.png"
    assert main(["data", *overrides, f"out={out}"]) == 0
    shown = capsys.readouterr().out
    for text in ("bytes per token", "Rows of 64 tokens", "1 without text left out", str(out)):
        assert text in shown
    from matplotlib.image import imread

    picture = imread(out)
    assert picture.shape[0] > 400
    assert np.ptp(picture) > 0.5
    for wrong in (f"{tmp_path}/no/such/folder.png", f"{tmp_path}/picture.odd"):
        assert main(["data", *overrides, f"out={wrong}"]) == 2
        assert f"error: out={wrong}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.pth=x"], r"data\.pth .*data\.path"),
        (["seq_len=abc"], r"seq_len=abc: "),
        (["data=books"], r"data=books: "),
        (["data=text"], r"data\.path is not set"),
        (["data.path=docs"], r"data\.path=docs: data=embedded .*data=text"),
        (["data.val_fraction=1"], r"data\.val_fraction=1\.0"),
        (["data.vocab_size=100"], r"data\.vocab_size=100"),
        (["data.documents=0"], r"data\.documents=0"),
        (["data=text", "data.path=x", "data.errors=ignore"], r"data\.errors=ignore"),
        (["data=text", "data.path=x", "data.files=y"], r"data\.files=y"),
        (["data=needles", "data.errors=strict"], r"data\.errors=strict: .*data\.path"),
        (["data.tokenizer=a/b", "data.vocab_size=16384"], r"data\.vocab_size=16384: "),
        (["data=mix", "data.mix.a.pth=x"], r"data\.mix\.a\.pth: .*path"),
        (["-m", "seq_len=64,128"], r"-m: "),
    ],
)
def test_mistake_is_one_line(overrides, message, capsys) -> None:
    with pytest.raises(ValueError, match=message):
        cli.compose("data", overrides)
    assert main(["data", *overrides]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_overrides_become_the_configuration() -> None:
    overrides = [
        "data=text",
        "data.path=[a, 'b c']",
        "data.documents=3",
        "data.cache=null",
        "seq_len=128",
        "out=null",
    ]
    config = cli.compose("data", overrides).config
    assert config.data == DataConfig(source="text", path=["a", "b c"], documents=3)
    assert (config.seq_len, config.out) == (128, None)
    hub = cli.compose("data", ["data=hub", "data.path=some/set"]).config
    assert hub.data.documents == 10000


def test_a_mix_is_described_with_its_sources(corpus, tmp_path, capsys) -> None:
    overrides = [
        "data=mix",
        f"data.mix.long.path={corpus}",
        "data.mix.long.weight=3",
        "data.mix.recall.source=needles",
    ]
    overrides += [
        f"data.mix.recall.path={corpus}",
        "data.mix.recall.documents=4",
        "data.mix.recall.length=600",
    ]
    overrides += [
        "data.vocab_size=400",
        f"data.cache={tmp_path / 'c'}",
        "seq_len=64",
        f"out={tmp_path / 'mix.png'}",
    ]
    assert main(["data", *overrides]) == 0
    shown = capsys.readouterr().out
    assert "Sources" in shown
    assert "recall       1          4" in shown
    assert (tmp_path / "mix.png").stat().st_size > 10_000


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_presets_hold_only_known_keys(file) -> None:
    values = yaml.safe_load(file.read_text())
    assert set(values) <= {field.name for field in dataclasses.fields(DataConfig)}
    assert values["source"] == file.stem
