"""Runs that start from the weights of a Hugging Face folder (`init=`) instead of random ones.

The folder is read once, at the start: config.yaml of the run holds the whole model, and the run's
folder its tokenizer, so that resuming and evaluating need nothing else.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from longctx import files
from longctx.config.train_config import TrainConfig
from longctx.model import huggingface
from longctx.model.extension import extended

OURS_TO_SAY = ("vocab_size",)  # what the weights leave open


def model_of_folder(request: TrainConfig, changed: dict[str, str]) -> tuple[str, TrainConfig]:
    """What a run says about its model, and `request` with the model and, where none is named, the
    tokenizer of the folder `request.init`, its positions stretched as `request.rope` says.

    The weights are checked from the files' headers. Raises ValueError or OSError for a folder that
    is not covered, and for words in `changed` that say another model.
    """
    folder = Path(request.init or "").expanduser().resolve()
    if changed.get("model", "auto") != "auto":
        raise ValueError(
            f"model={changed['model']}: init={request.init} brings its own model; leave out one of them"
        )
    for key in (key.removeprefix("model.") for key in changed if key.startswith("model.")):
        if key not in OURS_TO_SAY:
            raise ValueError(
                f"model.{key}={changed[f'model.{key}']}: the weights of init={request.init} decide that; "
                f"only {', '.join(f'model.{free}' for free in OURS_TO_SAY)} can be said"
            )
    if "data.vocab_size" in changed:
        raise ValueError(
            f"data.vocab_size={changed['data.vocab_size']}: init={request.init} brings its tokenizer; leave it out"
        )
    if not folder.is_dir():
        raise FileNotFoundError(
            f"init={request.init}: no such folder; give a Hugging Face folder on this machine"
        )
    said = {key: getattr(request.model, key) for key in OURS_TO_SAY if f"model.{key}" in changed}
    said = {key: value for key, value in said.items() if key != "vocab_size" or value is not None}
    assert not isinstance(request.seq_len, str)  # seq_len=max is a number by now
    model, how = extended(
        replace(huggingface.read_config(folder), **said), request.rope, request.seq_len
    )
    huggingface.check_weights(model, folder)
    tokenizer = str(folder) if request.data.tokenizer is None else request.data.tokenizer
    described = f"weights of {request.init}" + (f", rope {how}" if how else "")
    return described, replace(
        request, init=str(folder), model=model, data=replace(request.data, tokenizer=tokenizer)
    )


def keep_for_export(config: TrainConfig, folder: Path) -> None:
    """Copy what belongs to the tokenizer of `config.init`, its chat template and generation
    settings, into a run.
    """
    source = Path(config.init or "")
    if config.init is None or config.data.tokenizer != config.init:
        return
    settings = source / "tokenizer_config.json"
    template = huggingface.read_json(settings).get("chat_template") if settings.is_file() else None
    if isinstance(template, list):  # several, by name
        template = next(
            (
                x.get("template")
                for x in template
                if isinstance(x, dict) and x.get("name") == "default"
            ),
            None,
        )
    if isinstance(template, str):
        files.write_text(folder / "chat_template.jinja", template)
    for name in ("chat_template.jinja", "generation_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def choices_of_folder(request: TrainConfig, choices: dict[str, str]) -> dict[str, str]:
    """`choices`, which name the run's folder, with the name of `request.init` as that of the model."""
    return choices | {"model": Path(request.init or "").name.lstrip(".-") or "model"}
