"""Which scores outgrow the kept maximum: those of a key that draws all weight, and in a run."""

import json
import math

import pytest
import torch

import train
from benchmarks.outgrown import Watched
from longctx.attention import Mask
from tests.processes import ROOT, finished

BM, BN = 32, 16


@pytest.mark.slow
def test_the_rows_of_a_run_are_counted(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"word{n % 97} of {n % 11}" for n in range(4000)))
    model = ["model=tiny", "model.layers=2", "model.channels=128", "model.heads=2"]
    model += ["model.kv_heads=1", "model.ffn=64", "device=cpu", "compile=false", "max_steps=2"]
    data = ["data=text", f"data.path={text}", "data.vocab_size=300", "data.val_fraction=0"]
    own = [f"runs={tmp_path}", "name=r", "seq_len=512", "batch_size=1", "wandb.mode=disabled"]
    assert train.main([*model, *data, *own]) == 0
    # The Hopper kernel is read for its tiles, and has no interpreter.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    count = ["outgrown", f"checkpoint={tmp_path}/r", "rows=3", f"out={tmp_path}/o"]
    done = finished("-m", ["benchmarks", *count], ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "o.json").read_text())
    assert [layer["rows"] for layer in result["layers"]] == [3 * 512 * 2] * 2
    assert result["tiles"] == 2 * 3 * 2 * math.ceil(512 / 192)
    assert result["outgrown_tiles"] == 0
    assert all(0 < layer["largest_nats"] < 22 for layer in result["layers"])


@pytest.mark.parametrize(("documents", "outgrown"), [([64], 32), ([32, 32], 0)], ids=str)
def test_a_far_key_that_draws_all_weight_outgrows(documents, outgrown):
    """The rows of the second tile outgrow the maximum of their own tile, if they see that key."""
    q, k = torch.ones(1, 64, 1, 8), torch.zeros(1, 64, 1, 8)
    k[0, 0] = 30 * 8**-0.5  # 30 nats above the others
    ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))[None]
    watched = Watched(lambda q, k, v, mask: q, (BM, BN))  # type: ignore[arg-type]
    watched(q, k, k, Mask.documents(ids))
    assert (watched.rows, watched.outgrown_rows) == (64, outgrown)
    assert (watched.tiles, watched.outgrown_tiles) == (2, outgrown // BM)
    assert watched.largest_nats == pytest.approx(30 if outgrown else 0, abs=0.1)
