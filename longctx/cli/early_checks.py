"""Check a request against this machine, before torch is imported, which takes 5 to 30 s."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from longctx import hub_snapshot, plugins
from longctx.config.doors import TRACKERS
from longctx.config.eval_config import EvalConfig
from longctx.config.fields import shown
from longctx.config.presets import Request
from longctx.config.train_config import TrainConfig, WandbConfig, check_warmup
from longctx.data.sources.registry import check_files
from longctx.model.families import has_family, read_model
from longctx.parallel.launch import launched, number_here
from longctx.runs import run_folder
from longctx.spec import hardware
from longctx.spec.model_config import GPTConfig


def check_training(config: TrainConfig) -> None:
    """Raise ValueError or OSError for a path that is missing, or exists already.

    A model of the Hub in `config.init` gets its commit.
    """
    check_device(config)
    check_semaphores(config.workers)
    check_trackers(config)
    config.runs = str(Path(config.runs).expanduser())
    if config.resume is None:
        check_strategy(config)
        check_warmup(config.warmup_steps, config.max_steps)
        if config.context.degree == 1 and config.context.method != "auto":
            raise ValueError(
                f"context.method={config.context.method}: does nothing with context=1; give "
                "context=N, or leave it out"
            )
        if config.lora.rank is not None and config.init is None:
            raise ValueError(
                f"lora.rank={config.lora.rank}: adds to trained weights, and init= names none; "
                "leave lora out"
            )
        # Other ranks may find the folder that rank 0 has made
        if number_here() == 0:
            run_folder.check_root(Path(config.runs))
            # A dry run makes no folder
            run_folder.check_free(Path(config.runs), None if config.dry_run else config.name)
            config.init = config.init and hub_snapshot.pinned(config.init, "init")
        if config.init is not None and hub_snapshot.model_name(config.init) is None:
            path = Path(config.init).expanduser()
            if not run_folder.is_hugging_face(path):
                run_folder.checkpoint_of(path, "init")
            # Else transformers reads the settings
            elif is_ours(path, config.transformers):
                read_model(path)
    data = replace(config.data, preferences=config.objective.traits.data)
    # A resumed run has its tokenizer in its own folder
    if config.resume is not None and config.init is not None:
        data = replace(data, tokenizer=None)
    check_files(data)


def check_strategy(config: TrainConfig | EvalConfig) -> None:
    """Raise ValueError if one device has nothing to share."""
    if config.strategy.name != "auto" and launched(config).ranks == 1:
        raise ValueError(
            f"strategy={config.strategy.name}: several devices share the model, and there is one; "
            "give devices=N, or leave strategy out"
        )


def check_trackers(config: TrainConfig) -> None:
    """Raise ValueError if a tracker is not installed. Warn of keys of `wandb` that none reads."""
    for name in config.tracker:
        TRACKERS[name].check_installed(name)
    read = [TRACKERS[name].reads for name in config.tracker]
    usual = vars(WandbConfig())
    unread = [
        f"wandb.{key}={shown(value)}"
        for key, value in vars(config.wandb).items()
        if value != usual[key] and not any(keys is None or key in keys for keys in read)
    ]
    if unread and number_here() == 0:
        print(f"warning: {', '.join(unread)}: not read by tracker={shown(config.tracker)}")


def check_evaluation(request: Request[EvalConfig]) -> None:
    """Raise ValueError or OSError for a path of an evaluation that is missing."""
    config = request.config
    check_device(config)
    check_strategy(config)
    config.checkpoint = with_commit(config.checkpoint or "", config.plugins)
    if request.names_data:
        check_files(config.data)


def with_commit(checkpoint: str, named: Sequence[str] | None) -> str:
    """Return `checkpoint`, a model of the Hub with its commit.

    ValueError or OSError if it is no run, checkpoint or Hugging Face folder, or a run with plugins
    and none are `named`.
    """
    if checkpoint.startswith("~"):
        checkpoint = str(Path(checkpoint).expanduser())
    # Other ranks take the model of rank 0
    if number_here() == 0:
        checkpoint = hub_snapshot.pinned(checkpoint, "checkpoint")
    path = Path(checkpoint)
    if hub_snapshot.model_name(checkpoint) is None and not run_folder.is_hugging_face(path):
        plugins.check_checkpoint(run_folder.checkpoint_of(path), named)
    return checkpoint


def is_ours(path: Path, by_transformers: str) -> bool:
    """Return True if the model in the folder `path` is not computed by transformers."""
    return by_transformers == "never" or (by_transformers == "auto" and has_family(path))


def with_init(request: Request[TrainConfig]) -> Request[TrainConfig]:
    """Return `request` with the model of its init=, from config.json or config.yaml alone.

    torch is imported only for a model that transformers computes.
    """
    config = request.config
    if config.init is None:
        return request
    for key in request.overrides:
        if key.partition(".")[0] == "model":
            raise ValueError(f"{key}: init={config.init} brings its own model; leave one out")
    path = hub_snapshot.folder(hub_snapshot.pinned(config.init, "init"), "init")
    if not run_folder.is_hugging_face(path):
        # Its plugins may be missing: they are no part of the shape
        run = run_folder.checkpoint_of(path, "init").parent.parent
        run_folder.read_config(run, needed=["model.layers"])
        model = GPTConfig.of_saved(run_folder.read_keys(run / "config.yaml").get("model", {}))
    elif is_ours(path, config.transformers):
        model = read_model(path)[1]
    else:
        from longctx.model import huggingface

        model = huggingface.read_config(path, config.transformers)
    return request._replace(
        config=replace(config, model=model), choices=request.choices | {"model": path.name}
    )


def check_semaphores(workers: int) -> None:
    """Raise ValueError if /dev/shm, which may be small or read-only in a container, has no room
    for the semaphores of `workers` data workers: a page of memory each.
    """
    try:
        # As many as torch's DataLoader makes: 3 a queue, 5 an event
        _ = [multiprocessing.Lock() for _ in range(3 * workers + 8 if workers else 0)]
    except OSError as error:
        raise ValueError(
            f"workers={workers}: /dev/shm has no room for their semaphores ({error.strerror}); "
            "make it larger, as with docker run --shm-size=64m, or set workers=0"
        ) from error


def check_device(config: TrainConfig | EvalConfig) -> None:
    """Raise ValueError for a setting that needs a GPU if there is none.

    Warn if processes share the cores of a CPU.
    """
    if config.device != "cpu" and hardware.may_be_here():
        return
    hardware.Machine(0, None, 0.0).device_for(config.device, config.precision)
    config.attention.check_without_gpu()
    if config.seq_len == "max":
        raise ValueError(hardware.NO_LONGEST)
    here, cores = launched(config).local_ranks, hardware.cores()
    if here > cores and number_here() == 0:
        print(
            f"warning: devices={here}: {here} processes share the {cores} "
            f"core{'s' if cores > 1 else ''} of this machine, which is slower than devices={cores}"
        )
