"""Whole training steps beside other trainers: same shape, same tokens in a step, random tokens, one
GPU, one after another.

A step is forward, backward, clipping, AdamW, zero_grad. Its time is the median of the steps after
warm-up; nothing waits for the device between steps, as in a run that seldom logs. longctx's steps
are those of train.py (fp32 weights, batches from its loader); those of the others are in
`trainers`. longctx-bare is its model without Lightning's loop; longctx-sdpa and longctx-fp8 are
longctx with another attention or precision. Every point runs in a child process, so that running
out of memory is a row of the table. Rows are one document each.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.report import machine, write_json
from benchmarks.words import check_unused, decided, training_run
from longctx.config.fields import key
from longctx.planner import fitting, step_time
from longctx.tables import grid

if TYPE_CHECKING:
    from longctx.spec.hardware import Chip
    from longctx.training.run import Run

TAKES_TRAINING_KEYS = True
PEERS = (
    *("longctx", "longctx-bare", "longctx-sdpa", "longctx-fp8"),
    *("nanogpt", "transformers", "transformers-liger"),
)
# longctx otherwise than asked for: the key, and what it becomes. sdpa: torch's FlashAttention-2
OTHERWISE = {
    "longctx-sdpa": ("attention", ["attention=sdpa", "attention.options.kernel=flash"]),
    "longctx-fp8": ("precision", ["precision=fp8"]),
}
TAKEN = {"seq_len": "use lengths=", "batch_size": "use step_tokens=", "devices": "one is compared"}
WARM = 3
WAYS = {"always": [True], "never": [False], "auto": [False, True]}  # of checkpointing=
# As many steps are timed as longctx is predicted to do in this time, `steps` at most.
TIMED_SECONDS = 15.0
SMALL = 500e6  # parameters; below, a step has 65,536 tokens, else 16,384
SHOWN = (
    "tokens",
    "rows",
    "peer",
    "tokens_per_second",
    "mfu",
    "mfu_6n",
    "memory_peak_gib",
    "longctx_over_it",
    "how",
)


@dataclass(frozen=True)
class Options:
    """Whom to measure, and where; keys of train.py may follow, such as model=1b or lora.rank=16."""

    peers: tuple[str, ...] = key(PEERS, "in this order at every length", choices=PEERS)
    lengths: tuple[int, ...] = key((4096, 16384, 65536), "tokens in a row")
    step_tokens: str = key(
        "auto", "tokens in a step, one row at least; auto: 65536, 16384 for large models"
    )
    nanogpt: str = key("", "folder of nanoGPT's model.py, which is run as it is")
    checkpointing: str = key(
        "auto", "transformers: auto: only where memory runs out without", choices=tuple(WAYS)
    )
    steps: int = key(5, "timed steps, after 3 warm ones; fewer where they take seconds")
    seconds: float = key(300.0, "a point is ended after that")
    minutes: float = key(60.0, "points not begun by then are left out")
    out: str = key("results/peers", "writes .json")


def run(options: Options, command: str, overrides: list[str]) -> None:
    """Measure every peer at every length, print, write `out`.json."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    check(options, overrides)
    runs = {n: shaped(options, overrides, n, device) for n in options.lengths}
    end = time.monotonic() + 60 * options.minutes
    rows: list[dict[str, Any]] = []
    first = next(iter(runs.values()))
    result = {
        "command": command,
        **machine(),
        "options": asdict(options),
        "parameters": first.workload.model.parameters(),
        "precision": first.workload.precision,
        "clip": first.config.clip,
        "rows": rows,
    }
    for tokens in options.lengths:
        here: list[dict[str, Any]] = []
        for peer in options.peers:
            count = runs[tokens].workload.rows_per_step
            print(f"{count} × {tokens:,} tokens, {peer}:", end=" ", flush=True)
            here.append(point(peer, runs[tokens], options, overrides, rows, end))
            rows.append(here[-1])
            print(outcome(rows[-1]), flush=True)
            write_json(Path(f"{options.out}.json"), result)  # an interruption loses no point
        ours = next(
            (r["tokens_per_second"] for r in here if r["peer"] == "longctx" and "ms" in r), None
        )
        for row in here:
            if ours is not None and "ms" in row:
                row["longctx_over_it"] = ours / row["tokens_per_second"]
    percents = [
        r | {key: f"{r[key]:.1%}" for key in ("mfu", "mfu_6n") if r.get(key) is not None}
        for r in rows
    ]
    grid(
        "Whole training steps; mfu: visible pairs; "
        "mfu 6n: (6 parameters + 6 layers × channels × tokens in a row) a token",
        SHOWN,
        percents,
    )
    write_json(Path(f"{options.out}.json"), result)
    print(f"wrote {options.out}.json")


def check(options: Options, overrides: list[str]) -> None:
    """Raise ValueError for what no point could be measured with."""
    if options.step_tokens != "auto" and (
        not options.step_tokens.isdigit() or int(options.step_tokens) < 1
    ):
        raise ValueError(f"step_tokens={options.step_tokens}: a number of tokens, or auto")
    if options.nanogpt and not Path(options.nanogpt, "model.py").is_file():
        raise ValueError(
            f"nanogpt={options.nanogpt}: no model.py there; give the folder of nanoGPT's source"
        )
    check_unused(overrides, TAKEN)


def shaped(options: Options, overrides: list[str], tokens: int, device: str) -> Run:
    """longctx's run with rows of `tokens`; ValueError where the rows of a step are no
    whole micro-batches.
    """
    run = training_run([*overrides, f"seq_len={tokens}", "batch_size=1"], device)
    model = run.workload.model
    if model.window is not None:
        raise ValueError(
            f"model.window={model.window}: peers compares whole causal attention; leave it out"
        )
    small = model.parameters() < SMALL
    wanted = (
        (65536 if small else 16384) if options.step_tokens == "auto" else int(options.step_tokens)
    )
    rows, micro = max(1, wanted // tokens), run.config.accumulate or 1
    if rows % micro:
        raise ValueError(
            f"accumulate={micro}: does not divide the {rows} rows of {tokens:,} tokens in a step"
        )
    workload = replace(run.workload, batch_size=rows // micro, accumulate=micro)
    return replace(run, workload=workload)


def point(
    peer: str,
    run: Run,
    options: Options,
    overrides: list[str],
    before: list[dict[str, Any]],
    end: float,
) -> dict[str, Any]:
    """One row; where there is no speed, `how` says why."""
    work = run.workload
    row: dict[str, Any] = {"peer": peer, "tokens": work.seq_len, "rows": work.rows_per_step}
    if time.monotonic() >= end:
        return row | {"how": f"skipped: {options.minutes:g} minutes were over"}
    if reason := missing(peer, run, options):
        return row | {"how": f"skipped: {reason}"}
    limit = min(options.seconds, end - time.monotonic())
    try:
        if peer == "longctx" or peer in OTHERWISE:
            measured = of_longctx(peer, run, options, overrides, limit)
        else:
            full = [r for r in before if r["peer"] == peer and r.get("full_without")]
            measured = of_other(peer, run, options, full, limit)
    # such as a backend that cannot run here, a model that transformers has no class for
    except ValueError as error:
        return row | {"how": f"skipped: {error}"}
    row |= measured
    if "ms" not in row:
        return row
    seconds = median(row["ms"]) / 1000
    row |= {"tokens_per_second": work.tokens_per_step / seconds}
    return row | utilization(run, row["tokens_per_second"], row["parameters"])


def missing(peer: str, run: Run, options: Options) -> str | None:
    """Why `peer` cannot be measured, or None: a package, a folder, or a kind of model that it has
    not.
    """
    from longctx.parallel.devices import this_machine

    work = run.workload
    model, lora = work.model, work.lora.rank is not None
    if peer == "longctx-bare" and work.accumulate > 1:
        return "a bare step is one micro-batch; leave accumulate out"
    if peer == "nanogpt":
        own = 12 * model.layers * model.channels**2 + (model.vocab_size or 0) * model.channels
        if not options.nanogpt:
            return "give nanogpt=FOLDER, that of nanoGPT's model.py"
        if lora:
            return "nanoGPT has no LoRA"
        if (
            model.kv_heads != model.heads
            or not model.tied
            or abs(own / model.matmul_parameters() - 1) > 0.02
        ):
            return (
                "nanoGPT has no model of this shape: as many kv_heads as heads, tied, "
                "ffn = 8/3 channels"
            )
    gpu = this_machine().gpu
    if peer == "longctx-fp8" and not (gpu and gpu.fp8):
        return "products in FP8 need a GPU of compute capability 8.9 or above"
    needed = []
    if peer.startswith("transformers"):
        needed = ["transformers"] + (["peft"] if lora else [])
    if peer == "transformers-liger":
        needed.append("liger-kernel")
        if work.device != "cuda":
            return "Liger's kernels need a GPU"
        if model.qk_norm != "none" or model.qkv_bias or model.nope_layers:
            return (
                "here Liger's kernels are put into Llama only, and this model is of another family"
            )
    for package in needed:
        try:
            version(package)
        except PackageNotFoundError:
            return f"{package} is not installed (pip install {package})"
    return None


def of_longctx(
    peer: str, run: Run, options: Options, overrides: list[str], limit: float
) -> dict[str, Any]:
    """Measure steps of longctx, its memory policy the one that a run would choose."""
    from longctx.parallel.devices import check_attention
    from longctx.training.dry_run import dry_run_in_child

    if peer in OTHERWISE:
        name, pinned = OTHERWISE[peer]
        others = [one for one in overrides if not one.startswith(name)]
        seq_len = f"seq_len={run.workload.seq_len}"
        other = training_run([*others, *pinned, seq_len], run.workload.device).workload
        chosen = {name: getattr(other, name)}
        run = replace(
            run, config=replace(run.config, **chosen), workload=replace(run.workload, **chosen)
        )
    check_attention(run.config, run.workload.model, run.workload.device)
    run.config.check_model(run.workload.model)
    run = decided(run)
    work = run.workload
    warm, timed = steps_of(run, options)
    measured = dry_run_in_child(run, warm + timed, None, False, limit)
    how = f"memory={work.memory.policy}"
    if measured.failed is not None:
        return measured.memory | {"how": f"{measured.failed} ({how})"}
    kernel = measured.kernels[work.attention.backend]
    added = work.lora.parameters(work.model)
    return measured.memory | {
        "ms": measured.ms[warm:],
        "parameters": work.model.parameters() + added,
        "attention": kernel,
        "how": f"{kernel}, {how}",
    }


def of_other(
    peer: str, run: Run, options: Options, full: list[dict[str, Any]], limit: float
) -> dict[str, Any]:
    """Measure steps of another trainer, transformers' first without gradient checkpointing.

    That is left out where `full`, rows so far, tell that memory ran out with no more tokens.
    """
    from benchmarks.trainers import Job
    from longctx.model.export import architecture
    from longctx.training.dry_run import OUT_OF_MEMORY, in_child

    bare = peer == "longctx-bare"
    run = decided(run) if bare else run
    warm, timed = steps_of(run, options)
    run = replace(run, max_steps=warm + timed)
    work, config = run.workload, run.config
    job = Job(
        trainer=peer,
        model=asdict(work.model),
        lora=asdict(work.lora),
        rows=work.rows_per_step,
        tokens=work.seq_len,
        warm=warm,
        timed=timed,
        device=work.device,
        bf16=work.precision != "fp32",
        lrs=[run.schedule.rate(n) for n in range(warm + timed)],
        betas=config.betas,
        weight_decay=config.weight_decay,
        clip=config.clip,
        folder=options.nanogpt,
        settings=run.settings() if bare else {},
    )
    ways = WAYS[options.checkpointing]
    if bare or peer == "nanogpt":
        ways = [False]
    else:
        architecture(work.model, work.seq_len)  # ValueError where transformers has no such model
        if any(r["rows"] * r["tokens"] <= job.rows * job.tokens for r in full):
            ways = [way for way in ways if way] or ways
    measured: dict[str, Any] = {}
    ran_out: dict[str, Any] = {}  # that memory did without gradient checkpointing
    start = time.monotonic()
    for checkpointing in ways:
        left = max(1.0, limit - (time.monotonic() - start))
        request = asdict(replace(job, checkpointing=checkpointing))
        answer = in_child("benchmarks.trainers", request, left)
        measured = {"failed": answer} if isinstance(answer, str) else answer
        if measured["failed"] is None:
            break
        if not checkpointing and measured["failed"].startswith(OUT_OF_MEMORY):
            ran_out = {"full_without": True}
        if not ran_out:
            break
    failed = measured.pop("failed")
    if failed is not None:
        measured.pop("ms", None)
        with_it = " with gradient checkpointing" if checkpointing else ""
        return measured | ran_out | {"how": f"{failed}{with_it}"}
    with_it = ", gradient checkpointing" if checkpointing else ""
    return measured | ran_out | {"how": f"{measured['attention']}{with_it}"}


def steps_of(run: Run, options: Options) -> tuple[int, int]:
    """Count the steps before the timed ones, and those.

    Where steps are long, one before is enough to compile, and few are timed.
    """
    work, chip = run.workload, gpu_of(run)
    typical = fitting.with_policy(work, "balanced") if work.memory.policy == "auto" else work
    expected = step_time.seconds(typical, chip) if chip is not None else None
    each = expected.total if expected else 0.0
    timed = max(1, min(options.steps, int(TIMED_SECONDS / each))) if each else options.steps
    return (WARM if timed > 2 else 1), timed


def gpu_of(run: Run) -> Chip | None:
    """The GPU that `run` is on; None on a CPU."""
    from longctx.parallel.devices import this_machine

    return this_machine().gpu if run.workload.device == "cuda" else None


def utilization(run: Run, tokens_per_second: float, parameters: int) -> dict[str, Any]:
    """`mfu` with visible pairs and without frozen weights.

    Where all weights are trained the usual `mfu_6n` too.
    """
    chip, work = gpu_of(run), run.workload
    peak = chip.flops if chip is not None else None
    if peak is None:
        return {}
    model, added = work.model, work.lora.parameters(work.model)
    per_token = model.flops_per_token((work.seq_len + 1) / 2, added)
    shares = {"mfu": per_token * tokens_per_second / peak}
    usual = 6 * parameters + 6 * model.layers * model.channels * work.seq_len
    return shares if added else shares | {"mfu_6n": usual * tokens_per_second / peak}


def outcome(row: dict[str, Any]) -> str:
    """The speed of a row, or why there is none."""
    return (
        f"{row['tokens_per_second']:,.0f} tokens/s ({row['how']})"
        if "ms" in row
        else str(row["how"])
    )
