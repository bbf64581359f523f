"""DPO on long documents next to TRL, at the shape of gemma-3-1b.

A pair is two sides of equal length, random tokens, all of them learned. TRL's DPOTrainer has its
fused head, gradient checkpointing, weights and averages in bf16, and, as ours, log-probabilities of
the reference that were computed before. longctx has fp32 weights under autocast, as train.py has.
Whole steps of equal lengths are timed, up to one at which TRL runs out of the memory of `gib`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.points import Row, capped, emptied, point, training_run
from benchmarks.report import machine, write_json
from benchmarks.shapes import SHAPES
from longctx.config.doors import ObjectiveConfig
from longctx.config.fields import Group, key
from longctx.planner import fitting
from longctx.spec import hardware
from longctx.spec.hardware import GIB
from longctx.tables import grid

SHOWN = ("case", "side", "memory", "tokens_per_second", "gib", "predicted_gib", "failed")
TINY = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 7}


@dataclass(frozen=True)
class Options(Group):
    """What to measure. Lengths are tokens of a side; a pair has two."""

    attentions: tuple[str, ...] = key(
        ("sdpa", "flex_attention"), "of TRL, as transformers calls them"
    )
    lengths: tuple[int, ...] = key((8192, 32768, 77824, 81920, 118784), "in this order")
    steps: int = key(2, "of a point; the last counts, the first one compiles", between=(1, 100))
    gib: float = key(79.0, "of the GPU's memory", above=0)
    host_gib: float = key(110.0, "host memory to plan with; some machines show it late", above=0)
    tiny: bool = key(False, "small shapes, for a CPU: shows that all parts run")
    out: str = key("results/preferences", "writes .json")


def run(options: Options, command: str) -> None:
    """Measure every part, print, write `out`.json after each point."""
    import torch

    if not options.tiny and not torch.cuda.is_available():
        raise ValueError("preferences: measures a GPU, and there is none here; tiny=true tries it")
    rows: list[Row] = []
    result = {"command": command, **machine(), "options": asdict(options), "results": rows}
    for row in chain(ours(options), of_trl(options)):
        rows.append(row)
        print(row, flush=True)
        write_json(Path(f"{options.out}.json"), result)
    grid("Preferences", SHOWN, rows)


def settings_of(options: Options) -> dict[str, Any]:
    """Return the config.json of the model."""
    settings = SHAPES["gemma-3-1b"] | (TINY if options.tiny else {})
    return settings | {"layer_types": settings["layer_types"][: settings["num_hidden_layers"]]}


def ours(options: Options) -> Iterator[Row]:
    """Yield our steps at every length."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    step = ["seq_len=512", "batch_size=1", "accumulate=1", "workers=0", "graphs=false"]
    run = training_run(step, device, settings_of(options))
    # A request would need data and weights, which no dry run opens
    run = replace(run, config=replace(run.config, objective=ObjectiveConfig.of("dpo")))
    room = options.gib * GIB / 100
    if device == "cuda":
        room = hardware.chip(torch.cuda.get_device_name(), options.gib * GIB).usable
    for side in options.lengths:
        workload = replace(run.workload, seq_len=2 * side)
        found = fitting.first_that_fits(workload, room, options.host_gib * GIB)
        workload = found or fitting.smallest(workload)
        row = point(replace(run, workload=workload), options.steps, 1, gib=options.gib)
        yield row | {"case": "longctx", "side": side, "gib": row["measured_gib"]}


def of_trl(options: Options) -> Iterator[Row]:
    """Yield TRL's steps at every length with each attention; one row tells what it raises."""
    for attention in options.attentions:
        trl: Trl | None = None
        emptied()
        try:
            with capped(options.gib):
                trl = Trl(settings_of(options), attention)
                for side in options.lengths:
                    yield trl.steps(side, options.steps + 1, f"trl {attention}")
        except Exception as error:  # of TRL and transformers: any
            yield {"case": f"trl {attention}", "failed": f"{type(error).__name__}: {error}"[:300]}
        del trl


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
        row: Row = {"case": case, "side": side, "ms": [], "failed": None}
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
