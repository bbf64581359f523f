"""How often the scores of a trained model outgrow the maximum that the Hopper forward keeps.

In bf16 that kernel keeps the softmax maximum of the tiles that need the mask, those of the diagonal
and of a document's first tokens (`kernels/attention/hopper_forward.py`). A tile of queries is
computed twice if a row's sum over e^(score - maximum) leaves 2^-32 .. 2^32, 22 nats. Here maximum
and sum are computed in fp32 from the queries and keys of a run's model on the run's documents.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import machine, write_json
from longctx.config.fields import key
from longctx.tables import grid

if TYPE_CHECKING:
    from torch import Tensor

    from longctx.attention import Attention, Mask

SHOWN = ("layer", "rows", "largest_nats", "outgrown_rows", "tiles", "outgrown_tiles")
MOST_BITS = 32  # of a row's sum, in base 2: `LARGEST` of the kernel


@dataclass(frozen=True)
class Options:
    """The model, and what it reads."""

    checkpoint: str = key("", "a run's folder or one of its checkpoints")
    seq_len: int | None = key(None, "tokens of a row; null: as the run trained", between=(2, 10**8))
    rows: int = key(4, "of the documents that it validates on, or trained on", between=(1, 10**6))
    out: str = key("results/outgrown", "writes .json")


class Watched:
    """The attention of a layer, which notes what it is given."""

    def __init__(self, attention: Attention, tile: tuple[int, int]) -> None:
        self.attention, self.tile = attention, tile
        self.rows = self.outgrown_rows = self.tiles = self.outgrown_tiles = 0
        self.largest_nats = 0.0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *others: Any) -> Any:
        bound = mask.bind(q.shape[0], q.shape[1], k.shape[1], q.device)
        for b in range(q.shape[0]):
            for nats, is_checked in growth(q[b : b + 1], k[b : b + 1], bound, b, self.tile):
                self.rows += nats.numel()
                self.tiles += nats.shape[0]
                if is_checked:
                    outgrown = nats.abs() >= MOST_BITS * math.log(2)
                    self.largest_nats = max(self.largest_nats, float(nats.abs().max()))
                    self.outgrown_rows += int(outgrown.sum())
                    self.outgrown_tiles += int(outgrown.any(1).sum())
        return self.attention(q, k, v, mask, *others)


def run(options: Options, command: str) -> None:
    """Read rows, count, print, write `out`.json."""
    import torch

    from longctx.attention.description import AttentionConfig
    from longctx.evaluation.load import build_model, open_run
    from longctx.kernels import HAS_TRITON
    from longctx.kernels.attention import HOPPER_HEAD_SIZES

    if not HAS_TRITON:
        raise ValueError("outgrown: reads the tiles of the Hopper kernel, and triton is missing")
    if not options.checkpoint:
        raise ValueError("checkpoint=: names nothing; give a run, such as checkpoint=runs/NAME")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    file, _, config = open_run(Path(options.checkpoint))
    model = build_model(file, AttentionConfig("flash"), device)
    if model.config.head_size not in HOPPER_HEAD_SIZES:
        sizes = f"{HOPPER_HEAD_SIZES[0]} to {HOPPER_HEAD_SIZES[-1]} channels"
        raise ValueError(
            f"checkpoint={options.checkpoint}: its heads have {model.config.head_size} channels, "
            f"and the Hopper kernel takes {sizes}"
        )
    watched = []
    for block in model.blocks:
        watched.append(Watched(block.attention.attend, tile_of(model.config.head_size)))
        block.attention.attend = watched[-1]
    seq_len = options.seq_len or int(config["seq_len"])
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        for tokens, mask in rows_of(options.checkpoint, config, seq_len, options.rows):
            model(tokens.to(device), mask=mask)
    layers = [
        {"layer": n} | {name: getattr(one, name) for name in SHOWN[1:]}
        for n, one in enumerate(watched)
    ]
    tiles = sum(one.tiles for one in watched)
    twice = sum(one.outgrown_tiles for one in watched)
    result = {"command": command, **machine(), "options": asdict(options), "seq_len": seq_len}
    result |= {"parameters": model.config.parameters(), "head_size": model.config.head_size}
    result |= {"tiles": tiles, "outgrown_tiles": twice, "layers": layers}
    write_json(Path(f"{options.out}.json"), result)
    grid("Scores that outgrow the kept maximum", SHOWN, layers)
    print(f"{twice:,} of {tiles:,} tiles would be computed twice ({twice / tiles:.2%})")
    print(f"wrote {options.out}.json")


def rows_of(
    checkpoint: str, config: dict[str, Any], seq_len: int, most: int
) -> list[tuple[Tensor, Mask]]:
    """Tokens (1, at most seq_len) and mask of the first rows that the run validates on, without
    their padding; of those that it trained on, where there are no others.
    """
    from longctx.attention import Mask
    from longctx.data import DataConfig, load
    from longctx.evaluation.load import open_run

    _, folder, _ = open_run(Path(checkpoint))
    data = load(DataConfig(**config["data"] | {"tokenizer": str(folder)}), seq_len)
    rows, found = data.val if len(data.val) else data.train, []
    for number in range(min(most, len(rows))):
        row = rows[number]
        real = slice(seq_len - int(row["padding"]))
        found.append((row["tokens"][None, real], Mask.documents(row["doc_ids"][None, real])))
    return found


def tile_of(head_size: int) -> tuple[int, int]:
    """Queries and keys of a tile of the Hopper forward for heads of that size."""
    from longctx.kernels.attention import hopper_size
    from longctx.kernels.attention.hopper_forward import CONFIGS

    config = CONFIGS[hopper_size(head_size)]
    return 64 * config.consumers, config.BN


def growth(
    q: Tensor, k: Tensor, mask: Mask, b: int, tile: tuple[int, int]
) -> list[tuple[Tensor, bool]]:
    """For each tile of the queries q (1, T, H, D) of row `b`: (H, queries) nats by which the log of
    a row's sum exceeds the maximum that is kept, and whether a tile without a mask follows.
    """
    import torch

    assert mask.first is not None and mask.last is not None
    first, last = (x[b if len(x) > 1 else 0] for x in (mask.first, mask.last))
    scale, group, (BM, BN) = q.shape[3] ** -0.5, q.shape[2] // k.shape[2], tile
    queries = q[0].transpose(0, 1).float()  # (H, T, D)
    keys = k[0].transpose(0, 1).float().repeat_interleave(group, dim=0)
    found, T = [], q.shape[1]
    # tiles of queries as `first_query` of the kernel has them
    ends = -(-T // 64) * 64 if BM > BN else -(-T // BM) * BM
    for end in range(ends, 0, -BM):
        at = slice(max(0, end - BM), min(end, T))
        low, high = int(first[at][0]) // BN, int(last[at][-1]) // BN + 1
        full_low, full_high = -(-int(first[at][-1]) // BN), (int(last[at][0]) + 1) // BN
        if full_high <= full_low:
            full_low = full_high = high
        j = torch.arange(low * BN, min(high * BN, k.shape[1]), device=q.device)
        seen = (j >= first[at][:, None]) & (j <= last[at][:, None])
        scores = (queries[:, at] @ keys[:, j].transpose(1, 2)) * scale
        scores = scores.masked_fill(~seen, -math.inf)
        unmasked = (j >= full_low * BN) & (j < full_high * BN)
        kept = scores.masked_fill(unmasked, -math.inf).amax(2)
        kept = kept.masked_fill(kept == -math.inf, 0.0)  # of a row that the masked tiles hide
        found.append((scores.logsumexp(2) - kept, full_high > full_low))
    return found
