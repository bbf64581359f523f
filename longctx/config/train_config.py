"""The keys of a training run. Torch-free, so that `python train.py --help` answers at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from typing import Any

from longctx.attention.description import AttentionConfig
from longctx.config.data_config import SOURCES, DataConfig
from longctx.config.doors import SCHEDULES, TRACKERS, ObjectiveConfig, OptimizerConfig
from longctx.config.eval_config import PasskeyConfig
from longctx.config.fields import (
    DEVICE,
    PLUGINS,
    SEEDS,
    Group,
    foreign_keys,
    group,
    key,
    positive,
    refuse_first,
    shown,
)
from longctx.config.layout_config import ContextConfig, MemoryConfig, StrategyConfig
from longctx.config.rope_config import RopeConfig
from longctx.model.mixers.description import check_windows
from longctx.spec.model_config import GPTConfig, LoraConfig
from longctx.spec.step import LONGEST

# Of the schedule: a resumed run may have another one, and names show it
SCHEDULE: dict[str, Any] = {"resume": True, "names": True}
FOLDER_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}(?<!\.ckpt)", re.ASCII)


@dataclass
class WandbConfig:
    """What Weights & Biases hears about a run. Other trackers use its project and group too.

    mode: auto: online with an API key, else offline | online | offline | disabled
    """

    project: str = key("longctx", "the project that the run appears in")
    entity: str | None = key(None, "team or user; null: your default")
    mode: str = key("auto", choices=("auto", "online", "offline", "disabled"))
    group: str | None = key(None, "runs drawn together; null: offline, a run and its resumes")
    job_type: str = key("train", "the kind of run, to filter by; eval.py's is eval")
    tags: list[str] = key([], "such as [baseline,h200]")
    notes: str | None = key(None, "a sentence about the run")


@dataclass
class KernelConfig:
    """How strictly a run keeps its kernels, as recorded in its kernel.lock.json.

    lock: auto: record, and refuse others on resume | record: take what is here now | off
    """

    lock: str = key("auto", choices=("auto", "record", "off"), resume=True)


@dataclass
class TrainConfig(Group):
    """Train a GPT on long documents.

    python train.py attention=flash seq_len=16384
    python train.py -m attention=naive,sdpa,flash seq_len=4096,8192
        -m: a sweep, every combination, one process each
    python train.py resume=runs/NAME
    python train.py my.yaml key=value ...
        my.yaml: keys as below, or a run's config.yaml
        values: text as it is typed, null for none, lists as [a,b]
    The same: longctx train key=value ...

    seq_len: tokens per sequence, its context in training; max: the longest that fits the GPU
    seq_len_schedule: [[tokens, steps], …]: shorter sequences first, the same tokens per step
    batch_size: sequences per device and micro-batch; null: a whole step if it fits, else 16,384
        tokens or fewer
    accumulate: micro-batches per step; null: 65,536 tokens a step on a GPU, 4,096 on a CPU
    max_steps: optimizer steps; null: from max_tokens, else 300 on a GPU, up to 40 on a CPU
    max_tokens: tokens to train on, in place of max_steps; counts padding, unlike tokens_seen
    lr: peak learning rate; null: 0.5 / model.channels, with init 2e-5, with lora 2e-4
    lr_schedule: the rate after the warm-up: cosine, linear: falls to min_lr_ratio · lr | wsd:
        stays, and falls over the last steps | inverse_sqrt: falls as 1 / √step | constant
    min_lr_ratio: cosine, linear, wsd: rate of the last step, as a share of lr; null: 0.1
    lr_decay_share: wsd: share of the steps in which the rate falls; null: 0.2
    lr_decay_from: wsd: steps before the rate falls, in place of lr_decay_share
    lr_decay_shape: wsd: 1-sqrt | linear; null: 1-sqrt
    warmup_steps: linear warm-up; null: a tenth of the steps, at most 200
    weight_decay: on matrices, embeddings among them; never on norms and biases
    precision: auto: bf16 on a GPU, fp32 on a CPU | bf16: fp32 weights, the rest in bf16 | fp32 |
        fp8: as bf16, the matrix products of the blocks' linear layers in FP8
    bf16_layers: blocks that stay in bf16 under precision=fp8: the first is 0, the last -1
    compile: auto: on a GPU | true | false: torch.compile of each transformer block
    graphs: auto: on a GPU that would wait for the host | true | false: micro-batches as CUDA graphs
    name: of the run's folder; null: made of what differs from the defaults, and a counter
    init: start from the model and tokenizer of a Hugging Face folder, of a run, runs/NAME, or of a
        model of the Hub, owner/name or owner/name@revision (branch, tag or commit)
    transformers: auto: transformers computes init= if no family here can | always | never
    dry_run: print the run and its predicted memory and time; train nothing
    val_every: steps between validations, also one at step 0; null: a fifth of the run, 20 or more
    val_rows: sequences of a validation; null: 262,144 tokens on a GPU, 32,768 on a CPU; 0: all
    sample_prompt: what a sample continues; null: the beginning of a document that validates
    keep_best: also keep the checkpoint with the lowest validation loss, as best.ckpt; given on
        resume: the lowest from then on
    patience: end after this many validations without a lower loss; null: after max_steps
    workers: processes that prepare batches, per device; 0: none
    tracker: copies of metrics.jsonl, one or several as [wandb,tensorboard]; none: the file alone
    """

    seq_len: int | str = key(4096, between=(2, LONGEST), unit=1024, word="max", names=False)
    seq_len_schedule: list[list[int]] | None = key(None)
    batch_size: int | None = positive(None, resume=True)
    accumulate: int | None = positive(None, resume=True)
    max_steps: int | None = positive(None, resume=True)
    max_tokens: int | None = positive(None, limit=10**15, unit=1000, resume=True)
    lr: float | None = key(None, between=(0.0, 10.0))
    lr_schedule: str = key("cosine", choices=SCHEDULES, **SCHEDULE)
    min_lr_ratio: float | None = key(None, between=(0.0, 1.0), **SCHEDULE)
    lr_decay_share: float | None = key(None, between=(0, 1), above=0, **SCHEDULE)
    lr_decay_from: int | None = key(None, between=(0, 10**9), **SCHEDULE)
    lr_decay_shape: str | None = key(None, choices=("1-sqrt", "linear"), **SCHEDULE)
    warmup_steps: int | None = key(None, between=(0, 10**9))
    weight_decay: float = key(0.1, between=(0.0, 10.0))
    betas: tuple[float, float] = key((0.9, 0.95), "AdamW's β1 and β2", between=(0, 0.999999))
    clip: float | None = key(1.0, "largest global gradient norm; null: no clipping")
    seed: int = key(1, "of the initial weights and of the order of the sequences", between=SEEDS)
    device: str = key("auto", DEVICE, choices=("auto", "cpu", "cuda"), resume=True)
    devices: int = positive(1, "GPUs, or processes on a CPU", limit=4096, resume=True)
    precision: str = key("auto", choices=("auto", "bf16", "fp32", "fp8"))
    bf16_layers: list[int] = key([], between=(-4096, 4095), needs="precision=fp8")
    compile: str = key("auto", choices=("auto", "true", "false"), resume=True)
    graphs: str = key("auto", choices=("auto", "true", "false"), resume=True)
    deterministic: bool = key(False, "only algorithms that give the same bits in every run; slower")
    name: str | None = key(None, names=False, compared=False)
    init: str | None = key(None, names=False)
    transformers: str = key("auto", choices=("auto", "always", "never"), needs="init")
    resume: str | None = key(None, "continue this run, such as runs/NAME", compared=False)
    dry_run: bool = key(False, resume=True, compared=False)
    runs: str = key("runs", "the folder that runs are written to", names=False, compared=False)
    plugins: list[str] | None = key(None, PLUGINS, resume=True)
    val_every: int | None = positive(None, resume=True)
    val_rows: int | None = key(None, between=(0, 10**9), resume=True)
    sample_every: int | None = positive(None, "steps per text sample; null: none", resume=True)
    sample_prompt: str | None = key(None, literal=True, needs="sample_every", resume=True)
    checkpoint_every: int = positive(200, "steps between checkpoints; also at the end", resume=True)
    keep_checkpoints: int = positive(2, "how many stay on disk, the newest", resume=True)
    keep_best: bool = key(False, resume=True)
    patience: int | None = positive(None, resume=True)
    log_every: int = positive(5, "steps between rows of metrics.jsonl", resume=True)
    workers: int = key(1, between=(0, 256), resume=True)
    tracker: list[str] = key(["wandb"], choices=TRACKERS, distinct=True, resume=True)
    attention: AttentionConfig = group(AttentionConfig)
    kernel: KernelConfig = group(KernelConfig)
    model: GPTConfig = group(GPTConfig)
    memory: MemoryConfig = group(MemoryConfig, resume=True, names=False)
    objective: ObjectiveConfig = group(ObjectiveConfig)
    optimizer: OptimizerConfig = group(OptimizerConfig)
    lora: LoraConfig = group(LoraConfig)
    rope: RopeConfig = group(RopeConfig)
    passkey: PasskeyConfig = group(PasskeyConfig, resume=True, names=False)  # at every validation
    data: DataConfig = group(DataConfig, names=False)
    strategy: StrategyConfig = group(StrategyConfig, resume=True, names=False)
    context: ContextConfig = group(ContextConfig, resume=True, names=False)
    wandb: WandbConfig = group(WandbConfig, resume=True, names=False)

    def problems(self) -> Iterator[str]:
        """Yield a message for keys that contradict each other on any machine, with any data."""
        yield from self._problems_of_schedules()
        yield from self._problems_of_objective()
        # Else the model is known when init is read
        if self.init is None:
            yield from self._problems_of_layers(self.model)
        # With one a launcher may have started more
        if self.devices > 1:
            self.context.check_degree(self.devices)
        state = self.memory.filled(self.memory.policies()[0]).optimizer_state
        traits, setting = self.optimizer.traits, f"optimizer={self.optimizer.name}"
        if (state or "fp32") not in traits.states:
            possible = ", ".join(traits.states)
            yield f"memory.optimizer_state={state} with {setting}: can be {possible}"
        if self.lora.rank is not None and not traits.lora:
            yield f"{setting} with lora.rank={self.lora.rank}: trains no LoRA; use optimizer=adamw"
        is_shared = self.devices > 1 or self.strategy.name != "auto"
        if (share := self.memory.offload_weights) and (is_shared or self.lora.rank is None):
            yield f"memory.offload_weights={share}: needs lora.rank=, and devices=1 strategy=auto"
        for name in self.tracker:
            package = TRACKERS[name].package
            if package is not None and find_spec(package) is None:
                yield f"tracker={name}: not installed; pip install {package}"
        if self.max_tokens and self.max_steps:
            yield f"max_steps={self.max_steps} and max_tokens={self.max_tokens}: give one"
        if self.name is not None and not FOLDER_NAME.fullmatch(self.name):
            rule = "up to 100 letters, digits, '.', '_', '-', letter or digit first, no .ckpt last"
            yield f"name={self.name!r}: names a folder: {rule}"
        if self.init is None and self.rope not in (RopeConfig(), RopeConfig("keep")):
            typed = f".factor={factor}" if (factor := self.rope.factor) else f"={self.rope.type}"
            yield f"rope{typed}: stretches trained weights; give init=, or leave rope out"
        # 16 bits lose a change of less than 1/256, so the average would stand still
        if self.memory.optimizer_state == "bf16" and self.betas[1] > 0.98:
            setting = f"memory.optimizer_state=bf16 with betas[1]={self.betas[1]}"
            yield f"{setting}: too close to 1 for 16 bits; use at most 0.98, or fp32 or host"

    def problems_of_new_run(self) -> Iterator[str]:
        """Yield a message for keys that a new run cannot have; a resumed one had them before."""
        if self.context.degree == 1 and self.context.method != "auto":
            yield f"context.method={self.context.method}: does nothing with context=1; give both"
        if self.max_steps and (self.warmup_steps or 0) > self.max_steps:
            yield f"warmup_steps={self.warmup_steps}: above max_steps={self.max_steps}; give fewer"
        if self.lora.rank is not None and self.init is None:
            yield f"lora.rank={self.lora.rank}: adds to trained weights; give init="

    @property
    def data_as_read(self) -> DataConfig:
        """Return the objective's documents; a resumed run of init= has the tokenizer itself."""
        data = replace(self.data, preferences=self.objective.traits.data)
        is_own = self.init is not None and self.resume is not None
        return replace(data, tokenizer=self.resume) if is_own else data

    def unread(self) -> list[str]:
        """Return the keys of `wandb` that no tracker reads, with their values."""
        read, usual = [TRACKERS[name].reads for name in self.tracker], vars(WandbConfig())
        return [
            f"wandb.{name}={shown(value)}"
            for name, value in vars(self.wandb).items()
            if value != usual[name] and not any(keys is None or name in keys for keys in read)
        ]

    def _problems_of_objective(self) -> Iterator[str]:
        """Yield a message for what the objective does not go with."""
        traits, setting = self.objective.traits, f"objective={self.objective.name}"
        preferences = self.data.preferences
        if preferences not in (None, traits.data):
            yield f"data.preferences={preferences}: {setting} sets it; give data.preferences=null"
        if traits.data is None:
            return
        if "preferences" not in SOURCES[self.data.source].keys_of(self.data):
            yield f"{setting}: data={self.data.source} has no answers; use data=text or data=hub"
        if hasattr(self.objective, "reference") and self.init is None:
            yield f"{setting}: begins with trained weights; give init="
        if getattr(self.objective, "reference", None) == "step" and self.lora.rank is None:
            yield "objective.reference=step: only LoRA can be switched off; use lora.rank="
        if not self.data.packing:
            yield f"{setting} with data.packing=false: answers share a sequence; leave it out"
        if self.seq_len_schedule:
            yield f"{setting} with seq_len_schedule: longer answers would not fit; leave it out"
        if self.graphs.lower() == "true":
            yield f"{setting} with graphs=true: no CUDA graph holds its step; use graphs=auto"

    def _problems_of_schedules(self) -> Iterator[str]:
        """Yield a message for keys of another schedule than lr_schedule, and unless the lengths of
        seq_len_schedule grow and divide seq_len.
        """
        values = {name: getattr(self, name) for x in SCHEDULES.values() for name in x.keys}
        own = SCHEDULES[self.lr_schedule].keys
        yield from foreign_keys(values, own, f"lr_schedule={self.lr_schedule}")
        if self.lr_decay_share is not None and self.lr_decay_from is not None:
            share = f"lr_decay_share={self.lr_decay_share}"
            yield f"{share} and lr_decay_from={self.lr_decay_from}: give one"
        setting, before = f"seq_len_schedule={self.seq_len_schedule}", 1
        if self.seq_len_schedule and self.seq_len == "max":
            yield f"{setting}: its lengths divide seq_len; give a number, not max"
        for stage in self.seq_len_schedule or []:
            if len(stage) != 2 or stage[1] < 1:
                yield f"{setting}: pairs of length and steps, such as [[2048,100],[8192,50]]"
            length, last = stage[0], int(self.seq_len)
            if not before < length < last or last % length:
                yield f"{setting}: growing lengths that divide seq_len={last}, which comes last"
            before = length

    def check_model(self, model: GPTConfig) -> None:
        """Raise ValueError for keys with which `model` cannot be trained."""
        refuse_first(chain(self._problems_of_layers(model), self._problems_of_fp8(model)))
        self.lora.check_model(model)
        check_windows(model, self.attention.window)

    def _problems_of_layers(self, model: GPTConfig) -> Iterator[str]:
        """Yield a message for what the experts or mixers of `model` do not go with."""
        count, balance = model.experts.count, model.experts.balance
        dense, variant = model.experts.dense_layers, self.attention.variant
        if variant and not any(getattr(x.attention, "softmax_calls", 1) for x, _ in model.kinds):
            yield f"{variant}: no layer has softmax attention; leave it out"
        if balance and count is None:
            yield f"model.experts.balance={balance}: the model has no experts of ours; leave it out"
        if balance and self.objective.traits.data is not None:
            setting = f"objective={self.objective.name}"
            yield f"model.experts.balance={balance}: {setting} does not train it; give 0"
        if count is None:
            return
        if len(dense) == model.layers:
            yield f"model.experts.dense_layers={dense}: leaves no layer with experts; give fewer"
        if self.precision == "fp8":
            yield f"precision=fp8: model.experts.count={count} has no FP8; use precision=bf16"
        if (self.lora.rank or 0) % 8 and {"gate_up", "down"} & {*self.lora.targets}:
            yield f"lora.rank={self.lora.rank}: experts take a multiple of 8; use 8 or 16"

    def _problems_of_fp8(self, model: GPTConfig) -> Iterator[str]:
        """Yield a message if the matrices of `model` have no FP8 products as asked for."""
        if self.precision != "fp8":
            return
        # torch._scaled_mm takes no other sizes
        for name, linear in (x for block, _ in model.kinds for x in block.linears.items()):
            if linear.outputs % 16 or linear.columns % 16:
                size = f"{linear.outputs} × {linear.columns}"
                yield f"precision=fp8: {name} is {size}, and FP8 products need multiples of 16"
        layers, setting = model.layers, f"bf16_layers={self.bf16_layers}"
        if self.lora.base is not None:
            yield f"precision=fp8: lora.base={self.lora.base} has no 16-bit weights; use bf16"
        if any(not -layers <= layer < layers for layer in self.bf16_layers):
            yield f"{setting}: layers from 0 to {layers - 1}, or from the last, -1"
        if len({layer % layers for layer in self.bf16_layers}) == layers:
            yield f"{setting}: leaves no layer in FP8; use precision=bf16"
