"""Write a GPT as a Hugging Face folder: config.json, generation_config.json, weights, tokenizer; or
LoRA's additions as an adapter. `longctx export runs/NAME out/` writes the model of a checkpoint.

It opens in transformers, or peft, and in what reads its formats. The folder appears under its name
only when it is complete.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from longctx import files, hub_snapshot, plugins, untrusted
from longctx.model import huggingface, lora, packed
from longctx.model.families import family_of, multimodal, read_model
from longctx.model.families.family import Family
from longctx.model.gpt import GPT
from longctx.model.huggingface import inventory, values_of
from longctx.model.restore import copy_weights, lora_of, mapped_model
from longctx.runs import run_folder
from longctx.runs.checkpoints import not_finite, read, verify
from longctx.spec.model_config import GPTConfig, LoraConfig
from longctx.spec.parts import Piece

SHARD_BYTES = 5_000_000_000
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
SHORT_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(
    model: GPT,
    tokenizer_folder: str | Path,
    out: str | Path,
    context: int | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    wrapper: Path | None = None,
) -> None:
    """Write `model` to the new folder `out`, in files of at most about `shard_bytes`.

    `context` is the longest input, by default that of `model.config`. Without `dtype` each
    weight keeps its own. Tokenizer files come from `tokenizer_folder`. `wrapper` is the multimodal
    folder that the model takes its place in again. Raises ValueError if `out` has something in it
    or transformers has no class for the model, OSError if it cannot be written; then nothing is
    left behind.
    """
    out, tokenizers = Path(out), Path(tokenizer_folder)
    check_out(out)
    context = context or model.config.context
    if context is None:
        raise ValueError(
            f"{out}: the context is not known, which becomes max_position_embeddings; give it"
        )
    if not (tokenizers / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{tokenizers}: no tokenizer.json to go with the model")

    # Refused models and tokenizers raise here, before gigabytes are written
    generation = _generation(tokenizers)
    # Each kind of model has a writer of config.json and weights
    write: Callable[[Path], None]
    if model.config.transformers:
        from longctx.model import transformers_folder

        write = partial(transformers_folder.write_model, model, context, dtype, shard_bytes)
    else:
        write = _writer(model, tokenizers, generation, context, dtype, shard_bytes, wrapper)
    # A reader never sees half a model: the folder is renamed to `out` when it is whole
    try:
        with files.atomic(out) as folder:
            folder.mkdir(parents=True)
            write(folder)
            write_json(folder / "generation_config.json", generation)
            for name in TOKENIZER_FILES:
                if (tokenizers / name).is_file():
                    limit = untrusted.TOKENIZER_SIZE
                    untrusted.copy_file(tokenizers / name, folder / name, limit, within=tokenizers)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{out}: cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from error


def _writer(
    model: GPT,
    tokenizers: Path,
    generation: dict[str, Any],
    context: int,
    dtype: torch.dtype | None,
    shard_bytes: int,
    wrapper: Path | None,
) -> Callable[[Path], None]:
    """Return a function that writes config.json and weights into a folder; refuses now."""
    family = family_of(model.config) if wrapper is None else read_model(wrapper)[0]
    keys = family.write(model.config, context)
    family.check_tokenizer(tokenizers / "tokenizer.json")
    # These ids are in generation_config.json too, so readers of either agree
    keys |= {f"{key}_token_id": generation.get(f"{key}_token_id") for key in ("bos", "eos", "pad")}
    keys |= {"dtype": str(dtype or model.embed.weight.dtype).removeprefix("torch.")}
    keys = keys if wrapper is None else multimodal.wrapped(wrapper, keys)
    tensors = list(_of_model(model, family, dtype))
    if wrapper is not None:
        tensors = list(_in_wrapper(tensors, wrapper))

    def write(folder: Path) -> None:
        write_json(folder / "config.json", keys)
        for name in multimodal.PROCESSOR_FILES:
            if wrapper is not None and (wrapper / name).is_file():
                limit = untrusted.SETTINGS_SIZE
                untrusted.copy_file(wrapper / name, folder / name, limit, within=wrapper)
        _write_weights(tensors, shard_bytes, folder)

    return write


def check_out(out: Path) -> None:
    """Raise ValueError unless `out` is free: not there, or an empty folder."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ValueError(
            f"{out}: exists already and is not an empty folder; give the name of a new one"
        )


def architecture(config: GPTConfig, context: int) -> dict[str, Any]:
    """Return config.json of `config` for `context` tokens.

    Raises ValueError with the key that no class of transformers has next to the others.
    """
    return family_of(config).write(config, context)


class _Tensor(NamedTuple):
    """A tensor to write: about how many bytes it has, and what reads it when its turn comes."""

    name: str
    size: int
    read: Callable[[], Tensor]


def _of_model(model: GPT, family: Family, dtype: torch.dtype | None) -> Iterator[_Tensor]:
    """Yield the tensors of `model` as `family` names and stores them."""
    parameters = dict(model.named_parameters())
    common = dtype or model.embed.weight.dtype
    parts: dict[str, list[tuple[Tensor, Piece]]] = {}
    for piece in family.tensors(model.config):
        parts.setdefault(piece.theirs, []).append((parameters[piece.ours], piece))
    for name, pieces in parts.items():
        piece = pieces[0][1]
        size = common.itemsize * torch.Size(piece.shape).numel()
        own = common if piece.fold.widens else dtype
        own = own if piece.fold.narrows else torch.float32
        yield _Tensor(name, size, partial(_whole, pieces, own))


def _in_wrapper(tensors: Iterable[_Tensor], wrapper: Path) -> Iterator[_Tensor]:
    """Yield `tensors` by their names in the multimodal folder `wrapper`, then all others there."""
    stored = inventory(wrapper)
    names = {multimodal.text_name(name): name for name in stored}
    for tensor in tensors:
        yield tensor._replace(name=names[tensor.name])
    for name, entry in stored.items():
        if multimodal.text_name(name) is None:
            # An upper limit: sizes decide only where shards begin
            size = 4 * torch.Size(entry.shape).numel()
            yield _Tensor(name, size, partial(values_of, entry))


def _write_weights(all_tensors: Sequence[_Tensor], shard_bytes: int, folder: Path) -> None:
    by_name = {tensor.name: tensor for tensor in all_tensors}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    size, flawed = 0, None
    for file, names in split.filename_to_tensors.items():
        # A shard at a time: the weights need not fit in memory twice
        tensors = {name: by_name[name].read() for name in names}
        flawed = flawed or not_finite(tensors)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files.as_umask_allows(folder / file)
        size += sum(x.nbytes for x in tensors.values())
    warn_of_not_finite(flawed)
    if split.is_sharded:
        index = {"metadata": {"total_size": size}, "weight_map": split.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)


def warn_of_not_finite(name: str | None) -> None:
    """Print a warning that the tensor `name`, if any, is written with NaN or infinity in it."""
    if name is not None:
        print(
            f"warning: {name} has numbers that are not finite: the weights are damaged, or, with "
            "dtype=fp16, larger than the 65,504 that it can hold",
            file=sys.stderr,
        )


def _whole(pieces: Sequence[tuple[Tensor, Piece]], dtype: torch.dtype | None) -> Tensor:
    """Return a tensor of a folder; its pieces add up."""
    first, *others = (piece.fold.save(x.detach()[piece.rows]) for x, piece in pieces)
    whole = sum(others, first)
    return whole if dtype is None else whole.to(dtype)


def _generation(tokenizers: Path) -> dict[str, Any]:
    """Return the tokenizer's generation_config.json, else one with its BOS and EOS ids."""
    if (tokenizers / "generation_config.json").is_file():
        return untrusted.read_settings(tokenizers / "generation_config.json")
    described = untrusted.read_settings(tokenizers / "tokenizer.json", untrusted.TOKENIZER_SIZE)
    vocabulary = described.get("model", {}).get("vocab", {})
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    ids |= {token["content"]: token["id"] for token in described.get("added_tokens", [])}
    settings = untrusted.read_settings(tokenizers / "tokenizer_config.json")
    special: dict[str, Any] = {}
    for kind, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if kind in ("bos_token", "eos_token") and isinstance(text, str) and text in ids:
            special[f"{kind}_id"] = ids[text]
    return {"_from_model_config": True, **special}


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write `content` as the JSON files of a Hugging Face folder are written."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def run(file: Path, out: Path, precision: str | None, shard_gb: float, adapter: bool) -> None:
    """Read the checkpoint `file`, write the folder `out`, print a line about it."""
    check_out(out)
    verify(file)
    with untrusted.opened(file):
        checkpoint = read(file)
        config = checkpoint["longctx"]["config"]
        model = mapped_model(file, checkpoint, GPTConfig.of_saved(config["model"]))
        seq_len, added = int(config["seq_len"]), lora_of(checkpoint)
    attention = plugins.attention_of(config, file)
    if not attention.description.exact:
        raise ValueError(
            f"{file}: it was trained with attention={attention.backend}, which config.json "
            "cannot describe: others would compute plain softmax; generate and evaluate it here"
        )
    if adapter:
        run_adapter(model, file, checkpoint, added, seq_len, out)
        return
    if added.rank is not None:
        model = merged(model, str(config.get("init")), added.base)
    context = max(seq_len, model.config.context or 0)
    tokenizer_folder = file.resolve().parent.parent
    dtype = SHORT_NAMES[precision] if precision else None
    wrapper = wrapper_of(config)
    export(model, tokenizer_folder, out, context, dtype, int(shard_gb * 1e9), wrapper)
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
        equal = float((rows == packed.packed(values)).float().mean()) > 0.99
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
    init = str(config.get("init"))
    base, revision = init, None
    if (from_hub := hub_snapshot.model_name(init)) is not None:
        base, revision = from_hub
    elif Path(init).exists() and not (Path(init) / "config.json").is_file():
        raise ValueError(
            f"adapter=true: init={init} is of a run, and peft opens Hugging Face folders only; "
            "leave adapter out, which writes the merged model"
        )
    elif Path(init).is_dir():
        base = str(Path(init).resolve())
    wrapper = wrapper_of(config)
    family: Family | None = None
    opened_with: dict[str, Any] | None = None
    # Models of transformers keep their own names and positions
    if not model.config.transformers:
        # Its class in transformers names the layers, also if another one would do
        family, source = read_model(hub_snapshot.folder(init, "init"))
        positions = ("rope_theta", "rope_scaling", "context")
        if any(getattr(model.config, key) != getattr(source, key) for key in positions):
            opened_with = family.write(model.config, max(seq_len, model.config.context or 0))
            if wrapper is not None:
                opened_with = multimodal.wrapped(wrapper, opened_with)
    is_wrapped = wrapper is not None
    export_adapter(model, added, base, out, opened_with, revision, is_wrapped, family)
    print(f"{out}: {added.parameters(model.config):,} parameters of {file}, an adapter of {base}")
    if opened_with is not None:
        opening = f"open {base} with config=AutoConfig.from_pretrained('{out}')"
        print(f"its positions are stretched, which peft does not do: {opening}")


def export_adapter(
    model: GPT,
    config: LoraConfig,
    base: str,
    out: Path,
    architecture: dict[str, Any] | None = None,
    revision: str | None = None,
    in_wrapper: bool = False,
    family: Family | None = None,
) -> None:
    """Write the adapter of `model` to the new folder `out` as peft reads it.

    `base` names the model of the frozen weights, `revision` its commit at the Hub. `architecture`
    is the config.json to open it with, if its own will not do, such as for stretched positions.
    `in_wrapper`: the model is the text model of a multimodal one. `family` is that of `base`.
    """
    # Our q, k and v are one layer, theirs are three: each gets a copy of A and its rows of B
    tensors: dict[str, Tensor] = {}
    modules = model.named_modules()
    layers = {name: module for name, module in modules if isinstance(module, lora.LoraLinear)}
    for piece in tensors_of(model, family):
        layer = layers.get(piece.ours.removesuffix(".weight"))
        if layer is not None and piece.ours.endswith(".weight"):
            name = piece.theirs.removesuffix(".weight")
            # A wrapper's language model lies one level deeper
            if in_wrapper:
                name = name.replace("model.", "model.language_model.", 1)
            path = f"base_model.model.{name}"
            # safetensors refuses tensors that share memory, as copies of A would
            tensors[f"{path}.lora_A.weight"] = layer.lora_a.detach().clone()
            lora_b = piece.fold.save(layer.lora_b.detach()[piece.rows])
            tensors[f"{path}.lora_B.weight"] = lora_b.clone()

    warn_of_not_finite(not_finite(tensors))
    adapter: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
    }
    # The folder is renamed to `out` when it is whole
    with files.atomic(out) as folder:
        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        files.as_umask_allows(folder / "adapter_model.safetensors")
        write_json(folder / "adapter_config.json", adapter)
        if architecture is not None:
            write_json(folder / "config.json", architecture)


def tensors_of(model: GPT, family: Family | None) -> Iterator[Piece]:
    """Yield every tensor of a folder of `family`, as rows of a parameter of `model`."""
    if not model.config.transformers:
        yield from (family or family_of(model.config)).tensors(model.config)
        return
    for name, weight in model.named_parameters():
        theirs: Any = model
        yield Piece(theirs.name_of(name), name, 0, tuple(weight.shape))
