"""Models whose weights two processes share in bf16 compute as one process does: logits and the
gradients of weights in fp32 are equal to the bit.

Arguments: a plugin, and models: keys of GPTConfig as JSON, or folders.
"""

import json
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from longctx import plugins, system
from longctx.attention import Mask
from longctx.config.layout_config import MemoryConfig
from longctx.hf import model_folder
from longctx.model.gpt import build
from longctx.parallel import sharding
from longctx.spec.model_config import GPTConfig

SIZES = {"vocab_size": 61, "layers": 3, "channels": 32, "heads": 4, "kv_heads": 2, "ffn": 48}
MEMORIES = (
    MemoryConfig("balanced", recompute_share=0.5),
    MemoryConfig("balanced", keep_every=2, mlp_tile=5),
    MemoryConfig("balanced", keep_every=2, mlp_tile=9, offload=0.6, attention_again=0.5),
)


def computed(given, memory, mesh):
    """Return logits, gradients and the names of weights in fp32, of a model sharded over `mesh`."""
    ours = given.startswith("{")
    config = GPTConfig.of_saved(SIZES | json.loads(given)) if ours else None
    with torch.device("meta"):
        model = build(config or model_folder.read_config(given), "naive", memory)
    wide = {name for name, _ in model.named_parameters()} - model.rounded
    if mesh is not None:
        sharding.shard(model, mesh, torch.bfloat16)
    elif not ours:
        model.cast(torch.bfloat16)  # some of its products are in the weights' precision
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    if not ours:
        model_folder.load_weights(model, given)
    else:
        model.init_weights(sharding.draw)
        for name, weight in model.named_parameters():
            if name in wide:
                sharding.draw(weight, partial(nn.init.normal_, mean=1.0, std=0.3))
    tokens = torch.randint(61, (3, 24), generator=torch.Generator().manual_seed(1))
    mask = Mask.documents((torch.arange(23) // 9).expand(2, 23))
    with torch.autocast("cpu", torch.bfloat16):
        for row in tokens.split((2, 1)):
            model(row[:, :-1], row[:, 1:], mask if len(row) == 2 else None).backward()
        with torch.no_grad():
            logits = model(tokens[:, :-1])
    sharding.reshard(model)
    weights = dict(model.named_parameters())
    gradients = {n: x.grad for n, x in weights.items() if x.grad is not None}
    return logits, {n: sharding.full(x).float() for n, x in gradients.items()}, wide


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    plugins.load(sys.argv[1:2])
    for given in sys.argv[2:]:
        ours = given.startswith("{")
        for memory in MEMORIES if ours else MEMORIES[:2]:
            alone, wanted, wide = computed(given, memory, None)
            logits, found, _ = computed(given, memory, mesh)
            assert found.keys() == wanted.keys()
            torch.testing.assert_close(logits, alone, rtol=0, atol=0, msg=f"{given} {memory}")
            for name, gradient in found.items():
                # Gradients of matrices are rounded, since the matrices are
                rtol, atol = (0, 0) if name in wide else (0.1, 0.02)
                limits = {"rtol": rtol, "atol": atol, "msg": f"{name} {memory}"}
                torch.testing.assert_close(gradient, wanted[name], **limits)
    dist.barrier()  # or one process ends while the other still reads from it
    system.exit_with(0)


if __name__ == "__main__":
    main()
