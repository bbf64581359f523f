"""A context extended, from start to finish: pretrain a small GPT at a short length, stretch it with
YaRN, fine-tune briefly.

It runs the project's own commands and prints them: train.py, `python -m longctx export`, train.py
with init= and rope=yarn, export. Then three models answer the same questions: the pretrained one,
the same stretched but not trained further, and the fine-tuned one. A model this small learns to
look facts up only from text that asks for them: half of its training rows are generated documents
with facts and questions (data=needles), with other numbers than those of the test. The long
documents of the fine-tuning are of the same kinds.

`init=FOLDER` extends the weights of a Hugging Face folder instead, from the length that its
config.json names.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.process_group import ROOT
from benchmarks.report import machine, save_figure, write_json
from longctx import cli, system
from longctx.config.fields import key
from longctx.tables import show


@dataclass
class Options:
    """What `python -m benchmarks extension` takes."""

    init: str = key("", "a Hugging Face folder to extend, instead of pretraining a small GPT")
    short: int = key(2048, "tokens that the small GPT is pretrained at; with init, the folder's")
    long: int = key(16384, "tokens that it is extended to")
    layers: int = key(8, "of the small GPT")
    channels: int = key(512, "of the small GPT, with heads of 64")
    vocab: int = key(16384, "tokens of the vocabulary trained on the documents")
    steps: int = key(2500, "of pretraining")
    tune_steps: int = key(1500, "of fine-tuning")
    tune_lr: float = key(0.0003, "peak learning rate of fine-tuning")
    lora: int = key(0, "rank of LoRA in fine-tuning; 0: all weights are trained", between=(0, 4096))
    tokens: int = key(32768, "of a step")
    documents: int = key(12000, "generated documents of the short length; of the long, an eighth")
    samples: int = key(20, "texts for each length, depth and kind")
    path: str = key("", "text files instead of the embedded documents")
    device: str = key("auto", "auto, cpu or cuda")
    kernel: str = key("auto", "attention.options.kernel of the flash backend")
    precision: str = key("auto", "of training, as train.py takes it")
    seed: int = key(1, "of weights and order")
    out: str = key("extension", "a new folder for runs, models and the result")


def run(options: Options, command: str) -> dict[str, Any]:
    """Run all of it and write extension.json and extension.png into `options.out`; ValueError where
    a command fails.
    """
    out = Path(options.out)
    if out.exists() and any(out.iterdir()):
        raise ValueError(
            f"out={out}: exists already and is not an empty folder; give the name of a new one"
        )
    if options.init:
        options = replace(options, short=_own_length(options.init))
    check(options, out)
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    seconds: dict[str, float] = {}
    for what, arguments in commands(options, out):
        began = time.perf_counter()
        print(f"\n$ python {' '.join(arguments)}", flush=True)
        if subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=system.child_environment()
        ).returncode:
            raise ValueError(f"{what} failed: see above")
        seconds[what] = seconds.get(what, 0.0) + time.perf_counter() - began
    began = time.perf_counter()
    measured = measure(options, out)
    seconds["measuring"] = time.perf_counter() - began
    result = {"command": command, "versions": machine(), "options": vars(options)} | measured
    result |= {"seconds": {key: round(x, 1) for key, x in seconds.items()}}
    result["seconds"]["all"] = round(time.perf_counter() - started, 1)
    write_json(out / "extension.json", result)
    draw(result, out / "extension.png")
    _print(result)
    files = f"{out / 'extension.png'}, {out / 'extension.json'}"
    print(f"\n{files}: {result['seconds']['all']:.0f} s in all")
    return result


def check(options: Options, out: Path) -> None:
    """Raise ValueError for what would only fail after minutes."""
    if options.long <= options.short or options.long % options.short:
        raise ValueError(f"long={options.long}: a multiple of short={options.short}")
    if options.path and not Path(options.path).exists():
        raise ValueError(f"path={options.path}: no such file or folder")
    _, (_, *overrides) = next(commands(options, out))
    cli.compose("train", overrides)


def _own_length(folder: str) -> int:
    from longctx.model.huggingface import read_config

    if (context := read_config(folder).context) is None:
        raise ValueError(f"init={folder}: its config.json names no length")
    return context


def commands(options: Options, out: Path) -> Iterator[tuple[str, list[str]]]:
    """Name what is run, each with its arguments after `python`."""
    out, path = out.resolve(), Path(options.path).resolve()
    text = [f"data.mix.code.path={path}"] if options.path else ["data.mix.code.source=embedded"]
    filler = [f"data.mix.recall.path={path}"] if options.path else []
    workers = 0 if options.device == "cpu" else 4
    common = [f"device={options.device}", f"precision={options.precision}", f"seed={options.seed}"]
    common += [f"runs={out}/runs", f"attention.options.kernel={options.kernel}", "data=mix", *text]
    common += ["data.mix.recall.source=needles", *filler, "passkey=true", "passkey.samples=4"]
    common += ["data.val_fraction=0.05", "checkpoint_every=100000", f"workers={workers}"]
    common += ["wandb.mode=disabled"]
    if not options.init:
        heads, channels = max(1, options.channels // 64), options.channels
        model = ["model=tiny", f"model.layers={options.layers}", f"model.channels={channels}"]
        model += [f"model.heads={heads}", f"model.kv_heads={heads}", f"model.ffn={3 * channels}"]
        model += ["model.rope_theta=10000", f"data.vocab_size={options.vocab}", "name=short"]
        rows = [f"max_steps={options.steps}", *_rows(options, options.short, options.documents)]
        yield "pretraining", ["train.py", *common, *model, *rows]
        yield "export", ["-m", "longctx", "export", f"{out}/runs/short", f"{out}/short"]
    tuning = [f"init={_trained(options, out)}", "rope=yarn", f"lora.rank={options.lora or 'null'}"]
    tuning += [f"lr={options.tune_lr}", f"max_steps={options.tune_steps}", "name=long"]
    rows = _rows(options, options.long, max(8, options.documents // 8))
    yield "fine-tuning", ["train.py", *common, *tuning, *rows]
    yield "export", ["-m", "longctx", "export", f"{out}/runs/long", f"{out}/long"]


def _trained(options: Options, out: Path) -> Path:
    return Path(options.init).resolve() if options.init else out / "short"


def _rows(options: Options, length: int, documents: int) -> list[str]:
    rows = max(1, options.tokens // length)  # in a micro-batch, of which a step has one
    # Bytes: the longest documents just fill a row
    per_token = (
        _characters_per_token(options) if options.init else 0.4 * math.log2(options.vocab) - 1.25
    )
    step = [f"seq_len={length}", f"batch_size={rows}", "accumulate=1"]
    step += [f"data.mix.recall.length={int(per_token * length)}"]
    return [*step, f"data.mix.recall.documents={documents}"]


def _characters_per_token(options: Options) -> float:
    """Return the fewest characters per token of some generated documents."""
    from longctx.data import DataConfig, Tokenizer
    from longctx.data.sources.needles import Needles

    tokenizer = Tokenizer.load(options.init)
    settings = DataConfig(path=options.path or None, length=65536, documents=8)
    texts = [one.text for one in Needles().open(settings, frozenset()).shards[0].read()]
    return min(len(text) / len(tokenizer.encode(text)) for text in texts)


def measure(options: Options, out: Path) -> dict[str, Any]:
    """Recall over length and depth and loss by position of the three models, on the same texts."""
    import torch

    from longctx.data import DataConfig, Tokenizer, load
    from longctx.evaluation.passkey import content, filler_of, recall
    from longctx.evaluation.perplexity import perplexity
    from longctx.evaluation.score import Scorer
    from longctx.evaluation.windows import Document

    device = "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    trained = _trained(options, out)
    tokenizer = Tokenizer.load(trained)
    source = DataConfig(
        source="text" if options.path else "embedded",
        path=options.path or None,
        tokenizer=str(trained),
        val_fraction=0.05,
    )
    unseen = [Document(*one[:3]) for one in load(source, options.long).documents("val")]
    filler = filler_of(unseen, tokenizer, 8 * options.long)
    longest = [
        one for one in sorted(unseen, key=lambda one: -len(one.ids)) if len(one.ids) > options.long
    ]
    longest = longest or sorted(unseen, key=lambda one: -len(one.ids))[:8]
    lengths = [options.short]
    while lengths[-1] < options.long:
        lengths.append(lengths[-1] * 2)
    models = {}
    for name, model in _models(options, out, device):
        scorer = Scorer(model, dtype)
        cells = recall(scorer, tokenizer, filler, lengths, samples=options.samples)
        scored = perplexity(scorer, islice(longest, 64), options.long, options.long)
        models[name] = {
            "recall": content(cells)["kinds"],
            "by_position": scored.content()["by_position"],
        }
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {"device": where, "long_documents": len(longest), "models": models}


def _models(options: Options, out: Path, device: str) -> Iterator[tuple[str, Any]]:
    from longctx.attention.description import AttentionConfig
    from longctx.config.rope_config import RopeConfig
    from longctx.model import GPT
    from longctx.model.context_extension import extended
    from longctx.model.huggingface import load_weights, pretrained, read_config

    attention = AttentionConfig("flash", {"kernel": options.kernel})
    trained = _trained(options, out)
    yield "as pretrained", pretrained(trained, attention, device)
    config, _ = extended(read_config(trained), RopeConfig("yarn"), options.long)
    stretched = GPT(config, attention).to(device)
    load_weights(stretched, trained)
    yield "YaRN, not trained", stretched
    yield "YaRN, fine-tuned", pretrained(out / "long", attention, device)


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the picture: pass keys by length and depth before and after, and loss by position of
    all three.
    """
    from matplotlib.figure import Figure

    from longctx.evaluation.results import recall_map

    models = result["models"]
    names = list(models)
    figure = Figure(figsize=(13, 4), layout="constrained")
    for number, name in enumerate((names[0], names[2]), start=1):
        image = recall_map(
            figure.add_subplot(1, 3, number),
            models[name]["recall"]["passkey"],
            f"pass key found, {name}",
        )
    figure.colorbar(image, ax=figure.axes, label="right answers", fraction=0.05)
    axes = figure.add_subplot(1, 3, 3)
    for name, model in models.items():
        rows = model["by_position"]
        axes.plot(
            [row["last"] for row in rows],
            [row["loss"] for row in rows],
            marker="o",
            markersize=3,
            label=name,
        )
    axes.axvline(
        result["options"]["short"], color="grey", linestyle=":", label="length of pretraining"
    )
    axes.set_xscale("log", base=2)
    lowest = min(row["loss"] for model in models.values() for row in model["by_position"])
    axes.set_ylim(lowest - 0.3, lowest + 5)
    axes.set(
        xlabel="tokens before", ylabel="loss (nats)", title="loss by position, unseen documents"
    )
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    save_figure(figure, path)


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    view = Table(title="right answers over all depths (the worst depth)", title_justify="left")
    view.add_column("model")
    first = next(iter(result["models"].values()))["recall"]
    for kind, grid in first.items():
        for length in grid["lengths"]:
            view.add_column(f"{kind} {length:,}", justify="right")
    for name, model in result["models"].items():
        cells = [
            f"{sum(row) / len(row):.0%} ({min(row):.0%})"
            for grid in model["recall"].values()
            for row in grid["accuracy"]
        ]
        view.add_row(name, *cells)
    show(view)
