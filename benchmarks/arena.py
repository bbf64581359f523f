"""The arena: mixers trained alike on equal tokens, and one page that compares them.

An entrant is a name of model.mixer=, also of a plugin, of attention.options.score=, or of SETTINGS.
Each is a run of train.py in a process of its own, which is asked for pass keys. Then each is alone
on the machine: steps of several lengths are timed. What longctx check prints of each comes last.
"""

import fcntl
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from inspect import getfile
from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure

from benchmarks.points import Row, decided, point, training_run
from benchmarks.processes import ROOT, finished, in_child, ran
from benchmarks.report import dress, machine, save_figure, table, write_json
from benchmarks.words import check_unused
from longctx import files
from longctx.attention.description import SCORES
from longctx.config.fields import Group, key, refuse
from longctx.model.mixers.description import FILES, MIXERS, SOFTMAX
from longctx.report.compare import positions
from longctx.runs import metrics, metrics_file
from longctx.spec.step import Workload
from longctx.tables import cell

TAKES_TRAINING_KEYS = True
TAKEN = {"model.mixer": "use mixers=", "max_steps": "use tokens=", "runs": "use out="}
SETTINGS = {
    "window": "model.window={window}",
    "window-full": "model.window={window} model.window_layers={three_of_four}",
    "gated": "model.attention_gate=channel",
    "nope": "model.nope_layers={all}",
    "gdn-softmax": "model.mixer=[gdn,gdn,gdn,softmax]",
}
EXAMPLES = ("fox", "xsa", "differential")
# What a machine trains in about ten minutes, and the tokens of each run
USUAL = {
    "cuda": "model.layers=8 model.channels=512 model.heads=8 model.kv_heads=8 model.ffn=1408 "
    "model.vocab_size=null seq_len=8192 batch_size=4 accumulate=1 compile=false tracker=none",
    "cpu": "model=tiny seq_len=512 batch_size=1 accumulate=1 val_rows=32 data.documents=200 "
    "data.vocab_size=512 tracker=none",
}
TOKENS = {"cuda": 2**23, "cpu": 3 * 2**16}
LENGTHS = {"cuda": (8192, 16384, 32768, 65536), "cpu": ()}
FIGURES = "val_loss", "val_loss_error", "tokens_per_second", "memory_peak_gib", "process_peak_gib"
LATE = "no minutes left"
MARKERS = "osD^v<>phXP"  # next to a colour of its own
HOST = "Short sequences measure a GPU's host, without CUDA graphs. On a CPU naive computes scores."
KEYS_FOUND = "pass keys found, from the beginning of a text to its end"
OF_STEPS = ("tokens of a sequence", "tokens/s", "a step of training")
BY_LENGTH = ("tokens/s of steps", "GiB of steps", KEYS_FOUND)


@dataclass(frozen=True)
class Options(Group):
    """Who trains, and how much; keys of train.py may follow, such as model=124m seq_len=16384."""

    mixers: tuple[str, ...] = key(
        (SOFTMAX, *SETTINGS, *EXAMPLES, *sorted(FILES & MIXERS.keys())),
        "mixers, names of score functions, or of settings",
    )
    tokens: int | None = key(None, "of each run; null: 8.4 million, on a CPU 196,608")
    lengths: tuple[int, ...] | None = key(None, "of steps to time; null: 8,192 to 65,536 on a GPU")
    passkeys: tuple[int, ...] | None = key(None, "tokens of texts with pass keys; null: to seq_len")
    check: bool = key(True, "show what longctx check prints of each")
    jobs: int | None = key(None, "runs at a time; null: 4 on a GPU; with 1 they are timed too")
    minutes: float = key(12.0, "for all; later runs and steps are left out")
    out: str = key("runs/arena", "a folder for the runs, page.md, page.png and page.json")


def run(options: Options, command: str, overrides: list[str]) -> None:
    """Train, ask, check and time each entrant; write the page again after each."""
    import torch

    check_unused(overrides, TAKEN)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    end, out = time.monotonic() + 60 * options.minutes, Path(options.out)
    jobs = options.jobs or (4 if device == "cuda" else 1)
    begun = [name for name in options.mixers if (out / name).exists()]
    refuse((begun, f"out={out}: has {', '.join(begun)} already; give another folder, or delete it"))
    named = [x.partition("=")[2].strip("[]") for x in overrides if x.startswith("plugins=")]
    named += [f"{ROOT}/examples/{name}.py" for name in options.mixers if name in EXAMPLES]
    words = [x for x in overrides if not x.startswith("plugins=")]
    given = [re.split("[.=]", x)[0] for x in words]
    words[:0] = [x for x in USUAL[device].split() if re.split("[.=]", x)[0] not in given]
    words += [f"plugins=[{','.join(named)}]"] if named else []
    plain = training_run(words, device)  # plugins register their names
    of_step = plain.workload.tokens_per_step
    steps = max(1, (options.tokens or TOKENS[device]) // of_step)
    entrants = {x: [*words, *settings(x, plain.workload)] for x in options.mixers}
    # All models are checked before the first one trains
    models = {x: training_run(own, device).workload.model for x, own in entrants.items()}
    rows: list[Row] = [{"mixer": x, "parameters": models[x].parameters()} for x in entrants]
    about = {"command": command, "tokens of each run": steps * of_step, **machine()}
    texts = ["passkey=true", "passkey.depths=[0,0.25,0.5,0.75,1]", "passkey.samples=4"]
    texts += [] if options.passkeys is None else [f"passkey.lengths={[*options.passkeys]}"]

    def compete(row: Row) -> Row:
        name = row["mixer"]
        found = trained([*entrants[name], f"max_steps={steps}"], texts, out / name, end)
        print(f"{name}: {found['failed'] or found['val_loss']}", flush=True)
        return found | ({"tokens_per_second": None} if jobs > 1 else {})

    def time_steps(row: Row) -> Row:
        lengths = LENGTHS[device] if options.lengths is None else options.lengths
        try:
            given = device, entrants[row["mixer"]], lengths, end
            found = {} if row["failed"] else in_child(timed, *given)
        except RuntimeError as error:  # the process ended
            found = {n: {"failed": str(error)} for n in lengths}
        speeds = {n: x.get("tokens_per_second", x["failed"]) for n, x in found.items()}
        peaks = {n: x.get("measured_gib") for n, x in found.items()}
        return dict(zip(BY_LENGTH, (speeds, peaks), strict=False))

    subjects = dict.fromkeys(x for x in map(subject, options.mixers) if x)
    with ThreadPoolExecutor(jobs) as pool:
        # Steps are timed when none trains; checks are last, since kernels compile in many sizes
        for measured in (compete, time_steps):
            for row, found in zip(rows, pool.map(measured, rows), strict=True):
                row |= found
                write_page(about, rows, out)
        found = pool.map(lambda x: check(x, end), subjects if options.check else ())
        for name, lines in zip(subjects, found, strict=False):
            about["check"] = about.get("check", {}) | {name: lines}
            write_page(about, rows, out)
    print(f"\n{(out / 'page.md').read_text()}\nwrote {out}/page.md and {out}/page.png")


def settings(name: str, step: Workload) -> list[str]:
    """Return an entrant's keys of train.py; ValueError for an unknown name."""
    choice = f"model.mixer=[{name}]" if name in MIXERS else f"attention.options.score={name}"
    if name in SCORES or "score" in getattr(MIXERS.get(name), "needs", ()):
        return [choice, "attention=flex" if step.device == "cuda" else "attention=naive"]
    if name in MIXERS:
        return [choice]
    if name not in SETTINGS:
        known = ", ".join([*MIXERS, *SETTINGS, *EXAMPLES])
        raise ValueError(f"mixers={name}: name the plugin that has it, or one of {known}")
    each = [str(n) for n in range(step.model.layers)]
    windowed = ",".join(n for n in each if int(n) % 4 != 3)
    texts = {"all": f"[{','.join(each)}]", "three_of_four": f"[{windowed}]"}
    return SETTINGS[name].format(window=step.seq_len // 8, **texts).split()


def subject(name: str) -> str | None:
    """Return what longctx check is asked for: a built-in name, or an entrant's file."""
    if name == SOFTMAX or name in FILES:
        return name.replace(SOFTMAX, "flash")
    return getfile(MIXERS[name]) if MIXERS.get(name) else SCORES.get(name, [None])[-1]


def trained(words: list[str], texts: list[str], folder: Path, end: float) -> Row:
    """Return the figures of a run, its loss by position, and the pass keys that it finds in `texts`
    by length and depth; `failed` says why it has none.
    """
    own = [f"name={folder.name}", f"runs={folder.parent.absolute()}"]
    command, place = [sys.executable, str(ROOT / "train.py"), *words, *own], Path.cwd()
    failed = finished(command, max(0, end - time.monotonic()), place)
    records = [] if failed else metrics_file.read(folder)
    found = metrics.figures(records)
    losses = dict(zip(*(positions(records).values() or ((), ())), strict=True))
    row = {name: found.get(name) for name in FIGURES} | {"failed": failed, "losses": losses}
    if failed:
        return row
    command = [sys.executable, str(ROOT / "eval.py"), f"checkpoint={folder.absolute()}", *texts]
    command += [word for word in words if word.startswith("plugins=")]
    if problem := finished(command, max(0, end - time.monotonic()), place):
        return row | {KEYS_FOUND: {"failed": problem}}
    (file,) = (folder / "eval").glob("passkey*.json")
    grid = json.loads(file.read_text())["kinds"]["passkey"]
    return row | {KEYS_FOUND: dict(zip(grid["lengths"], grid["accuracy"], strict=True))}


def check(subject: str, end: float) -> list[str]:
    """Return the lines that longctx check prints until `end`."""
    command = [sys.executable, "-m", "longctx", "check", subject]
    code, lines, errors = ran(command, max(0, end - time.monotonic()))
    return (lines or errors) + [LATE] * (code is None)


def timed(device: str, words: list[str], lengths: tuple[int, ...], end: float) -> dict[int, Row]:
    """Return a point for each length, in this process, when no other one measures."""
    others = [word for word in words if not word.startswith(("seq_len=", "batch_size="))]
    runs = {n: training_run([*others, f"seq_len={n}", "batch_size=1"], device) for n in lengths}
    found: dict[int, Row] = {n: {"failed": LATE} for n in lengths}
    with open(__file__) as file:
        # Kernels compile while no one's steps are timed, and before these are
        fcntl.flock(file, fcntl.LOCK_SH)
        if runs and time.monotonic() < end:
            point(decided(runs[min(runs)]), 0, 1, apart=False)
        fcntl.flock(file, fcntl.LOCK_EX)
        for n, own in runs.items():
            if time.monotonic() < end:
                found[n] = point(decided(own), 2, 3, apart=False)
    return found


def write_page(about: Row, rows: list[Row], out: Path) -> None:
    """Write page.json, page.md and page.png of what is measured so far."""
    write_json(out / "page.json", about | {"rows": rows})
    panels = 1 + any(row.get(BY_LENGTH[0]) for row in rows)  # one, if no steps are timed
    figure = Figure(figsize=(2 + 5 * panels, 4), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    ranked = sorted((row for row in rows if row.get("val_loss")), key=lambda row: row["val_loss"])
    for place, row in enumerate(ranked):
        losses = {n: x for n, x in row["losses"].items() if n >= 8}  # before, most know nothing
        speeds = {n: x for n, x in row.get(BY_LENGTH[0], {}).items() if isinstance(x, float)}
        color = colormaps["turbo"]((place + 0.5) / len(ranked))
        for axis, found in zip(axes, (losses, speeds), strict=False):
            error, marker = row.get("val_loss_error") or 0, MARKERS[place % len(MARKERS)]
            label = f"{row['val_loss']:.2f} ± {error:.2f}  {row['mixer']}"
            axis.plot(list(found), list(found.values()), color=color, marker=marker, label=label)
    names = ("tokens before", "loss", "validation loss by position, and of all"), OF_STEPS
    for axis, (x, y, title) in zip(axes, names, strict=False):
        axis.set_xscale("log", base=2)
        dress(axis, title, x, ylabel=y)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    save_figure(figure, out / "page.png")
    lines = ["# The arena", ""]
    lines += [f"{name}: {cell(x)}  " for name, x in about.items() if name != "check"]
    lines += ["", table(map(summary, rows)), "", "![](page.png)", "", HOST, ""]
    for title in BY_LENGTH:
        cells = {row["mixer"]: by_length(row.get(title, {})) for row in rows}
        shown = [{"mixer": mixer} | found for mixer, found in cells.items() if found]
        lines += [f"## By length: {title}", "", table(shown), ""] if shown else []
    for checked, found in about.get("check", {}).items():
        lines += [f"## longctx check {Path(checked).name}", "", *(f"    {x}" for x in found), ""]
    files.write_text(out / "page.md", "\n".join(lines))


def summary(row: Row) -> Row:
    """Return the first cells of an entrant."""
    names = "mixer", "parameters", *FIGURES, "failed"
    shown = {x: cell(row[x]) for x in names if row.get(x) is not None}
    shown |= {"val_loss": f"{row['val_loss']:.4f}"} if row.get("val_loss") else {}
    shown |= {f"loss at {n:,}": f"{x:.3f}" for n, x in row.get("losses", {}).items()}
    return {name.replace("_", " "): text for name, text in shown.items()}


def by_length(found: Row) -> Row:
    """Return a cell for each length; several numbers are of depths."""
    lists = {n: x if isinstance(x, list) else [x] for n, x in found.items() if x is not None}
    return {cell(n): " ".join(map(cell, x)) for n, x in lists.items()}
