"""Evaluate a run or a Hugging Face folder: `python eval.py checkpoint=runs/NAME seq_len=16384`;
every key: `--help`.

torch is imported only once the command line is known to make sense.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from longctx import cli
from longctx.config.eval_config import SHORTEST, TOKENS_PER_BATCH, EvalConfig, doubling, names_data
from longctx.cli import libraries

if TYPE_CHECKING:
    import torch

    from longctx.data import Tokenizer
    from longctx.evaluation.windows import Document
    from longctx.model import GPT


class Subject(NamedTuple):
    """What is evaluated: its model, where it lies, and the configuration of its run (None: a
    Hugging Face folder).
    """

    model: "GPT"
    tokenizer: "Tokenizer"
    folder: Path
    file: Path
    seq_len: int
    run: dict[str, Any] | None


def main(argv: list[str]) -> int:
    """Exit code: 0 done, 2 a mistake in what was asked (one line on stderr), 130 stopped by Ctrl-C."""
    return cli.run("eval", argv, asked)


def asked(words: cli.Arguments) -> int:
    """The evaluation that the words ask for."""
    if words.sweep:
        raise ValueError("-m: eval.py does one evaluation at a time; call it once for each")
    composed = cli.compose("eval", words.overrides)
    other_data = names_data(composed.changed)
    for key in ("data", "split"):
        if composed.config.tasks and key in composed.changed:
            raise ValueError(
                f"{key}={composed.changed[key]}: tasks bring their own documents; leave {key} out"
            )
    evaluate(composed.config, other_data, words.overrides)
    return 0


def evaluate(asked: EvalConfig, other_data: bool, words: list[str]) -> None:
    """Score the documents, print the tables, write JSON and picture into the folder of the run or
    model.
    """
    with libraries():
        import torch

        from longctx.attention import check, kernels_run
        from longctx.evaluation import plots, processes, report
        from longctx.evaluation.perplexity import merged, perplexity, to_plain
        from longctx.evaluation.scoring import round_matrices

    number, part = processes.part()
    device = placed(asked, number)
    precision = (
        {"cuda": "bf16", "cpu": "fp32"}[device.type]
        if asked.precision == "auto"
        else asked.precision
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    subject = opened(asked, device, other_data)
    model, run, backend = subject.model, subject.run, asked.attention.backend
    if run is None and (split := next((word for word in words if word.startswith("split=")), None)):
        raise ValueError(
            f"{split}: a Hugging Face folder has no documents of its own to split; leave it out"
        )
    check(
        backend,
        device=device,
        dtype=dtype,
        head_dim=model.config.head_size,
        options=asked.attention.options,
    )
    results = writable(subject.folder / "eval", asked)
    context = asked.seq_len or subject.seq_len
    if context > subject.seq_len and not part:
        by = "the run trained at" if run else "the model is made for"
        print(
            f"seq_len={context:,} is longer than the {subject.seq_len:,} tokens per row that {by}"
        )
    if precision == "bf16":
        round_matrices(model, dtype)
    if asked.compile:
        model.compile_blocks()
    if asked.passkey.enabled:
        probe(asked, subject, other_data, context, dtype if precision == "bf16" else None)
        return
    if asked.tasks:
        run_tasks(asked, subject, context, dtype if precision == "bf16" else None)
        return

    started = time.perf_counter()
    with processes.others(__file__, words, 1 if part else asked.devices) as others:
        result = perplexity(
            model,
            documents_of(subject, asked, other_data, number),
            context,
            asked.stride,
            batch_size=asked.batch_size or max(1, TOKENS_PER_BATCH[device.type] // context),
            dtype=dtype if precision == "bf16" else None,
            progress=not part,
            contexts=doubling(context) if asked.contexts is None else asked.contexts,
        )
        if part:
            part.write_text(json.dumps(to_plain(result)))
            return
        if asked.devices > 1:
            result = merged([to_plain(result), *others.parts()])
    result.require_scores()
    about: dict[str, Any] = {
        "asked": decisive(asked),
        "checkpoint": str(subject.file),
        "scored": asdict(asked.data) if other_data else f"{asked.split} split of the run's data",
        "trained_seq_len": subject.seq_len,
        "attention": backend,
        "kernel": kernels_run()[backend],
        "precision": precision,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "devices": asked.devices,
        "seconds": round(time.perf_counter() - started, 3),
        "tokens_per_second": result.speed.tokens_per_second,
        "memory_peak_gib": torch.cuda.max_memory_allocated() / 2**30
        if device.type == "cuda"
        else None,
    }
    what = asked.data.source if other_data else asked.split
    name = subject.file.stem if run else subject.file.name
    path = report.place(
        results / f"{what}-{name}-{context}-{result.stride}-{backend}.json", about["asked"]
    )
    found = report.content(result, about, subject.tokenizer.decode)
    report.show(result, subject.tokenizer.decode)
    print(report.speed(found))
    report.write(found, path)
    plots.draw(found, path.with_suffix(".png"))
    to_wandb(asked, subject, found, path.with_suffix(".png"))
    print(path)


def decisive(asked: EvalConfig) -> dict[str, Any]:
    """The keys that decide what is measured, without those that say where it runs and how fast."""
    place = ("checkpoint", "device", "devices", "batch_size", "compile", "wandb")
    return {key: value for key, value in asdict(asked).items() if key not in place}


def to_wandb(
    asked: EvalConfig, subject: Subject, found: dict[str, Any], picture: Path | None
) -> None:
    """Send the result, if asked, to the project and group that the run is in; a failure is said and
    ends nothing.
    """
    if asked.wandb == "disabled":
        return
    from longctx.config.train_config import WandbConfig
    from longctx.runs.tracking import log_evaluation

    known = {
        key: value
        for key, value in (subject.run or {}).get("wandb", {}).items()
        if key in vars(WandbConfig())
    }
    try:
        log_evaluation(
            replace(WandbConfig(**known), mode=asked.wandb), subject.folder, found, picture
        )
    except Exception as error:  # wandb's own errors, the network's, the disk's
        print(f"wandb is off: {' '.join(str(error).split())}", file=sys.stderr)


def probe(
    asked: EvalConfig, subject: Subject, other_data: bool, context: int, dtype: "torch.dtype | None"
) -> None:
    """Hide facts in documents, ask for them, print the tables, write JSON and picture."""
    from longctx.attention import kernels_run
    from longctx.evaluation import documents, heatmap, report
    from longctx.evaluation.passkey import DEPTHS, filler_of, recall

    usual = [length for length in doubling(context) if length >= SHORTEST] or [context]
    lengths, tokenizer = asked.passkey.lengths or usual, subject.tokenizer
    own = subject.run is not None and not other_data
    share = documents.Share(most=asked.documents)
    found = (
        documents_of(subject, asked, other_data, 0)
        if own
        else documents.of_source(asked.data, tokenizer, share)
    )
    started = time.perf_counter()
    cells = recall(
        subject.model,
        tokenizer,
        filler_of(found, tokenizer, 4 * max(lengths)),
        lengths,
        asked.passkey.depths or DEPTHS,
        asked.passkey.samples,
        asked.passkey.kinds,
        dtype,
    )
    about: dict[str, Any] = {
        "asked": decisive(asked),
        "checkpoint": str(subject.file),
        "filler": f"{asked.split} split of the run's data" if own else asdict(asked.data),
        "trained_seq_len": subject.seq_len,
        "attention": asked.attention.backend,
        "kernel": kernels_run()[asked.attention.backend],
        "seconds": round(time.perf_counter() - started, 3),
    }
    name = subject.file.stem if subject.run else subject.file.name
    path = subject.folder / "eval" / f"passkey-{name}-{max(lengths)}-{asked.attention.backend}.json"
    path = report.place(path, about["asked"])
    content = heatmap.content(cells, about)
    heatmap.show(cells)
    report.write(content, path)
    heatmap.draw(content, path.with_suffix(".png"))
    to_wandb(asked, subject, content, path.with_suffix(".png"))
    print(path)


def run_tasks(
    asked: EvalConfig, subject: Subject, context: int, dtype: "torch.dtype | None"
) -> None:
    """Run tasks of lm-evaluation-harness, print the table, write the JSON."""
    from longctx.attention import kernels_run
    from longctx.evaluation import report
    from longctx.evaluation.harness import Harness, evaluate_tasks, scores

    stride = max(1, context // 2) if asked.stride is None else asked.stride
    if stride > context:
        raise ValueError(f"stride={stride}: from 1 to seq_len={context}")
    rows = asked.batch_size or max(
        1, TOKENS_PER_BATCH[next(subject.model.parameters()).device.type] // context
    )
    lm = Harness(subject.model, subject.tokenizer, context, stride, rows, dtype)
    folder = None if asked.tasks_path is None else Path(asked.tasks_path)
    started = time.perf_counter()
    found = evaluate_tasks(lm, asked.tasks, subject.folder, folder, asked.documents, asked.fewshot)
    about: dict[str, Any] = {
        "asked": decisive(asked),
        "checkpoint": str(subject.file),
        "trained_seq_len": subject.seq_len,
        "context": context,
        "stride": stride,
        "attention": asked.attention.backend,
        "kernel": kernels_run()[asked.attention.backend],
        "documents": asked.documents,
        "seconds": round(time.perf_counter() - started, 3),
    }
    name = subject.file.stem if subject.run else subject.file.name
    path = subject.folder / "eval" / f"tasks-{'-'.join(asked.tasks)[:80]}-{name}-{context}.json"
    path = report.place(path, about["asked"])
    report.show_tasks(scores(found["results"]))
    report.write(about | found, path)
    to_wandb(asked, subject, about | found, None)
    print(path)


def placed(asked: EvalConfig, number: int) -> "torch.device":
    """The device of process `number`, chosen and its share of the cores taken; ValueError where
    there is none.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked.device == "cuda" and not gpus:
        raise ValueError(
            "device=cuda: torch finds no GPU here; use device=cpu, or device=auto for what there is"
        )
    if asked.device == "cpu" or not gpus:
        torch.set_num_threads(max(1, torch.get_num_threads() // asked.devices))
        return torch.device("cpu")
    if asked.devices > gpus:
        raise ValueError(
            f"devices={asked.devices}: there {'is' if gpus == 1 else 'are'} {gpus} here"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def writable(results: Path, asked: EvalConfig) -> Path:
    """The folder `results`; OSError where nothing can be written into it."""
    if results.exists() and not results.is_dir():
        raise FileExistsError(
            f"checkpoint={asked.checkpoint}: the result goes into the folder {results}, which is a file"
        )
    if not os.access(results if results.exists() else results.parent, os.W_OK):
        raise PermissionError(
            f"checkpoint={asked.checkpoint}: no permission to write the result into {results}"
        )
    return results


def documents_of(
    subject: Subject, asked: EvalConfig, other_data: bool, number: int
) -> "Iterator[Document]":
    """The documents that process `number` scores."""
    from longctx.evaluation import documents
    from longctx.runs import checkpoints

    share = documents.Share(number, asked.devices, asked.documents)
    if subject.run is None or other_data:
        return documents.of_source(asked.data, subject.tokenizer, share)
    fingerprint = checkpoints.read(subject.file)["longctx"]["data"]
    return documents.of_run(subject.folder, subject.run, asked.split, fingerprint, share)


def opened(asked: EvalConfig, device: "torch.device", other_data: bool) -> Subject:
    """The run, checkpoint or Hugging Face folder that `asked.checkpoint` names; ValueError where it
    is none of them.
    """
    from longctx.data import Tokenizer
    from longctx.evaluation.subject import load_model
    from longctx.model import huggingface
    from longctx.runs import run_folder

    if not asked.checkpoint:
        raise ValueError("checkpoint= names nothing; give a run, such as checkpoint=runs/NAME")
    given = Path(asked.checkpoint)
    if huggingface.is_folder(given):
        if not other_data and not asked.passkey.enabled and not asked.tasks:
            raise ValueError(
                f"checkpoint={given}: a Hugging Face folder has no documents of its own; add data=text data.path=..."
            )
        import torch

        tokenizer = Tokenizer.load(given)
        model = huggingface.pretrained(given, asked.attention, device, torch.float32).eval()
        return Subject(model, tokenizer, given, given.resolve(), model.config.context or 1, None)
    model, tokenizer, run = load_model(given, device, asked.attention)
    file = run_folder.checkpoints(given)[-1] if given.is_dir() else given.resolve()
    return Subject(
        model, tokenizer, given if given.is_dir() else file.parent.parent, file, run["seq_len"], run
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
