"""What a training run is told: its keys, checked, and completed for the machine at hand.

Torch-free, so that `python train.py --help` and every mistyped word are answered in a second. The comment beside a
key is its help text.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from longctx.attention.config import AttentionConfig
from longctx.data.config import DataConfig
from longctx.evaluation.config import PasskeyConfig
from longctx.model.config import GPTConfig, LoraConfig
from longctx.model.extension import RopeConfig
from longctx.model.memory import MemoryConfig

LONGEST_ROW = 2**24
LONGEST = -(2**62)  # what seq_len=max is in a configuration, until a run has found the length
SPELLED = {"seq_len=max": f"seq_len={LONGEST}"}  # words of the command line → what the schema can hold
TOKENS_PER_MICRO_BATCH = {"cuda": 16384, "cpu": 4096}
TOKENS_PER_STEP = {"cuda": 65536, "cpu": 4096}
TOKENS_PER_VALIDATION = {"cuda": 262144, "cpu": 32768}
STEPS = {"cuda": 300, "cpu": 60}


@dataclass
class StrategyConfig:
    """How several devices share the work."""

    name: str = "auto"  # auto: ddp with more than one device, else none | ddp: a copy of the model per device


@dataclass
class WandbConfig:
    """What Weights & Biases is told about a run."""

    project: str = "longctx"  # the project that the run appears in
    entity: str | None = None  # team or user; null: your default
    mode: str = "auto"  # auto: online with an API key, else offline | online | offline | disabled
    group: str | None = None  # runs of one group are drawn together; null: offline, the run and what continues it
    job_type: str = "train"  # the kind of run, to filter by; eval.py's is eval
    tags: list[str] = field(default_factory=list)  # such as [baseline,h200]
    notes: str | None = None  # a sentence about the run
    artifacts: bool = False  # also upload the checkpoints


@dataclass
class KernelConfig:
    """Whether a run holds on to its kernels; kernel.lock.json in its folder says which they are."""

    lock: str = "auto"  # auto: record, on resume strict | record: take what is here now | strict: refuse others | off


@dataclass
class TrainConfig:
    """One training run."""

    seq_len: int = 4096  # tokens per row: the context that the model trains at; max: the longest that fits the GPU
    seq_len_schedule: list[list[int]] | None = None  # [[tokens per row, steps], …]: shorter rows first, steps as large
    batch_size: int | None = None  # rows per device and micro-batch; null: a step's if that fits, else 16,384 tokens
    accumulate: int | None = None  # micro-batches per step; null: 65,536 tokens a step on a GPU, 4,096 on a CPU
    max_steps: int | None = None  # optimizer steps; null: from max_tokens, else 300 on a GPU and 60 on a CPU
    max_tokens: int | None = None  # stop after about so many tokens, padding included, instead of max_steps
    lr: float | None = None  # peak rate of AdamW; null: 0.5 / model.channels, with init 2e-5, with lora 2e-4
    min_lr: float = 0.1  # the cosine ends at this share of lr
    warmup_steps: int | None = None  # linear warm-up; null: a tenth of the steps, at most 200
    weight_decay: float = 0.1  # on matrices, embeddings among them; never on norms and biases
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's averages of the gradient and of its square
    clip: float | None = 1.0  # largest global gradient norm; null: no clipping
    seed: int = 1  # of the initial weights and of the order of the rows
    device: str = "auto"  # auto: a GPU if there is one | cpu | cuda
    devices: int = 1  # GPUs, or processes on a CPU
    precision: str = "auto"  # auto: bf16 on a GPU, fp32 on a CPU | bf16: fp32 weights, the rest in bf16 | fp32
    compile: str = "auto"  # auto: on a GPU | true | false: torch.compile of each transformer block
    deterministic: bool = False  # only algorithms that give the same bits in every run; slower
    name: str | None = None  # of the run's folder; null: made of what differs from the defaults, and a counter
    init: str | None = None  # start from this Hugging Face folder (config.json, safetensors): its model and tokenizer
    resume: str | None = None  # continue this run, for example runs/tiny-flash-4k-001
    runs: str = "runs"  # the folder that runs are written to
    val_every: int | None = None  # steps between validations, also one at step 0; null: a fifth of the run, 20 or more
    val_rows: int | None = None  # rows of a validation; null: 262,144 tokens on a GPU, 32,768 on a CPU; 0: all
    checkpoint_every: int = 200  # steps between checkpoints; one always comes at the end
    keep_checkpoints: int = 2  # the newest so many stay on disk
    log_every: int = 5  # steps between rows of metrics.jsonl
    workers: int = 1  # processes that prepare batches, per device; 0: none
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    kernel: KernelConfig = field(default_factory=KernelConfig)
    model: GPTConfig = field(default_factory=GPTConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    rope: RopeConfig = field(default_factory=RopeConfig)
    passkey: PasskeyConfig = field(default_factory=PasskeyConfig)  # at every validation
    data: DataConfig = field(default_factory=DataConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def validate(self) -> None:
        """Raise ValueError naming the first key whose value makes no sense on any machine, with any data."""
        if self.seq_len != LONGEST:
            _in_range("seq_len", self.seq_len, 2, LONGEST_ROW)
        for key in ("batch_size", "accumulate", "max_steps", "val_every"):
            if getattr(self, key) is not None:
                _in_range(key, getattr(self, key), 1, 10**9)
        self._validate_schedule()
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 1, 10**15)
            if self.max_steps is not None:
                raise ValueError(
                    f"max_steps={self.max_steps} and max_tokens={self.max_tokens} both end the run; give one"
                )
        for key in ("warmup_steps", "val_rows"):
            if getattr(self, key) is not None:
                _in_range(key, getattr(self, key), 0, 10**9)
        for key in ("checkpoint_every", "keep_checkpoints", "log_every"):
            _in_range(key, getattr(self, key), 1, 10**9)
        _in_range("devices", self.devices, 1, 4096)
        _in_range("workers", self.workers, 0, 256)
        _in_range("seed", self.seed, 0, 2**63 - 1)
        if self.lr is not None:
            _in_range("lr", self.lr, 0.0, 10.0)
        _in_range("min_lr", self.min_lr, 0.0, 1.0)
        _in_range("weight_decay", self.weight_decay, 0.0, 10.0)
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError(
                f"betas={list(self.betas)}: two numbers from 0 up to, not including, 1, such as [0.9,0.95]"
            )
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip={self.clip}: a norm above 0, or null for no clipping")
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        _one_of("precision", self.precision, ("auto", "bf16", "fp32"))
        _one_of("compile", self.compile.lower(), ("auto", "true", "false"))
        _one_of("kernel.lock", self.kernel.lock, ("auto", "record", "strict", "off"))
        _one_of("strategy.name", self.strategy.name, ("auto", "ddp"))
        _one_of("wandb.mode", self.wandb.mode, ("auto", "online", "offline", "disabled"))
        if self.name is not None:
            check_name(self.name)
        if self.init == "":
            raise ValueError("init= names no folder; give a Hugging Face folder, or leave it out for random weights")
        if self.resume == "":
            raise ValueError("resume= names no run; give its folder, such as resume=runs/NAME, or leave it out")
        if not self.runs.strip() or "\0" in self.runs:
            raise ValueError(f"runs={self.runs!r}: the path of a folder")
        self.model.validate()
        self.memory.validate()
        if self.memory.optimizer == "bf16" and self.betas[1] > 0.98:
            raise ValueError(
                f"memory.optimizer=bf16 with betas[1]={self.betas[1]}: a change of less than 1/256 is lost in 16 bits and "
                "the average stands still; use betas[1] up to 0.98, or memory.optimizer=fp32 or host"
            )
        self.rope.validate()
        self.passkey.validate()
        if self.rope.type != "keep" and self.init is None:
            raise ValueError(f"rope={self.rope.type}: stretches trained weights, and init= names none; leave rope out")
        self.lora.validate()
        self.data.validate_words()

    def _validate_schedule(self) -> None:
        before = 1
        for stage in self.seq_len_schedule or []:
            said = f"seq_len_schedule={self.seq_len_schedule}"
            if len(stage) != 2 or stage[1] < 1:
                raise ValueError(f"{said}: pairs of row length and steps, such as [[2048,100],[8192,50]]")
            if self.seq_len == LONGEST:
                raise ValueError(f"{said}: its lengths divide seq_len, which seq_len=max leaves open; give a number")
            if not before < stage[0] < self.seq_len or self.seq_len % stage[0]:
                raise ValueError(f"{said}: growing lengths that divide seq_len={self.seq_len}, which comes last")
            before = stage[0]


@dataclass
class CompleteConfig(TrainConfig):
    """A configuration in which nothing is left to be decided; made by `complete`."""

    batch_size: int = 1
    accumulate: int = 1
    max_steps: int = 1
    lr: float = 1e-3
    warmup_steps: int = 0
    val_every: int = 1
    val_rows: int = 0

    @property
    def rows_per_step(self) -> int:
        """Rows that one optimizer step takes, over all micro-batches and devices."""
        return self.batch_size * self.accumulate * self.devices


def check_name(name: str) -> None:
    """Raise ValueError unless `name` is safe as the name of one folder."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ValueError(
            f"name={name!r}: names a folder: up to 100 letters, digits, '.', '_', '-', the first a letter or digit"
        )


def complete(config: TrainConfig, device: str) -> CompleteConfig:
    """The configuration with every null that depends on `device` ("cuda" or "cpu") filled in; pure.

    On a GPU `longctx.training.plan.decide` may make fewer micro-batches of the same step. ValueError for seq_len=max, which
    depends on more than that.
    """
    if config.seq_len == LONGEST:
        raise ValueError("seq_len=max: a run finds that on its GPU; here give a number of tokens")
    batch_size = config.batch_size or max(1, TOKENS_PER_MICRO_BATCH[device] // config.seq_len)
    micro_batch = batch_size * config.seq_len * config.devices
    accumulate = config.accumulate or max(1, TOKENS_PER_STEP[device] // micro_batch)
    if config.max_tokens is not None:
        steps = math.ceil(config.max_tokens / (micro_batch * accumulate))
    else:
        steps = config.max_steps or STEPS[device]
    if sum(length for _, length in config.seq_len_schedule or []) >= steps:
        raise ValueError(
            f"seq_len_schedule={config.seq_len_schedule}: takes all {steps:,} steps; leave some for seq_len"
        )
    warmup = min(200, steps // 10) if config.warmup_steps is None else config.warmup_steps
    decided = {
        "batch_size": batch_size,
        "accumulate": accumulate,
        "max_steps": steps,
        "max_tokens": None,
        "lr": default_rate(config) if config.lr is None else config.lr,
        "warmup_steps": warmup,
        "val_every": config.val_every or max(20, math.ceil(steps / 5)),
        "val_rows": max(1, TOKENS_PER_VALIDATION[device] // config.seq_len)
        if config.val_rows is None
        else config.val_rows,
        "memory": config.memory.filled(config.memory.policies()[0]),
        "precision": {"cuda": "bf16", "cpu": "fp32"}[device] if config.precision == "auto" else config.precision,
        "compile": str(device == "cuda").lower() if config.compile.lower() == "auto" else config.compile.lower(),
    }
    return CompleteConfig(**(vars(config) | decided))


def default_rate(config: TrainConfig) -> float:
    """The peak rate: near GPT-3's table of sizes from random weights; for trained ones what those who stretch them take
    (YaRN, arXiv 2309.00071), and ten times that for LoRA, whose additions begin at zero (arXiv 2405.09673).
    """
    if config.lora.rank is not None:
        return 2e-4
    return 2e-5 if config.init is not None else 0.5 / config.model.channels


def upgraded(saved: dict[str, Any]) -> dict[str, Any]:
    """A run's configuration as this version has it; older ones say recompute and loss_chunk under model."""
    model = dict(saved.get("model") or {})
    if not {"recompute", "loss_chunk"} & model.keys():
        return saved
    recompute, chunk = model.pop("recompute", False), model.pop("loss_chunk", None)
    memory = {"policy": "balanced" if recompute else "fast", "loss_chunk": chunk}
    return saved | {"model": model, "memory": memory | dict(saved.get("memory") or {})}


def _in_range(key: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{key}={value}: a number from {least:,} to {most:,}")


def _one_of(key: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{key}={value}: one of {', '.join(allowed)}")
