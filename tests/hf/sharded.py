"""Models whose weights two processes share in bf16: logits and gradients are those of one process,
to the bit where a weight stays in fp32.

Arguments: folders of models.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from longctx import system
from longctx.hf import model_folder
from longctx.model.gpt import build
from longctx.parallel import sharding


def computed(folder: Path, mesh):
    """Return the logits of some tokens and the gradients of exact weights, sharded over `mesh`."""
    with torch.device("meta"):
        model = build(model_folder.read_config(folder), "naive")
    if mesh is not None:
        sharding.shard(model, mesh, torch.bfloat16)
    model.to_empty(device="cpu")
    model_folder.load_weights(model, folder)
    ids = torch.arange(3, 40)[None]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids)
    logits.float().square().mean().backward()
    weights = {x: weight for x, weight in model.named_parameters() if weight.grad is not None}
    gradients = {x: sharding.full(weights[x].grad) for x in sorted(model.exact & weights.keys())}
    return logits.detach().float(), gradients


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for folder in map(Path, sys.argv[1:]):
        (alone, wanted), (logits, found) = computed(folder, None), computed(folder, mesh)
        off = float((logits - alone).norm() / alone.norm())
        assert off < 0.01, (folder.name, off)
        assert wanted.keys() == found.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=0.1, atol=0.02)
    dist.barrier()  # or one process ends while the other still reads from it
    system.exit_with(0)


if __name__ == "__main__":
    main()
