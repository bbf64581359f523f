"""A small model learns by DPO to answer with quotations from a text, and shows it on unseen texts.

The texts are paragraphs of Python's own documentation, so nothing is downloaded. To each belongs a
question. The chosen answer quotes the sentence that is asked about. The rejected one is what the
model answers by itself, if that is no quotation; of every second text it quotes another text, so
that a quotation's form is not enough. Some texts are held out, with near-duplicates on one side.
They tell in how many pairs the chosen answer has the larger reward while the model learns, and how
much of what it writes is quoted before and after.

    python -m benchmarks.real_weights smollm2 weights/smollm2
    python -m benchmarks preference_curve init=weights/smollm2
"""

from __future__ import annotations

import ast
import json
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from benchmarks.report import machine, save_figure, write_json
from longctx import cli
from longctx.config.fields import key
from longctx.data import DataConfig, load
from longctx.runs import metrics_file

LENGTH = 512  # tokens of a sequence
HELD_OUT = 0.15  # of the pairs
SENTENCE = re.compile(r"(?<=[a-z\")]\.) (?=[A-Z])")
WHOLE = re.compile(r"(?s)(.*\.[”\"]?|.*)")  # up to the last full stop, if there is one
QUOTED = 5  # successive words of the text from which on they count as quoted
FIGURES = {"rewards/accuracies": "pairs won by reward", "rewards/margins": "margin of rewards"}


@dataclass
class Options:
    """What `python -m benchmarks preference_curve` takes."""

    init: str = key("", "a Hugging Face folder with a chat template")
    texts: int = key(160, "that are asked about, each once", between=(8, 1000))
    steps: int = key(24, "of training, of two sequences each: about four pairs")
    lr: float = key(0.0001, "peak learning rate of LoRA")
    device: str = key("auto", "auto, cpu or cuda")
    out: str = key("preference-curve", "a new folder for pairs, run and result")


def run(options: Options, command: str) -> None:
    """Ask, train and ask again; write result.json and result.png into `options.out`."""
    out = Path(options.out)
    if out.exists() or not (Path(options.init) / "config.json").is_file():
        raise ValueError(f"out={out}: is no new folder, or init={options.init}: no model's folder")
    out.mkdir(parents=True)
    asked = dict(questions(options.texts))
    own = answers(options, options.init, list(asked), out / "own.jsonl")
    rows = list(compared(asked, own))
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    pairs = ({name: message(role, row[name]) for name, role in roles.items()} for row in rows)
    write_lines(out / "pairs.jsonl", pairs)
    call("train", *training(options))
    config = DataConfig("text", str(out / "pairs.jsonl"), tokenizer=options.init, chat=True)
    config = replace(config, preferences="pairs", val_fraction=HELD_OUT)
    trained, data = str(out / "runs" / "dpo"), load(config, LENGTH)
    samples = [rows[number] for number in data.split["val"]]
    after = answers(options, trained, [row["prompt"] for row in samples], out / "after.jsonl")
    samples = [row | {"after": text} for row, text in zip(samples, after, strict=True)]
    result = {
        "command": command,
        "versions": machine(),
        "options": vars(options),
        "pairs": {"train": len(rows) - len(samples), "held_out": len(samples)},
        "quoted": {
            when: fmean(quoted_share(row[when], row["prompt"]) for row in samples)
            for when in ("before", "after")
        },
        "curve": [
            {key: row[key] for key in row if key == "step" or key.removeprefix("val_") in FIGURES}
            for row in metrics_file.read(Path(trained))
        ],
        "samples": samples,
    }
    write_json(out / "result.json", result)
    draw(result, out / "result.png")
    print(f"{out / 'result.json'}, {out / 'result.png'}")


def questions(count: int) -> Iterator[tuple[str, str]]:
    """Yield `count` questions about paragraphs of the language reference and of the standard
    library's docstrings, each with an answer that quotes a sentence.
    """
    pages = [*topics.values(), *docstrings()]
    texts = (" ".join(part.split()) for page in pages for part in page.split("\n\n"))
    found = [text for text in dict.fromkeys(texts) if 180 < len(text) < 480]
    random.Random(1).shuffle(found)
    for text in found:
        sentences = SENTENCE.split(text)
        whole = [one for one in sentences if 8 <= len(one.split()) <= 24 and one[0].isupper()]
        terms = [(len(x), x, one) for one in whole for x in re.findall(r"\b[a-z]{6,}\b", one)]
        once = [each for each in terms if text.count(each[1]) == 1]
        if count and once and len(sentences) > 1:
            count -= 1
            _, term, quote = max(once)
            yield f"{text}\n\nWhat does this text say about “{term}”?", f"The text says: “{quote}”"


def docstrings() -> Iterator[str]:
    """Yield the docstrings of the standard library's modules."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        nodes = ast.walk(ast.parse(file.read_bytes()))
        yield from (ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds))


def message(role: str, content: str) -> list[dict[str, str]]:
    """Return a conversation of one message."""
    return [{"role": role, "content": content}]


def compared(asked: dict[str, str], own: list[str]) -> Iterator[dict[str, str]]:
    """Yield each question with the answer that quotes, one that does not, and the model's own."""
    other = list(asked.values())[-1]
    for number, ((question, quotation), answer) in enumerate(zip(asked.items(), own, strict=True)):
        rejected = other if number % 2 else answer
        other = quotation
        # A special token would end the message
        is_text = rejected.strip() and "<|" not in rejected
        if is_text and quoted_share(rejected, question) < 0.5:
            yield {"prompt": question, "chosen": quotation, "rejected": rejected, "before": answer}


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write each row as a line of JSON."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def answers(options: Options, model: str, prompts: list[str], file: Path) -> list[str]:
    """Return the likeliest answer of `model` to each prompt, up to its last whole sentence."""
    asks = file.with_suffix(".asked.jsonl")
    write_lines(asks, ({"messages": message("user", prompt)} for prompt in prompts))
    words = [f"prompts={asks}", f"out={file}", "max_new_tokens=40", "temperature=0"]
    call("generate", model, *words, "batch_size=16", f"device={options.device}")
    lines = [line for line in file.read_text().split("\n") if line]
    return [WHOLE.findall(json.loads(line)["text"])[0].strip() for line in lines]


def call(*command: str) -> None:
    """Run a command of longctx; ValueError if it fails."""
    if cli.main(list(command)):
        raise ValueError(f"{command[0]} failed: see above")


def training(options: Options) -> list[str]:
    """Return the overrides of train.py."""
    return [
        *("objective=dpo", f"init={options.init}", "lora.rank=16", f"lr={options.lr}"),
        *("data=text", f"data.path={options.out}/pairs.jsonl", "data.chat=true"),
        *(f"data.val_fraction={HELD_OUT}", "val_rows=0", "log_every=1", "workers=0"),
        *(f"val_every={max(1, options.steps // 4)}", f"max_steps={options.steps}"),
        *(f"seq_len={LENGTH}", "batch_size=2", "accumulate=1", f"device={options.device}"),
        *("name=dpo", f"runs={options.out}/runs", "wandb.mode=disabled"),
    ]


def quoted_share(answer: str, text: str) -> float:
    """Return the share of the answer's words that are in runs of QUOTED words of the text."""
    words, source = (re.findall(r"\w+", each.lower()) for each in (answer, text))
    runs = {tuple(source[n : n + QUOTED]) for n in range(len(source) - QUOTED + 1)}
    starts = [n for n in range(len(words)) if tuple(words[n : n + QUOTED]) in runs]
    return len({n + k for n in starts for k in range(QUOTED)}) / max(1, len(words))


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw accuracy and margin of the pairs by step, and the model before and after."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    *lines, right = figure.subplots(1, 3)
    for axes, (name, title) in zip(lines, FIGURES.items(), strict=True):
        for prefix, label, style in (("", "training", ":"), ("val_", "held out", "-o")):
            found = [(x["step"], x[prefix + name]) for x in result["curve"] if prefix + name in x]
            axes.plot(*zip(*found, strict=True), style, label=label)
        axes.set(xlabel="step", title=title)
        axes.legend(frameon=False)
    bars = right.bar(list(result["quoted"]), list(result["quoted"].values()), 0.5)
    right.bar_label(bars, [f"{share:.0%}" for share in result["quoted"].values()])
    right.set(ylim=(0, 1.05), title="words quoted in held-out answers")
    save_figure(figure, path)
