"""A model that transformers computes, with our attention: what GPT has no family for.

Kept: interval masks, windows, sinks, packing and every attention backend; ranks that share
sequences; the loss in chunks; recomputation that saves attention's output; LoRA, checkpoints,
evaluation. Lost: fused norms and SwiGLU, FP8, CUDA graphs, torch.compile, Muon, tiles, offloading.
Times are predicted as those of a GPT of its sizes, memory from measured layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longctx.attention import Mask
from longctx.attention.context_parallel import Context, Shards
from longctx.attention.description import AttentionConfig
from longctx.config.fields import refuse
from longctx.config.layout_config import MemoryConfig
from longctx.hf.families.config_json import TARGETS
from longctx.hf.layer_memory import recompute
from longctx.hf.transformers_config import TransformersConfig
from longctx.model.decoder import Decoder
from longctx.model.gpt import GPT, Draw, settings_of
from longctx.model.packed import is_packed
from longctx.spec.model_config import Multipliers
from longctx.transformers import NAME, Documents, vouch

TARGET_OF = {leaf: target for target, leaves in TARGETS.items() for leaf in leaves.split()}
# Keys of a config.json that choose code: of the folder, of others, or another attention than ours
OF_CODE = {"auto_map", "trust_remote_code", "custom_pipelines", "attn_implementation"}
OF_CODE |= {"experts_implementation", "dtype", "torch_dtype"}
NOT_REPLACED = "its attention cannot be replaced by longctx's"
NOT_TEXT = "it is not a model of text alone"
# Settings of layers with a choice of keys; only newer releases of transformers know them
SPARSE = ("index_topk", "indexer_budget")


def described(settings: Mapping[str, Any]) -> TransformersConfig:
    """Return the model of a config.json with these `settings`."""
    settings = without_code(settings)
    whole = empty_model(settings)
    config, decoder, head = whole.config, whole.get_decoder(), whole.get_output_embeddings()
    refuse_unless_covered(settings, whole)
    # Heads may differ by layer: predictions are for the largest
    heads = value_of(config, "num_attention_heads")
    refuse((not heads, f"model_type={config.model_type}: it has no num_attention_heads"))
    kv_heads = value_of(config, "num_key_value_heads") or heads
    names = ("head_dim", "qk_head_dim", "global_head_dim")
    head_dim = max(value_of(config, name) for name in names) or config.hidden_size // heads
    # Windows, for FLOPs and for ranks that share sequences
    layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    windowed = [n for n, kind in enumerate(kinds) if kind == "sliding_attention"]
    if not windowed or getattr(config, "use_sliding_window", None) is False:
        window = None
    # Granite divides logits by a number, Cohere multiplies
    divisor, factor = (getattr(config, name, None) for name in ("logits_scaling", "logit_scale"))
    # A rank adds so many parameters to each target
    lora = dict.fromkeys(TARGETS, 0)
    for _, linear, target in linears_of(decoder):
        lora[target] += linear.in_features + linear.out_features
    return TransformersConfig(
        vocab_size=config.vocab_size,
        layers=layers,
        channels=config.hidden_size,
        heads=heads,
        kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_dim=head_dim + head_dim % 2,
        ffn=value_of(config, "intermediate_size") or 4 * config.hidden_size,
        window=window,
        window_layers=windowed if window is not None and len(windowed) < layers else None,
        tied=head.weight is whole.get_input_embeddings().weight,
        softcap=getattr(config, "attn_logit_softcapping", None),
        sinks=any(name.endswith(".sinks") for name, _ in decoder.named_parameters()),
        context=getattr(config, "max_position_embeddings", None),
        multipliers=Multipliers(
            logits=1 / divisor if divisor else float(factor or 1.0),
            logit_softcap=getattr(config, "final_logit_softcapping", None),
        ),
        transformers={
            "config": settings,
            "parameters": sum(x.numel() for x in whole.parameters() if x.requires_grad),
            "products": products(whole),
            "lora": lora,
            "positions": learned_positions(whole),
            "matrices": [list(layer.weight.shape) for _, layer, _ in linears_of(decoder)],
        },
    )


def without_code(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` without keys that choose code: it never runs."""
    return {x: y for x, y in settings.items() if x not in OF_CODE and not x.startswith("_")}


def learned_positions(whole: Any) -> int | None:
    """Return the number of positions that are rows of a table, as in GPT-2; None: any number."""
    words, limit = whole.get_input_embeddings(), value_of(whole.config, "max_position_embeddings")
    tables = [x for x in whole.modules() if isinstance(x, nn.Embedding) and x is not words]
    # OPT has two rows before the first position
    return limit if any(0 <= table.num_embeddings - limit <= 2 for table in tables) else None


def value_of(config: Any, name: str) -> int:
    """Return a size of the model, the largest of its layers; 0 if it has none of this name."""
    has_layers = hasattr(config, "num_hidden_layers")
    layers = (has_layers and getattr(config, "per_layer_config", None)) or [config]
    return max(getattr(layer, name, None) or 0 for layer in layers)


def refuse_unless_covered(settings: Mapping[str, Any], whole: Any) -> None:
    """Raise ValueError for a model that trains otherwise than it says."""
    config, head = whole.config, whole.get_output_embeddings()
    rope = getattr(config, "rope_parameters", None) or {}
    # Some models have a rope for each kind of layer, by name
    ropes = [values for values in (rope, *rope.values()) if isinstance(values, dict)]
    rope_types = {values.get("rope_type") for values in ropes}
    is_longrope = any(values.get("short_factor") != values.get("long_factor") for values in ropes)
    sparse = next((key for key in SPARSE if getattr(config, key, None) is not None), None)
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    name, decoder = f"model_type={config.model_type}", whole.get_decoder()
    has_list = decoder and any(isinstance(module, nn.ModuleList) for module in decoder.children())
    refuse(
        ("quantization_config" in settings, "quantization_config: quantized weights do not train"),
        (getattr(head, "bias", None) is not None, "a bias of the lm_head is not supported"),
        ("dynamic" in rope_types, "rope_type=dynamic follows the longest document of a batch"),
        (is_longrope, "rope_type=longrope follows the longest document of a batch"),
        (sparse, f"{name}: its layers choose few keys ({sparse}), which longctx does not"),
        (chunked, f"{name}: longctx has no chunked attention (attention_chunk_size)"),
        (head is None or not has_list, f"{name}: it has no causal decoder of one list of layers"),
    )


def empty_model(settings: Mapping[str, Any], device: str = "meta", attention: str = NAME) -> Any:
    """Return transformers' model of a config.json, without memory for its weights."""
    # With attention "eager" it is as transformers has it: our changes are left out.
    settings = without_code(settings)
    kind = str(settings.get("model_type"))
    unknown = f"model_type={kind} is not known to transformers {transformers.__version__}"
    refuse((kind not in CONFIG_MAPPING, unknown))
    try:
        # Infinite numbers are written as objects
        config = CONFIG_MAPPING[kind].from_dict(PreTrainedConfig._decode_special_floats(settings))
        refuse((config.get_text_config() is not config, NOT_TEXT))
        for name, value in vars(config).items():
            # A run is exact, and recomputed layers must draw the same
            if attention == NAME and "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:  # a model's own code may raise anything
        is_other = kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        refuse(
            (error.args == (NAME,), f"model_type={kind}: {NOT_REPLACED}"),
            (error.args == (NOT_TEXT,), f"model_type={kind}: {NOT_TEXT}"),
            (is_other, f"model_type={kind}: it is no causal language model"),
        )
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"model_type={kind}: transformers cannot build it: {reason}") from error
    for module in list(model.modules()):
        for name, values in list(module._buffers.items()):
            # Saved buffers, such as a router's correction, become weights that are not trained
            if values is not None and name not in module._non_persistent_buffers_set:
                del module._buffers[name]
                frozen = nn.Parameter(values, requires_grad=False)
                module.register_parameter(name, frozen)
    return model


def linears_of(decoder: nn.Module) -> Iterator[tuple[str, nn.Linear, str]]:
    """Yield path, layer and target of every linear layer that LoRA can adapt."""
    for path, module in decoder.named_modules():
        target = TARGET_OF.get(path.rpartition(".")[2])
        if isinstance(module, nn.Linear) and target is not None:
            yield path, module, target


def products(whole: Any) -> int:
    """Count the weights that multiply a token; it meets a few of the experts only."""
    config = whole.config
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    experts = experts or getattr(config, "n_routed_experts", None) or 0
    each = getattr(config, "num_experts_per_tok", None) or experts
    total = 0.0
    for path, module in whole.named_modules():
        matrices = [weight for weight in module.parameters(recurse=False) if weight.ndim > 1]
        if isinstance(module, nn.Embedding):
            continue
        share = each / max(experts, 1) if "expert" in path.rpartition(".")[2] else 1.0
        total += sum(weight.numel() * (share if weight.ndim == 3 else 1.0) for weight in matrices)
    return int(total)


class TransformersDecoder(Decoder):
    """A cache of transformers for each text."""

    def __init__(self, model: GPT, sequences: int, length: int, *_: Any) -> None:
        model.config.check_length(length, "prompt and max_new_tokens")
        self.model, self.device = model, model.embed.weight.device
        self.sequences, self.length = sequences, length
        self.caches: list[Any] = []

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        self.caches = [None] * len(prompts)
        return self._after([torch.tensor(ids, device=self.device) for ids in prompts])

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        return self._after(list(tokens[:, None]))

    def _after(self, texts: Sequence[Tensor]) -> Tensor:
        model: Any = self.model
        model.documents.begin(None)
        logits: list[Tensor] = []
        for n, ids in enumerate(texts):
            cache = {"past_key_values": self.caches[n], "use_cache": True}
            out = model.computed(input_ids=ids[None], **cache)
            self.caches[n] = out.past_key_values
            logits.append(model.logits(out.last_hidden_state[:, -1], model.lm_head_weight))
        return torch.cat(logits)


class TransformersModel(GPT):
    """The model of `config.transformers`, called as a GPT is."""

    config: TransformersConfig
    decoder = TransformersDecoder
    whole: Any  # transformers' model, whose decoder and head are modules of this one

    def __init__(
        self,
        config: TransformersConfig,
        attention: AttentionConfig | str = "flash",
        memory: MemoryConfig | str = "fast",
        is_proven: bool = False,
    ) -> None:
        if not is_proven:
            resolve_name("longctx.hf.proof:require")(config)
        nn.Module.__init__(self)
        attention, self.memory = settings_of(attention, memory)
        self.config = config
        whole = empty_model(config.settings)
        vouch(whole.config)  # the proof compares them
        # No module: the names of its weights would come twice
        self.__dict__["whole"] = whole
        self.backbone = whole.get_decoder()
        self.head = None if config.tied else whole.get_output_embeddings()
        # transformers keeps some weights in fp32, and saved buffers, such as a router's correction
        wide = {*whole._keep_in_fp32_modules, *whole._keep_in_fp32_modules_strict}
        self.exact = {
            name
            for name, weight in self.named_parameters()
            if any(f".{part}." in f"{name}." for part in wide) or not weight.requires_grad
        }
        self.context = Context()
        self.documents = Documents(attention.backend, dict(attention.options))
        for module in self.backbone.modules():
            module.__dict__["documents"] = self.documents
            ndims = {weight.ndim for weight in module.parameters()}
            is_norm = ndims == {1} and not list(module.children())
            if is_norm or module is self.embed:
                module.register_forward_hook(in_precision_of_autocast)
        if self.memory.recompute != "none":
            recompute(self.blocks, self.documents)
        self.train()

    @property
    def embed(self) -> nn.Embedding:  # type: ignore[override]
        """Return the embedding; some models scale its rows."""
        embedding: nn.Embedding = self.backbone.get_input_embeddings()
        return embedding

    @property
    def blocks(self) -> Any:
        """Return the layers of the decoder, the longest list of its modules."""
        lists = [module for module in self.backbone.children() if isinstance(module, nn.ModuleList)]
        return max(lists, key=len)

    def name_of(self, weight: str) -> str:
        """Return transformers' name of our `weight`, which the decoder or the head has."""
        owner, _, rest = weight.partition(".")
        modules = self.whole.named_modules()
        name = next(name for name, module in modules if module is getattr(self, owner))
        return f"{name}.{rest}"

    def train(self, mode: bool = True) -> TransformersModel:
        """Let the layers recompute if `mode`; noise, as of routers, is never drawn."""
        super().train(mode)
        for block in self.blocks:
            for module in block.modules():
                module.training = mode and module is block
        return self

    def to_empty(self, *, device: Any, recurse: bool = True) -> TransformersModel:
        """Give all weights memory, and compute the buffers: they are in no checkpoint."""
        super().to_empty(device=device, recurse=recurse)
        # Layers that share weights have got memory each
        self.whole.tie_weights()
        # An initialization may draw weights too, so the random state is set back
        with self.random_state_kept():
            for module in self.backbone.modules():
                # Falcon-H1 computes the buffers of its layers as a whole
                if any(part._non_persistent_buffers_set for part in module.modules()):
                    self.backbone._init_weights(module)
        return self

    @torch.no_grad()
    def init_weights(self, draw: Draw = lambda x, fill: fill(x)) -> None:
        """Draw the matrices anew; vectors are as transformers sets them, and else ones."""
        # Saved buffers and some vectors have no initialization of their own
        for weight in self.parameters():
            if weight.ndim < 2 or is_packed(weight):
                nn.init.ones_(weight)
        with self.random_state_kept():
            for module in self.modules():
                if not any(map(is_packed, module.parameters(recurse=False))):
                    self.backbone._init_weights(module)
        std = float(getattr(self.whole.config, "initializer_range", 0.02))
        for weight in self.parameters():
            if weight.ndim > 1 and not is_packed(weight):
                draw(weight, partial(nn.init.normal_, std=std))

    def random_state_kept(self) -> AbstractContextManager[None]:
        """Leave the random numbers after the block as they would be without it."""
        device = self.embed.weight.device
        return torch.random.fork_rng([device] if device.type == "cuda" else [])

    @property
    def rounded(self) -> set[str]:
        """Return the names of the matrices, but for `exact`."""
        return {name for name, weight in self.named_parameters() if weight.ndim > 1} - self.exact

    def linears(self) -> Iterator[tuple[Any, str, str, bool]]:
        """Yield block, path, target of LoRA, and True, since lora.base packs the weight."""
        for block in self.blocks:
            for path, _, target in linears_of(block):
                yield block, path, target, True

    def hidden(self, tokens: Tensor, mask: Mask, shards: Shards, length: int) -> Tensor:
        """Return the normed x (B, n, C) of this rank's tokens (B, n)."""
        positions = shards.local(mask.positions(len(tokens), shards.length, tokens.device))
        self.documents.begin(mask, shards)
        positions = positions.expand(tokens.shape)
        out = self.computed(input_ids=tokens, position_ids=positions, use_cache=False)
        normed: Tensor = out.last_hidden_state
        return normed

    def computed(self, **inputs: Any) -> Any:
        """Return the decoder's outputs; in 16 bits under autocast, as layers compute in fp32."""
        kind, dtype = self.embed.weight.device.type, self.embed.weight.dtype
        if dtype == torch.float32 or torch.is_autocast_enabled(kind):
            return self.backbone(**inputs)
        with torch.autocast(kind, dtype):
            out = self.backbone(**inputs)
        out.last_hidden_state = out.last_hidden_state.to(dtype)
        return out


def in_precision_of_autocast(module: nn.Module, inputs: Any, values: Any) -> Any:
    """Return embedded or normed tokens in autocast's dtype: their fp32 weights make them fp32, and
    the residual stream and the inputs of products would take twice the memory.
    """
    # Some modules of vectors return a tuple
    is_cast = isinstance(values, Tensor) and torch.is_autocast_enabled(values.device.type)
    return values.to(torch.get_autocast_dtype(values.device.type)) if is_cast else values
