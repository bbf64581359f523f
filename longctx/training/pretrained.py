"""Runs that start from trained weights (`init=`): a Hugging Face folder, a model of the Hub, or
another run.

The folder is read once, at the start: config.yaml of the run holds the whole model, and the run's
folder its tokenizer, so that resuming and evaluating need nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from longctx import files, hub_snapshot, untrusted
from longctx.config.model_config import GPTConfig
from longctx.config.train_config import TrainConfig
from longctx.data import chat
from longctx.data.sources import mix
from longctx.model import GPT, huggingface, restore
from longctx.parallel import sharding
from longctx.runs import checkpoints, run_folder

OPEN_KEYS = ("vocab_size",)  # the weights leave them open
# Copied to the run next to the tokenizer, for exports
KEPT_FILES = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def model_of_folder(
    config: TrainConfig, overrides: Mapping[str, str]
) -> tuple[TrainConfig, GPTConfig]:
    """Return `config` with the tokenizer of its folder init= if none is named, and the model.

    A model of the Hub gets its commit in init=, and its weights are in the cache then.

    The weights are checked from the files' headers; positions are not stretched yet. Raises
    ValueError or OSError for a folder that is not covered, and for overrides of its model.
    """
    init = hub_snapshot.pinned(config.init or "", "init")
    folder = hub_snapshot.folder(init, "init")
    if overrides.get("model", "auto") != "auto":
        raise ValueError(
            f"model={overrides['model']}: init={init} brings its own model; leave out one of them"
        )
    for name in (key.removeprefix("model.") for key in overrides if key.startswith("model.")):
        if name not in OPEN_KEYS:
            raise ValueError(
                f"model.{name}={overrides[f'model.{name}']}: the weights of init={init} decide "
                f"that; only {', '.join(f'model.{key}' for key in OPEN_KEYS)} can be given"
            )
    if "data.vocab_size" in overrides:
        raise ValueError(
            f"data.vocab_size={overrides['data.vocab_size']}: init={init} brings its tokenizer; "
            "leave it out"
        )
    if run_folder.is_run(folder):
        return model_of_run(config, overrides)
    opened = {key: getattr(config.model, key) for key in OPEN_KEYS if f"model.{key}" in overrides}
    opened = {key: value for key, value in opened.items() if value is not None}
    model = replace(huggingface.read_config(folder), **opened)
    huggingface.check_weights(model, huggingface.with_weights(init, "init"))
    for name in KEPT_FILES:
        if os.path.lexists(folder / name):
            untrusted.check_file(folder / name, untrusted.SETTINGS_SIZE, within=folder)
    tokenizer = str(folder) if config.data.tokenizer is None else config.data.tokenizer
    data = replace(config.data, tokenizer=tokenizer)
    is_path = hub_snapshot.model_name(init) is None
    return replace(config, init=str(folder) if is_path else init, data=data), model


def model_of_run(
    config: TrainConfig, overrides: Mapping[str, str]
) -> tuple[TrainConfig, GPTConfig]:
    """Do as `model_of_folder` for a checkpoint, or a run, which stands for its newest one. LoRA's
    additions become part of the weights.
    """
    path = Path(config.init or "").expanduser().resolve()
    file = run_folder.checkpoint_of(path, "init")
    checkpoints.verify(file)
    saved = checkpoints.read(file)["longctx"]["config"]
    if "model.vocab_size" in overrides:
        raise ValueError(
            f"model.vocab_size={overrides['model.vocab_size']}: the weights of init={config.init} "
            "decide that; leave it out"
        )
    model = GPTConfig.of_saved(saved["model"])
    model = replace(model, context=max(saved["seq_len"], model.context or 0))
    tokenizer = config.data.tokenizer or str(file.resolve().parent.parent)
    data = replace(config.data, tokenizer=tokenizer)
    return replace(config, init=str(file), data=data), model


def load(model: GPT, name: str) -> None:
    """Copy the weights of `name` (a folder, a checkpoint, a model of the Hub with its commit) into
    `model`; this rank may hold a part of it.
    """
    init = huggingface.with_weights(name, "init")
    if not run_folder.is_run(init):
        huggingface.load_weights(model, init, sharding.write)
        return
    restore.copy_weights(model, init, checkpoints.read(init), sharding.write_rows_of)


def keep_for_export(config: TrainConfig, folder: Path) -> None:
    """Copy the chat template, its tokens, and the generation settings of init= into the folder of a
    run that began with weights or reads conversations.
    """
    source = Path(config.data.tokenizer or "").expanduser()
    source = source if source.is_dir() else source.parent
    init = hub_snapshot.folder(config.init, "init") if config.init is not None else None
    is_of_init = init is not None and source in (init, init.parent.parent)
    sources = [config.data, *(member.config for member in mix.members(config.data).values())]
    if not is_of_init and not any(data.chat for data in sources):
        return
    settings: dict[str, Any] = {}
    if os.path.lexists(source / "tokenizer_config.json"):
        settings = huggingface.read_json(source / "tokenizer_config.json")
    template = chat.template_in(settings)
    if template is not None:
        files.write_text(folder / "chat_template.jinja", template)
    for name in KEPT_FILES[1:] if is_of_init else KEPT_FILES[1:2]:
        if os.path.lexists(source / name):
            untrusted.copy_file(
                source / name, folder / name, untrusted.SETTINGS_SIZE, within=source
            )
    named = {name: token for name, token in chat.tokens_in(settings).items() if token}
    written = named | huggingface.read_json(folder / "tokenizer_config.json")
    files.write_text(folder / "tokenizer_config.json", json.dumps(written, indent=2) + "\n")
