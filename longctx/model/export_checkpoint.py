"""`longctx export runs/NAME out/`: the model of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longctx import hub_snapshot
from longctx.config.command_config import ExportOptions
from longctx.config.model_config import GPTConfig
from longctx.model import GPT, huggingface, lora, packed
from longctx.model.export import SHORT_NAMES, check_out, export
from longctx.model.families import family_of, multimodal, read_model
from longctx.model.restore import copy_weights, lora_of, mapped_model
from longctx.runs import run_folder
from longctx.runs.checkpoints import read, verify


def run(options: ExportOptions) -> None:
    """Read the checkpoint of `options`, write the folder, print a line about it."""
    out = Path(options.out)
    check_out(out)
    file = run_folder.checkpoint_of(Path(options.run), "run")
    verify(file)
    checkpoint = read(file)
    config = checkpoint["longctx"]["config"]
    model = mapped_model(file, checkpoint, GPTConfig.of_saved(config["model"]))
    seq_len, added = int(config["seq_len"]), lora_of(checkpoint)
    if options.adapter:
        run_adapter(model, file, checkpoint, added, seq_len, out)
        return
    if added.rank is not None:
        model = merged(model, str(config.get("init")), added.base)
    context = max(seq_len, model.config.context or 0)
    tokenizer_folder = file.resolve().parent.parent
    dtype = SHORT_NAMES[options.dtype] if options.dtype else None
    wrapper = wrapper_of(config)
    export(model, tokenizer_folder, out, context, dtype, int(options.shard_gb * 1e9), wrapper)
    written = dtype or model.embed.weight.dtype
    name = next(name for name, short in SHORT_NAMES.items() if short == written)
    parameters = f"{model.config.parameters():,} parameters of {file}"
    print(f"{out}: {parameters}, {name}, for {context:,} tokens")


def wrapper_of(config: dict[str, Any]) -> Path | None:
    """Return the multimodal folder that a run with this `config`, or one before it, began with.

    If its first weights are gone, a line on stderr names the loss.
    """
    if config.get("init") is None:
        return None
    init = str(config["init"])
    try:
        folder = hub_snapshot.folder(init, "init")
        if run_folder.is_run(folder):
            return wrapper_of(read(run_folder.checkpoint_of(folder, "init"))["longctx"]["config"])
        return huggingface.with_weights(init, "init") if multimodal.wraps(folder) else None
    except (OSError, ValueError):
        family = family_of(GPTConfig.of_saved(config["model"]))
        if family.model_type in multimodal.WRAPPERS.values():
            lost = "what it had beside a text model is not exported"
            print(f"warning: init={init} is gone; {lost}", file=sys.stderr)
        return None


def merged(model: GPT, init: str, base: str | None = None) -> GPT:
    """Add LoRA's products to the weights of `init`, in their own dtype.

    The run rounded its copy of these weights to its precision, or packed it as `base`. If they are
    gone or have changed, that copy is merged, and a line on stderr says so.
    """
    try:
        visit(model, init, check_rounded)
    except (OSError, ValueError) as error:
        copy = f"the run's own copy, in {base or model.embed.weight.dtype}, is merged"
        print(f"warning: init={init}: {error}; {copy}", file=sys.stderr)
        return lora.merge(model.float())
    packed.unpack(model, model.embed.weight.dtype)
    visit(model, init, put_unrounded)
    return lora.merge(model)


def visit(model: GPT, init: str, write: Callable[[Tensor, Tensor, int], None]) -> None:
    """Call `write` with each weight of `model`, the values that `init` has for it, and the row of
    the first of them.
    """
    path = huggingface.with_weights(init, "init")
    if run_folder.is_run(path):
        copy_weights(model, path, read(path), lambda rows, weight: write(weight, rows[:], 0))
    else:
        huggingface.load_weights(model, path, write)


def check_rounded(weight: Tensor, values: Tensor, first: int) -> None:
    """Raise ValueError unless rows of `weight` are `values`, as the run rounded or packed them."""
    rows = weight[first : first + len(values)]
    if packed.is_packed(weight):
        # A GPU may round a value in the middle of two codes otherwise
        equal = float((rows == packed.packed(values, weight.shape[1])).float().mean()) > 0.99
    else:
        equal = torch.equal(rows, values.to(weight.dtype))
    if not equal:
        raise ValueError("its weights are not those that the run began with")


def put_unrounded(weight: Tensor, values: Tensor, first: int) -> None:
    """Put `values` in the place of rows of `weight`, which takes their dtype."""
    weight.data = weight.data.to(values.dtype)
    weight.data[first : first + len(values)] = values


def run_adapter(
    model: Any, file: Path, checkpoint: dict[str, Any], added: Any, seq_len: int, out: Path
) -> None:
    """Write the weights that LoRA trained, as peft reads them.

    If positions are stretched, a config.json to open the base model with is written too.
    """
    if added.rank is None:
        raise ValueError(f"adapter=true: {file} was trained without lora.rank; leave adapter out")
    config = checkpoint["longctx"]["config"]
    base, revision = str(config.get("init")), None
    stretched = config.get("rope", {}).get("type", "keep") != "keep"
    if (from_hub := hub_snapshot.model_name(base)) is not None:
        base, revision = from_hub
    elif Path(base).exists() and not (Path(base) / "config.json").is_file():
        raise ValueError(
            f"adapter=true: init={base} is of a run, and peft opens Hugging Face folders only; "
            "leave adapter out, which writes the merged model"
        )
    elif Path(base).is_dir():
        base = str(Path(base).resolve())
        positions = ("rope_theta", "rope_scaling", "context")
        stretched = any(
            getattr(model.config, key) != getattr(huggingface.read_config(base), key)
            for key in positions
        )
    context = max(seq_len, model.config.context or 0)
    # Its class in transformers names the layers, also if another one would do
    family = read_model(hub_snapshot.folder(str(config.get("init")), "init"))[0]
    opened_with = family.write(model.config, context) if stretched else None
    wrapper = wrapper_of(config)
    if wrapper is not None and opened_with is not None:
        opened_with = multimodal.wrapped(wrapper, opened_with)
    is_wrapped = wrapper is not None
    lora.export_adapter(model, added, base, out, opened_with, revision, is_wrapped, family)
    print(f"{out}: {added.parameters(model.config):,} parameters of {file}, an adapter of {base}")
    if stretched:
        opening = f"open {base} with config=AutoConfig.from_pretrained('{out}')"
        print(f"its positions are stretched, which peft does not do: {opening}")
