"""Everything that an evaluation decides, decided once, before anything is scored."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from longctx.attention import check
from longctx.config.eval_config import TOKENS_PER_BATCH, EvalConfig, EvalRequest
from longctx.evaluation import processes
from longctx.evaluation.scoring import round_matrices
from longctx.evaluation.subject import Subject, open_subject
from longctx.runs import evaluations


@dataclass(frozen=True)
class Setup:
    """One evaluation, ready to run."""

    request: EvalRequest
    subject: Subject
    device: torch.device
    precision: str  # bf16 | fp32
    context: int  # tokens that the model sees at most
    batch_size: int  # windows per forward
    process: int  # number of this process, from 0; each scores its own documents
    part: Path | None  # where process 0 expects the scores of this one; None in process 0

    @property
    def config(self) -> EvalConfig:
        return self.request.config

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast; None: none."""
        return torch.bfloat16 if self.precision == "bf16" else None

    @property
    def results(self) -> Path:
        """The folder for JSON and pictures."""
        return self.subject.folder / evaluations.FOLDER

    @property
    def scores_own_split(self) -> bool:
        """Whether the documents are those of the run; otherwise data= names them."""
        return self.subject.run is not None and not self.request.other_data


def resolve(request: EvalRequest) -> Setup:
    """Open what `request` names and choose where and how it runs.

    Says in one line where the context is longer than the model trained at. Raises ValueError or
    OSError, one line naming the key, for what cannot be done here.
    """
    config = request.config
    process, part = processes.part()
    device = choose_device(config, process)
    precision = config.precision
    if precision == "auto":
        precision = {"cuda": "bf16", "cpu": "fp32"}[device.type]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    subject = open_subject(request, device)
    check(
        config.attention.backend,
        device=device,
        dtype=dtype,
        head_dim=subject.model.config.head_size,
        options=config.attention.options,
    )
    context = config.seq_len or subject.seq_len
    setup = Setup(
        request=request,
        subject=subject,
        device=device,
        precision=precision,
        context=context,
        batch_size=config.batch_size or max(1, TOKENS_PER_BATCH[device.type] // context),
        process=process,
        part=part,
    )
    check_writable(setup.results, config)
    if context > subject.seq_len and part is None:
        origin = "the run trained at" if subject.run else "the model is made for"
        print(
            f"seq_len={context:,} is longer than the {subject.seq_len:,} tokens per sequence "
            f"that {origin}"
        )
    if setup.autocast is not None:
        round_matrices(subject.model, setup.autocast)
    if config.compile:
        subject.model.compile_blocks()
    return setup


def choose_device(config: EvalConfig, process: int) -> torch.device:
    """The device of `process`; ValueError where there is none. Takes its share of a CPU's cores."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and not gpus:
        raise ValueError(
            "device=cuda: torch finds no GPU here; use device=cpu, or device=auto for what there is"
        )
    if config.device == "cpu" or not gpus:
        torch.set_num_threads(max(1, torch.get_num_threads() // config.devices))
        return torch.device("cpu")
    if config.devices > gpus:
        raise ValueError(f"devices={config.devices}: more than the GPUs here; use 1 to {gpus}")
    torch.cuda.set_device(process)
    return torch.device("cuda", process)


def check_writable(folder: Path, config: EvalConfig) -> None:
    """OSError where no file can be written into `folder`, which need not exist yet."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(
            f"checkpoint={config.checkpoint}: the result goes into the folder {folder}, "
            "which is a file; move it away"
        )
    if not os.access(folder if folder.exists() else folder.parent, os.W_OK):
        raise PermissionError(
            f"checkpoint={config.checkpoint}: no permission to write the result into {folder}; "
            "copy the run, or change its permissions"
        )
