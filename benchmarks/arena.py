"""The arena: mixers trained alike on equal tokens, and one page that compares them.

An entrant is a name of model.mixer=, also of a plugin, of attention.options.score=, or of SETTINGS.
Each is a run of train.py in a process of its own; then steps of other lengths are timed.
"""

import re
import shutil
import sys
import time
from dataclasses import dataclass
from math import nan
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.cards import table
from benchmarks.points import Row, decided, point, training_run
from benchmarks.processes import ROOT, finished
from benchmarks.report import machine, save_figure, write_json
from benchmarks.words import check_unused
from longctx import files
from longctx.attention.description import SCORES
from longctx.config.fields import Group, key
from longctx.model.mixers.description import MIXERS
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
SETTINGS |= {x: f"plugins=[examples/{x}.py] model.mixer=[{x}]" for x in ("xsa", "differential")}
ALL = ("softmax", *SETTINGS, "fox", "gdn", "kda", "mamba2")
# What a machine trains in about ten minutes, and the tokens of each run
USUAL = {
    "cuda": "model.layers=8 model.channels=512 model.heads=8 model.kv_heads=8 model.ffn=1408 "
    "seq_len=8192 batch_size=4 accumulate=1 val_rows=64",
    "cpu": "model=tiny seq_len=512 batch_size=1 accumulate=1 val_rows=32 data.documents=200 "
    "data.vocab_size=512",
}
TOKENS = {"cuda": 2**23, "cpu": 3 * 2**16}
FIGURES = ("val_loss", "tokens_per_second", "memory_peak_gib", "process_peak_gib")


@dataclass(frozen=True)
class Options(Group):
    """Who trains, and how much; keys of train.py may follow, such as model=124m seq_len=16384."""

    mixers: tuple[str, ...] = key(ALL, "mixers, names of score functions, or of settings")
    tokens: int | None = key(None, "of each run; null: 8.4 million, on a CPU 196,608")
    lengths: tuple[int, ...] | None = key(None, "of steps to time; null: 65,536 on a GPU")
    minutes: float = key(12.0, "for all; later runs and steps are left out")
    out: str = key("runs/arena", "a folder for the runs, page.md, page.png and page.json")


def run(options: Options, command: str, overrides: list[str]) -> None:
    """Train and time each entrant; write the page again after each."""
    import torch

    check_unused(overrides, TAKEN)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    end, out = time.monotonic() + 60 * options.minutes, Path(options.out)
    given = {re.split("[.=]", x)[0] for x in overrides}
    words = [x for x in USUAL[device].split() if re.split("[.=]", x)[0] not in given] + overrides
    plain = training_run(words, device).workload  # plugins register their names
    steps = max(1, (options.tokens or TOKENS[device]) // plain.tokens_per_step)
    entrants = {name: settings(name, plain) for name in options.mixers}
    about = {"command": command, "tokens of each run": steps * plain.tokens_per_step, **machine()}
    rows: list[Row] = []
    # All models are checked before the first one trains
    models = {name: training_run([*words, *own], device).workload for name, own in entrants.items()}
    for name, own in entrants.items():
        parameters = models[name].parameters
        print(f"{name}: {parameters:,} parameters", flush=True)
        row = trained([*words, *own, f"max_steps={steps}"], out / name, end)
        lengths = (65536,) * (device == "cuda") if options.lengths is None else options.lengths
        for length in () if row["failed"] or time.monotonic() > end else lengths:
            others = [word for word in words if not word.startswith(("seq_len=", "batch_size="))]
            longer = training_run([*others, *own, f"seq_len={length}", "batch_size=1"], device)
            step = point(decided(longer), 2, 3)
            row[f"tokens/s at {length:,}"] = step.get("tokens_per_second", step["failed"])
            row[f"GiB at {length:,}"] = step["measured_gib"]
        rows.append({"mixer": name, "parameters": parameters} | row)
        write_page(about, rows, out)
    print(f"\n{(out / 'page.md').read_text()}\nwrote {out}/page.md and {out}/page.png")


def settings(name: str, step: Workload) -> list[str]:
    """Return an entrant's keys of train.py; ValueError for an unknown name."""
    if name in MIXERS:
        return [f"model.mixer=[{name}]"]
    if name in SCORES:
        backend = "flex" if step.device == "cuda" else "naive"
        return [f"attention={backend}", f"attention.options.score={name}"]
    if name not in SETTINGS:
        known = ", ".join([*MIXERS, *SETTINGS])
        raise ValueError(f"mixers={name}: name the plugin that has it, or one of {known}")
    each = [str(n) for n in range(step.model.layers)]
    windowed = ",".join(n for n in each if int(n) % 4 != 3)
    texts = {"all": f"[{','.join(each)}]", "three_of_four": f"[{windowed}]"}
    return SETTINGS[name].format(window=step.seq_len // 8, **texts).split()


def trained(words: list[str], folder: Path, end: float) -> Row:
    """Return the figures of a run, and its loss by position; `failed` says why it has none."""
    shutil.rmtree(folder, ignore_errors=True)
    own = [f"name={folder.name}", f"runs={folder.parent.absolute()}", "tracker=none"]
    command, left = [sys.executable, str(ROOT / "train.py"), *words, *own], end - time.monotonic()
    failed = finished(command, left, Path.cwd()) if left > 0 else "no minutes left"
    found = metrics.figures(records := [] if failed else metrics_file.read(folder))
    losses = dict(zip(*(positions(records).values() or ((), ())), strict=True))
    return {name: found.get(name) for name in FIGURES} | {"failed": failed, "losses": losses}


def write_page(about: Row, rows: list[Row], out: Path) -> None:
    """Write page.json, page.md and page.png of what is measured so far."""
    write_json(out / "page.json", about | {"rows": rows})
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for row in rows:
        axes.plot(list(row["losses"]), list(row["losses"].values()), "o-", label=row["mixer"])
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens before", ylabel="loss", title="validation loss by position")
    axes.legend()
    save_figure(figure, out / "page.png")
    lines = ["# The arena", "", *(f"{name}: {cell(x)}  " for name, x in about.items()), ""]
    shown: list[Row] = []
    for row in rows:
        losses = {f"loss at {n:,}": f"{x:.3f}" for n, x in row["losses"].items()}
        figures = row | losses | {"losses": None, "val_loss": f"{row['val_loss'] or nan:.4f}"}
        shown.append({k.replace("_", " "): cell(x) for k, x in figures.items() if x is not None})
    lines += [table(shown), "", "![](page.png)", ""]
    files.write_text(out / "page.md", "\n".join(lines))
