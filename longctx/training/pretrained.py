"""Runs that start from trained weights (`init=`): a Hugging Face folder, a model of the Hub, or
another run.

The folder is read once, at the start: config.yaml of the run holds the whole model, and the run's
folder its tokenizer, so that resuming and evaluating need nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from longctx import hub_snapshot, untrusted
from longctx.attention.description import AttentionConfig
from longctx.config.data_config import DataConfig
from longctx.config.fields import refuse
from longctx.config.train_config import TrainConfig
from longctx.data import Data, chat
from longctx.data.tokenizer import check_same_ids
from longctx.model import GPT
from longctx.model.saved_weights import copy_weights
from longctx.parallel import sharding
from longctx.runs import checkpoints, run_folder
from longctx.spec.model_config import GPTConfig, weights_reader
from longctx.untrusted import opened

SOME_LENGTH = 4096  # tokens of seq_len=max, for choices that are made before the length is known
BALANCE = "model.experts.balance"
OPEN_KEYS = ("model.vocab_size", BALANCE)  # the weights leave them open


@dataclass(frozen=True)
class Choice:
    """The model of a run, and its keys as the model decides them."""

    config: TrainConfig
    device: str
    model: GPTConfig
    data: DataConfig  # with the tokenizer that the run reads
    name: str = ""  # for the name of the folder
    source: str = ""  # such as "tiny (model=auto)" or "weights of FOLDER"
    weights: Path | None = None  # the folder of trained weights, with settings for exports
    rope: str = ""  # how their positions are stretched to seq_len
    able: Sequence[str] = ()  # backends that can compute it, if there is a choice

    @property
    def seq_len(self) -> int:
        """Return the tokens per sequence, or SOME_LENGTH for seq_len=max."""
        return SOME_LENGTH if self.config.seq_len == "max" else int(self.config.seq_len)


def model_of(config: TrainConfig, device: str, overrides: Mapping[str, str]) -> Choice:
    """Return the model of init=. Its weights are in the cache then, if it is one of the Hub.

    The weights are checked from the files' headers; positions are not stretched yet. Raises
    ValueError or OSError for a folder that is not covered, and for overrides of its model.
    """
    # The branch of a model may move on while the run trains, its commit does not
    init = hub_snapshot.pinned(config.init or "", "init")
    folder, from_hub = hub_snapshot.folder(init, "init"), hub_snapshot.model_name(init)
    for key, text in overrides.items():
        is_own = key.startswith("model.") and key not in OPEN_KEYS
        if is_own or key == "data.vocab_size" or (key == "model" and text != "auto"):
            problem = f"{key}={text}: init={init} brings its own model and tokenizer"
            remedy = f"leave out one of them. Only {', '.join(OPEN_KEYS)} can be given"
            raise ValueError(f"{problem}; {remedy}")
    # A checkpoint is in the folder `checkpoints` of its run
    named = folder.parent.parent if folder.suffix == ".ckpt" else folder
    name = named.name.lstrip(".-") or "model" if from_hub is None else Path(from_hub.repo).name
    source = f"weights of {config.init if from_hub is None else init}"
    vocab_size = config.model.vocab_size if "model.vocab_size" in overrides else None
    if run_folder.is_run(folder):
        weights_reader().asked_of(config, Path(init))
        file, model, variant = read_run(init, folder, vocab_size)
        if variant not in (None, config.attention.variant):
            source += f", trained with {variant}"
        init, home = str(file), file.resolve().parent.parent
    else:
        model = read_hugging_face(init, folder, vocab_size, config)
        init, home = str(folder) if from_hub is None else init, folder
        settings = untrusted.read_settings(folder / "config.json").items()
        # As attention_dropout and attn_pdrop
        dropouts = [f"{x}={y}" for x, y in settings if y and x.endswith(("dropout", "pdrop"))]
        source += f", without its {', '.join(dropouts)}" if dropouts else ""
    # Weights do not say how their experts were balanced
    if BALANCE in overrides:
        experts = replace(model.experts, balance=config.model.experts.balance)
        model = replace(model, experts=experts)
    given = config.data.tokenizer
    if given is not None and not config.data.replace_tokenizer:
        check_same_ids(given, home)
    data = replace(config.data, tokenizer=given or str(home))
    config = replace(config, init=init, data=data)
    return Choice(config, device, model, data, name, source + model.remark, home)


def read_hugging_face(
    init: str, folder: Path, vocab_size: int | None, config: TrainConfig
) -> GPTConfig:
    """Return the model of a Hugging Face folder, after checking the files."""
    model = weights_reader().read_config(folder, weights_reader().asked_of(config))
    if vocab_size is not None:
        model = model.with_vocabulary(vocab_size)
    whole = weights_reader().with_weights(init, "init")
    weights_reader().format_of(model).check_weights(model, whole)
    return model


def read_run(init: str, folder: Path, vocab_size: int | None) -> tuple[Path, GPTConfig, str | None]:
    """Return the checkpoint of a run (its newest one, if none is named), the model, and the setting
    by which its attention is no plain softmax. LoRA's additions become part of the weights.
    """
    decided = f"model.vocab_size={vocab_size}: the weights of init={init} decide that; leave it out"
    refuse((vocab_size is not None, decided))
    file = run_folder.checkpoint_of(folder, "init")
    checkpoints.verify(file)
    with opened(file):
        saved = checkpoints.read(file)["longctx"]["config"]
        model = GPTConfig.of_saved(saved["model"])
        variant = AttentionConfig(**saved.get("attention", {})).variant
        return file, replace(model, context=max(saved["seq_len"], model.context or 0)), variant


def copy_into(model: GPT, name: str) -> None:
    """Copy the weights of `name` (a folder, a checkpoint, a model of the Hub with its commit) into
    `model`; this rank may hold a part of it.
    """
    init = weights_reader().with_weights(name, "init")
    if not run_folder.is_run(init):
        weights_reader().load_weights(model, init)
        return
    with opened(init):
        copy_weights(model, init, checkpoints.read(init), sharding.write)


def texts_for_export(data: Data, weights: Path | None) -> dict[str, str]:
    """Return name → text of the files that a run keeps next to its metrics: the tokenizer, and if
    it began with `weights` (their folder) or reads conversations, the chat template, its tokens and
    the generation settings.
    """
    texts = data.tokenizer.texts()
    source = Path(data.config.tokenizer or "").expanduser()
    source = source if source.is_dir() else source.parent
    own = None if data.config.replace_tokenizer else weights
    if own is None and not any(part.config.chat for part in data.parts.values()):
        return texts
    settings = untrusted.read_settings(source / "tokenizer_config.json")
    template = chat.template_in(settings)
    if template is not None:
        texts["chat_template.jinja"] = template
    paths = [source / "chat_template.jinja"]
    if own is not None:
        # A tokenizer in a folder of its own has no stop tokens there
        paths += [own / "generation_config.json", source / "generation_config.json"]
    for path in filter(os.path.lexists, paths):
        texts[path.name] = untrusted.read_text(path, within=path.parent)
    named = {name: token for name, token in chat.tokens_in(settings).items() if token}
    written = named | json.loads(texts["tokenizer_config.json"])
    return texts | {"tokenizer_config.json": json.dumps(written, indent=2) + "\n"}
