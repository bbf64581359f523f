"""Preferences on long documents: DPO beside TRL, DPO of an 8B model by LoRA, LoRA on few bits.

A pair is two sides of equal length, random tokens, all of them learned. TRL's DPOTrainer has its
fused head, gradient checkpointing, weights and averages in bf16, and, as ours, log-probabilities of
the reference that were computed before. longctx has fp32 weights under autocast, as train.py has.
All parts run in this process, each with its own result, so a part that fails loses no other:

    speed   gemma-3-1b, tokens/s of whole steps at equal lengths, beside TRL
    trl     the longest pair of gemma-3-1b by TRL within `gib`, by bisection
    ours    the same by longctx: the prediction, shortened until a step fits
    lora    Qwen3-8B with `layers` layers: DPO of sides of `side` tokens, beside two passes of cross
            entropy of so many tokens
    whole   Qwen3-8B with all layers: one such step of DPO
    packed  Qwen3-8B on nf4 and fp8 within `packed_gib`: the longest sequence, predicted and stepped
    losses  runs of train.py: a small model is trained, then LoRA on its weights in bf16, nf4, fp8
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.families import SHAPES
from benchmarks.process_group import in_child, train
from benchmarks.report import machine, write_json
from benchmarks.words import training_run
from longctx.config.doors import ObjectiveConfig
from longctx.config.fields import key
from longctx.planner import fitting
from longctx.planner.peak_memory import predict
from longctx.runs import metrics_file
from longctx.spec import hardware
from longctx.spec.hardware import GIB
from longctx.tables import grid

if TYPE_CHECKING:
    from longctx.spec.step import Workload
    from longctx.training.dry_run import DryRun
    from longctx.training.run import Run

SHOWN = (
    *("part", "case", "side", "memory", "tokens_per_second", "gib", "predicted_gib"),
    *("seconds", "last_loss", "failed"),
)
SHARES = (1.0, 0.95, 0.9, 0.8)  # of the memory, for predictions that a step does not confirm
TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
TINY_RUN = ["model.layers=1", "model.channels=64", "model.heads=4", "model.ffn=128"]
TINY_RUN += ["seq_len=64", "batch_size=2", "accumulate=1", "data.vocab_size=300", "device=cpu"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What to measure. Lengths are tokens of a side; a pair has two."""

    parts: tuple[str, ...] = key(
        ("speed", "trl", "ours", "lora", "whole", "packed", "losses"),
        "in this order; the module's text says what they are",
        choices=("speed", "trl", "ours", "lora", "whole", "packed", "losses"),
    )
    attentions: tuple[str, ...] = key(
        ("sdpa", "flex_attention"), "of TRL, as transformers calls them"
    )
    lengths: tuple[int, ...] = key((8192, 32768, 118784), "of speed")
    shortest: int = key(16384, "for TRL, taken to fit")
    longest: int = key(131072, "for TRL, taken not to fit")
    step: int = key(4096, "tokens by which TRL's lengths are tried")
    side: int = key(131072, "of lora and whole")
    layers: int = key(4, "of the model of lora")
    rank: int = key(16, "of LoRA")
    steps: int = key(2, "of a point; the last counts, the first one compiles", between=(1, 100))
    gib: float = key(79.0, "memory of speed, trl, ours, lora and whole", above=0)
    host_gib: float = key(110.0, "host memory to plan with; some machines show it late", above=0)
    packed_gib: float = key(24.0, "memory of packed", above=0)
    pretraining: int = key(200, "steps of the model of losses")
    runs: str = key("runs/preferences", "folder of the runs of losses")
    tiny: bool = key(False, "small shapes, for a CPU: shows that all parts run")
    out: str = key("results/preferences", "writes .json")


def run(options: Options, command: str) -> None:
    """Measure every part, print, write `out`.json after each point."""
    import torch

    if not options.tiny and not torch.cuda.is_available():
        raise ValueError("preferences: measures a GPU, and there is none here; tiny=true tries it")
    rows: list[Row] = []
    result = {"command": command, **machine(), "options": asdict(options), "results": rows}
    for part in options.parts:
        began = time.monotonic()
        try:
            for row in PARTS[part](options):
                rows.append({"part": part, **row})
                print(rows[-1], flush=True)
                write_json(Path(f"{options.out}.json"), result)
        except Exception as error:  # of TRL, transformers and bitsandbytes: any
            traceback.print_exc()
            rows.append({"part": part, "failed": f"{type(error).__name__}: {error}"[:300]})
        rows.append({"part": part, "case": "all of it", "seconds": time.monotonic() - began})
        write_json(Path(f"{options.out}.json"), result)
        emptied()
    grid("Preferences", SHOWN, rows)


@contextmanager
def capped(gib: float) -> Iterator[None]:
    """Give tensors no more than `gib` GiB of the GPU."""
    import torch

    if not torch.cuda.is_available():
        yield
        return
    emptied()
    share = gib * GIB / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def emptied() -> None:
    """Give back memory that nothing holds."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def room(gib: float) -> float:
    """Return the bytes that the planner may fill of a GPU with `gib` GiB."""
    import torch

    if not torch.cuda.is_available():
        return gib * GIB / 100
    return hardware.chip(torch.cuda.get_device_name(), gib * GIB).usable


def settings_of(shape: str, tiny: bool) -> dict[str, Any]:
    """Return the config.json of `shape`."""
    settings = SHAPES[shape]
    if not tiny:
        return settings
    settings = settings | TINY | {"num_hidden_layers": 7}
    if "layer_types" in settings:
        settings |= {"layer_types": settings["layer_types"][:7]}
    return settings


def run_of_shape(
    shape: str, options: Options, objective: str, overrides: list[str], layers: int | None = None
) -> Run:
    """Return a run with random weights of `shape`, one sequence a step.

    `objective` is its name, and "step" or "cached" for the reference.
    """
    import torch

    from longctx.model.huggingface import read_config

    device = "cuda" if torch.cuda.is_available() else "cpu"
    step = ["model=tiny", "seq_len=512", "batch_size=1", "accumulate=1", "workers=0"]
    with tempfile.TemporaryDirectory() as folder:
        settings = json.dumps(settings_of(shape, options.tiny))
        (Path(folder) / "config.json").write_text(settings)
        model = read_config(folder, "never")
    if layers is not None:
        model = model.with_layers(range(layers))
    run = training_run([*step, *overrides], device)
    name, *reference = objective.split()
    # A request would need data and weights, which no dry run opens
    chosen = ObjectiveConfig(name, reference=reference[0] if reference else None)
    workload = replace(run.workload, model=model, graphs="false")
    return replace(run, config=replace(run.config, objective=chosen), workload=workload)


def fitted(workload: Workload, options: Options) -> Workload:
    """Return `workload` with the fastest policy that is predicted to fit, else the smallest."""
    found = fitting.first_that_fits(workload, room(options.gib), options.host_gib * GIB)
    return found or fitting.policies(workload)[-1]


def stepped(run: Run, workload: Workload, steps: int, case: str, gib: float) -> Row:
    """Return what `steps` steps of `workload` take within `gib` GiB, the last one's speed."""
    run = replace(run, workload=workload)
    found = in_child(stepped_here, run, steps, gib)
    row: Row = {
        "case": case,
        "side": workload.seq_len // (1 if run.config.objective.traits.data is None else 2),
        "layers": workload.model.layers,
        "memory": workload.memory.policy,
        "predicted_gib": predict(workload).peak / GIB,
        "host_gib": sum(predict(workload).host.values()) / GIB,
        "gib": found.memory.get("memory_peak_gib"),
        "ms": found.ms,
        "kernels": found.kernels,
    }
    if found.failed is None:
        return row | {"tokens_per_second": 1e3 * found.tokens / found.ms[-1]}
    return row | {"failed": found.failed}


def stepped_here(run: Run, steps: int, gib: float) -> DryRun:
    """Return `steps` steps of `run` in this process."""
    from longctx.training.dry_run import dry_run

    with capped(gib):
        return dry_run(run, steps)


def longest_of_ours(run: Run, options: Options, gib: float, case: str) -> Iterator[Row]:
    """Yield a step of the longest sequences that are predicted to fit, then of shorter ones until
    one does.
    """
    limit = 2048 if options.tiny else 2**24
    for share in SHARES:
        workload = fitting.longest(
            [lambda tokens: replace(run.workload, seq_len=tokens)],
            share * room(gib),
            options.host_gib * GIB,
            1024,
            limit,
        )
        if workload is None:
            raise ValueError(f"{case}: no length is predicted to fit {gib} GiB")
        row = stepped(run, workload, 1, case, gib)
        yield row
        if "failed" not in row:
            return


def speed(options: Options) -> Iterator[Row]:
    """Yield steps of gemma-3-1b at equal lengths: ours, and TRL's with each attention."""
    run = run_of_shape("gemma-3-1b", options, "dpo", [])
    for side in options.lengths:
        workload = fitted(replace(run.workload, seq_len=2 * side), options)
        yield stepped(run, workload, options.steps + 1, "longctx", options.gib)
    with capped(options.gib):
        for attention in options.attentions:
            yield from of_trl(options, attention, timed)


def longest_of_trl(options: Options) -> Iterator[Row]:
    """Yield TRL's steps on the way to the longest pair, with each attention."""
    with capped(options.gib):
        for attention in options.attentions:
            yield from of_trl(options, attention, bisected)


def longest_ours(options: Options) -> Iterator[Row]:
    """Yield our longest pair of gemma-3-1b."""
    run = run_of_shape("gemma-3-1b", options, "dpo", [])
    yield from longest_of_ours(run, options, options.gib, "longctx")


def of_trl(
    options: Options, attention: str, function: Callable[[Options, Trl, str], Iterator[Row]]
) -> Iterator[Row]:
    """Yield the rows of `function`; one row tells what TRL raises."""
    trl: Trl | None = None
    try:
        trl = Trl(settings_of("gemma-3-1b", options.tiny), attention)
        yield from function(options, trl, f"trl {attention}")
    except Exception as error:  # of TRL and transformers: any
        traceback.print_exc()
        yield {"case": f"trl {attention}", "failed": f"{type(error).__name__}: {error}"[:300]}
    del trl
    emptied()


def timed(options: Options, trl: Trl, case: str) -> Iterator[Row]:
    """Yield TRL's steps at every length."""
    for side in options.lengths:
        yield trl.steps(side, options.steps + 1, case)


def bisected(options: Options, trl: Trl, case: str) -> Iterator[Row]:
    """Yield one step at each length that is tried, and the longest one that fits."""
    fits, fails = options.shortest, options.longest
    first = trl.steps(fits, 1, case)
    yield first
    while "failed" not in first and fails - fits > options.step:
        side = (fits + fails) // 2 // options.step * options.step
        row = trl.steps(side, 1, case)
        yield row
        fits, fails = (fits, side) if "failed" in row else (side, fails)
    yield {"case": f"{case}, longest", "side": fits, "failed": first.get("failed")}


class Trl:
    """TRL's DPOTrainer with a model of random weights in bf16, and steps of random pairs."""

    def __init__(self, settings: dict[str, Any], attention: str) -> None:
        import torch
        from datasets import Dataset
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
        from trl import DPOConfig, DPOTrainer

        on_gpu = torch.cuda.is_available()
        self.device, self.vocab_size = "cuda" if on_gpu else "cpu", settings["vocab_size"]
        words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="a"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")

        def model_of(settings: dict[str, Any]) -> Any:
            with torch.device(self.device):
                return AutoModelForCausalLM.from_config(
                    AutoConfig.for_model(**settings),
                    dtype=torch.bfloat16,
                    attn_implementation=attention,
                )

        with tempfile.TemporaryDirectory() as folder:
            self.trainer: Any = DPOTrainer(
                model=model_of(settings),
                ref_model=model_of(settings | {"num_hidden_layers": 1, "layer_types": None}),
                args=DPOConfig(
                    folder,
                    use_cpu=not on_gpu,
                    bf16=on_gpu,
                    report_to=[],
                    max_length=None,
                    save_strategy="no",
                ),
                train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "a", "rejected": "b"}]),
                processing_class=tokenizer,
            )
        # As after precompute_ref_log_probs=True, which would read the data once
        self.trainer.ref_model, self.trainer.precompute_ref_logps = None, True
        self.model = self.trainer.model.train()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = self.trainer.create_optimizer()

    def step(self, side: int) -> float:
        """Train on one pair; return its loss."""
        import torch

        shape, log_p = (2, side), torch.zeros(1, device=self.device)
        is_answer = torch.ones(shape, dtype=torch.long, device=self.device)
        is_answer[:, 0] = 0
        batch = {
            "input_ids": torch.randint(self.vocab_size, shape, device=self.device),
            "attention_mask": torch.ones_like(is_answer),
            "completion_mask": is_answer,
            "ref_chosen_logps": log_p,
            "ref_rejected_logps": log_p,
        }
        with self.trainer.compute_loss_context_manager():
            loss = self.trainer.compute_loss(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())  # waits for the device

    def steps(self, side: int, count: int, case: str) -> Row:
        """Return what `count` steps take, the last one's speed."""
        import torch

        from longctx.parallel.devices import is_out_of_memory

        emptied()
        row: Row = {"case": case, "side": side, "ms": []}
        try:
            for _ in range(count):
                began = time.perf_counter()
                self.step(side)
                row["ms"].append(1e3 * (time.perf_counter() - began))
            row["tokens_per_second"] = 2e3 * side / row["ms"][-1]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            row["failed"] = "out of memory"
        self.optimizer.zero_grad()
        if torch.cuda.is_available():
            row["gib"] = torch.cuda.max_memory_allocated() / GIB
        return row


def by_lora(options: Options) -> Iterator[Row]:
    """Yield DPO with a cached reference, two passes of cross entropy, and DPO whose step computes
    the reference, all with the policy of the whole model.
    """
    lora, side = [f"lora.rank={options.rank}"], options.side
    longest = run_of_shape("qwen3-8b", options, "dpo cached", lora).workload
    policy = fitted(replace(longest, seq_len=2 * side), options).memory.policy
    for objective in ("dpo cached", "cross_entropy", "dpo step"):
        run = run_of_shape("qwen3-8b", options, objective, lora, options.layers)
        sizes = {"seq_len": 2 * side}
        if objective == "cross_entropy":
            sizes = {"seq_len": side, "accumulate": 2}
        workload = fitting.with_policy(replace(run.workload, **sizes), policy)
        yield stepped(run, workload, options.steps, objective, options.gib)


def whole(options: Options) -> Iterator[Row]:
    """Yield a step of DPO by LoRA on all layers."""
    run = run_of_shape("qwen3-8b", options, "dpo cached", [f"lora.rank={options.rank}"])
    workload = fitted(replace(run.workload, seq_len=2 * options.side), options)
    yield stepped(run, workload, max(1, options.steps - 1), "dpo cached", options.gib)


def on_few_bits(options: Options) -> Iterator[Row]:
    """Yield the longest sequence of LoRA on each base within packed_gib."""
    for base in ("nf4", "fp8"):
        given = [f"lora.rank={options.rank}", f"lora.base={base}"]
        run = run_of_shape("qwen3-8b", options, "cross_entropy", given)
        yield from longest_of_ours(run, options, options.packed_gib, base)


def losses(options: Options) -> Iterator[Row]:
    """Yield the last losses of 100 steps of LoRA on each base, of one model trained before."""
    sizes = ["model=124m", "model.layers=4", "model.qk_norm=head", "seq_len=4096"]
    sizes, steps = (["model=tiny", *TINY_RUN], 2) if options.tiny else (sizes, 100)
    first = ["name=pretrained", f"max_steps={options.pretraining}", *sizes]
    yield trained(options, "pretrained", first, options.pretraining)
    init = [f"init={options.runs}/pretrained", f"lora.rank={options.rank}", f"max_steps={steps}"]
    init += [x for x in sizes if not x.startswith(("model", "data."))]
    for base in ("bf16", "nf4", "fp8"):
        packs = [] if base == "bf16" else [f"lora.base={base}"]
        yield trained(options, base, [f"name={base}", *packs, *init], steps)


def trained(options: Options, case: str, overrides: list[str], steps: int) -> Row:
    """Return the last losses of a run of train.py, in a child process."""
    own = [f"runs={options.runs}", "wandb.mode=disabled", f"val_every={steps}", "log_every=1"]
    began = time.monotonic()
    train([*overrides, *own])
    rows = metrics_file.read(Path(options.runs) / case)
    return {
        "case": case,
        "last_loss": next(row["loss"] for row in reversed(rows) if row.get("loss")),
        "val_loss": next(row["val_loss"] for row in reversed(rows) if row.get("val_loss")),
        "seconds": time.monotonic() - began,
    }


PARTS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "speed": speed,
    "trl": longest_of_trl,
    "ours": longest_ours,
    "lora": by_lora,
    "whole": whole,
    "packed": on_few_bits,
    "losses": losses,
}
