"""Whole training steps of other trainers on several GPUs, as their users run them, on random
tokens.

Both train transformers' Llama, with Liger's kernels where these are installed. Weights, gradients
and AdamW's averages are fp32 slices of FSDP2, all else is bf16.

torch-context-parallel: one row over all GPUs by torch's own context_parallel; labels are shifted
before the row is cut. Its attention is the fastest kernel of torch whose result on a small row
equals attention on the whole row.
accelerate-fsdp2: a row for each GPU, by accelerate.

    python -m torch.distributed.run --nproc-per-node N -m benchmarks.device_peers REQUEST OUT

Both are JSON files: a `Job`, and what `measure` returns.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.trainers import random_model
from longctx.attention.communication import Laps
from longctx.spec.model_config import GPTConfig
from longctx.training.memory import measured

Step = Callable[[], Tensor]
SMALL_ROW = 4096  # tokens of a rank, for what attention gives and takes
CLOSE = 0.02  # relative, in bf16
KERNELS = ("CUDNN_ATTENTION", "FLASH_ATTENTION")
PACKAGES = ("torch", "transformers", "accelerate", "liger-kernel")


@dataclass(frozen=True)
class Job:
    """What the processes are asked for: `steps` steps of rows of `tokens` random tokens."""

    peer: str  # a key of PEERS
    model: dict[str, Any]  # a GPTConfig
    tokens: int
    steps: int
    device: str  # "cuda" or "cpu"
    checkpointing: bool  # of every layer: compute it again in backward


def llama(job: Job) -> nn.Module:
    """transformers' model with random fp32 weights, the same on every rank."""
    torch.manual_seed(1)
    model: nn.Module = random_model(
        job.model, job.tokens, device_of(job), torch.float32, liger(job)
    )
    return model.train()


def liger(job: Job) -> bool:
    """Whether Liger's kernels are there, which need a GPU."""
    return job.device == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def device_of(job: Job) -> torch.device:
    """The device of this rank."""
    return torch.device(job.device, int(os.environ["LOCAL_RANK"]) if job.device == "cuda" else None)


def adamw(model: nn.Module, job: Job) -> torch.optim.Optimizer:
    """Fused on a GPU."""
    fused = {"fused": True} if job.device == "cuda" else {}
    return torch.optim.AdamW(
        model.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.1, **fused
    )


class LossOfPart(nn.Module):
    """Llama's loss on a part of a row whose labels come shifted."""

    def __init__(self, model: Any, job: Job) -> None:
        super().__init__()
        self.model, self.fused = model, None
        if liger(job):
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            self.fused = LigerFusedLinearCrossEntropyLoss()

    def forward(self, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        llama = self.model.model
        x = llama.embed_tokens(tokens)
        rotary = llama.rotary_emb(x, position_ids=positions)
        for layer in llama.layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=rotary)
            x = x[0] if isinstance(x, tuple) else x
        x, weight = llama.norm(x).flatten(0, 1), self.model.lm_head.weight
        if self.fused is not None:
            loss: Tensor = self.fused(weight, x, labels.flatten())
            return loss
        return F.cross_entropy((x @ weight.T).float(), labels.flatten())


def torch_context_parallel(job: Job) -> tuple[Step, dict[str, Any]]:
    """One row over all ranks."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.experimental import context_parallel

    ranks, device = dist.get_world_size(), device_of(job)
    mesh = init_device_mesh(job.device, (ranks,))
    way = fastest_way(job, mesh)
    with_way(way)
    model: Any = llama(job)
    bf16 = torch.bfloat16 if job.device == "cuda" else torch.float32
    precision = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32)
    layers = model.model.layers
    for number, layer in enumerate(layers):
        if job.checkpointing:
            layers[number] = layer = checkpoint_wrapper(layer, preserve_rng_state=False)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    wrapped = LossOfPart(model, job)
    fully_shard(wrapped, mesh=mesh, mp_policy=precision)
    optimizer = adamw(wrapped, job)
    positions_of_row = torch.arange(job.tokens, device=device)[None]

    def step() -> Tensor:
        row = torch.randint(job.model["vocab_size"], (1, job.tokens + 1), device=device)
        tokens, labels = row[:, :-1].clone(), row[:, 1:].clone()
        parts = [tokens, labels, positions_of_row.clone()]
        cut = context_parallel(
            mesh, buffers=parts, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(parts)
        )
        with cut, way.kernel():
            loss: Tensor = wrapped(parts[0], parts[2], parts[1])
            loss.backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, {"attention": way.name, "tokens_per_step": job.tokens}


@dataclass(frozen=True)
class Way:
    """How torch attends: with which kernel, and with key-value heads as they are or repeated."""

    kernel_name: str  # of torch.nn.attention.SDPBackend
    repeated: bool

    @property
    def name(self) -> str:
        return self.kernel_name.lower() + (", repeated kv heads" if self.repeated else "")

    @contextmanager
    def kernel(self) -> Iterator[None]:
        """Attention inside takes this kernel alone."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel([getattr(SDPBackend, self.kernel_name)]):
            yield


def with_way(way: Way) -> None:
    """Make transformers hand over key-value heads as `way` says."""
    from transformers.integrations import sdpa_attention

    if way.repeated:
        sdpa_attention.use_gqa_in_sdpa = lambda *_, **__: False


def fastest_way(job: Job, mesh: Any) -> Way:
    """The fastest way that is right; ValueError where none is."""
    ways = [Way(name, again) for again in (False, True) for name in KERNELS]
    tried: dict[Way, float | str] = {}
    for way in ways:
        try:
            tried[way] = milliseconds(way, job, mesh)
        except Exception as error:  # whatever this version of torch cannot do
            tried[way] = f"{type(error).__name__}: {error}".partition("\n")[0][:150]
        if dist.get_rank() == 0:
            print(f"{way.name}: {tried[way]}", flush=True)
    times = torch.tensor(
        [ms if isinstance(ms, float) else float("inf") for ms in tried.values()],
        device=device_of(job),
    )
    dist.all_reduce(times, op=dist.ReduceOp.MAX)  # all ranks take the same
    if not times.isfinite().any():
        raise ValueError(f"torch's context_parallel: no attention of it is right here: {tried}")
    return ways[int(times.argmin())]


def milliseconds(way: Way, job: Job, mesh: Any) -> float:
    """Of forward and backward in a small row, compared with attention of the whole row."""
    from torch.distributed.tensor.experimental import context_parallel

    shape, device = GPTConfig.of_saved(job.model), device_of(job)
    tokens = SMALL_ROW * dist.get_world_size()
    torch.manual_seed(2)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    dtype = torch.bfloat16 if job.device == "cuda" else torch.float32
    q, k, v, dout = (
        torch.randn(1, h, tokens, shape.head_size, device=device, dtype=dtype) for h in heads
    )
    group = shape.heads // shape.kv_heads

    def attended(*rows: Tensor) -> tuple[Tensor, ...]:
        q, k, v, dout = (x.detach().requires_grad_() for x in rows)
        keys, values = k, v
        if way.repeated:
            keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
        with way.kernel():
            out = F.scaled_dot_product_attention(
                q, keys, values, is_causal=True, enable_gqa=not way.repeated and group > 1
            )
            out.backward(dout)
        assert q.grad is not None and k.grad is not None and v.grad is not None
        return out.detach(), q.grad, k.grad, v.grad

    expected = [x.contiguous() for x in attended(q, k, v, dout)]
    rows = [q.clone(), k.clone(), v.clone(), dout.clone(), *expected]
    cut = context_parallel(
        mesh, buffers=rows, buffer_seq_dims=[2] * len(rows), no_restore_buffers=set(rows)
    )
    with cut:
        actual = attended(*rows[:4])
        apart = torch.stack(
            [
                (x - reference).float().norm() / reference.float().norm()
                for x, reference in zip(actual, rows[4:], strict=True)
            ]
        ).nan_to_num(torch.inf)
        dist.all_reduce(apart, op=dist.ReduceOp.MAX)  # so that all ranks go on, or none
        if float(apart.max()) > CLOSE:
            raise ValueError(f"differs by {float(apart.max()):.3f} from attention of the whole row")
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(3):
            attended(*rows[:4])
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 3


def accelerate_fsdp2(job: Job) -> tuple[Step, dict[str, Any]]:
    """A row of its own for each rank."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        activation_checkpointing=job.checkpointing,
        cpu_ram_efficient_loading=False,
    )
    cuda = job.device == "cuda"
    accelerator = Accelerator(
        mixed_precision="bf16" if cuda else "no", fsdp_plugin=plugin, cpu=not cuda
    )
    model = llama(job)
    model, optimizer = accelerator.prepare(model, adamw(model, job))
    device = device_of(job)

    def step() -> Tensor:
        rows = torch.randint(job.model["vocab_size"], (1, job.tokens), device=device)
        loss: Tensor = model(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    kernel = "as torch chooses"
    return step, {"attention": kernel, "tokens_per_step": job.tokens * dist.get_world_size()}


PEERS: dict[str, Callable[[Job], tuple[Step, dict[str, Any]]]] = {
    "torch-context-parallel": torch_context_parallel,
    "accelerate-fsdp2": accelerate_fsdp2,
}


def measure(job: Job) -> dict[str, Any]:
    """Milliseconds of each step, from rank to rank the slowest's, and peak memory."""
    device = device_of(job)
    step, about = PEERS[job.peer](job)
    torch.manual_seed(3 if job.peer == "torch-context-parallel" else 3 + dist.get_rank())
    laps, ms, losses = Laps(device.type == "cuda"), [], []
    for number in range(job.steps):
        laps.begin()
        loss = step()
        laps.end()
        slowest = torch.tensor(laps.ms()[-1], device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(loss)
        ms.append(float(slowest))
        losses.append(float(loss) / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"step {number + 1}: {ms[-1]:,.0f} ms, loss {losses[-1]:.4f}", flush=True)
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    checked = {"checkpointing": job.checkpointing, "liger": liger(job), "versions": versions}
    return about | {"ms": ms, "loss": losses} | checked | measured(device)


def main(argv: list[str]) -> None:
    """A rank's side; the first one writes."""
    job = Job(**json.loads(Path(argv[0]).read_text()))
    if job.device == "cuda":
        torch.cuda.set_device(device_of(job))
    if job.peer != "accelerate-fsdp2":  # accelerate forms the group of its processes itself
        dist.init_process_group("nccl" if job.device == "cuda" else "gloo")
    answer = measure(job)
    if dist.get_rank() == 0:
        partial = Path(f"{argv[1]}.partial")
        partial.write_text(json.dumps(answer))
        partial.rename(argv[1])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
