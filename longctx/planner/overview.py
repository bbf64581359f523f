"""longctx plan: does a run fit, how fast is it and what does it cost; the tables behind that.

On several GPUs it compares layouts. Nothing runs and torch is not imported, so it takes a moment.
Only layers that transformers computes are measured before, on fake tensors.
"""

from __future__ import annotations

import textwrap
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from longctx.config.asked import divisions, with_vocabulary, workload_of
from longctx.config.train_config import TrainConfig
from longctx.planner import fitting, step_time
from longctx.planner.peak_memory import TERMS, predict
from longctx.spec.hardware import GIB, Chip
from longctx.spec.step import Measured, Workload
from longctx.tables import count_of, grid
from longctx.training.learning_rate import schedule_of

SIZES = ("GiB", "host GiB")  # of a GPU, of the host
SPEED = ("s/step", "tokens/s", "MFU")
WIDTH = 110  # columns of a line of settings
SHORTEST = 5e-3  # seconds of a step: nothing shorter was measured, and launches are not predicted


def run(
    requests: Mapping[str, TrainConfig],
    asked: str,
    chip: Chip,
    host: float,
    of_host: str,
    per_machine: int,
    price: float | None,
    measured: Measured,
) -> None:
    """Print if the run fits, then memory, time and longest context by policy and backend.

    requests: backend → request; the answer is about the backend that is `asked` for.
    host: bytes of the memory of each machine, of which `of_host` says the source.
    per_machine: GPUs of a machine. price: of an hour of one.
    """
    request = next(iter(requests.values()))
    chip.check(request.precision)
    merge = request.batch_size is None and request.accumulate is None
    each = {backend: each_layout(x, per_machine, measured) for backend, x in requests.items()}

    @cache
    def in_layouts(backend: str) -> tuple[list[Workload], Workload, str]:
        """Return the step of a backend in every layout, that of a run, and its reason."""
        decided = [fitting.decide(step, chip, host, merge) for step in each[backend]]
        return decided, *fitting.choose_layout(decided, chip, host)

    # The answer comes first: many read no further
    fastest, reason = asked, ""
    if len(requests) > 1:
        # All backends are compared in one step: the fastest settings of the plainest layout
        plain = next(iter(each.values()))[0]
        plain = replace(plain, memory=fitting.ways(plain)[0][0][0])
        fastest, reason = fitting.fastest_backend(plain, list(requests), chip)
    decided, answered, _ = in_layouts(asked if asked in requests else fastest)
    answered.check_graphs()
    line = answer(answered, chip, host, schedule_of(request, answered).max_steps, price)
    reason_of_memory = fitting.memory_line(request.memory, answered, chip, host)
    print_wrapped([*line.splitlines(), reason_of_memory])
    print_machine(answered, chip, host, of_host)
    if answered.devices > 1:
        print_layouts(chip, host, each[answered.attention.label], decided)
        for backend in requests:
            _, chosen, why = in_layouts(backend)
            print(f"attention={backend}: strategy={fitting.name_of(chosen)} ({why})")
        print()

    # Each backend in the layout of a run, with every policy: the step as asked, and as decided
    pairs: list[tuple[Workload, Workload]] = []
    for backend in requests:
        decided, chosen, _ = in_layouts(backend)
        own = each[backend][decided.index(chosen)]
        for policy in dict.fromkeys([*own.memory.policies(), own.memory.policy]):
            named = replace(own, memory=replace(own.memory, policy=policy))
            if fitting.ways(named):  # else the optimizer lacks the policy's state
                step = chosen if named == own else fitting.decide(named, chip, host, merge)
                pairs.append((named, step))
    print_policies(pairs, chip, host)
    if len(requests) > 1:
        print(f"attention=auto: {fastest}, {reason}\n")
    print_longest(requests, [named for named, _ in pairs], chip, host)


def print_policies(pairs: list[tuple[Workload, Workload]], chip: Chip, host: float) -> None:
    """Print memory and speed of each step, as asked and as decided, then memory by term."""
    rows: list[dict[str, Any]] = []
    for named, step in pairs:
        row = figures(step, chip, host)
        # auto may have chosen what a policy does anyway
        if all(row | {"memory": earlier["memory"]} != earlier for earlier in rows):
            rows.append(row | {"memory": named.memory.policy})
    columns = ("backend", "memory", "sequences", *SIZES, "fits", *SPEED)
    print_rows("Memory and speed", columns, rows)
    terms = [term.split()[0] for term in TERMS]
    where = f" on each of {step.devices:,} GPUs" if step.devices > 1 else ""
    grid(f"Predicted peak by term{where}, GiB", ("backend", "memory", *terms, "GiB"), rows)


def print_longest(backends: Iterable[str], steps: list[Workload], chip: Chip, host: float) -> None:
    """Print the longest sequences by backend and the policy of each of `steps`."""
    columns = ("backend", "memory", "tokens", "sequences", *SIZES, *SPEED)
    rows: list[dict[str, Any]] = []
    for backend in backends:
        own = [step for step in steps if step.attention.label == backend]
        for name, longest in lengths(own, chip, host).items():
            cells = {} if longest is None else figures(longest, chip, host)
            rows.append({"backend": backend, "tokens": "none"} | cells | {"memory": name})
    print_rows("The longest sequences that fit, at about the same tokens per step", columns, rows)


def print_rows(title: str, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Print a table, and below it the settings of each row if its policy alone has others."""
    grid(title, columns, rows)
    others = [row for row in rows if row.get("settings", row["memory"]) != row["memory"]]
    print_wrapped([f"{x['backend']}, {x['memory']}: memory={x['settings']}" for x in others])


def print_wrapped(lines: Sequence[str]) -> None:
    """Print `lines`, each in at most WIDTH columns, and an empty one."""
    wrapped = [textwrap.fill(line, WIDTH, subsequent_indent="    ") for line in lines if line]
    print(*wrapped, sep="\n", end="\n\n" if wrapped else "", flush=True)


def lengths(steps: Sequence[Workload], chip: Chip, host: float) -> dict[str, Workload | None]:
    """Return the step of the longest sequence for the policy of each of `steps`. auto gives two: of
    all settings, and with half the speed of the first policy at its longest.
    """
    longest = {step.memory.policy: longest_step([step], chip, host) for step in steps}
    if "auto" not in longest:
        return longest
    first, auto = next(filter(None, longest.values()), None), longest.pop("auto")
    if auto is None or first is None:
        return longest | {"all settings": auto}
    at, speed = fitting.one_row(steps[-1]), fitting.tokens_per_second(first, chip) / 2

    def decided(tokens: int) -> Workload:
        return fitting.decide(at(tokens), chip, host)

    tried = range(1024, auto.seq_len, 1024)
    n = bisect_left(tried, True, key=lambda n: fitting.tokens_per_second(decided(n), chip) < speed)
    half = {"half speed": decided(tried[n - 1])} if 0 < n < len(tried) else {}
    return longest | half | {"all settings": auto}


def answer(step: Workload, chip: Chip, host: float, steps: int, price: float | None) -> str:
    """Return a line that says if `step` fits, and one with the time of so many `steps`."""
    memory, time = predict(step).peak / GIB, step_time.seconds(step, chip)
    layout = [fitting.name_of(step)] if step.devices > 1 else []
    parts = [step.attention.label, *layout, str(step.memory)]
    size = f"{memory:,.1f} GiB" + " a GPU" * (step.devices > 1)
    if not fitting.fits(step, fitting.room(chip), host):
        remedy = fitting.smallest_change(step, fitting.room(chip), host)
        return f"does not fit: {', '.join(parts)}, {size}; use {remedy}"
    line = f"fits: {', '.join(parts)}, {size}"
    if time is None or time.total < SHORTEST:
        return line if time is None else f"{line}; the host decides the speed of so short a step"
    hours = time.total * steps / 3600
    length = f"{hours:,.1f} hours" if hours >= 1 else count_of(round(60 * hours), "minute")
    length += "" if price is None else f", cost {hours * step.devices * price:,.2f}"
    return f"{line}, {time.tokens / time.total:,.0f} tokens/s\n{count_of(steps, 'step')}: {length}"


def longest_step(steps: Sequence[Workload], chip: Chip, host: float) -> Workload | None:
    """Return the step of the longest sequence that fits in one of the layouts of `steps`, with a
    part of the GPU's memory left free, since no dry run confirms it.
    """
    candidates = [fitting.one_row(step) for step in steps]
    return fitting.longest(candidates, fitting.room(chip), host, chip=chip)


def each_layout(
    request: TrainConfig, per_machine: int, measured: Measured | None = None
) -> list[Workload]:
    """Return the step of `request` on a GPU in every layout that it leaves open."""
    step = without_data(request, "cuda")
    step = replace(step, machines=-(-request.devices // per_machine), measured=measured or {})
    each = divisions(request, request.model)
    return [step.divided(division, step.seq_len) for division in each]


def print_layouts(chip: Chip, host: float, steps: list[Workload], decided: list[Workload]) -> None:
    """Print memory and speed of each layout, its open settings `decided`."""
    longest = (getattr(longest_step([step], chip, host), "seq_len", "none") for step in steps)
    rows = [figures(x, chip, host) | {"longest": n} for x, n in zip(decided, longest, strict=True)]
    columns = ("strategy", "context", "method", "memory", "GiB", "fits", *SPEED[:2], "longest")
    where = f"{steps[0].devices:,} GPUs, attention={steps[0].attention.label}"
    grid(f"Layouts on {where}, with the longest sequences", columns, rows)


def figures(step: Workload, chip: Chip, host: float) -> dict[str, Any]:
    """Return the cells of all tables for one step; no speed for an unknown chip."""
    memory, time = predict(step), step_time.seconds(step, chip)
    fit = "no: host" if fitting.fits(step, fitting.room(chip)) else "no"
    fit = "yes" if fitting.fits(step, fitting.room(chip), host) else fit
    on_host = fitting.on_host(step, memory) + fitting.copy_on_host(step, host)
    speed = () if time is None else (time.total, time.tokens / time.total, time.mfu)
    formats = (",.2f", ",.0f", ".1%") if speed and speed[0] >= SHORTEST else ()
    return {
        "backend": step.attention.label,
        "memory": step.memory.policy,
        "settings": str(step.memory),
        "strategy": "" if step.strategy == "none" else step.strategy,
        "context": step.context,
        "method": step.context_method if step.context > 1 else "",
        "tokens": step.seq_len,
        "sequences": f"{step.batch_size} × {step.accumulate}",
        **{term.split()[0]: f"{memory.gpu[term] / GIB:.2f}" for term in TERMS},
        "GiB": f"{memory.peak / GIB:.1f}",
        "host GiB": f"{on_host / GIB:.1f}",
        "fits": fit,
        **dict(zip(SPEED, map(format, speed, formats), strict=False)),
    }


def without_data(request: TrainConfig, device: str) -> Workload:
    """Return the step of `request` on "cuda" or "cpu" without opening data; ValueError for
    seq_len=max and resume=. Without a tokenizer the vocabulary gets the size data.vocab_size.
    """
    if request.resume is not None:
        raise ValueError(f"resume={request.resume}: nothing is resumed here; give init= instead")
    if isinstance(request.seq_len, str):
        raise ValueError("seq_len=max: a run finds that on its GPU; here give a number of tokens")
    request.check_model(request.model)
    step = workload_of(request, device, request.seq_len)
    return with_vocabulary(step, request.data.vocab_size)


def print_machine(step: Workload, chip: Chip, host: float, of_host: str) -> None:
    """Print the model, the size of a step and the machine; `of_host` follows the host memory."""
    count = count_of(step.sequences_per_step, "sequence")
    frozen = f", frozen weights in {step.lora.base}" if step.lora.base else ""
    parameters = f"{step.model.parameters() / 1e6:,.0f} million parameters"
    print(f"{parameters}, {count} of {step.seq_len:,} tokens a step, {step.precision}{frozen}")
    if step.measured:
        print("transformers computes this model: speed is that of a family of ours of its sizes")
    sizes = f"{chip.memory / GIB:.1f} GiB, {fitting.room(chip) / GIB:.1f} of them for tensors"
    print(f"{chip.name}, {sizes}; host {host / GIB:,.0f} GiB{of_host}")
    if chip.generation != "hopper" and chip.flops is not None:
        print("predicted from its data sheet; flash has not run on such a card")
    if step.devices > 1:
        beyond = f", {chip.network / 1e9:,.0f} beyond" if step.machines > 1 else ""
        link = f"{chip.link / 1e9:,.0f} GB/s from each to others of its machine{beyond}"
        print(f"{step.devices:,} GPUs on {count_of(step.machines, 'machine')}, {link}")
    print()
