"""The comparison of optimizers, tiny and on a CPU, and what it makes of losses."""

import json
from pathlib import Path

import pytest

from benchmarks.optimizers import shared_target, tokens_to
from benchmarks.words import main


def test_tokens_to_a_loss_are_interpolated() -> None:
    losses = [(0, 6.0), (100, 4.0), (200, 3.0), (300, 3.5)]
    assert tokens_to(losses, 6.5) == 0
    assert tokens_to(losses, 5.0) == 50
    assert tokens_to(losses, 3.25) == 175
    assert tokens_to(losses, 2.9) is None


def test_each_optimizer_reaches_the_target() -> None:
    ends = {("a", 1): 3.0, ("a", 2): 2.5, ("b", 1): 2.7, ("b", 2): None}
    rows = [
        {"optimizer": name, "lr": lr, "last_loss": loss, "validations": [(9, loss)] if loss else []}
        for (name, lr), loss in ends.items()
    ]
    assert shared_target(rows) == 2.7
    with pytest.raises(ValueError, match="optimizers=b"):
        shared_target([row for row in rows if row["optimizer"] == "a" or row["lr"] == 2])


@pytest.mark.slow
def test_a_tiny_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(30):
        lines = (f"line {i * n} of {n} dull texts" for i in range(20 + 5 * n))
        (texts / f"{n}.txt").write_text("\n".join(lines))
    out = tmp_path / "out" / "optimizers.json"
    overrides = ["model=tiny", "model.layers=1", "model.channels=32", "model.ffn=48", "seq_len=64"]
    overrides += ["data=text", f"data.path={texts}", "data.vocab_size=300", "data.val_fraction=0.2"]
    overrides += [
        "batch_size=2",
        "accumulate=1",
        "device=cpu",
        "workers=0",
        f"runs={tmp_path / 'r'}",
    ]
    own = ["rates=0.001", "steps=4", "val_every=2", f"out={out}"]
    for note in (None, "was there already"):
        assert main(["optimizers", *own, *overrides]) == 0
        result = json.loads(out.read_text())
        pairs = [(row["optimizer"], row["lr"]) for row in result["runs"]]
        assert pairs == [("adamw", 0.001), ("muon", 0.001)]
        for row in result["runs"]:
            assert row.get("note") == note
            assert [tokens for tokens, _ in row["validations"]] == [0, 256, 512]
        assert all(best["tokens_to_target"] <= 512 for best in result["best"].values())
        assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
