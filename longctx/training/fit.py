"""One training run from a checked configuration to its closing table.

Everything that can be wrong is found before the run's folder is made, so a mistake leaves nothing
behind.
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies.launchers import subprocess_script
from lightning.pytorch.strategies import DDPStrategy

from longctx import attention
from longctx.config.rope_config import RopeConfig
from longctx.config.train_config import CompleteConfig, TrainConfig, complete
from longctx.data import Data, DataConfig, Mixture, load
from longctx.kernels.selftest import SelfTestFailed
from longctx.model.restore import mapped_model
from longctx.planner import fitting, hardware
from longctx.planner.hardware import GIB
from longctx.planner.peak_memory import predict
from longctx.runs import checkpoints, run_folder
from longctx.runs.tracking import Tracker
from longctx.training import kernel_lock
from longctx.training.batches import train_loader
from longctx.training.collector import QuietCollector
from longctx.training.console import Display, closing_table
from longctx.training.initial import choices_of_folder, keep_for_export, model_of_folder
from longctx.training.module import TrainingModule
from longctx.training.recorder import Recorder
from longctx.training.schedule import Schedule
from longctx.training.sweep import RESULT_VARIABLE
from longctx.training.validation import check_facts, check_validation

SOME_ROW = 4096  # tokens of a row while those of seq_len=max are not known
RUN_VARIABLE = "LONGCTX_RUN"  # the folder, for the other ranks of a run


def train(request: TrainConfig, choices: dict[str, str], changed: dict[str, str]) -> int:
    """Train as `request` says, in a new folder or, where it has `resume`, in that one; returns the
    exit code.

    `choices` and `changed` (see `longctx.config.Composed`) give the folder its name. Raises
    ValueError or OSError, one line, for whatever is wrong with the request.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ValueError(
            f"torchrun is not needed: python train.py devices={request.devices} starts the processes itself"
        )
    quiet_lightning()
    device = pick_device(request)
    if request.lora.rank is not None and request.init is None:
        raise ValueError(
            f"lora.rank={request.lora.rank}: adds to trained weights, and init= names none; leave lora out"
        )
    asked, asked_choices = request, choices
    if request.seq_len == "max":
        request = replace(
            request, seq_len=SOME_ROW, rope=RopeConfig()
        )  # stretched once the length is known
    preset = choices.get("model", "") + (
        " (model=auto)" if changed.get("model", "auto") == "auto" else ""
    )
    if request.init is not None and request.resume is None:
        preset, request = model_of_folder(request, changed)
        choices = choices_of_folder(request, choices)
    if request.resume is None:
        run_folder.check_root(Path(request.runs))
        if rank() == 0:
            run_folder.check_free(Path(request.runs), request.name)
    config = complete(request, device)
    check_attention(config, device)
    if asked.seq_len == "max":
        found = replace(
            asked, seq_len=longest_rows(request, config, device), batch_size=asked.batch_size or 1
        )
        return train(found, asked_choices, changed)
    data = load(data_of(config), config.seq_len)
    config = decide_memory(fit_vocabulary(config, data), request, device)
    check_facts(data, config)
    check_validation(data, config, changed)
    if config.resume is not None:
        folder = Path(config.resume)
        with run_folder.locked(folder) if rank() == 0 else nullcontext():
            return run(config, folder, continue_from(config, data, device), data, device, preset="")
    kernels = kernel_lock.of_run(config, device) if rank() == 0 else None
    folder = claim_folder(config, run_folder.stem(choices, config.seq_len, changed), data)
    config = replace(config, name=folder.name, data=config.data.absolute())
    with run_folder.locked(folder) if rank() == 0 else nullcontext():
        fill_folder(config, folder, data, kernels)
        return run(config, folder, None, data, device, preset)


def check_attention(config: CompleteConfig, device: str) -> None:
    """Raise ValueError, saying what to use instead, where the backend cannot run as asked."""
    attention.check(
        config.attention.backend,
        device=device,
        dtype=torch.bfloat16 if config.precision == "bf16" else torch.float32,
        head_dim=config.model.head_size,
        options=config.attention.options,
        deterministic=config.deterministic,
    )


def longest_rows(request: TrainConfig, config: CompleteConfig, device: str) -> int:
    """Tokens per row for seq_len=max; ValueError on a CPU, whose memory others use too."""
    if device != "cuda":
        raise ValueError(
            "seq_len=max: finds what fits a GPU, and this run is on a CPU; give a number of tokens"
        )
    from longctx.training import longest  # a child of it imports this file

    known = fit_vocabulary(config, load(data_of(config), config.seq_len)).model
    say = Display(1, 0, silent=rank() > 0).say
    return longest.find(replace(request, model=known), gpu(), say)


def decide_memory(config: CompleteConfig, request: TrainConfig, device: str) -> CompleteConfig:
    """`config` with what it takes of the GPU decided by prediction: the policy, where `request`
    says memory=auto, and the rows of a micro-batch, where it has neither batch_size nor accumulate.
    """
    merge = request.batch_size is None and request.accumulate is None
    if device != "cuda" or not (merge or request.memory.policy == "auto"):
        return config
    return fitting.decide(
        replace(config, memory=request.memory), gpu(), hardware.host_memory(), merge
    )


def gpu() -> hardware.Chip:
    """The GPU that this process trains on."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return hardware.chip(properties.name, float(properties.total_memory))


def pick_device(config: TrainConfig) -> str:
    """ "cuda" or "cpu"; ValueError where a GPU is asked for and there is none, or not so many."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and not gpus:
        raise ValueError(
            "device=cuda: torch finds no GPU here; use device=cpu, or device=auto for what there is"
        )
    device = "cpu" if config.device == "cpu" or not gpus else "cuda"
    if device == "cuda" and config.devices > gpus:
        raise ValueError(
            f"devices={config.devices}: there {'is' if gpus == 1 else 'are'} {gpus} here"
        )
    if (
        device == "cuda"
        and config.precision in ("auto", "bf16")
        and not torch.cuda.is_bf16_supported()
    ):
        raise ValueError(
            f"precision=bf16: {torch.cuda.get_device_name()} has no bf16; use precision=fp32"
        )
    return device


def data_of(config: CompleteConfig) -> DataConfig:
    """Where documents and tokenizer come from; a run that began with `init` has that folder's
    tokenizer in its own.
    """
    if config.init is None or config.resume is None:
        return config.data
    return replace(config.data, tokenizer=config.resume)


def fit_vocabulary(config: CompleteConfig, data: Data | Mixture) -> CompleteConfig:
    """`model.vocab_size` from the tokenizer, a multiple of 64, where it is not set; ValueError if
    too small.
    """
    need, have = data.tokenizer.vocab_size, config.model.vocab_size
    if have is not None and have < need:
        raise ValueError(
            f"model.vocab_size={have}: the tokenizer has {need:,} tokens; use at least that, or null to follow it"
        )
    return replace(config, model=replace(config.model, vocab_size=have or -(-need // 64) * 64))


def claim_folder(config: CompleteConfig, beginning: str, data: Data | Mixture) -> Path:
    """Make the folder of a new run; the first rank does, the others are told."""
    if not len(data.train):
        raise ValueError(
            f"data={config.data.source}: no document is left to train on; data.val_fraction={config.data.val_fraction}"
        )
    return (
        run_folder.create(Path(config.runs), config.name, beginning)
        if rank() == 0
        else Path(os.environ[RUN_VARIABLE])
    )


def fill_folder(
    config: CompleteConfig, folder: Path, data: Data | Mixture, kernels: kernel_lock.Lock | None
) -> None:
    """Write what a run's folder begins with; the folder goes again if that fails."""
    if rank():
        return
    try:
        data.tokenizer.save(folder / "tokenizer.json")
        keep_for_export(config, folder)
        (folder / "checkpoints").mkdir()
        kernel_lock.write(folder, kernels)
        run_folder.write_config(folder, kernel_lock.lasting(config))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(f"{folder}: cannot be written: {error.strerror or error}") from error
    announce(folder, config.devices)


def continue_from(config: CompleteConfig, data: Data | Mixture, device: str) -> Path:
    """The newest checkpoint of the run `config.resume`, after checking that it and the kernels fit;
    metrics past it are dropped.
    """
    folder = Path(config.resume or "")
    path = run_folder.checkpoints(folder)[-1]
    if rank() == 0:
        checkpoints.verify(path)
    checkpoint = checkpoints.read(path, checkpoints.TO_RESUME)
    said, done = checkpoint["longctx"], checkpoint["steps_done"]
    if said["data"] != data.fingerprint:
        raise ValueError(
            f"resume={folder}: the documents or the tokenizer are no longer those that the run began with"
        )
    if done >= config.max_steps:
        raise ValueError(
            f"resume={folder}: the run has done its {done:,} steps; to go on, give a larger max_steps="
        )
    run_folder.check_unedited(folder, said["config"], config)
    mapped_model(path, checkpoint, config.model, config.attention, config.lora)
    if rank() == 0:
        kernels, note = kernel_lock.held(
            config, kernel_lock.of_run(config, device), said.get("kernel_lock"), done
        )
        if note:
            print(f"kernels    {note}")
        kernel_lock.write(folder, kernels)
        run_folder.write_config(folder, replace(kernel_lock.lasting(config), resume=None))
        run_folder.drop_metrics_after(folder, done)
        announce(folder, config.devices)
    return path


def run(
    config: CompleteConfig,
    folder: Path,
    start: Path | None,
    data: Data | Mixture,
    device: str,
    preset: str,
) -> int:
    """Train in `folder`, from the checkpoint `start` or from the beginning."""
    shorter = [load(data_of(config), seq_len) for seq_len, _ in config.seq_len_schedule or []]
    done = 0 if start is None else int(checkpoints.read(start)["steps_done"])
    facts = run_folder.plain(config) | {
        "backend": config.attention.backend,
        "data_fingerprint": data.fingerprint,
        "parameters": config.model.parameters(),
        "trained_parameters": config.lora.parameters(config.model) or config.model.parameters(),
        "data_summary": data.summary(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "kernel_lock": kernel_lock.read(folder),
        "memory_predicted_gib": predict(config, device).peak / GIB,
    }
    display = Display(config.max_steps, done, silent=rank() > 0)
    tracker = Tracker(folder, config.wandb) if rank() == 0 else None
    for line in opening(config, folder, data, device, preset, done):
        display.say(line)
    if tracker is not None and (how := tracker.how_to_look()):
        display.say(how)

    schedule = Schedule(config, [*shorter, data])
    recorder = Recorder(config, folder, data, tracker, display, facts, schedule.epoch)
    module = TrainingModule(
        config, Path(config.init) if config.init is not None and start is None else None
    )
    loader = train_loader(
        schedule.rows,
        schedule.order(rank(), done),
        config.batch_size,
        config.accumulate,
        config.workers,
        pin=device == "cuda",
        windows=config.model.windows(),
        tokens=config.batch_size * config.seq_len,
    )
    code, problem = 1, None
    try:
        trainer = lightning_trainer(config, device, config.max_steps - done, [recorder])
        with within_memory(device):
            trainer.fit(module, loader, ckpt_path=start, weights_only=True)
        leave_group()
        code = 0 if recorder.stopped_by is None else 128 + recorder.stopped_by
    except SystemExit:  # Lightning's 1 for Ctrl-C at once
        code = 128 + (recorder.stopped_by or signal.SIGINT)
        raise SystemExit(code) from None
    except SelfTestFailed as error:
        problem = str(error)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            problem = out_of_memory(config, device, module.steps_done)
        elif config.devices > 1 and is_lost_connection(error):
            said = str(error).splitlines()[0].partition(". ")[0]
            problem = (
                f"a process of the run is gone ({said}); python train.py resume={folder} goes on"
            )
        else:
            raise
    except FloatingPointError as error:
        problem = str(error)
    finally:
        display.stop()
        if tracker is not None:
            tracker.finish(code)
    if rank() == 0:
        if recorder.stopped_by is not None:
            display.say(
                f"stopped by {signal.Signals(recorder.stopped_by).name} after step {module.steps_done:,}, saved"
            )
        display.say("")
        display.console.print(closing_table(folder, attention.kernels_run(), finished=code == 0))
    if problem:
        print(f"error: {problem}", file=sys.stderr)
    return code


def leave_group() -> None:
    """Part from the other processes together, while all are there: gloo's threads do not outlive an
    interpreter's exit.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def lightning_trainer(
    config: CompleteConfig, device: str, steps: int, callbacks: list[pl.Callback]
) -> pl.Trainer:
    """Lightning, for devices, precision and checkpoints; its own logging, bars and folders stay
    off.
    """
    shared = config.devices > 1 or config.strategy.name == "ddp"
    if config.deterministic:
        # A debugging aid, of which every allocation pays: all kernels here write what they
        # allocate.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return pl.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=config.devices,
        strategy=DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
        if shared
        else "auto",
        precision="bf16-mixed" if config.precision == "bf16" else "32-true",
        max_steps=steps,
        max_epochs=-1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        deterministic=config.deterministic,
        use_distributed_sampler=False,
        plugins=[LightningEnvironment(), checkpoints.WholeFiles()],
        callbacks=[QuietCollector(), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def opening(
    config: CompleteConfig, folder: Path, data: Data | Mixture, device: str, preset: str, done: int
) -> list[str]:
    """The block that a run begins with."""
    where = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    rows = config.rows_per_step
    compiled = ", torch.compile" if config.compile == "true" else ""
    summary = data.summary()
    left_out = (
        f" ({summary['documents_dropped']:,} empty left out)"
        if summary["documents_dropped"]
        else ""
    )
    added = config.lora.parameters(config.model)
    lora = (
        f", which rest; LoRA of rank {config.lora.rank} trains {added:,} beside them"
        if added
        else ""
    )
    return [
        f"run        {folder}" + (f", continued after step {done:,}" if done else ""),
        f"device     {f'{config.devices} × ' if config.devices > 1 else ''}{where}, {config.precision}{compiled}",
        f"model      {preset}{', ' if preset else ''}{config.model.parameters():,} parameters{lora}",
        f"attention  {config.attention.backend}"
        + "".join(f", {key}={value}" for key, value in config.attention.options.items()),
        f"memory     {config.memory}",
        f"data       {config.data.source}, {summary['documents']:,} documents{left_out}, {summary['tokens']:,} tokens, "
        f"{len(data.train):,} rows of {config.seq_len:,}",
        f"step       {rows * config.seq_len:,} tokens = {config.batch_size} rows × {config.accumulate} "
        + ("micro-batch" if config.accumulate == 1 else "micro-batches")
        + (f" × {config.devices} devices" if config.devices > 1 else ""),
        f"length     {config.max_steps:,} steps, {config.max_steps * rows * config.seq_len:,} tokens"
        + "".join(
            f", {steps:,} steps with rows of {seq_len:,}"
            for seq_len, steps in config.seq_len_schedule or []
        )
        + (" first" if config.seq_len_schedule else ""),
    ]


@contextmanager
def within_memory(device: str) -> Iterator[None]:
    """On a CPU, refuse memory that the machine does not have when it is asked for, while that can
    be said; else the kernel grants it, and kills some process once it is used. A tenth is left to
    everything else.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if device == "cpu":
        most = machine_memory() // 10 * 9
        resource.setrlimit(
            resource.RLIMIT_DATA,
            (most if soft == resource.RLIM_INFINITY else min(soft, most), hard),
        )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def machine_memory() -> int:
    """Bytes of memory that this machine has, swap left out."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on the CPU (for which torch has no exception of its own)."""
    return isinstance(
        error, torch.OutOfMemoryError | MemoryError
    ) or "can't allocate memory" in str(error)


def is_lost_connection(error: BaseException) -> bool:
    """Whether another process went away in the middle of a collective (for which gloo has no
    exception of its own).
    """
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)


def out_of_memory(config: CompleteConfig, device: str, steps_done: int) -> str:
    """What ran out, predicted and measured, which term takes most, and the smallest change that
    fits.
    """
    predicted = predict(config, device)
    if device == "cuda":
        room, peak = gpu().usable, float(torch.cuda.max_memory_allocated())
        have = f"{peak / GIB:.1f} GiB used of {gpu().memory / GIB:.1f}"
        what = f"out of GPU memory in step {steps_done + 1} ({have}; {predicted.peak / GIB:.1f} predicted)"
    else:
        room, have = 0.9 * machine_memory(), f"{machine_memory() / GIB:.1f} GiB in all"
        what = (
            f"out of memory in step {steps_done + 1} ({have}; {predicted.peak / GIB:.1f} predicted)"
        )
    # It did not fit, whatever the prediction was: what fits must be predicted to take clearly less.
    advice = fitting.smallest_change(
        config, min(room, 0.9 * predicted.peak), hardware.host_memory()
    )
    return (
        f"{what} at seq_len={config.seq_len}, batch_size={config.batch_size}, memory={config.memory.policy}: "
        f"{predicted.largest} take {predicted.gpu[predicted.largest] / GIB:.1f} GiB of it; try {advice}"
    )


def rank() -> int:
    """This process's number among those of the run."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def announce(folder: Path, devices: int) -> None:
    """Tell the other ranks, and a sweep, which folder the run has."""
    if devices > 1:
        os.environ[RUN_VARIABLE] = str(folder)
    if os.environ.get(RESULT_VARIABLE):
        Path(os.environ[RESULT_VARIABLE]).write_text(str(folder), encoding="utf-8")


class LostProcess(logging.Handler):
    """Says which of a run's processes is gone, which Lightning notes just before it kills the
    others.
    """

    def emit(self, record: logging.LogRecord) -> None:
        what, folder = (
            record.getMessage().partition(". ")[0],
            os.environ.get(RUN_VARIABLE, "runs/NAME"),
        )
        print(
            f"error: {what}, and the run with it; python train.py resume={folder} goes on",
            file=sys.stderr,
            flush=True,
        )


def quiet_lightning() -> None:
    """Silence advice that does not apply here: own loggers, own checkpoints, workers chosen by the
    configuration.
    """
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    launcher = logging.getLogger(subprocess_script.__name__)
    if not any(isinstance(handler, LostProcess) for handler in launcher.handlers):
        launcher.addHandler(LostProcess())
    launcher.setLevel(logging.INFO)
    launcher.propagate = False
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    warnings.filterwarnings(
        "ignore", message=r".*(does not have many workers|LeafSpec|pkg_resources).*"
    )
