"""Whole training steps beside other trainers: same shape, same tokens in a step, random tokens, one
GPU, one after another.

A step is forward, backward, clipping, AdamW, zero_grad; its time the median of those after warm-up;
nothing waits for the device between steps, as in a run that seldom logs. longctx's steps are those
of train.py (fp32 weights, batches from its loader), the others' are in `trainers`; longctx-bare is
its model without Lightning's loop. Every point runs in a child process, so that running out of
memory is a row of the table. Rows are one document each.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import grid, machine, save_figure, write_json
from benchmarks.step import short
from benchmarks.words import check_unused, training_config
from longctx.config.train_config import CompleteConfig
from longctx.planner import fitting

TAKES_TRAINING_KEYS = True
PEERS = ("longctx", "longctx-bare", "longctx-sdpa", "nanogpt", "transformers", "transformers-liger")
PINNED = [
    "attention=sdpa",
    "attention.options.kernel=flash",
]  # longctx-sdpa: torch's FlashAttention-2
TAKEN = {"seq_len": "use lengths=", "batch_size": "use step_tokens=", "devices": "one is compared"}
WARM = 3
TIMED_SECONDS = (
    15.0  # as many steps are timed as longctx is predicted to do in this time, `steps` at most
)
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

    peers: tuple[str, ...] = field(
        default=PEERS, metadata={"help": "in this order at every length"}
    )
    lengths: tuple[int, ...] = field(
        default=(4096, 16384, 65536), metadata={"help": "tokens in a row"}
    )
    step_tokens: str = field(
        default="auto",
        metadata={
            "help": "tokens in a step, one row at least; auto: 65536, 16384 for large models"
        },
    )
    nanogpt: str = field(
        default="", metadata={"help": "folder of nanoGPT's model.py, which is run as it is"}
    )
    checkpointing: str = field(
        default="auto",
        metadata={"help": "transformers: always|never|auto: only where memory runs out without"},
    )
    steps: int = field(
        default=5,
        metadata={"help": "timed steps, after 3 warm ones; fewer where they take seconds"},
    )
    seconds: float = field(default=300.0, metadata={"help": "a point is ended after that"})
    minutes: float = field(default=60.0, metadata={"help": "points not begun by then are left out"})
    out: str = field(default="results/peers", metadata={"help": "writes .json and .png"})


def run(options: Options, command: str, words: list[str]) -> None:
    """Measure every peer at every length, print, write `out`.json and `out`.png."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    check(options, words)
    configs = {n: shaped(options, words, n, device) for n in options.lengths}
    end = time.monotonic() + 60 * options.minutes
    rows: list[dict[str, Any]] = []
    first = next(iter(configs.values()))
    found = {
        "command": command,
        **machine(),
        "options": asdict(options),
        "parameters": first.model.parameters(),
        "precision": first.precision,
        "clip": first.clip,
        "rows": rows,
    }
    for tokens in options.lengths:
        here: list[dict[str, Any]] = []
        for peer in options.peers:
            print(
                f"{configs[tokens].rows_per_step} × {tokens:,} tokens, {peer}:", end=" ", flush=True
            )
            here.append(point(peer, configs[tokens], options, words, rows, end, device))
            rows.append(here[-1])
            print(said(rows[-1]), flush=True)
            write_json(
                Path(f"{options.out}.json"), found
            )  # what is known so far outlives an interruption
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
        "Whole training steps; mfu: visible pairs; mfu 6n: (6 parameters + 6 layers × channels × tokens in a row) a token",
        SHOWN,
        percents,
    )
    write_json(Path(f"{options.out}.json"), found)
    plot(found, Path(f"{options.out}.png"))
    print(f"wrote {options.out}.json and {options.out}.png")


def check(options: Options, words: list[str]) -> None:
    """Raise ValueError for what no point could be measured with."""
    for peer in options.peers:
        if peer not in PEERS:
            raise ValueError(f"peers={peer}: one or several of {', '.join(PEERS)}")
    if options.checkpointing not in ("auto", "always", "never"):
        raise ValueError(f"checkpointing={options.checkpointing}: one of auto, always, never")
    if options.step_tokens != "auto" and (
        not options.step_tokens.isdigit() or int(options.step_tokens) < 1
    ):
        raise ValueError(f"step_tokens={options.step_tokens}: a number of tokens, or auto")
    if options.nanogpt and not Path(options.nanogpt, "model.py").is_file():
        raise ValueError(
            f"nanogpt={options.nanogpt}: no model.py there; give the folder of nanoGPT's source"
        )
    check_unused(words, TAKEN)


def shaped(options: Options, words: list[str], tokens: int, device: str) -> CompleteConfig:
    """longctx's configuration for rows of `tokens`; ValueError where the rows of a step are no
    whole micro-batches.
    """
    config = training_config([*words, f"seq_len={tokens}", "batch_size=1"], device)
    if config.model.window is not None:
        raise ValueError(
            f"model.window={config.model.window}: bench peers compares whole causal attention; leave it out"
        )
    said = any(word.partition("=")[0] == "accumulate" for word in words)
    small = config.model.parameters() < SMALL
    wanted = (
        (65536 if small else 16384) if options.step_tokens == "auto" else int(options.step_tokens)
    )
    rows, micro = max(1, wanted // tokens), config.accumulate if said else 1
    if rows % micro:
        raise ValueError(
            f"accumulate={micro}: does not divide the {rows} rows of {tokens:,} tokens in a step"
        )
    return replace(config, batch_size=rows // micro, accumulate=micro)


def point(
    peer: str,
    config: CompleteConfig,
    options: Options,
    words: list[str],
    before: list[dict[str, Any]],
    end: float,
    device: str,
) -> dict[str, Any]:
    """One row; where there is no speed, `how` says why."""
    row: dict[str, Any] = {"peer": peer, "tokens": config.seq_len, "rows": config.rows_per_step}
    if time.monotonic() >= end:
        return row | {"how": f"skipped: {options.minutes:g} minutes were over"}
    if reason := missing(peer, config, options, device):
        return row | {"how": f"skipped: {reason}"}
    limit = min(options.seconds, end - time.monotonic())
    try:
        if peer in ("longctx", "longctx-sdpa"):
            found = of_longctx(peer, config, options, words, limit, device)
        else:
            full = [r for r in before if r["peer"] == peer and r.get("full_without")]
            found = of_other(peer, config, options, full, limit, device)
    # such as a backend that cannot run here, a model that transformers has no class for
    except ValueError as error:
        return row | {"how": f"skipped: {error}"}
    row |= found
    if "ms" not in row:
        return row
    seconds, step = median(row["ms"]) / 1000, config.rows_per_step * config.seq_len
    row |= {"tokens_per_second": step / seconds}
    return row | utilization(config, row["tokens_per_second"], row["parameters"], device)


def missing(peer: str, config: CompleteConfig, options: Options, device: str) -> str | None:
    """Why `peer` cannot be measured, or None: a package, a folder, or a kind of model that it has
    not.
    """
    model, lora = config.model, config.lora.rank is not None
    if peer == "longctx-bare" and config.accumulate > 1:
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
            return "nanoGPT has no model of this shape: as many kv_heads as heads, tied, ffn = 8/3 channels"
    needed = []
    if peer.startswith("transformers"):
        needed = ["transformers"] + (["peft"] if lora else [])
    if peer == "transformers-liger":
        needed.append("liger-kernel")
        if device != "cuda":
            return "Liger's kernels need a GPU"
        if model.qk_norm or model.qkv_bias or model.nope_layers:
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
    peer: str, asked: CompleteConfig, options: Options, words: list[str], limit: float, device: str
) -> dict[str, Any]:
    """Steps of longctx, its memory policy the one that a run would choose."""
    from longctx.training.fit import check_attention, decide_memory
    from longctx.training.probe import in_child

    if peer == "longctx-sdpa":
        others = [word for word in words if not word.startswith("attention")]
        pinned = training_config([*others, *PINNED, f"seq_len={asked.seq_len}"], device)
        asked = replace(asked, attention=pinned.attention)
    check_attention(asked, device)
    config = decide_memory(asked, asked, device)
    warm, timed = steps_of(config, options, device)
    measured = in_child(config, device, warm + timed, None, False, limit)
    how = f"memory={config.memory.policy}"
    if measured.failed is not None:
        return measured.memory | {"how": f"{measured.failed} ({how})"}
    kernel = measured.kernels[config.attention.backend]
    added = config.lora.parameters(config.model)
    return measured.memory | {
        "ms": measured.ms[warm:],
        "parameters": config.model.parameters() + added,
        "attention": kernel,
        "how": f"{kernel}, {how}",
    }


def of_other(
    peer: str,
    config: CompleteConfig,
    options: Options,
    full: list[dict[str, Any]],
    limit: float,
    device: str,
) -> dict[str, Any]:
    """Steps of another trainer; transformers' without gradient checkpointing first unless `full`,
    rows so far, tell that memory ran out with no more tokens.
    """
    from longctx.training.fit import decide_memory
    from longctx.training.probe import OUT_OF_MEMORY, child

    from benchmarks.trainers import Job
    from longctx.model.export import architecture
    from longctx.runs import run_folder
    from longctx.training.learning_rate import learning_rate

    bare = peer == "longctx-bare"
    config = decide_memory(config, config, device) if bare else config
    warm, timed = steps_of(config, options, device)
    config = replace(config, max_steps=warm + timed)
    job = Job(
        trainer=peer,
        model=asdict(config.model),
        lora=asdict(config.lora),
        rows=config.rows_per_step,
        tokens=config.seq_len,
        warm=warm,
        timed=timed,
        device=device,
        bf16=config.precision == "bf16",
        lrs=[learning_rate(n, config) for n in range(warm + timed)],
        betas=config.betas,
        weight_decay=config.weight_decay,
        clip=config.clip,
        folder=options.nanogpt,
        config=run_folder.plain(config) if bare else {},
    )
    ways = {"always": [True], "never": [False], "auto": [False, True]}[options.checkpointing]
    if bare or peer == "nanogpt":
        ways = [False]
    else:
        architecture(
            config.model, config.seq_len
        )  # ValueError where transformers has no such model
        if any(r["rows"] * r["tokens"] <= job.rows * job.tokens for r in full):
            ways = [way for way in ways if way] or ways
    found: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    start = time.monotonic()
    for checkpointing in ways:
        left = max(1.0, limit - (time.monotonic() - start))
        answer = child(
            "benchmarks.trainers", asdict(replace(job, checkpointing=checkpointing)), left
        )
        found = {"failed": answer} if isinstance(answer, str) else answer
        with_it = ", gradient checkpointing" if checkpointing else ""
        if found["failed"] is None:
            break
        kept = (
            {"full_without": True}
            if not checkpointing and found["failed"].startswith(OUT_OF_MEMORY)
            else kept
        )
        if not kept:
            break
    failed = found.pop("failed")
    if failed is not None:
        found.pop("ms", None)
        return found | kept | {"how": f"{failed}{with_it and ' with gradient checkpointing'}"}
    return found | kept | {"how": f"{found['attention']}{with_it}"}


def steps_of(config: CompleteConfig, options: Options, device: str) -> tuple[int, int]:
    """Steps before the timed ones, and those; where steps are long, one before is enough to
    compile, and few are timed.
    """
    from longctx.training.fit import gpu

    typical = fitting.with_policy(config, "balanced") if config.memory.policy == "auto" else config
    expected = fitting.seconds(typical, gpu()) if device == "cuda" else None
    each = expected.total if expected else 0.0
    timed = max(1, min(options.steps, int(TIMED_SECONDS / each))) if each else options.steps
    return (WARM if timed > 2 else 1), timed


def utilization(
    config: CompleteConfig, tokens_per_second: float, parameters: int, device: str
) -> dict[str, Any]:
    """`mfu` with visible pairs and without weights that rest, and the usual `mfu_6n` where all
    weights are trained.
    """
    from longctx.training.fit import gpu

    peak = gpu().flops if device == "cuda" else None
    if peak is None:
        return {}
    model, added = config.model, config.lora.parameters(config.model)
    found = {
        "mfu": model.flops_per_token((config.seq_len + 1) / 2, added) * tokens_per_second / peak
    }
    usual = 6 * parameters + 6 * model.layers * model.channels * config.seq_len
    return found if added else found | {"mfu_6n": usual * tokens_per_second / peak}


def said(row: dict[str, Any]) -> str:
    """The speed of a row, or why there is none."""
    return (
        f"{row['tokens_per_second']:,.0f} tokens/s ({row['how']})"
        if "ms" in row
        else str(row["how"])
    )


def plot(found: dict[str, Any], path: Path) -> None:
    """Tokens/s and peak memory, a bar per peer in a group per length; over each bar how many times
    as fast longctx is.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.6))
    rows, lengths = found["rows"], list(found["options"]["lengths"])
    peers = [
        peer
        for peer in found["options"]["peers"]
        if any(r["peer"] == peer and "ms" in r for r in rows)
    ]
    for axis, key, label in (
        (axes[0], "tokens_per_second", "tokens/s"),
        (axes[1], "memory_peak_gib", "peak GiB"),
    ):
        for n, peer in enumerate(peers):
            shown = [r for r in rows if r["peer"] == peer and "ms" in r and key in r]
            places = [
                lengths.index(r["tokens"]) + 0.8 * ((n + 0.5) / len(peers) - 0.5) for r in shown
            ]
            bars = axis.bar(places, [r[key] for r in shown], width=0.75 / len(peers), label=peer)
            ratios = [
                f"{r['longctx_over_it']:.2f}×" if "longctx_over_it" in r else "" for r in shown
            ]
            if key == "tokens_per_second":
                axis.bar_label(bars, ratios, fontsize=7)
        axis.set_xticks(range(len(lengths)), [short(tokens) for tokens in lengths])
        axis.set_xlabel("tokens in a row")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3, axis="y")
    if peers:
        axes[0].legend(fontsize=8)
    where = found["gpu"] if found["gpu"] != "none" else "a CPU"
    figure.suptitle(
        f"Training {found['parameters'] / 1e6:,.0f} million parameters on {where}; over a bar: longctx's speed over it",
        fontsize=11,
    )
    figure.tight_layout()
    save_figure(figure, path)
