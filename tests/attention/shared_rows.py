"""Attention of rows that two processes share by Ulysses, beside that of one: out and gradients.

    python -m torch.distributed.run --nproc-per-node 2 tests/attention/shared_rows.py DEVICE OUT

Writes to OUT as JSON, for each case, which results have other bits.
"""

import itertools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from longctx import system
from longctx.attention import Attention, Mask
from longctx.attention.context_parallel import Context
from tests.attention.rule import Case, inputs

TOKENS = 1100  # an odd number of tiles
MASKS = (("causal", None), ("documents", None), ("causal", 200))
HEADS = ((4, 4), (8, 2))  # of queries, of keys and values


def results(context: Context, mask: Mask, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """out, dq, dk, dv (B, T, heads, D) of whole rows, each process computing its part."""
    rows, device = given[0].shape[0], given[0].device
    mask = mask.bind(rows, TOKENS, TOKENS, device)
    shards = context.shards(mask, TOKENS)
    q, k, v, do = (shards.local(x).contiguous() for x in given)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = Attention("flash")(*leaves, shards.mask(mask))
    return [shards.gathered(x) for x in (out, *torch.autograd.grad(out, leaves, do))]


def main(device: str, path: Path) -> None:
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank())
    sizes, dtype = ((64, 128, 256), torch.bfloat16) if device == "cuda" else ((32,), torch.float32)
    # a window's keys come from the neighbour otherwise, which is no Ulysses
    shared = Context(dist.group.WORLD, "ulysses", fetches_windows=False)
    differ = {}
    for (mask, window), heads, D in itertools.product(MASKS, HEADS, sizes):
        case = Case(2, TOKENS, TOKENS, *heads, D, mask, window)
        given, mask = [x.to(device) for x in inputs(case, dtype)], case.build_mask()
        pairs = zip(results(Context(), mask, given), results(shared, mask, given), strict=True)
        names = zip(("out", "dq", "dk", "dv"), pairs, strict=True)
        differ[str(case)] = [name for name, (one, two) in names if not torch.equal(one, two)]
    if dist.get_rank() == 0:
        path.write_text(json.dumps(differ))
    dist.barrier()  # or one process ends while the other still reads from it
    system.exit_with(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
