"""Whole training steps in a plain loop on random tokens: longctx and other trainers, as their users
run them on one GPU.

transformers, with Liger's kernels, with peft's LoRA: weights, gradients and AdamW's averages in
bf16, SDPA. nanoGPT: fp32 weights under autocast to bf16, torch.compile. longctx-bare is our own
model and optimizer in this same loop, without Lightning, loader and log. A step is forward,
backward, clipping of the gradients, AdamW (fused on a GPU), zero_grad; its learning rate is that of
the same step of train.py, so that all weights change alike. Each trainer runs in a child process,
so that running out of memory ends nothing else:

    python -m benchmarks.trainers REQUEST OUT

Both are JSON files: a `Job`, and what `measure` returns.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from longctx.attention import kernels_run
from longctx.attention.communication import Laps
from longctx.model.export import architecture
from longctx.parallel.devices import is_out_of_memory, within_memory
from longctx.spec.model_config import GPTConfig, LoraConfig
from longctx.training.dry_run import OUT_OF_MEMORY
from longctx.training.memory import measured
from longctx.training.module import TrainingModule, clip_gradients
from longctx.training.optimizers import build
from longctx.training.run import run_of

Built = tuple[
    nn.Module, torch.optim.Optimizer, Callable[[Tensor], Tensor]
]  # the last: (B, T + 1) tokens → loss
LORA_LAYERS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


@dataclass(frozen=True)
class Job:
    """What the child is asked for: `warm` steps and then `timed` ones on `rows` rows of `tokens`
    random tokens.
    """

    trainer: str  # a key of TRAINERS
    model: dict[str, Any]  # a GPTConfig
    lora: dict[str, Any]  # a LoraConfig
    rows: int
    tokens: int
    warm: int
    timed: int
    device: str  # "cuda" or "cpu"
    bf16: bool
    lrs: list[float]  # of each step, warm ones first
    betas: tuple[float, float]
    weight_decay: float
    clip: float | None
    checkpointing: bool = False  # gradient checkpointing, of transformers
    folder: str = ""  # of nanoGPT's model.py
    settings: dict[str, Any] = field(default_factory=dict)  # of longctx-bare: `Run.settings`


def random_model(
    shape: dict[str, Any], tokens: int, device: str | torch.device, dtype: torch.dtype, liger: bool
) -> Any:
    """transformers' class for a GPTConfig, random weights; with `liger` Liger's rope, RMSNorm,
    SwiGLU and fused loss.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    described = architecture(GPTConfig.of_saved(shape), tokens) | {"use_cache": False}
    config = AutoConfig.for_model(**described)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def transformers(job: Job, liger: bool = False) -> Built:
    """transformers' class for the model, its weights in the dtype of the job."""
    dtype = torch.bfloat16 if job.bf16 else torch.float32
    model = random_model(job.model, job.tokens, job.device, dtype, liger)
    if job.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if job.lora["rank"] is not None:
        model = with_peft(model, LoraConfig(**job.lora))
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    fused = {"fused": True} if job.device == "cuda" else {}
    optimizer = torch.optim.AdamW(
        trained, lr=job.lrs[0], betas=job.betas, weight_decay=job.weight_decay, **fused
    )

    def loss(tokens: Tensor) -> Tensor:
        rows = tokens[:, :-1].contiguous()
        return model(input_ids=rows, labels=rows).loss  # it shifts the labels itself

    return model, optimizer, loss


def with_peft(model: Any, lora: LoraConfig) -> nn.Module:
    """`model` with peft's LoRA on the layers that ours has it on, in the dtype of the model's
    weights.
    """
    import peft

    layers = [name for target in lora.targets for name in LORA_LAYERS[target]]
    alpha: Any = lora.alpha  # peft takes fractions, and says it takes whole numbers
    config = peft.LoraConfig(
        r=lora.rank or 0,
        lora_alpha=alpha,
        use_rslora=lora.rslora,
        target_modules=layers,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    adapted: nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return adapted


def nanogpt(job: Job) -> Built:
    """GPT and its optimizer from the model.py in `job.folder`, set up as its train.py does it."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(job.folder, "model.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    shape = GPTConfig.of_saved(job.model)
    config = module.GPTConfig(
        block_size=job.tokens,
        vocab_size=shape.vocab_size,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.channels,
        dropout=0.0,
        bias=False,
    )
    model = module.GPT(config).to(job.device)
    optimizer = model.configure_optimizers(job.weight_decay, job.lrs[0], job.betas, job.device)
    compiled = torch.compile(model) if job.device == "cuda" else model
    autocast = torch.autocast(job.device, torch.bfloat16) if job.bf16 else nullcontext()

    def loss(tokens: Tensor) -> Tensor:
        with autocast:
            mean: Tensor = compiled(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())[1]
        return mean

    return model, optimizer, loss


def longctx_bare(job: Job) -> Built:
    """The model that train.py would train, built, compiled and optimized as there; a step is one
    micro-batch.
    """
    run = run_of(job.settings, job.device)
    module = TrainingModule(run)
    with torch.device(job.device):
        module.configure_model()
    model, autocast = (
        module.model,
        torch.autocast(job.device, torch.bfloat16) if job.bf16 else nullcontext(),
    )

    def loss(tokens: Tensor) -> Tensor:
        with autocast:
            mean: Tensor = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        return mean

    return model, build(model, run), loss


TRAINERS: dict[str, Callable[[Job], Built]] = {
    "longctx-bare": longctx_bare,
    "nanogpt": nanogpt,
    "transformers": transformers,
    "transformers-liger": partial(transformers, liger=True),
}
PACKAGES = {
    "transformers": ("transformers",),
    "transformers-liger": ("transformers", "liger-kernel"),
}


def measure(job: Job) -> dict[str, Any]:
    """Milliseconds of each timed step, peak memory, parameters (nanoGPT's positions left out),
    attention's operator.
    """
    torch.manual_seed(1)
    result: dict[str, Any] = {"ms": [], "failed": None}
    try:
        with within_memory(job.device):
            model, optimizer, loss = TRAINERS[job.trainer](job)
            positions = sum(
                p.numel() for name, p in model.named_parameters() if name.endswith("wpe.weight")
            )
            result["parameters"] = sum(p.numel() for p in model.parameters()) - positions
            result |= timed_steps(job, model, optimizer, loss)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        result["failed"] = OUT_OF_MEMORY
    peft = ("peft",) if job.lora["rank"] is not None else ()
    result["versions"] = {name: version(name) for name in (*PACKAGES.get(job.trainer, ()), *peft)}
    return result | measured(torch.device(job.device))


def timed_steps(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """The steps, between which nothing waits for the device. The last warm step tells which
    attention ran.
    """

    def step(tokens: Tensor) -> Tensor:
        value = loss(tokens)
        value.backward()
        if job.settings:  # ours clips on the way
            clip_gradients(optimizer, job.clip)
        elif job.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    laps, last, operators = Laps(job.device == "cuda"), torch.zeros(()), set()
    for n in range(job.warm + job.timed):
        tokens = torch.randint(
            job.model["vocab_size"], (job.rows, job.tokens + 1), device=job.device
        )
        for group in optimizer.param_groups:
            group["lr"] = job.lrs[n]
        laps.begin()
        if n == job.warm - 1:
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                last = step(tokens)
            operators = {event.key for event in profiler.key_averages()}
        else:
            last = step(tokens)
        laps.end()
    ms = laps.ms()
    attention = sorted(
        name.removeprefix("aten::_") for name in operators if name.startswith("aten::_scaled_dot")
    )
    attention = [name for name in attention if not name.endswith("backward")]
    if job.settings:  # ours say themselves what ran
        attention = [kernels_run()[job.settings["attention"]["backend"]]]
    return {"ms": ms[job.warm :], "loss": float(last), "attention": " and ".join(attention)}


def main(argv: list[str]) -> None:
    """The child's side."""
    job = Job(**json.loads(Path(argv[0]).read_text()))
    Path(argv[1]).write_text(json.dumps(measure(job)))


if __name__ == "__main__":
    main(sys.argv[1:])
