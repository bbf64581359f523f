"""Whole training steps of other trainers on random tokens, as their users run them.

nanogpt: its model.py, fp32 weights under autocast to bf16, compiled. transformers: its class for
the model, all of it in bf16, SDPA; with Liger's kernels; with peft's LoRA.
On several GPUs transformers' Llama with Liger's kernels, fp32 weights and averages cut by
FSDP2: torch-context-parallel shares one sequence by torch's own context_parallel over its flash
attention, accelerate-fsdp2 takes a sequence on each GPU.

A step is forward, backward, clipping of the gradients, AdamW (fused on a GPU), zero_grad. Nothing
waits for the device between steps. Each trainer runs in processes of its own:

    python -m benchmarks.trainers REQUEST OUT

Both are JSON files: a `Job`, and what `measure` returns.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import enable_cudnn_sdp, enable_math_sdp, enable_mem_efficient_sdp
from torch.profiler import ProfilerActivity, profile

from longctx.attention import Mask
from longctx.attention.communication import elapsed_ms, now
from longctx.config.layout_config import MemoryConfig
from longctx.model.loss import linear_cross_entropy
from longctx.parallel.devices import is_out_of_memory, within_memory
from longctx.training.dry_run import OUT_OF_MEMORY
from longctx.training.memory import measured

PACKAGES = ("transformers", "liger-kernel", "peft", "accelerate")
LORA_LAYERS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
LARGEST_LOGITS = 2**31  # elements; above, transformers' own loss takes tens of GiB


@dataclass(frozen=True)
class Job:
    """What the processes are asked for."""

    peer: str  # a key of TRAINERS
    config: dict[str, Any]  # transformers' config.json
    lora: dict[str, Any] | None
    rows: int  # sequences of a step, on each GPU
    tokens: int  # of a sequence
    document: int  # tokens; 0: a sequence is one document
    warm: int  # steps before the timed ones
    timed: int
    device: str  # "cuda" or "cpu"
    bf16: bool
    optimizer: dict[str, Any]  # lr, betas, weight_decay
    clip: float | None
    checkpointing: bool  # gradient checkpointing
    folder: str  # of nanoGPT's model.py


class Built(NamedTuple):
    """A trainer: its model and optimizer, and the loss of (B, T + 1) tokens."""

    model: nn.Module
    optimizer: Any
    loss: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor], None] = Tensor.backward
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # forward and backward
    tokens_of_rank: float = 1.0  # the share of a sequence that a GPU has


def device_of(job: Job) -> torch.device:
    """Return the device of this rank."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    return torch.device(job.device, rank if job.device == "cuda" else None)


def of_transformers(job: Job, liger: bool, dtype: torch.dtype) -> Any:
    """Return transformers' class with random weights; with `liger` Liger's kernels."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[job.config["model_type"]].from_dict(dict(job.config))
    config.use_cache = False
    with torch.device(device_of(job)):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if liger:
        from liger_kernel.transformers import monkey_patch

        monkey_patch._apply_liger_kernel_to_instance(model=model)
    return model.train()


def adamw(model: nn.Module, job: Job) -> torch.optim.Optimizer:
    """Return torch's AdamW on the weights that are trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, **job.optimizer, fused=job.device == "cuda")


def transformers(job: Job, liger: bool = False) -> Built:
    """On one GPU."""
    model = of_transformers(job, liger, torch.bfloat16 if job.bf16 else torch.float32)
    if job.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if job.lora is not None:
        model = with_peft(model, job.lora)
    numbers = torch.arange(job.tokens, device=job.device) // (job.document or job.tokens)
    positions = Mask.documents(numbers[None]).positions(1, job.tokens, torch.device(job.device))
    positions = positions.expand(job.rows, -1)
    vocab_size = model.config.vocab_size
    chunk = MemoryConfig("balanced").chunk(vocab_size, job.device)

    def loss(tokens: Tensor) -> Tensor:
        rows, targets = tokens[:, :-1].contiguous(), tokens[:, 1:]
        # Without positions transformers needs no mask
        given = {"input_ids": rows} | ({"position_ids": positions} if job.document else {})
        if liger or rows.numel() * vocab_size <= LARGEST_LOGITS:
            return model(**given, labels=rows).loss  # it shifts the labels itself
        x = model.get_decoder()(**given)[0]
        return linear_cross_entropy(x, model.get_output_embeddings().weight, targets, chunk)

    return Built(model, adamw(model, job), loss)


def with_peft(model: Any, lora: dict[str, Any]) -> nn.Module:
    """Return `model` with peft's LoRA on the layers that ours has it on, in the same dtype."""
    import peft

    config = peft.LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        use_rslora=lora["rslora"],
        target_modules=[name for target in lora["targets"] for name in LORA_LAYERS[target]],
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    adapted: nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return adapted


def nanogpt(job: Job) -> Built:
    """GPT and its optimizer from the model.py in `job.folder`, set up as its train.py does it."""
    spec = spec_from_file_location("nanogpt_model", Path(job.folder, "model.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    config = module.GPTConfig(
        block_size=job.tokens,
        vocab_size=job.config["vocab_size"],
        n_layer=job.config["num_hidden_layers"],
        n_head=job.config["num_attention_heads"],
        n_embd=job.config["hidden_size"],
        dropout=0.0,
        bias=False,
    )
    model = module.GPT(config).to(job.device)
    decay, rate, betas = (job.optimizer[name] for name in ("weight_decay", "lr", "betas"))
    optimizer = model.configure_optimizers(decay, rate, betas, job.device)
    compiled = torch.compile(model) if job.device == "cuda" else model
    autocast = torch.autocast(job.device, torch.bfloat16) if job.bf16 else nullcontext()

    def loss(tokens: Tensor) -> Tensor:
        with autocast:
            mean: Tensor = compiled(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())[1]
        return mean

    return Built(model, optimizer, loss)


class LossOfPart(nn.Module):
    """Llama's loss on a part of a sequence whose labels come shifted."""

    def __init__(self, model: Any, liger: bool) -> None:
        super().__init__()
        self.model, self.fused = model, None
        if liger:
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


def torch_context_parallel(job: Job) -> Built:
    """Share one sequence over all ranks; labels are shifted before it is cut."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.experimental import context_parallel

    on_gpu, mesh = job.device == "cuda", init_device_mesh(job.device, (dist.get_world_size(),))
    torch.manual_seed(1)  # the same weights on every rank
    model = of_transformers(job, has_liger(job), torch.float32)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = model.model.layers
    for number, layer in enumerate(layers):
        if job.checkpointing:
            layers[number] = layer = checkpoint_wrapper(layer, preserve_rng_state=False)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    wrapped = LossOfPart(model, has_liger(job))
    fully_shard(wrapped, mesh=mesh, mp_policy=precision)
    parts: list[Tensor] = []
    positions = torch.arange(job.tokens, device=device_of(job))[None]

    def around() -> AbstractContextManager[Any]:
        row = torch.randint(job.config["vocab_size"], (1, job.tokens + 1), device=device_of(job))
        parts[:] = [row[:, :-1].clone(), positions.clone(), row[:, 1:].clone()]
        return context_parallel(
            mesh, buffers=parts, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(parts)
        )

    def loss(_: Tensor) -> Tensor:
        mean: Tensor = wrapped(*parts)
        return mean

    torch.manual_seed(3)  # and the same tokens
    # Flash attention: the fastest that is right on a Hopper GPU, with torch 2.11
    for switch in (enable_cudnn_sdp, enable_mem_efficient_sdp, enable_math_sdp):
        switch(not on_gpu)
    return Built(wrapped, adamw(wrapped, job), loss, around=around, tokens_of_rank=1 / mesh.size())


def accelerate_fsdp2(job: Job) -> Built:
    """Take a sequence on each rank."""
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
    on_gpu = job.device == "cuda"
    precision = "bf16" if on_gpu else "no"
    accelerator = Accelerator(mixed_precision=precision, fsdp_plugin=plugin, cpu=not on_gpu)
    torch.manual_seed(1)
    model = of_transformers(job, has_liger(job), torch.float32)
    model, optimizer = accelerator.prepare(model, adamw(model, job))

    def loss(tokens: Tensor) -> Tensor:
        rows = tokens[:, :-1].contiguous()
        mean: Tensor = model(input_ids=rows, labels=rows).loss
        return mean

    return Built(model, optimizer, loss, backward=accelerator.backward)


def has_liger(job: Job) -> bool:
    """Return True if Liger's kernels are there, which need a GPU."""
    return job.device == "cuda" and find_spec("liger_kernel") is not None


TRAINERS: dict[str, Callable[[Job], Built]] = {
    "nanogpt": nanogpt,
    "transformers": transformers,
    "transformers-liger": partial(transformers, liger=True),
    "torch-context-parallel": torch_context_parallel,
    "accelerate-fsdp2": accelerate_fsdp2,
}


def measure(job: Job) -> dict[str, Any]:
    """Return the milliseconds of each timed step, on the slowest rank, and this rank's memory."""
    torch.manual_seed(1)
    result: dict[str, Any] = {"ms": [], "failed": None}
    try:
        with within_memory(job.device):
            built = TRAINERS[job.peer](job)
            named = built.model.named_parameters()  # nanoGPT's positions left out
            sizes = [p.numel() for name, p in named if not name.endswith("wpe.weight")]
            result |= {"parameters": sum(sizes)} | timed_steps(job, built)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        result["failed"] = OUT_OF_MEMORY
    names = ((name, name.replace("-", "_")) for name in PACKAGES)
    result["versions"] = {name: version(name) for name, module in names if find_spec(module)}
    return result | measured(device_of(job))


def timed_steps(job: Job, built: Built) -> dict[str, Any]:
    """Take the steps. The last warm step tells which attention ran."""

    def step(tokens: Tensor) -> Tensor:
        with built.around():
            value = built.loss(tokens)
            built.backward(value)
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_(built.model.parameters(), job.clip)
        built.optimizer.step()
        built.optimizer.zero_grad(set_to_none=True)
        return value.detach()

    device, last, operators = device_of(job), torch.zeros(()), set()
    times = [now(device.type == "cuda")]  # before the first step, and after each
    for number in range(job.warm + job.timed):
        shape = job.rows, job.tokens + 1
        tokens = torch.randint(job.config["vocab_size"], shape, device=device)
        if number == job.warm - 1:
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                last = step(tokens)
            operators = {event.key for event in profiler.key_averages()}
        else:
            last = step(tokens)
        times.append(now(device.type == "cuda"))
    if device.type == "cuda":
        torch.cuda.synchronize()
    of_steps = map(elapsed_ms, times, times[1:])
    ms, ranks = torch.tensor([*of_steps][job.warm :], device=device), 1
    if dist.is_initialized():
        dist.all_reduce(ms, op=dist.ReduceOp.MAX)
        ranks = dist.get_world_size()
    names = (name.removeprefix("aten::_") for name in operators if "::_scaled_dot" in name)
    return {
        "ms": ms.tolist(),
        "tokens_per_step": round(job.rows * job.tokens * ranks * built.tokens_of_rank),
        "loss": float(last),
        "attention": " and ".join(sorted(name for name in names if "backward" not in name)),
    }


def main(argv: list[str]) -> None:
    """Answer the request on every rank; rank 0 writes."""
    job = Job(**json.loads(Path(argv[0]).read_text()))
    if job.device == "cuda":
        torch.cuda.set_device(device_of(job))
    # accelerate forms the group of its processes itself
    if "RANK" in os.environ and job.peer != "accelerate-fsdp2":
        dist.init_process_group("nccl" if job.device == "cuda" else "gloo")
    answer = measure(job)
    if int(os.environ.get("RANK", 0)) == 0:
        Path(argv[1]).write_text(json.dumps(answer))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
