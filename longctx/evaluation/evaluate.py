"""One evaluation, from the request to its files, on one device or several."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from longctx import files
from longctx.config.eval_config import EvalRequest
from longctx.evaluation.measure import measure
from longctx.evaluation.results import save
from longctx.evaluation.scorer import Scorer
from longctx.evaluation.setup import Setup, layout_of, resolve
from longctx.evaluation.weights import build_model
from longctx.parallel.devices import (
    dtype_of,
    is_out_of_memory,
    this_machine,
    within_memory,
)
from longctx.parallel.launch import Launched
from longctx.parallel.mesh import Parallel, parallel_of


def evaluate(request: EvalRequest, processes: Launched) -> int:
    """Evaluate as `request` says on these `processes`: print the tables, write the files, return
    the exit code.

    Raises ValueError or OSError, one line, for whatever is wrong with the request.
    """
    machine = this_machine()
    parallel = parallel_of(request.config, machine, processes)
    try:
        request = request._replace(config=replace(request.config, devices=parallel.ranks))
        device = parallel.device.type
        setup = resolve(request, device, machine) if parallel.is_first else None
        parallel.launch()
        scorer = build_scorer(request, setup, parallel)
        if setup is None:
            scorer.serve()
        else:
            with within_memory(device):
                result = measure(setup, scorer)
            result.show(result.content)
            print(save(result, setup))
            scorer.end()  # once nothing can fail any more: then the others leave
        parallel.shut_down()
    except KeyboardInterrupt:
        parallel.fail("stopped by a signal", code=128 + signal.SIGINT)
        raise
    except Exception as error:
        problem = why(error, request, parallel)
        if problem is not None and parallel.is_first:
            print(f"error: {problem}", file=sys.stderr, flush=True)
        parallel.fail(problem or str(error), files.exit_code(error))
        if problem is None:
            raise
        return 1
    return 0


def build_scorer(request: EvalRequest, setup: Setup | None, parallel: Parallel) -> Scorer:
    """The model of this process, as the first one has decided in `setup`."""
    decided: dict[str, Any] = {}
    if setup is not None:
        decided = {
            "file": str(setup.subject.file),
            "precision": setup.precision,
            "strategy": setup.strategy,
            "heads": setup.subject.model.heads,
        }
    decided = parallel.broadcast(decided)
    config = request.config
    parallel.init_mesh(layout_of(config, decided["strategy"], decided["heads"]))
    dtype = dtype_of(decided["precision"])
    model = build_model(
        Path(decided["file"]),
        config.attention,
        parallel.device,
        dtype,
        lambda model: parallel.shard(model, cast=False),
    )
    model.share_rows(parallel.context)
    if config.compile:
        model.compile_blocks()
    return Scorer(model, dtype, parallel)


def why(error: Exception, request: EvalRequest, parallel: Parallel) -> str | None:
    """What this process has to say about `error`; None where it is to be raised."""
    memory = "out of GPU memory" if parallel.device.type == "cuda" else "out of memory"
    if is_out_of_memory(error) and request.config.ruler.enabled:
        return (
            f"{memory} on process {parallel.rank}; let devices share the model "
            "(strategy=fsdp), or give shorter ruler.lengths"
        )
    if is_out_of_memory(error):
        return (
            f"{memory} on process {parallel.rank}; let more devices share a row "
            "(context=N) or the model (strategy=fsdp), or give a smaller batch_size or seq_len"
        )
    if parallel.is_lost_connection(error):
        return f"a process of the evaluation does not answer ({str(error).splitlines()[0]})"
    if parallel.is_first:
        return None
    return f"process {parallel.rank}: {' '.join(str(error).split())}"
