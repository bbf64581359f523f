"""docs/keys.md and docs/combinations.md, by asking the code: fields for the keys, checks for pairs.

No GPU is needed. A card is its compute capability, and every FlashAttention counts as installed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from benchmarks.processes import ROOT
from longctx import cli, files
from longctx.cli.commands import meaning_of, summary_of
from longctx.config import fields
from longctx.config.eval_config import EvalConfig
from longctx.config.train_config import TrainConfig

DOCS = ROOT / "docs"
CARDS = {"A100": (8, 0), "H100": (9, 0), "B200": (10, 0), "RTX 5090": (12, 0)}
HEAD_SIZES = (8, 36, 64, 72, 80, 96, 128, 192, 256, 512)
GIVEN = ["model=124m", "memory=fast"]
TRAINED = ["init=owner/name"]
PAIRS = [*TRAINED, "data=text", "data.path=pairs.jsonl"]
SETTINGS = {  # as the page shows it → overrides that it takes
    "`objective=dpo`": ["objective=dpo", *PAIRS],
    "`objective=kto`": ["objective=kto", *PAIRS],
    "`objective=orpo`": ["objective=orpo", *PAIRS],
    "`objective=simpo`": ["objective=simpo", *PAIRS],
    "`lora.rank=16`": ["lora.rank=16", *TRAINED],
    "`lora.base=nf4`": ["lora.base=nf4", "lora.rank=16", *TRAINED],
    "`optimizer=muon`": ["optimizer=muon"],
    "`memory.optimizer_state=bf16`": ["memory.optimizer_state=bf16"],
    "`precision=fp8`": ["precision=fp8"],
    "`strategy=fsdp`": ["strategy=fsdp", "devices=2"],
    "`context=2`": ["context=2", "devices=2"],
    "`graphs=true`": ["graphs=true"],
    "`data.packing=false`": ["data.packing=false"],
    "`seq_len_schedule`": ["seq_len_schedule=[[1024,10]]"],
    "`model.experts.count=8`": ["model.experts.count=8"],
    "a model of transformers": ["transformers=always", *TRAINED],
}
KEYS = """# Keys

Every key of `train.py` and `eval.py`, written by `python -m benchmarks reference` from the code.
`--help` has the same texts. A key of a group is given as `memory.policy=fast`; many groups have
presets, as `memory=fast`.
"""
COMBINATIONS = """# What combines with what

Written by `python -m benchmarks reference`, which asks the checks that a run asks.
"""


@dataclasses.dataclass(frozen=True)
class Options(fields.Group):
    """No keys."""


def run(options: Options, command: str) -> None:
    """Write both pages."""
    for name, page in pages().items():
        files.write_text(DOCS / name, page)
        print(f"wrote docs/{name}")


def pages() -> dict[str, str]:
    """Return the name of each page with its text."""
    keys = [KEYS, *section("train.py", TrainConfig, set()), *section("eval.py", EvalConfig)]
    combined = [COMBINATIONS, *of_backends(), *of_settings()]
    return {"keys.md": "\n".join([*keys, ""]), "combinations.md": "\n".join([*combined, ""])}


def section(title: str, schema: Any, seen: set[type] | None = None) -> Iterator[str]:
    """Yield a table of keys for each group, a link for one in `seen` or shared with train.py."""
    known = fields.keys(schema)
    groups = {name: key.type for name, key in known.items() if key.is_group}
    shared = {key.type for key in fields.keys(TrainConfig).values()} if seen is None else seen
    yield f"## {title}"
    for group, inner in {"": schema, **groups}.items():
        summary = summary_of(inner)
        yield "" if not group else f"\n### {title}: {group}\n\n{summary}.\n"
        if inner in shared:
            yield "The keys are those of [train.py](#trainpy)."
            continue
        yield "| key | default | value | meaning |\n|---|---|---|---|"
        for name, declared in known.items():
            if name.rpartition(".")[0] == group and not declared.is_group:
                yield row_of_key(name, declared)


def row_of_key(name: str, declared: fields.Key) -> str:
    """Return a row of the table of keys."""
    value = "a name" if declared.choices and not declared.is_list else declared.expected()
    value += " or null" if declared.optional else ""
    cells = [f"`{name}`", f"`{fields.shown(declared.default)}`", value, meaning_of(declared)]
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def refusal(ask: Callable[[], object]) -> str:
    """Return the message with which a check refuses; empty if it does not."""
    try:
        ask()
    except ValueError as error:
        return str(error)
    return ""


def table(head: list[str], rows: list[list[str]], notes: dict[str, int]) -> Iterator[str]:
    """Yield a table in Markdown, and the numbered `notes` of its cells."""
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield "\nThe messages:\n"
    yield from (f"{number}. `{message}`" for message, number in notes.items())


def of_backends() -> Iterator[str]:
    """Yield the table of attention backends and their features."""
    import torch

    from longctx import attention
    from longctx.attention import Mask, flash_attn

    features: dict[str, dict[str, Any]] = {
        "causal": {"mask": Mask.causal()},
        "sliding window": {"mask": Mask.causal(window=64)},
        "packed documents": {"mask": Mask("documents")},
        "full": {"mask": Mask.full()},
        "free intervals, as by `context.method=allgather`": {"mask": Mask("intervals")},
        "`softcap`": {"scores": frozenset(["softcap"])},
        "training with `sinks`": {"scores": frozenset(["sinks"])},
        "`key_bias`": {"scores": frozenset(["key_bias"])},
        "`deterministic=true`": {"deterministic": True},
        "fp16": {"dtype": torch.float16},
        "fp32": {"dtype": torch.float32},
        "fp64": {"dtype": torch.float64},
        **{f"heads of {size} channels": {"head_dim": size} for size in HEAD_SIZES},
    }
    backends = {
        name: backend
        for name, backend in sorted(attention.registered().items())
        if type(backend).__module__.startswith("longctx.")
    }
    notes: dict[str, int] = {}

    def cell(name: str, asked: dict[str, Any]) -> str:
        able, numbers = [], []
        for card in ("CPU", *CARDS):
            usual = {"dtype": torch.float32 if card == "CPU" else torch.bfloat16, "head_dim": 128}
            with as_on(card, torch, flash_attn):
                device = "cpu" if card == "CPU" else "cuda"
                arguments = usual | {"device": device} | asked
                message = refusal(partial(attention.check, name, **arguments))
            if message:
                numbers.append(notes.setdefault(message, len(notes) + 1))
            else:
                able.append(card)
        listed = "no" if not able else "yes" if not numbers else ", ".join(able)
        return " ".join([listed, *(f"({n})" for n in dict.fromkeys(numbers))])

    rows = [[name, *(cell(each, asked) for each in backends)] for name, asked in features.items()]
    graphs = ["yes" if each.description.capturable else "no" for each in backends.values()]
    rows.append(["[CUDA graphs](kernels.md#small-micro-batches)", *graphs])
    yield f"## Attention backends\n\n{BACKENDS}"
    yield from table(["", *(f"`{name}`" for name in backends)], rows, notes)


BACKENDS = """On a CPU in fp32, on GPUs in bf16, with heads of 128 channels, unless the row says
otherwise. A cell names the devices that can, if not all do, and the numbers of the messages on the
others. These are answers of the checks; H100 and H200 alone were measured. `flash_attn` calls what
FlashAttention 2, 3 and 4 have in common: FlashAttention-4 b36 itself has softcap, the gradient of
sinks and a deterministic backward on Hopper.
"""


def as_on(card: str, torch: Any, flash_attn: Any) -> ExitStack:
    """Return a context in which torch reports `card`."""
    from longctx.kernels.attention import flash_op

    stack, capability = ExitStack(), CARDS.get(card, (0, 0))
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    stack.enter_context(patch.dict(os.environ, environment, clear=True))
    properties = SimpleNamespace(major=capability[0], minor=capability[1])
    stack.enter_context(patch.object(torch.cuda, "get_device_properties", lambda _: properties))
    stack.enter_context(patch.object(flash_op, "_properties", lambda _: properties))  # its cache
    stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda _: capability))
    stack.enter_context(patch.object(flash_attn, "INSTALLED", tuple(flash_attn.APIS)))
    return stack


def of_settings() -> Iterator[str]:
    """Yield the table of pairs of settings."""
    notes: dict[str, int] = {}
    rows = []
    for name, own in SETTINGS.items():
        refused = []
        for other, theirs in SETTINGS.items():
            overrides = list(dict.fromkeys([*GIVEN, *own, *theirs]))
            clash = len({text.partition("=")[0] for text in overrides}) < len(overrides)
            if name == other or clash:
                continue
            if message := refusal(partial(checked, overrides)):
                refused.append(f"{other} ({notes.setdefault(message, len(notes) + 1)})")
        rows.append([name, ", ".join(refused) or "none of these is refused"])
    yield f"\n## Settings of a run\n\n{REFUSED}"
    yield from table(["", "not with"], rows, notes)


REFUSED = """Pairs that are refused before a run on a GPU begins. Two values of one key are no
pair. Weights and data can refuse more, such as a size that FP8 does not take.
"""


def checked(overrides: list[str]) -> None:
    """Raise ValueError if a run of these overrides would be refused before it begins, on a GPU."""
    from longctx.config.asked import workload_of

    config = cli.compose("train", overrides).config
    if config.transformers == "always":
        from longctx.hf.transformers_config import TransformersConfig

        TransformersConfig().accepted(config)
    config.check_model(config.model)
    workload_of(config, "cuda", 4096, config.model).check_graphs()
