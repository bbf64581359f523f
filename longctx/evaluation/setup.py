"""Everything that an evaluation decides, decided once, before anything is scored."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from longctx.attention.description import AttentionConfig
from longctx.config.eval_config import TOKENS_PER_BATCH, EvalConfig, EvalRequest
from longctx.evaluation.forward_memory import (
    check_fits,
    choose_strategy,
    largest_forward,
    room,
    text_lengths,
)
from longctx.evaluation.subject import Subject, open_subject
from longctx.parallel.devices import check_attention, dtype_of
from longctx.planner.hardware import Machine
from longctx.planner.workload import precision_of
from longctx.runs import evaluations


class Layout(NamedTuple):
    """How the devices of an evaluation share the model and the rows; see `Parallel.init_mesh`."""

    strategy: str  # none | ddp | fsdp
    data_ranks: int  # groups of devices that take rows of their own
    context: int  # devices that share each row
    context_method: str  # ulysses | allgather
    attention: AttentionConfig


@dataclass(frozen=True)
class Setup:
    """One evaluation, ready to run."""

    request: EvalRequest
    subject: Subject
    device: str  # cuda | cpu
    precision: str  # bf16 | fp32
    context: int  # tokens that the model sees at most
    batch_size: int  # windows per forward of one device, or of those that share rows
    lengths: list[int]  # tokens of the texts of pass keys or RULER
    strategy: str  # how the devices share the model: none | ddp | fsdp

    @property
    def config(self) -> EvalConfig:
        return self.request.config

    @property
    def results(self) -> Path:
        """The folder for JSON and pictures."""
        return self.subject.home / evaluations.FOLDER

    @property
    def scores_own_split(self) -> bool:
        """Whether the documents are those of the run; otherwise data= names them."""
        return self.subject.run is not None and not self.request.other_data


def resolve(request: EvalRequest, device: str, machine: Machine) -> Setup:
    """Open what `request` names and choose how it runs on `device`, "cuda" or "cpu".

    Says in one line where the context is longer than the model trained at. Raises ValueError or
    OSError, one line naming the key, for what cannot be done here.
    """
    config = request.config
    precision = precision_of(config.precision, device)
    dtype = dtype_of(precision)
    subject = open_subject(request)
    check_attention(config, subject.model, device)
    seq_len = config.seq_len or subject.seq_len
    sharing = config.context.degree
    assert isinstance(sharing, int)
    batch_size = config.batch_size or max(1, TOKENS_PER_BATCH[device] * sharing // seq_len)
    lengths = text_lengths(config, seq_len)
    forward = largest_forward(config, lengths, batch_size, device)
    there = room(config, machine, device)
    strategy = choose_strategy(config, subject.model, dtype, forward, there)
    check_fits(config, subject.model, dtype, forward, strategy, there, device)
    setup = Setup(
        request=request,
        subject=subject,
        device=device,
        precision=precision,
        context=seq_len,
        batch_size=batch_size,
        lengths=lengths,
        strategy=strategy,
    )
    check_writable(setup.results, config)
    if seq_len > subject.seq_len:
        origin = "the run trained at" if subject.run else "the model is made for"
        print(
            f"warning: seq_len={seq_len:,} is {seq_len / subject.seq_len:,.1f} times the "
            f"{subject.seq_len:,} tokens per sequence that {origin}, so positions beyond them are "
            "ones that it has never seen"
        )
    return setup


def layout_of(config: EvalConfig, strategy: str, heads: int) -> Layout:
    """The layout of `config` with a decided `strategy`, for a model of `heads` query heads."""
    context, degree = config.context, config.context.degree
    assert isinstance(degree, int)
    return Layout(
        strategy,
        config.devices // degree,
        degree,
        context.method_for(heads),
        config.attention,
    )


def check_writable(folder: Path, config: EvalConfig) -> None:
    """OSError where no file can be written into `folder`, which need not exist yet."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(
            f"checkpoint={config.checkpoint}: the result goes into the folder {folder}, "
            "which is a file; move it away"
        )
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not os.access(there, os.W_OK):
        raise PermissionError(
            f"checkpoint={config.checkpoint}: no permission to write the result into {folder}; "
            "copy the run, or change its permissions"
        )
