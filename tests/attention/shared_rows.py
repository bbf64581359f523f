"""Attention of rows that two processes share, beside that of one: out and gradients, with biases.

    python -m torch.distributed.run --nproc-per-node 2 tests/attention/shared_rows.py DEVICE OUT

Writes to OUT as JSON, for each case, which results have other bits, or other values if keys are
gathered: then a tile has other queries.
"""

import functools
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
GRADIENTS = ("dq", "dk", "dv", "dkey_bias")
NAMES = ("out", *GRADIENTS, *(f"{x} again" for x in GRADIENTS), "dsinks", "dsinks again")


def results(context: Context, mask: Mask, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """out, dq, dk, dv (B, T, heads, D), dkey_bias (B, T, H) of whole rows, computed in parts, and
    dsinks; gradients are those of autograd, and then those from saved results.
    """
    rows, device = given[0].shape[0], given[0].device
    mask = mask.bind(rows, TOKENS, TOKENS, device)
    shards = context.shards(mask, TOKENS)
    q, k, v, do, bias = (shards.local(x).contiguous() for x in given)
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    # Other ones in each head, or a head could take its neighbour's
    sinks = torch.arange(1.0, 1 + q.shape[2], device=device).requires_grad_()
    scores = Scores(sinks=sinks, key_bias=leaves[3].transpose(1, 2))
    attention, own = Attention("flash", OPTIONS), shards.mask(mask)
    out, lse = attention.with_lse(*leaves[:3], own, scores)
    *grads, dsinks = torch.autograd.grad(out, [*leaves, sinks], do)
    saved = q, k, v, out.detach(), lse.detach()
    *again, dsinks_again, dbias = attention.backward(do, saved, own, scores)
    for x in (dsinks, dsinks_again) if context.ranks.count > 1 else ():
        dist.all_reduce(x)
    rows = (*grads, *again, dbias.transpose(1, 2))
    return [shards.gathered(x) for x in (out.detach(), *rows)] + [dsinks, dsinks_again]


def close(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    return float((x - y).float().norm() / x.float().norm()) < 4 * torch.finfo(dtype or x.dtype).eps


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
        same = torch.equal if method == "ulysses" else close
        # A gradient of sinks is a sum over ranks, in fp32, of outputs that are rounded to `dtype`
        each = [same] * 9 + [functools.partial(close, dtype=dtype)] * 2
        named = zip(NAMES, pairs, each, strict=True)
        wrong = [name for name, (one, two), are_same in named if not are_same(one, two)]
        differ[f"{case} {method}"] = wrong
    if dist.get_rank() == 0:
        path.write_text(json.dumps(differ))
    dist.barrier()  # or one process ends while the other still reads from it
    system.exit_with(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
