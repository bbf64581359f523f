"""Attention of rows that two processes share, beside that of one: out and gradients, with biases.

    python -m torch.distributed.run --nproc-per-node 2 tests/attention/shared_rows.py DEVICE OUT

Writes to OUT as JSON, for each case, which results have other bits, or other values if keys are
gathered: then a tile has other queries.
"""

import itertools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from longctx import system
from longctx.attention import Attention, Mask, Scores
from longctx.attention.context_parallel import Context
from tests.attention.rule import Case, inputs

TOKENS = 1280  # an odd number of tiles of 256, and chunks for two ranks
MASKS = (("causal", None), ("documents", None), ("causal", 200))
HEADS = ((4, 4), (8, 2))  # of queries, of keys and values
METHODS = ("ulysses", "allgather")
OPTIONS = {"kernel": "portable"}


def results(context: Context, mask: Mask, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """out, dq, dk, dv (B, T, heads, D), dkey_bias (B, T, H) of whole rows, computed in parts."""
    rows, device = given[0].shape[0], given[0].device
    mask = mask.bind(rows, TOKENS, TOKENS, device)
    shards = context.shards(mask, TOKENS)
    q, k, v, do, bias = (shards.local(x).contiguous() for x in given)
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    scores = Scores(key_bias=leaves[3].transpose(1, 2))
    out = Attention("flash", OPTIONS)(*leaves[:3], shards.mask(mask), scores)
    return [shards.gathered(x) for x in (out, *torch.autograd.grad(out, leaves, do))]


def close(x: torch.Tensor, y: torch.Tensor) -> bool:
    return float((x - y).float().norm() / x.float().norm()) < 4 * torch.finfo(x.dtype).eps


def main(device: str, path: Path) -> None:
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank())
    sizes, dtype = ((64, 128, 256), torch.bfloat16) if device == "cuda" else ((32,), torch.float32)
    differ = {}
    for (mask, window), heads, D, method in itertools.product(MASKS, HEADS, sizes, METHODS):
        # a window's keys come from the neighbour otherwise, which is no Ulysses
        shared = Context(dist.group.WORLD, method, fetches_windows=method == "allgather")
        case = Case(2, TOKENS, TOKENS, *heads, D, mask, window)
        given, mask = [x.to(device) for x in inputs(case, dtype)], case.build_mask()
        # the reference of each query is a key, whoever has it
        bias = 0.25 * torch.arange(TOKENS).expand(2, heads[0], -1)
        given.append(bias.mT.to(device))
        pairs = zip(results(Context(), mask, given), results(shared, mask, given), strict=True)
        names = zip(("out", "dq", "dk", "dv", "dkey_bias"), pairs, strict=True)
        same = torch.equal if method == "ulysses" else close
        wrong = [name for name, (one, two) in names if not same(one, two)]
        differ[f"{case} {method}"] = wrong
    if dist.get_rank() == 0:
        path.write_text(json.dumps(differ))
    dist.barrier()  # or one process ends while the other still reads from it
    system.exit_with(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
