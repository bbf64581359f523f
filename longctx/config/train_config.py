"""What a training run is told: its keys, checked, and completed for the machine at hand.

Torch-free, so that `python train.py --help` and every mistyped word are answered in a second.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from longctx.config.data_config import DataConfig
from longctx.config.eval_config import PasskeyConfig
from longctx.config.fields import check, group, key
from longctx.config.memory_config import MemoryConfig
from longctx.config.model_config import AttentionConfig, GPTConfig, LoraConfig
from longctx.config.optimizer_config import OptimizerConfig
from longctx.config.parallel_config import ContextConfig, StrategyConfig
from longctx.config.rope_config import RopeConfig

LONGEST_ROW = 2**24


@dataclass
class WandbConfig:
    """What Weights & Biases is told about a run."""

    project: str = key("longctx", "the project that the run appears in")
    entity: str | None = key(None, "team or user; null: your default")
    mode: str = key(
        "auto",
        "auto: online with an API key, else offline | online | offline | disabled",
        choices=("auto", "online", "offline", "disabled"),
    )
    group: str | None = key(
        None,
        "runs of one group are drawn together; null: offline, the run and what continues it",
    )
    job_type: str = key("train", "the kind of run, to filter by; eval.py's is eval")
    tags: list[str] = key([], "such as [baseline,h200]")
    notes: str | None = key(None, "a sentence about the run")
    artifacts: bool = key(False, "also upload the checkpoints")


@dataclass
class KernelConfig:
    """Whether a run holds on to its kernels; kernel.lock.json in its folder says which they are."""

    lock: str = key(
        "auto",
        "auto: record, on resume strict | record: take what is here now | strict: refuse others"
        " | off",
        choices=("auto", "record", "strict", "off"),
    )


@dataclass
class TrainConfig:
    """One training run."""

    seq_len: int | str = key(
        4096,
        "tokens per row: the context that the model trains at; max: the longest that fits the GPU",
        between=(2, LONGEST_ROW),
        word="max",
    )
    seq_len_schedule: list[list[int]] | None = key(
        None,
        "[[tokens per row, steps], …]: shorter rows first, the same tokens per step",
    )
    batch_size: int | None = key(
        None,
        "rows per device and micro-batch; null: all of a step if they fit, else 16,384 tokens",
        between=(1, 10**9),
    )
    accumulate: int | None = key(
        None,
        "micro-batches per step; null: 65,536 tokens a step on a GPU, 4,096 on a CPU",
        between=(1, 10**9),
    )
    max_steps: int | None = key(
        None,
        "optimizer steps; null: from max_tokens, else 300 on a GPU, up to 40 on a CPU",
        between=(1, 10**9),
    )
    max_tokens: int | None = key(
        None,
        "stop after about this many tokens, padding included (tokens_seen counts none), instead of "
        "max_steps",
        between=(1, 10**15),
    )
    lr: float | None = key(
        None,
        "peak learning rate; null: 0.5 / model.channels, with init 2e-5, with lora 2e-4",
        between=(0.0, 10.0),
    )
    min_lr: float = key(0.1, "where the cosine ends, as a share of lr", between=(0.0, 1.0))
    warmup_steps: int | None = key(
        None, "linear warm-up; null: a tenth of the steps, at most 200", between=(0, 10**9)
    )
    weight_decay: float = key(
        0.1, "on matrices, embeddings among them; never on norms and biases", between=(0.0, 10.0)
    )
    betas: tuple[float, float] = key(
        (0.9, 0.95),
        "AdamW's β1 and β2",
    )
    clip: float | None = key(1.0, "largest global gradient norm; null: no clipping")
    objective: str = key("cross_entropy", "what a step minimizes", choices=("cross_entropy",))
    spike: str = key(
        "flag",
        "flag: say where the loss leaps | skip: drop such a step too (every step waits for it)",
        choices=("flag", "skip"),
    )
    spike_budget: int = key(4, "steps of the last 128 that spike=skip may drop", between=(1, 128))
    seed: int = key(
        1, "of the initial weights and of the order of the rows", between=(0, 2**63 - 1)
    )
    device: str = key(
        "auto", "auto: a GPU if there is one | cpu | cuda", choices=("auto", "cpu", "cuda")
    )
    devices: int = key(1, "GPUs, or processes on a CPU", between=(1, 4096))
    precision: str = key(
        "auto",
        "auto: bf16 on a GPU, fp32 on a CPU | bf16: fp32 weights, the rest in bf16 | fp32 | fp8: "
        "as bf16, the matrix products of the blocks' linear layers in FP8",
        choices=("auto", "bf16", "fp32", "fp8"),
    )
    bf16_layers: list[int] = key(
        [], "blocks that stay in bf16 under precision=fp8: the first is 0, the last -1"
    )
    compile: str = key(
        "auto",
        "auto: on a GPU | true | false: torch.compile of each transformer block",
    )
    graphs: str = key(
        "auto",
        "auto: on a GPU that would wait for the host | true | false: CUDA graphs, which launch a "
        "micro-batch's forward and backward as one",
    )
    deterministic: bool = key(False, "only algorithms that give the same bits in every run; slower")
    name: str | None = key(
        None,
        "of the run's folder; null: made of what differs from the defaults, and a counter",
    )
    init: str | None = key(
        None,
        "start from the model and tokenizer of a Hugging Face folder, of a run, runs/NAME, or of a "
        "model of the Hub, owner/name or owner/name@revision (branch, tag or commit)",
    )
    resume: str | None = key(None, "continue this run, for example runs/tiny-flash-4k-001")
    runs: str = key("runs", "the folder that runs are written to")
    val_every: int | None = key(
        None,
        "steps between validations, also one at step 0; null: a fifth of the run, 20 or more",
        between=(1, 10**9),
    )
    val_rows: int | None = key(
        None,
        "rows of a validation; null: 262,144 tokens on a GPU, 32,768 on a CPU; 0: all",
        between=(0, 10**9),
    )
    sample_every: int | None = key(
        None,
        "steps between samples of text, also one at the last step; null: none",
        between=(1, 10**9),
    )
    sample_prompt: str | None = key(
        None,
        "what a sample continues; null: the beginning of a document that validates",
        literal=True,
    )
    checkpoint_every: int = key(
        200, "steps between checkpoints; one always comes at the end", between=(1, 10**9)
    )
    keep_checkpoints: int = key(2, "how many stay on disk, the newest", between=(1, 10**9))
    keep_best: bool = key(
        False, "also keep the checkpoint with the lowest validation loss, as best.ckpt"
    )
    patience: int | None = key(
        None,
        "end after this many validations without a lower loss; null: after max_steps",
        between=(1, 10**9),
    )
    log_every: int = key(5, "steps between rows of metrics.jsonl", between=(1, 10**9))
    workers: int = key(1, "processes that prepare batches, per device; 0: none", between=(0, 256))
    attention: AttentionConfig = group(AttentionConfig)
    kernel: KernelConfig = group(KernelConfig)
    model: GPTConfig = group(GPTConfig)
    memory: MemoryConfig = group(MemoryConfig)
    optimizer: OptimizerConfig = group(OptimizerConfig)
    lora: LoraConfig = group(LoraConfig)
    rope: RopeConfig = group(RopeConfig)
    passkey: PasskeyConfig = group(PasskeyConfig)  # at every validation
    data: DataConfig = group(DataConfig)
    strategy: StrategyConfig = group(StrategyConfig)
    context: ContextConfig = group(ContextConfig)
    wandb: WandbConfig = group(WandbConfig)

    def validate(self) -> None:
        """Raise ValueError naming the first key whose value makes no sense on any machine, with any
        data.
        """
        check(self)
        self._validate_schedule()
        if self.max_tokens is not None and self.max_steps is not None:
            raise ValueError(
                f"max_steps={self.max_steps} and max_tokens={self.max_tokens} both end the run; "
                "give one"
            )
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError(
                f"betas={list(self.betas)}: two numbers from 0 to below 1, such as [0.9,0.95]"
            )
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ValueError(f"clip={self.clip}: a norm above 0, or null for no clipping")
        for name in ("compile", "graphs"):
            value = getattr(self, name)
            if value.lower() not in ("auto", "true", "false"):
                raise ValueError(f"{name}={value}: one of auto, true, false")
        if self.sample_prompt is not None and self.sample_every is None:
            raise ValueError(
                f"sample_prompt={self.sample_prompt}: does nothing without sample_every; give it "
                "too, such as sample_every=100"
            )
        if self.bf16_layers and self.precision != "fp8":
            raise ValueError(
                f"bf16_layers={self.bf16_layers}: does nothing without precision=fp8; leave it out"
            )
        check(self.kernel, "kernel.")
        check(self.strategy, "strategy.")
        check(self.context, "context.")
        if self.devices > 1:  # else a launcher may have started more
            self.context.validate(self.devices)
        if self.context.check and isinstance(self.seq_len, int) and self.seq_len < 8:
            raise ValueError(
                f"seq_len={self.seq_len}: too short for context.check=true, which puts two "
                "documents into each row; give 8 or more, or leave the check out"
            )
        check(self.wandb, "wandb.")
        if self.name is not None:
            check_name(self.name)
        if self.init == "":
            raise ValueError(
                "init= names no folder; give a Hugging Face folder, or leave it out for "
                "random weights"
            )
        if self.resume == "":
            raise ValueError(
                "resume= names no run; give its folder, such as resume=runs/NAME, or leave it out"
            )
        if not self.runs.strip() or "\0" in self.runs:
            raise ValueError(f"runs={self.runs!r}: the path of a folder")
        self.model.validate()
        self.memory.validate()
        self.optimizer.validate()
        for policy in self.memory.policies()[:1]:
            state = self.memory.filled(policy).optimizer_state
            self.optimizer.check_beside(state, self.lora.rank)
        if self.memory.optimizer_state == "bf16" and self.betas[1] > 0.98:
            raise ValueError(
                f"memory.optimizer_state=bf16 with betas[1]={self.betas[1]}: a change of less than "
                "1/256 is lost in 16 bits and the average stands still; use betas[1] up to 0.98, "
                "or memory.optimizer_state=fp32 or host"
            )
        self.rope.validate()
        self.passkey.validate()
        if self.rope.type != "keep" and self.init is None:
            raise ValueError(
                f"rope={self.rope.type}: stretches trained weights, and init= names none; "
                "leave rope out"
            )
        self.lora.validate()
        self.data.validate()

    def check_fp8(self, model: GPTConfig) -> None:
        """Raise ValueError where `model`, which may be of `init`, has no products in FP8 as
        asked for.
        """
        if self.precision != "fp8":
            return
        D = model.head_size
        for name, size in (
            ("channels", model.channels),
            ("ffn", model.ffn),
            ("heads × head size", model.heads * D),
            ("(heads + 2 · kv_heads) × head size", (model.heads + 2 * model.kv_heads) * D),
        ):
            if size % 16:
                raise ValueError(
                    f"precision=fp8: model.{name}={size} is not a multiple of 16, as FP8 products "
                    "need; use precision=bf16"
                )
        layers, setting = model.layers, f"bf16_layers={self.bf16_layers}"
        if any(not -layers <= n < layers for n in self.bf16_layers):
            raise ValueError(f"{setting}: layers from 0 to {layers - 1}, or from the last, -1")
        if len({n % layers for n in self.bf16_layers}) < len(self.bf16_layers):
            raise ValueError(f"{setting}: names a layer twice; name each once")
        if len(self.bf16_layers) == layers:
            raise ValueError(f"{setting}: leaves no layer in FP8; use precision=bf16")

    def _validate_schedule(self) -> None:
        before = 1
        for stage in self.seq_len_schedule or []:
            setting = f"seq_len_schedule={self.seq_len_schedule}"
            if len(stage) != 2 or stage[1] < 1:
                raise ValueError(
                    f"{setting}: pairs of row length and steps, such as [[2048,100],[8192,50]]"
                )
            if isinstance(self.seq_len, str):
                raise ValueError(
                    f"{setting}: its lengths divide seq_len, which seq_len=max leaves open; "
                    "give a number"
                )
            if not before < stage[0] < self.seq_len or self.seq_len % stage[0]:
                raise ValueError(
                    f"{setting}: growing lengths that divide seq_len={self.seq_len}, which comes "
                    "last"
                )
            before = stage[0]


def check_warmup(warmup_steps: int | None, max_steps: int | None) -> None:
    """Raise ValueError where the learning rate would never reach its peak."""
    if warmup_steps and max_steps and warmup_steps > max_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps}: the run has {max_steps:,} steps, so the learning rate "
            "would never reach lr; give fewer, or a larger max_steps"
        )


def check_name(name: str) -> None:
    """Raise ValueError unless `name` is safe as the name of one folder."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ValueError(
            f"name={name!r}: names a folder: up to 100 letters, digits, '.', '_', '-', "
            "the first a letter or digit"
        )


def from_plain(plain: dict[str, Any]) -> TrainConfig:
    """The configuration of which `dataclasses.asdict` made `plain`."""
    groups = {item.name: item.default_factory for item in fields(TrainConfig)}
    values = dict(plain)
    for name, value in plain.items():
        schema = groups[name]
        if is_dataclass(schema):
            values[name] = schema(**value)
    return TrainConfig(**values)


def upgraded(saved: dict[str, Any]) -> dict[str, Any]:
    """A run's configuration as this version has it. Older ones say memory.optimizer for
    memory.optimizer_state and know AdamW only; still older ones say recompute and loss_chunk under
    model. Raises ValueError where one of these groups is none.
    """
    for name in ("memory", "model"):
        if not isinstance(saved.get(name) or {}, dict):
            raise ValueError(f"{name}={str(saved[name])[:60]}: a group of keys belongs there")
    saved = {"optimizer": {"name": "adamw"}} | saved
    memory = saved.get("memory") or {}
    if "optimizer" in memory:
        memory = {"optimizer_state": memory["optimizer"]} | memory
        del memory["optimizer"]
        saved = saved | {"memory": memory}
    model = dict(saved.get("model") or {})
    if not {"recompute", "loss_chunk"} & model.keys():
        return saved
    recompute, chunk = model.pop("recompute", False), model.pop("loss_chunk", None)
    policy = {"policy": "balanced" if recompute else "fast", "loss_chunk": chunk}
    return saved | {"model": model, "memory": policy | memory}
