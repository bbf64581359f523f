"""Write a GPT as a Hugging Face folder: config.json, generation_config.json, weights, tokenizer; or
LoRA's additions as an adapter. `longctx export runs/NAME out/` writes the model of a checkpoint.

It opens in transformers, or peft, and in what reads its formats. It appears when it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from longctx import files, hub_snapshot, plugins, untrusted
from longctx.config.fields import refuse
from longctx.data import Tokenizer
from longctx.hf import model_folder
from longctx.hf.families import read_model, write_config
from longctx.hf.families.config_json import wraps
from longctx.hf.families.folds import Stacked
from longctx.hf.family_folder import joined, shares_of
from longctx.hf.stored import warn_of_not_finite, write_json
from longctx.model import lora
from longctx.model.gpt import GPT
from longctx.model.saved_weights import checked_skeleton, lora_of
from longctx.runs import run_folder
from longctx.runs.checkpoints import not_finite, read, verify
from longctx.spec.model_config import GPTConfig, LoraConfig
from longctx.spec.parts import Piece

NAMES = ("tokenizer", "tokenizer_config", "special_tokens_map")
TOKENIZER_FILES = (*(f"{name}.json" for name in NAMES), "chat_template.jinja")
FUSED = ("gate_proj", "up_proj", "down_proj")  # of an expert, in transformers' tensors of all
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MERGED = "leave adapter out to write the merged model"
SHORT_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def export(
    model: GPT,
    tokenizer_folder: str | Path,
    out: str | Path,
    context: int | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write `model` to the new folder `out`, in files of at most about `shard_bytes`.

    `context` is the longest input, by default that of `model.config`. Without `dtype` each
    weight keeps its own. Tokenizer files come from `tokenizer_folder`. Raises ValueError if
    transformers has no class for the model, OSError if `out` cannot be written; then nothing is
    left behind.
    """
    out, tokenizers = Path(out), Path(tokenizer_folder)
    # Servers refuse longer inputs than the folder names
    context = context or model.config.context
    # Refused models and tokenizers raise here, before gigabytes are written
    generation = _generation(tokenizers)
    write = model_folder.format_of(model.config).writer(
        model, tokenizers, generation, context, dtype, shard_bytes
    )
    with new_folder(out) as folder:
        write(folder)
        write_json(folder / "generation_config.json", generation)
        for path in filter(Path.is_file, map(tokenizers.joinpath, TOKENIZER_FILES)):
            text = untrusted.read_text(path, untrusted.TOKENIZER_SIZE, within=tokenizers)
            (folder / path.name).write_text(text, encoding="utf-8")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Make a folder that is renamed to `out` when the block ends: nobody reads half a model.
    OSError if it cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic(out) as folder:
            folder.mkdir()
            yield folder
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"{out}: cannot be written: {reason}") from error


def check_out(out: Path) -> None:
    """Raise ValueError unless `out` is free: not there, or an empty folder."""
    if out.suffix == ".gguf":
        raise ValueError(f"{out}: an export is a folder; docs/serving.md makes a .gguf of it")
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ValueError(f"{out}: exists already, and is no empty folder; give a new name")


def _generation(tokenizers: Path) -> dict[str, Any]:
    """Return the tokenizer's generation_config.json, else one with its BOS and EOS ids."""
    tokenizer = Tokenizer.load(tokenizers)
    if (tokenizers / "generation_config.json").is_file():
        return untrusted.read_settings(tokenizers / "generation_config.json")
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    return {"_from_model_config": True, **{key: x for key, x in ids.items() if x is not None}}


def run(file: Path, out: Path, precision: str | None, shard_gb: float, adapter: bool) -> None:
    """Read the checkpoint `file`, write the folder `out`, print a line about it."""
    check_out(out)
    verify(file)
    with untrusted.opened(file):
        checkpoint = read(file)
        saved = checkpoint["longctx"]["config"]
        seq_len, described = int(saved["seq_len"]), GPTConfig.of_saved(saved["model"])
        refuse((seq_len < 1, f"seq_len={seq_len}"))
        model, added, config = adapted_model(file, checkpoint, described)
    variant = plugins.attention_of(saved, file).variant
    given = f"{file}: it was trained with {variant}, which config.json cannot describe"
    refuse((variant, f"{given}: others would compute softmax; generate and evaluate it here"))
    if adapter:
        run_adapter(model, file, config, added, seq_len, out)
        return
    dtype = DTYPES[precision] if precision else None
    if added.rank is not None:
        # What was trained and evaluated: the products are added to the run's own copy of init=
        model = lora.merge(model)
        source = model.config.source
        of_init = getattr(torch, str(source.get("dtype", source.get("torch_dtype"))), None)
        dtype = dtype or (of_init if of_init in SHORT_NAMES else model.embed.weight.dtype)
    context = max(seq_len, model.config.context or 0)
    export(model, file.resolve().parent.parent, out, context, dtype, int(shard_gb * 1e9))
    name = SHORT_NAMES[dtype or model.embed.weight.dtype]
    parameters = f"{model.config.parameters():,} parameters of {file}"
    print(f"{out}: {parameters}, {name}, for {context:,} tokens")


def adapted_model(
    path: Path, checkpoint: dict[str, Any], config: GPTConfig
) -> tuple[GPT, LoraConfig, dict[str, Any]]:
    """Return the model of a checkpoint, mapped from disk, its LoRA, and its run's configuration.

    If the run continued one with LoRA, the model has the first run's weights, and the products of
    all are one; the configuration is the first's. Raises ValueError for weights of another model.
    """
    added, settings = lora_of(checkpoint), checkpoint["longctx"]["config"]
    own = checked_skeleton(path, checkpoint, config, added)
    rows = checkpoint["state_dict"].items()
    weights = {name.removeprefix("model."): weight for name, weight in rows}
    before = Path(str(settings.get("init")))
    if added.rank is not None and run_folder.is_run(before) and before.exists():
        before = run_folder.checkpoint_of(before, "init")
        verify(before)
        first = read(before)
        if lora_of(first).rank is not None:
            model, earlier, settings = adapted_model(before, first, config)
            stack(model, weights, added)
            both = [*dict.fromkeys([*earlier.targets, *added.targets])]
            rank = (earlier.rank or 0) + added.rank
            return model, LoraConfig(rank, 1.0, targets=both, base=earlier.base), settings
    own.load_state_dict({name: weight[:] for name, weight in weights.items()}, assign=True)
    return own, added, settings


@torch.no_grad()
def stack(model: GPT, weights: Mapping[str, Any], config: LoraConfig) -> None:
    """Add the products of a later run to those of `model`: further rows of A and columns of B."""
    assert config.rank is not None
    earlier = {name: x for name, x in model.named_modules() if isinstance(x, lora.LoraLinear)}
    rank = next(iter(earlier.values())).lora_b.shape[1]
    added = {name.rpartition(".")[0] for name in weights if name.endswith(lora.ADDED)}
    for name in sorted(earlier.keys() | added):
        layer: Any = model.get_submodule(name)
        layer = layer if name in earlier else lora.LoraLinear(layer, rank, 1.0)
        model.set_submodule(name, layer)
        a = torch.zeros(layer.experts * config.rank, layer.in_features)
        b = torch.zeros(layer.out_features, config.rank)
        if name in added:
            a, b = weights[f"{name}.lora_a"][:], weights[f"{name}.lora_b"][:]
        both = [matrix.unflatten(0, (layer.experts, -1)) for matrix in (layer.lora_a, a)]
        layer.lora_a = nn.Parameter(torch.cat(both, dim=1).flatten(0, 1))
        both = [layer.lora_b * layer.scale, b * config.factor]
        layer.lora_b = nn.Parameter(torch.cat(both, dim=1))
        layer.scale = 1.0


def run_adapter(
    model: Any, file: Path, config: dict[str, Any], added: Any, seq_len: int, out: Path
) -> None:
    """Write the weights that LoRA trained, as peft reads them."""
    # If positions are stretched, a config.json to open the base model with is written too
    if added.rank is None:
        raise ValueError(f"adapter=true: {file} was trained without lora.rank; leave adapter out")
    init = str(config.get("init"))
    folder, opened_with = hub_snapshot.folder(init, "init"), None
    given = f"adapter=true: init={init} is of a run, and peft opens Hugging Face folders only"
    refuse((run_folder.is_run(folder), f"{given}; {MERGED}"))
    base, revision = hub_snapshot.model_name(init) or (str(folder.resolve()), None)
    # Models of transformers keep their positions
    if model.config.has_kernels:
        source, vocabulary = read_model(folder)[1], model.config.vocab_size
        grown = f"adapter=true: init={init} lacks rows of model.vocab_size={vocabulary}"
        refuse((vocabulary != source.vocab_size, f"{grown}; {MERGED}"))
        positions = ("rope_theta", "rope_scaling", "context")
        if any(getattr(model.config, key) != getattr(source, key) for key in positions):
            opened_with = write_config(model.config, max(seq_len, model.config.context or 0))
    export_adapter(model, added, base, out, opened_with, revision, wraps(folder))
    print(f"{out}: {added.parameters(model.config):,} parameters of {file}, an adapter of {base}")
    if opened_with is not None:
        opening = f"open {base} with config=AutoConfig.from_pretrained('{out}')"
        print(f"its positions are stretched, which peft does not do: {opening}")


def _rows_of_b(layers: Mapping[str, Any], piece: Piece) -> Tensor:
    """Return the rows of LoRA's B for `piece`: 0 for a layer without LoRA beside an adapted one."""
    rank = next(iter(layers.values())).lora_b.shape[1]
    layer = layers.get(piece.ours)
    lora_b = torch.zeros(piece.rows.stop, rank) if layer is None else layer.lora_b.detach()
    return lora_b[piece.rows]


def export_adapter(
    model: GPT,
    config: LoraConfig,
    base: str,
    out: Path,
    architecture: dict[str, Any] | None = None,
    revision: str | None = None,
    in_wrapper: bool = False,
) -> None:
    """Write the adapter of `model` to the new folder `out` as peft reads it.

    `base` names the model of the frozen weights, `revision` its commit at the Hub. `architecture`
    is its config.json with stretched positions. `in_wrapper`: it is a multimodal model's text one.
    """
    tensors, paths, parameters = additions(model, in_wrapper)
    warn_of_not_finite(not_finite(tensors))
    # Next to experts, peft takes a layer of one of these names for a part of the experts' tensors
    has_experts = model.config.experts.count or any(x.ndim > 2 for x in model.parameters())
    fused = sorted(path for path in paths if has_experts and path.rpartition(".")[2] in FUSED)
    adapter: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": config.rank,
        "lora_alpha": config.scaling * (config.rank or 1),
        "use_rslora": config.rslora,
        "target_modules": sorted({path.rpartition(".")[2] for path in paths if path not in fused}),
        "target_parameters": [*parameters, *(f"{path}.weight" for path in fused)],
    }
    with new_folder(out) as folder:
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        files.as_umask_allows(folder / "adapter_model.safetensors")
        write_json(folder / "adapter_config.json", adapter)
        if architecture is not None:
            write_json(folder / "config.json", architecture)


def additions(model: GPT, in_wrapper: bool) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Return the tensors of an adapter, the layers that have one, and the parameters of experts;
    ValueError for a layer that peft does not adapt.
    """
    tensors: dict[str, Tensor] = {}
    paths, parameters = list[str](), list[str]()
    modules = model.named_modules()
    layers = {f"{name}.weight": x for name, x in modules if isinstance(x, lora.LoraLinear)}
    pieces = model_folder.format_of(model.config).pieces(model)
    for theirs, shares in shares_of(pieces).items():
        adapted = {piece.ours for piece in shares if piece.ours in layers}
        apart = f"adapter=true: peft cannot adapt parts of {theirs} apart; {MERGED}"
        refuse((len(adapted) > 1, apart))
        for layer in map(layers.__getitem__, adapted):
            name = theirs.removesuffix(".weight")
            # For the sake of kernels that read its weight past the module
            refused = f"adapter=true: peft refuses {name} of this family; {MERGED}"
            refuse((name.endswith("mixer.out_proj"), refused))
            # A wrapper's language model is one level deeper
            if in_wrapper:
                name = name.replace("model.", "model.language_model.", 1)
            if layer.experts == 1:
                lora_b = joined(shares, partial(_rows_of_b, layers))
                paths.append(name)
            elif shares[0].first:
                continue  # the first expert's piece stands for all
            else:
                name, parameter, lora_b = _of_experts(name, shares[0], layers)
                parameters.append(parameter)
            # safetensors refuses tensors that share memory, as copies of A would
            tensors[f"base_model.model.{name}.lora_A.weight"] = layer.lora_a.detach().clone()
            tensors[f"base_model.model.{name}.lora_B.weight"] = lora_b.detach().clone()
    return tensors, paths, parameters


def _of_experts(name: str, piece: Piece, layers: dict[str, Any]) -> tuple[str, str, Tensor]:
    """Return peft's path for A and B of a layer of all experts, the parameter changed by them, and
    B in its shape there.

    transformers 5 has one parameter for all experts, (experts, rows, columns), and peft wraps those
    of a module one in the other, gate and up first. Its A is ours; its B is (rows, rank · experts).
    """
    layer, (part, target, _) = layers[piece.ours], piece.ours.rsplit(".", 2)
    # (experts, rows, rank), however a folder stacks the weights
    of_each = Stacked(layer.experts, False, getattr(piece.fold, "paired", False)).save(layer.lora_b)
    experts = re.sub(r"(layers\.\d+(\.(?!experts)\w+)?).*", r"\1.experts", name)
    is_innermost = target == "gate_up" and f"{part}.down.weight" in layers
    wrapper = f"{experts}.base_layer" if is_innermost else experts
    target = "up" if name.endswith(".up_proj") else target  # without a gate
    return wrapper, f"{experts}.{target}_proj", of_each.permute(1, 2, 0).flatten(1)
