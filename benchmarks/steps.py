"""Whole training steps next to other trainers: same shape, same tokens in a step, random tokens,
one after another, on one GPU or several.

A step is forward, backward, clipping, AdamW, zero_grad. Its time is the median of the steps after
warm-up. longctx's steps on one GPU are those of a dry run; on several, those of `train.py` on one
long document. The others are in `trainers`. Every point runs in processes of its own, so that
running out of memory is a row of the table. A sequence is one document, or with documents=3000
packed ones. shape= takes a model that people bring instead of model=: longctx computes it with GPT,
and longctx-adapter lets transformers compute it with our attention.

    python -m benchmarks steps model=1b lengths=16384
    python -m benchmarks steps shape=gemma-3-1b documents=3000 checkpointing=always memory=balanced
    python -m benchmarks steps model=1b lengths=262144 gpus=2 context=2 strategy=fsdp
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.points import decided, point, this_gpu, training_run
from benchmarks.processes import ROOT, asked, finished
from benchmarks.report import machine, write_json
from benchmarks.shapes import SHAPES
from benchmarks.words import check_unused
from longctx import files
from longctx.config.fields import Group, key, refuse
from longctx.runs import metrics_file
from longctx.tables import grid

if TYPE_CHECKING:
    from longctx.training.run import Run

TAKES_TRAINING_KEYS = True
# longctx as asked for, or otherwise. sdpa: torch's FlashAttention-2
OURS = {
    "longctx": [],
    "longctx-sdpa": ["attention=sdpa", "attention.options.kernel=flash"],
    "longctx-fp8": ["precision=fp8"],
    "longctx-adapter": [],
}
# Peer → packages that it needs
OTHERS = {
    "nanogpt": [],
    "transformers": ["transformers"],
    "transformers-liger": ["transformers", "liger_kernel"],
    "torch-context-parallel": ["transformers"],
    "accelerate-fsdp2": ["transformers", "accelerate"],
}
ON_SEVERAL = ("longctx", "torch-context-parallel", "accelerate-fsdp2")
TAKEN = {"seq_len": "use lengths=", "batch_size": "use step_tokens=", "devices": "use gpus="}
WAYS = {"always": [True], "never": [False], "auto": [False, True]}  # of checkpointing=
SMALL = 500e6  # parameters; below, a step has 65,536 tokens, else 16,384
SHOWN = "tokens rows peer tokens_per_second mfu memory_peak_gib predicted_gib longctx_over_it how"
Row = dict[str, Any]


@dataclass(frozen=True)
class Options(Group):
    """Whom to measure, and where; keys of train.py may follow, such as model=1b or lora.rank=16."""

    peers: tuple[str, ...] = key((), "at every length; none: all", choices=(*OURS, *OTHERS))
    lengths: tuple[int, ...] = key((4096, 16384, 65536), "tokens of a sequence")
    step_tokens: int | None = key(
        None, "in a step of a GPU; null: 65,536, 16,384 for large models; one sequence at least"
    )
    documents: int = key(0, "tokens of a document; 0: a sequence is one", above=-1)
    gpus: int = key(1, "GPUs of one machine", between=(1, 64))
    shape: str = key("", "a model that people bring", choices=("", *SHAPES))
    nanogpt: str = key("", "folder of nanoGPT's model.py, which is run as it is")
    checkpointing: str = key(
        "auto", "transformers: auto: only if memory runs out without", choices=tuple(WAYS)
    )
    warm: int = key(3, "steps before the timed ones", between=(1, 100))
    steps: int = key(5, "that are timed; the median counts", between=(1, 10**6))
    seconds: float = key(300.0, "a point is ended after that")
    minutes: float = key(60.0, "points not begun by then are left out")
    out: str = key("results/steps", "writes .json")


def run(options: Options, command: str, overrides: list[str]) -> None:
    """Measure every peer at every length, print, write `out`.json."""
    import torch

    check_unused(overrides, TAKEN)
    if options.nanogpt and not Path(options.nanogpt, "model.py").is_file():
        raise ValueError(f"nanogpt={options.nanogpt}: no model.py there")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs = {n: shaped("longctx", options, overrides, n, device) for n in options.lengths}
    end = time.monotonic() + 60 * options.minutes
    rows: list[Row] = []
    result = {"command": command, **machine(), "options": asdict(options), "rows": rows}
    for tokens, training in runs.items():
        for peer in options.peers or (*OURS, *OTHERS):
            row: Row = {"peer": peer, "tokens": tokens, "gpus": options.gpus}
            row["rows"] = training.workload.sequences_per_step
            rows.append(row)
            print(f"{row['rows']} × {tokens:,} tokens, {peer}:", end=" ", flush=True)
            limit = min(options.seconds, end - time.monotonic())
            try:
                if limit <= 0:
                    raise ValueError(f"{options.minutes:g} minutes were over")
                check(peer, training, options)
                if peer in OTHERS:
                    row |= of_other(peer, training, options, limit)
                elif options.gpus > 1:
                    row |= of_train(training, options, overrides, limit)
                else:
                    row |= of_longctx(peer, options, overrides, tokens, device, limit)
            # such as a backend that cannot run here, a model that transformers has no class for
            except ValueError as error:
                row["how"] = f"skipped: {error}"
            if "ms" in row:
                speed = row["tokens_per_step"] / median(row["ms"]) * 1000
                row |= {"tokens_per_second": speed} | utilization(training, speed, options)
                ours = [x for x in rows if x["peer"] == "longctx" and x["tokens"] == tokens]
                if ours and "tokens_per_second" in ours[0]:
                    row["longctx_over_it"] = ours[0]["tokens_per_second"] / speed
                print(f"{speed:,.0f} tokens/s", end=", ")
            print(row["how"], flush=True)
            write_json(Path(f"{options.out}.json"), result)  # an interruption loses no point
    percents = [row | {"mfu": f"{row['mfu']:.1%}"} if row.get("mfu") else row for row in rows]
    grid("Whole training steps; mfu: visible pairs", SHOWN.split(), percents)
    print(f"wrote {options.out}.json")


def shaped(peer: str, options: Options, overrides: list[str], tokens: int, device: str) -> Run:
    """Return longctx's run with sequences of `tokens`; ValueError if none make a whole step."""
    given = [*overrides, f"seq_len={tokens}", "batch_size=1", f"devices={options.gpus}"]
    given += OURS.get(peer, [])
    by_transformers = "always" if peer == "longctx-adapter" else "never"
    run = training_run(given, device, SHAPES.get(options.shape), by_transformers)
    model, micro = run.workload.model, run.config.accumulate or 1
    if model.window is not None and not options.shape:
        raise ValueError(f"model.window={model.window}: steps compares whole causal attention")
    wanted = options.step_tokens or (65536 if model.parameters() < SMALL else 16384)
    rows = max(1, wanted // tokens)
    if rows % micro:
        raise ValueError(f"accumulate={micro}: does not divide the {rows} sequences of a step")
    workload = replace(run.workload, batch_size=rows // micro, accumulate=micro)
    return replace(run, workload=workload)


def check(peer: str, run: Run, options: Options) -> None:
    """Raise ValueError if `peer` cannot take this step."""
    work, model, several = run.workload, run.workload.model, options.gpus > 1
    absent = [name for name in OTHERS.get(peer, []) if find_spec(name) is None]
    refuse(
        (absent, f"{', '.join(absent)}: not installed"),
        (several and peer not in ON_SEVERAL, f"gpus={options.gpus}: for {', '.join(ON_SEVERAL)}"),
        (several and options.documents, "documents=: for one GPU"),
        (not several and peer in ON_SEVERAL[1:], "needs gpus=2 or more"),
        (peer == "longctx-adapter" and not options.shape, "needs shape="),
        (peer == "transformers-liger" and work.device != "cuda", "Liger's kernels need a GPU"),
    )
    if peer == "nanogpt":
        own = 12 * model.layers * model.channels**2 + (model.vocab_size or 0) * model.channels
        differs = abs(own / model.matmul_parameters() - 1) > 0.02
        differs |= model.kv_heads != model.heads or not model.tied
        others = work.lora.rank is not None or options.documents
        refuse(
            (not options.nanogpt, "give nanogpt=FOLDER, that of nanoGPT's model.py"),
            (others, "nanoGPT has no LoRA, and no documents"),
            (differs, "nanoGPT needs as many kv_heads as heads, tied, ffn = 8/3 channels"),
        )


def of_longctx(
    peer: str, options: Options, overrides: list[str], tokens: int, device: str, limit: float
) -> Row:
    """Measure steps of longctx, its memory policy the one that a run would choose."""
    from longctx.parallel.devices import check_attention

    run = shaped(peer, options, overrides, tokens, device)
    check_attention(run.config, run.workload.model, device)
    run.config.check_model(run.workload.model)
    run = decided(run)
    work = run.workload
    row = point(run, options.warm, options.steps, options.documents or None, seconds=limit)
    how = f"memory={work.memory.policy}"
    if (failed := row.pop("failed")) is not None:
        row.pop("ms", None)
        return row | {"how": f"{failed} ({how})"}
    parameters = work.model.parameters() + work.lora.parameters(work.model)
    row |= {"parameters": parameters, "tokens_per_step": work.tokens_per_step}
    return row | {"how": f"{row['kernel']}, {how}"}


def of_train(run: Run, options: Options, overrides: list[str], limit: float) -> Row:
    """Measure steps of `train.py` on several GPUs, whose sequences are all of one long document."""
    from longctx.config.data_config import DataConfig
    from longctx.data import read_documents

    work, steps = run.workload, options.warm + options.steps
    with tempfile.TemporaryDirectory() as scratch:
        room, parts = 6 * max(100_000, 2 * work.tokens_per_step), []  # characters
        for document in read_documents(DataConfig()):
            parts.append(document.text)
            if (room := room - len(document.text)) < 0:
                break
        files.write_text(Path(scratch, "document.txt"), "".join(parts))
        own = [f"devices={options.gpus}", f"seq_len={work.seq_len}"]
        own += [f"batch_size={work.batch_size}", f"accumulate={work.accumulate}"]
        own += ["data=text", f"data.path={scratch}/document.txt", "data.val_fraction=0"]
        own += ["tracker=none", "log_every=1", f"max_steps={steps}", f"runs={scratch}", "name=run"]
        problem = finished([sys.executable, str(ROOT / "train.py"), *overrides, *own], limit)
        rows = metrics_file.read(Path(scratch, "run")) if problem is None else []
    timed = [row for row in rows if row["step"] > options.warm and "ms_per_step" in row]
    if not timed:
        return {"how": problem or "logged no step"}
    return {
        "ms": [row["ms_per_step"] for row in timed],
        "tokens_per_step": work.tokens_per_step,
        "memory_peak_gib": timed[-1].get("memory_peak_gib"),
        "predicted_gib": timed[-1].get("memory_predicted_gib"),
        "how": f"context={work.context}, train.py",
    }


def of_other(peer: str, run: Run, options: Options, limit: float) -> Row:
    """Measure steps of another trainer, transformers' first without gradient checkpointing."""
    from benchmarks.trainers import Job
    from longctx.hf.families import write_config
    from longctx.training.dry_run import OUT_OF_MEMORY

    work, config = run.workload, run.config
    lora = asdict(work.lora) if work.lora.rank is not None else None
    given = {"lr": 1e-4, "betas": config.betas, "weight_decay": config.weight_decay}
    job = Job(
        peer=peer,
        config=SHAPES.get(options.shape) or write_config(work.model, work.seq_len),
        lora=lora,
        rows=work.batch_size * work.accumulate,
        tokens=work.seq_len,
        document=options.documents,
        warm=options.warm,
        timed=options.steps,
        device=work.device,
        bf16=work.precision != "fp32",
        optimizer=given,
        clip=config.clip,
        checkpointing=False,
        folder=options.nanogpt,
    )
    row: Row = {}
    for checkpointing in [False] if peer == "nanogpt" else WAYS[options.checkpointing]:
        request = asdict(replace(job, checkpointing=checkpointing))
        answer = asked("benchmarks.trainers", request, options.gpus, limit)
        row |= {"failed": answer} if isinstance(answer, str) else answer
        if not str(row["failed"]).startswith(OUT_OF_MEMORY):
            break
    with_it = ", gradient checkpointing" if checkpointing else ""
    if (failed := row.pop("failed")) is not None:
        row.pop("ms", None)
    return row | {"how": f"{failed or row['attention']}{with_it}"}


def utilization(run: Run, tokens_per_second: float, options: Options) -> Row:
    """Return `mfu` with visible pairs and without frozen weights."""
    gpu, work = this_gpu(), run.workload
    if gpu is None or gpu.flops is None or work.device != "cuda":
        return {}
    added = work.lora.parameters(work.model, of_token=True)
    length = min(options.documents or work.seq_len, work.seq_len)
    per_token = work.model.flops_per_token((length + 1) / 2, added)
    return {"mfu": per_token * tokens_per_second / (gpu.flops * options.gpus)}
