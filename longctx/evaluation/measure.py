"""The kinds of evaluation: perplexity of documents, pass keys, RULER, tasks of
lm-evaluation-harness.

Each takes a `Setup` and returns a `Result` with what only it says; what all of them say is added
once, in `measure`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from longctx.attention import kernels_run
from longctx.config.eval_config import default_lengths
from longctx.evaluation import heatmap, plots, result_tables, ruler, ruler_table
from longctx.evaluation.passkey import DEPTHS, filler_of, recall
from longctx.evaluation.perplexity import perplexity
from longctx.evaluation.results import Result, decisive, perplexity_content
from longctx.evaluation.scorer import Scorer
from longctx.evaluation.setup import Setup
from longctx.evaluation.subject import documents_of
from longctx.runs import evaluations


def measure(setup: Setup, scorer: Scorer) -> Result:
    """Run the evaluation, as the first process of it."""
    kind: Callable[[Setup, Scorer], Result] = measure_perplexity
    if setup.config.passkey.enabled:
        kind = measure_passkeys
    elif setup.config.ruler.enabled:
        kind = measure_ruler
    elif setup.config.tasks:
        from longctx.evaluation.harness import measure_tasks  # lm-eval is an optional extra

        kind = measure_tasks
    began = time.perf_counter()
    result = kind(setup, scorer)
    backend = setup.config.attention.backend
    about = {
        "asked": decisive(setup.config),
        "checkpoint": str(setup.subject.file),
        "trained_seq_len": setup.subject.seq_len,
        "attention": backend,
        "kernel": kernels_run()[backend],
        "seconds": round(time.perf_counter() - began, 3),
    }
    return result._replace(content=about | result.content)


def measure_perplexity(setup: Setup, scorer: Scorer) -> Result:
    """Perplexity of the documents; ValueError where they hold no token to score."""
    config, decode, gpu = setup.config, setup.subject.tokenizer.decode, setup.device == "cuda"
    result = perplexity(
        scorer,
        documents_of(setup.subject, setup.request),
        setup.context,
        config.stride,
        batch_size=setup.batch_size,
        progress=True,
        contexts=default_lengths(setup.context) if config.contexts is None else config.contexts,
    )
    result.require_scores()
    stem = evaluations.perplexity_stem(
        config.split if setup.scores_own_split else config.data.source,
        setup.subject.name,
        setup.context,
        result.stride,
        config.attention.backend,
    )
    content = {
        "scored": scored(setup),
        "precision": setup.precision,
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "devices": config.devices,
        "tokens_per_second": result.speed.tokens_per_second,
        "memory_peak_gib": torch.cuda.max_memory_allocated() / 2**30 if gpu else None,
        **perplexity_content(result, decode),
    }

    def show(content: dict[str, Any]) -> None:
        result_tables.show(result, decode)
        print(result_tables.speed(content))

    return Result(stem, content, show, plots.draw)


def measure_passkeys(setup: Setup, scorer: Scorer) -> Result:
    """Hide facts in documents and ask for them; ValueError where the documents are too short."""
    config, subject = setup.config, setup.subject
    lengths = setup.lengths
    documents = documents_of(subject, setup.request)
    cells = recall(
        scorer,
        subject.tokenizer,
        filler_of(documents, subject.tokenizer, 4 * max(lengths)),
        lengths,
        config.passkey.depths or DEPTHS,
        config.passkey.samples,
        config.passkey.kinds,
        progress=True,
    )
    return Result(
        evaluations.passkey_stem(subject.name, max(lengths), config.attention.backend),
        {"filler": scored(setup), **heatmap.content(cells)},
        lambda content: heatmap.show(cells),
        heatmap.draw,
    )


def measure_ruler(setup: Setup, scorer: Scorer) -> Result:
    """Answer RULER's tasks; ValueError where the documents are too few or a length too short."""
    config, subject, lengths = setup.config, setup.subject, setup.lengths
    if max(lengths) > max(setup.context, subject.seq_len):
        print(
            f"warning: ruler.lengths has {max(lengths):,}, more than the {subject.seq_len:,} "
            "tokens per sequence that the model was trained at"
        )
    text = None
    if config.ruler.made or any(ruler.TASKS[task].essay for task in config.ruler.chosen):
        documents = documents_of(subject, setup.request)
        ids = filler_of(documents, subject.tokenizer, 2 * max(lengths))
        if 4 * len(ids) < max(lengths):
            raise ValueError(
                f"ruler.lengths={lengths}: the documents have {len(ids):,} tokens, too few for "
                f"texts of {max(lengths):,}; give longer ones with data=text data.path=..., or "
                "shorter lengths"
            )
        text = subject.tokenizer.decode(ids)
    elif setup.request.other_data or config.documents is not None:
        raise ValueError("ruler.tasks: none of them is made of text; leave data and documents out")
    texts = ruler.Texts(config.ruler, subject.tokenizer, text or "")
    results = list(
        track(
            ruler.measured(scorer, texts, lengths, subject.end_tokens),
            "RULER",
            total=len(lengths) * len(config.ruler.chosen) * config.ruler.samples,
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
    )
    content = {
        "samples": config.ruler.samples,
        "seed": config.ruler.seed,
        "text": None if text is None else scored(setup),
        "made": config.ruler.made,
        **ruler_table.content(results),
    }
    stem = evaluations.ruler_stem(subject.name, max(lengths), config.attention.backend)
    return Result(stem, content, ruler_table.show, ruler_table.draw)


def scored(setup: Setup) -> str | dict[str, Any]:
    """Which documents are used, as the JSON says it."""
    if setup.scores_own_split:
        return f"{setup.config.split} split of the run's data"
    return asdict(setup.config.data)
