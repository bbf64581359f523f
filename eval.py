"""Evaluate a run or a Hugging Face folder: `python eval.py checkpoint=runs/NAME seq_len=16384`; every key: `--help`.

torch is imported only once the command line is known to make sense.
"""

import os
import sys
import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from longctx import config
from longctx.evaluation.config import TOKENS_PER_BATCH, EvalConfig, names_data

if TYPE_CHECKING:
    from longctx.data import Tokenizer
    from longctx.model import GPT


class Subject(NamedTuple):
    """What is evaluated: its model, where it lies, and the configuration of its run (None: a Hugging Face folder)."""

    model: "GPT"
    tokenizer: "Tokenizer"
    folder: Path
    file: Path
    seq_len: int
    run: dict[str, Any] | None


def main(argv: list[str]) -> int:
    """Exit code: 0 done, 2 a mistake in what was asked (one line on stderr), 130 stopped by Ctrl-C."""
    return config.run("eval", argv, asked)


def asked(words: config.Words) -> int:
    """The evaluation that the words ask for."""
    if words.sweep:
        raise ValueError("-m: eval.py does one evaluation at a time; call it once for each")
    composed = config.compose("eval", words.overrides)
    evaluate(composed.config, other_data=names_data(composed.changed))
    return 0


def evaluate(asked: EvalConfig, other_data: bool) -> None:
    """Score the documents, print the table, write the JSON into the folder of the run or model."""
    import torch

    from longctx.attention import check, kernels_run
    from longctx.evaluation import documents, report
    from longctx.evaluation.perplexity import perplexity
    from longctx.training import checkpoints

    if asked.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: torch finds no GPU here; use device=cpu, or device=auto for what there is")
    device = "cuda" if asked.device != "cpu" and torch.cuda.is_available() else "cpu"
    precision = {"cuda": "bf16", "cpu": "fp32"}[device] if asked.precision == "auto" else asked.precision
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    subject = opened(asked, device, other_data)
    model, folder, file, run = subject.model, subject.folder, subject.file, subject.run
    backend, options = asked.attention.backend, asked.attention.options
    check(backend, device=device, dtype=dtype, head_dim=model.config.head_size, options=options)
    results = folder / "eval"
    if not os.access(results if results.exists() else folder, os.W_OK):
        raise PermissionError(f"checkpoint={asked.checkpoint}: no permission to write the result into {results}")
    context = asked.seq_len or subject.seq_len
    if context > subject.seq_len:
        by = "the run trained at" if run else "the model is made for"
        print(f"seq_len={context:,} is longer than the {subject.seq_len:,} tokens per row that {by}")

    if run is None or other_data:
        found = documents.of_source(asked.data, subject.tokenizer)
    else:
        found = documents.of_run(folder, run, asked.split, checkpoints.read(file)["longctx"]["data"])
    started = time.perf_counter()
    result = perplexity(
        model,
        islice(found, asked.documents),
        context,
        asked.stride,
        batch_size=asked.batch_size or max(1, TOKENS_PER_BATCH[device] // context),
        dtype=dtype if precision == "bf16" else None,
        progress=True,
    )
    about = {
        "checkpoint": str(file),
        "scored": asdict(asked.data) if other_data else f"{asked.split} split of the run's data",
        "trained_seq_len": subject.seq_len,
        "attention": backend,
        "kernel": kernels_run()[backend],
        "precision": precision,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "seconds": round(time.perf_counter() - started, 3),
    }
    what = asked.data.source if other_data else asked.split
    name = file.stem if run else file.name
    path = results / f"{what}-{name}-{context}-{result.stride}-{backend}.json"
    report.show(result)
    report.write(result, about, path)
    print(path)


def opened(asked: EvalConfig, device: str, other_data: bool) -> Subject:
    """The run, checkpoint or Hugging Face folder that `asked.checkpoint` names; ValueError where it is none of them."""
    from longctx.data import Tokenizer
    from longctx.model import huggingface
    from longctx.training import checkpoints, runs

    given = Path(asked.checkpoint or "")
    if huggingface.is_folder(given):
        if not other_data:
            raise ValueError(
                f"checkpoint={given}: a Hugging Face folder has no documents of its own; add data=text data.path=..."
            )
        import torch

        tokenizer = Tokenizer.load(given)
        model = huggingface.pretrained(given, asked.attention, device, torch.float32).eval()
        return Subject(model, tokenizer, given, given.resolve(), model.config.context or 1, None)
    model, tokenizer, run = checkpoints.load_model(given, device, asked.attention)
    file = runs.checkpoints(given)[-1] if given.is_dir() else given.resolve()
    return Subject(model, tokenizer, given if given.is_dir() else file.parent.parent, file, run["seq_len"], run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
