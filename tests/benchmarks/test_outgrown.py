"""Which scores outgrow the kept maximum: by the formula, row by row, and in a model of a run."""

import json
import math

import pytest
import torch

import train
from benchmarks.outgrown import Watched, growth
from longctx.attention import Mask
from tests.processes import ROOT, finished

BM, BN = 32, 16


def by_hand(
    q: torch.Tensor, k: torch.Tensor, mask: Mask, h: int, i: int, tile: tuple[int, int]
) -> float:
    """log of the row's sum less its maximum over the tiles of keys that need the mask."""
    T, (BM, BN) = q.shape[1], tile
    ends = 128 if BM > BN else -(-T // BM) * BM  # of 100 queries
    end = next(end for end in range(ends, 0, -BM)[::-1] if i < end)
    queries = range(max(0, end - BM), min(end, T))
    first, last = mask.first[0].tolist(), mask.last[0].tolist()
    kh = h * k.shape[2] // q.shape[2]
    scores = (q[0, i, h] @ k[0, :, kh].T * q.shape[3] ** -0.5).tolist()
    seen = [j for j in range(T) if first[i] <= j <= last[i]]

    def needs_mask(j: int) -> bool:
        tile = [x for x in range(j // BN * BN, j // BN * BN + BN)]
        return not all(first[a] <= x <= last[a] for a in queries for x in tile)

    kept = [scores[j] for j in seen if needs_mask(j)]
    return math.log(sum(math.exp(scores[j]) for j in seen)) - max(kept, default=0.0)


@pytest.mark.parametrize("tile", [(BM, BN), (BN, BM)], ids=str)
@pytest.mark.parametrize("documents", [[100], [7, 50, 43]], ids=str)
def test_growth_is_that_of_the_formula(documents, tile):
    torch.manual_seed(1)
    q, k = torch.randn(1, 100, 4, 8), 3 * torch.randn(1, 100, 2, 8)
    ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))[None]
    mask = Mask.documents(ids).bind(1, 100, 100, "cpu")
    tiles = growth(q, k, mask, 0, tile)
    nats = torch.cat([nats for nats, _ in reversed(tiles)], dim=1)
    assert nats.shape == (4, 100)
    for h in range(4):
        for i in range(100):
            assert float(nats[h, i]) == pytest.approx(by_hand(q, k, mask, h, i, tile), abs=1e-4)


def test_masked_tiles_are_not_checked():
    q = torch.zeros(1, 64, 1, 8)
    mask = Mask.causal().bind(1, 64, 64, "cpu")
    last, first = growth(q, q, mask, 0, (BM, BN))
    assert (first[1], last[1]) == (False, True)


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


def test_a_far_key_that_draws_all_weight_outgrows():
    q, k = torch.ones(1, 64, 1, 8), torch.zeros(1, 64, 1, 8)
    k[0, 0] = 30 * 8**-0.5  # 30 nats above the others
    mask = Mask.causal().bind(1, 64, 64, "cpu")
    watched = Watched(lambda q, k, v, mask: q, (BM, BN))  # type: ignore[arg-type]
    watched(q, k, k, mask)
    assert (watched.rows, watched.outgrown_rows) == (64, 32)
    assert (watched.tiles, watched.outgrown_tiles) == (2, 1)
    assert watched.largest_nats == pytest.approx(30, abs=0.1)
