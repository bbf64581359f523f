"""The shape of a GPT and what it costs. Free of torch, so that the command line answers at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any, ClassVar, Self

from longctx.config.fields import Group, Key, build, group, key, positive, refuse
from longctx.config.layout_config import divisors
from longctx.config.rope_config import check_scaling
from longctx.model.mixers import description as mixers
from longctx.spec.experts import NORMS, ExpertsConfig, ExpertsSpec
from longctx.spec.parts import (
    NF4_BLOCK,
    AttentionSpec,
    BlockSpec,
    FeedForward,
    Norm,
    RopeSpec,
    packed_width,
)

LISTS = ("nope_layers", "no_mlp", "window_layers", "experts.dense_layers")  # of layers


@dataclass
class Multipliers(Group):
    """Factors on the way of the residual stream, as in Granite and Gemma."""

    prefix = "model.multipliers."
    embedding: float = key(1.0, "factor of the embedded tokens, as in Gemma and Granite", above=0)
    mlp: float = key(1.0, "factor of what MLP or experts read, as in Falcon-H1", above=0)
    residual: float = key(1.0, "factor of what attention and MLP add, as in Granite", above=0)
    logits: float = key(1.0, "factor of the logits, as in Granite", above=0)
    logit_softcap: float | None = key(None, "c: logits become c · tanh(logit / c)", above=0)


@dataclass
class GPTConfig(mixers.MixerKeys):
    """Sizes of a GPT in Llama's architecture; the defaults are the `tiny` preset.

    vocab_size: null: the tokenizer's, rounded up to a multiple of 64
    window_rope_theta: unscaled base in layers with the window; null: as others
    window: keys that a query sees, its own among them; null: all before it
    window_layers: layers with it, from 0; null: all
    norms: pre: before attention and MLP; post: after; sandwich: both; mixed: post with softmax;
        parallel: of one x before both, as in GPT-NeoX; shared: one norm for both, as in Cohere
    query_growth: [beta,n]: queries are multiplied by 1 + beta · ln(1 + floor(position / n))
    context: tokens that weights of init= were made for; null: seq_len
    """

    prefix = "model."
    vocab_size: int | None = key(None, between=(2, 2**31 - 1))
    layers: int = positive(4, "transformer blocks", limit=4096)
    channels: int = positive(128, "width of the residual stream", limit=2**20)
    heads: int = positive(4, "query heads", limit=2**20)
    kv_heads: int = positive(2, "key-value heads, for heads / kv_heads query heads", limit=2**20)
    head_dim: int | None = key(None, "head size; null: channels / heads", between=(0, 2**20))
    full_head_dim: int | None = positive(None, "without window; null: as others", limit=2**20)
    full_kv_heads: int | None = positive(None, "without window; null: as others", limit=2**20)
    full_shares_kv: bool = key(False, "without window values are keys, before norm and rope")
    ffn: int = positive(384, "inner width of the MLP", limit=2**20)
    rope_theta: float = key(500000.0, "base of the rotary frequencies")
    window_rope_theta: float | None = key(None, above=0, needs="window")
    rope_scaling: dict[str, Any] = key({}, "transformers' rope_parameters; {}: not scaled")
    rotary_share: float = key(1.0, "of a head, its first channels", between=(0, 1), above=0)
    nope_layers: list[int] = key([], "layers without rope; the first is 0", between=(0, 4095))
    window: int | None = positive(None, limit=2**31 - 1)
    window_layers: list[int] | None = key(None, between=(0, 4095), distinct=True, needs="window")
    norms: str = key("pre", choices=("pre", "post", "sandwich", "mixed", "parallel", "shared"))
    norm_form: str = key("rms", "centered: no bias", choices=("rms", "layer", "centered"))
    norm_eps: float = key(1e-5, "added to the mean square or variance in norms")
    out_factor: bool = key(False, "an untrained factor of each layer's output, as in Gemma 4")
    norm_plus_one: bool = key(False, "norms multiply by 1 + their weight, as in Gemma")
    tied: bool = key(True, "the output head is the embedding")
    qkv_bias: bool = key(False, "biases in the q, k and v projections, as in Qwen2")
    out_bias: bool = key(False, "a bias in attention's output projection")
    mlp_bias: bool = key(False, "biases in the projections of the MLP")
    mlp_gate: bool = key(True, "false: activation(up(x)), not activation(gate(x)) · up(x)")
    no_mlp: list[int] = key([], "layers without an MLP; the first is 0", between=(0, 4095))
    activation: str = key("silu", "of the MLP", choices=("silu", "gelu_tanh", "gelu", "relu2"))
    qk_norm: str = key("none", "RMSNorm of q and k", choices=("none", "head", "whole"))
    v_norm: bool = key(False, "RMSNorm of each head of v, without weight, as in Gemma 4")
    qk_norm_after_rope: bool = key(False, "q and k rotate before their norm", needs="qk_norm")
    attention_gate: str = key("none", "output times σ(W · input)", choices=("none", "channel"))
    attention_scale: float | None = key(None, "score factor; null: 1 / √head size", above=0)
    sinks: bool = key(False, "a logit per head joins the softmax without a value, as in gpt-oss")
    query_growth: list[float] = key([])
    softcap: float | None = key(None, "c: attention's scores become c · tanh(score / c)", above=0)
    multipliers: Multipliers = group(Multipliers)
    experts: ExpertsConfig = group(ExpertsConfig)
    context: int | None = positive(None, limit=2**31 - 1)
    init_std: float = key(0.02, "of the normal distribution that weights are drawn from")
    source: dict[str, Any] = field(
        default_factory=dict,
        compare=False,
        metadata={"key": Key("config.json of init=, which exports repeat", compared=False)},
    )

    # The module, and the reader and writer of Hugging Face folders
    implementation: ClassVar[str] = "longctx.model.gpt:GPT"
    folders: ClassVar[str] = "longctx.hf.family_folder"
    # Our kernels compute its layers, torch.compile and CUDA graphs may hold them
    has_kernels: ClassVar[bool] = True
    remark: ClassVar[str] = ""  # that the first lines of a run add to its name

    @classmethod
    def kind(cls, values: Mapping[str, Any]) -> type[GPTConfig]:
        """Return the class with its own answers to the questions here, if `values` are its."""
        path = "longctx.hf.transformers_config:TransformersConfig"
        kind: type[GPTConfig] = resolve_name(path) if values.get("transformers") else cls
        return kind

    @classmethod
    def of_saved(cls, saved: dict[str, Any]) -> GPTConfig:
        """Return the model of a run's configuration; ValueError for impossible sizes."""
        config: GPTConfig = build(cls, saved, "model.")
        config.validate()
        return config

    @property
    def head_size(self) -> int:
        return self.channels // self.heads if self.head_dim is None else self.head_dim

    @property
    def rotary_size(self) -> int:
        """Return the channels of one head that rotate."""
        return int(self.head_size * self.rotary_share)

    @property
    def expert_ffn(self) -> int:
        return self.experts.ffn or self.ffn

    def window_of(self, layer: int) -> int | None:
        """Return the keys that a query sees at most in `layer`, or None."""
        return self.window if self.window_layers is None or layer in self.window_layers else None

    def windows(self) -> dict[int | None, int]:
        """Return window (None: the whole past) → the number of layers that have it."""
        return dict(Counter(map(self.window_of, range(self.layers))))

    def has_experts(self, layer: int) -> bool:
        """Return True if the feed-forward network of `layer`, if it has one, is of experts."""
        return self.experts.count is not None and layer not in self.experts.dense_layers

    def block(self, layer: int) -> BlockSpec:
        """Return the parts of block `layer`, the first is 0."""
        named, experts = ("mlp", "mlp", self.channels), self.experts
        width = 0 if layer in self.no_mlp else self.ffn
        mlp = FeedForward(*named, width, self.mlp_bias, self.activation, self.mlp_gate)
        norms = list[Norm]()
        if width and self.has_experts(layer):
            inner = experts.shared * self.expert_ffn + experts.beside * width
            dense = replace(mlp, name="shared", folder="shared_experts", inner=inner)
            count, shape = experts.count or 0, (self.expert_ffn, experts.biased, self.activation)
            sizes = dict.fromkeys(NORMS, self.channels) | {"experts": count}
            norms = [replace(self.norm(x, x), size=n) for x, n in sizes.items() if experts.beside]
            mlp = ExpertsSpec(*named, *shape, self.mlp_gate, count, experts, dense, norms)
        has_before, has_after = self.norms_around(layer)
        before_mlp = width and has_before and self.norms != "shared" and not norms
        # Gemma's folders call the norm after attention what Llama's call the one before the MLP
        folder = "pre_feedforward_layernorm" if has_after else "post_attention_layernorm"
        out_folder, after_mlp = "post_feedforward_layernorm", width and has_after
        return BlockSpec(
            self.norm("attention_norm", "input_layernorm") if has_before else None,
            self._attention(layer),
            self.norm("mlp_norm", folder) if before_mlp else None,
            mlp,
            self.multipliers.mlp,
            self.multipliers.residual,
            self.norm("attention_out_norm", "post_attention_layernorm") if has_after else None,
            self.norm("mlp_out_norm", out_folder) if after_mlp else None,
            bool(width) and self.norms in ("parallel", "shared"),
            Norm("out_factor", "layer_scalar", 1, 1, False, "factor") if self.out_factor else None,
        )

    def norm(self, name: str, folder: str) -> Norm:
        """Return a norm of the residual stream."""
        each = self.channels, self.norm_eps, self.norm_plus_one, self.norm_form
        return Norm(name, folder, *each)

    def _attention(self, layer: int) -> AttentionSpec:
        theta, scaling, context = self.rope_theta, self.rope_scaling, self.context
        model, window = self, self.window_of(layer)
        if window is not None and self.window_rope_theta is not None:
            theta, scaling, context = self.window_rope_theta, {}, None
        if window is None and (self.full_head_dim or self.full_kv_heads):
            size, kv_heads = self.full_head_dim or self.head_dim, self.full_kv_heads
            model = replace(self, head_dim=size, kv_heads=kv_heads or self.kv_heads)
        rope = RopeSpec(model.rotary_size, theta, scaling, context, tuple(self.query_growth))
        sizes = "attention", "self_attn", self.channels, model, window, rope
        return mixers.layer(self.mixer_of(layer), *sizes, layer not in self.nope_layers)

    # A search asks thousands of steps of one model
    @cached_property
    def blocks(self) -> list[BlockSpec]:
        """Return the parts of every block; layers that are alike share one value."""
        # All else is the same in every layer
        lists = [attrgetter(name)(self) or () for name in LISTS]
        differences = [(self.mixer_of(n), *(n in x for x in lists)) for n in range(self.layers)]
        blocks = {each: self.block(differences.index(each)) for each in set(differences)}
        return [blocks[each] for each in differences]

    @cached_property
    def kinds(self) -> list[tuple[BlockSpec, int]]:
        """Return each value among the blocks once, with the number of its layers."""
        counts = Counter(map(id, self.blocks))
        return [(block, counts[n]) for n, block in {id(x): x for x in self.blocks}.items()]

    def ropes(self) -> list[RopeSpec]:
        """Return the rotary positions of its layers, each once."""
        # Their scaling is a dictionary, so a set cannot hold them
        ropes = [block.attention.rope for block in self.blocks]
        return [rope for layer, rope in enumerate(ropes) if rope not in ropes[:layer]]

    def with_layers(self, chosen: Sequence[int]) -> Self:
        """Return the model that has these layers alone."""
        lists = {name: attrgetter(name)(self) for name in LISTS}
        for name, layers in lists.items():
            lists[name] = layers and [new for new, layer in enumerate(chosen) if layer in layers]
        experts = replace(self.experts, dense_layers=lists.pop("experts.dense_layers"))
        mixer = [self.mixer_of(layer) for layer in chosen]
        return replace(self, layers=len(chosen), mixer=mixer, experts=experts, **lists)

    def problems(self) -> Iterator[str]:
        """Yield a message for sizes of which no model can be made."""
        experts, growth = self.experts, self.query_growth
        for name in ("kv_heads", "full_kv_heads"):
            given, possible = getattr(self, name) or 1, ", ".join(map(str, divisors(self.heads)))
            if self.heads % given:
                heads = f"model.heads={self.heads} is not a multiple of model.{name}={given}"
                yield f"{heads}; {name} can be {possible}"
        # Another layer would be ignored without a word
        for name in LISTS:
            layers = attrgetter(name)(self) or []
            if list(layers) != sorted(set(layers).intersection(range(self.layers))):
                last = self.layers - 1
                yield f"model.{name}={list(layers)}: layers from 0 to {last}, each once, in order"
        if self.head_dim is None and self.channels % self.heads:
            given = f"model.channels={self.channels}: not a multiple of model.heads={self.heads}"
            yield f"{given}; change one of them, or set model.head_dim"
        # Rotary embedding turns pairs of channels
        for size in {self.head_size, self.full_head_dim or self.head_size}:
            rotated = int(size * self.rotary_share)
            if rotated < 2 or rotated % 2 or size % 2:
                given = f"model.head_dim={size} model.rotary_share={self.rotary_share}"
                channels = f"a head has {size} channels and {rotated} of them rotate"
                yield f"{given}: {channels}; both must be even numbers of at least 2"
            check_scaling("model.rope_scaling", self.rope_scaling, rotated, self.context)
        count, groups, best = experts.count or 0, experts.groups, experts.top_groups
        least, allowed = experts.group_scores, count // groups * best if best <= groups else 0
        if count and (experts.per_token > allowed or count % groups or count < least * groups):
            names = "per_token", "groups", "top_groups", "group_scores"
            given = " ".join(f"model.experts.{name}={getattr(experts, name)}" for name in names)
            yield f"{given}: at most {allowed} of {count}; equal groups of at least group_scores"
        if experts.count is not None and (self.channels % 8 or self.expert_ffn % 8):
            sizes = f"model.channels={self.channels} model.experts.ffn={self.expert_ffn}"
            yield f"{sizes}: the grouped products of experts take multiples of 8"
        if self.activation in ("gelu", "relu2") and self.mlp_gate:
            yield f"model.activation={self.activation}: give model.mlp_gate=false, or gelu_tanh"
        # They would be ignored in layers with experts
        clamp = experts.clamp and not (self.mlp_gate and self.activation == "silu")
        beside = experts.beside and (experts.shared_gate or self.norm_form == "layer")
        ignored = {"mlp_bias": self.mlp_bias, "experts.clamp": clamp, "experts.beside": beside}
        for name in [x for x, is_given in ignored.items() if experts.count and is_given]:
            given = f"model.{name}={attrgetter(name)(self)}".lower()
            rule = "experts have experts.biased, a clamp only of silu with a gate, and beside"
            yield f"{given}: {rule} an MLP norm_form=rms and no shared_gate; leave it out"
        if growth and (len(growth) != 2 or min(growth) <= 0):
            yield f"model.query_growth={growth}: two numbers above 0, [beta,n], or []"
        yield from super().problems()

    def _embedding(self) -> int:
        assert self.vocab_size is not None, "model.vocab_size: a tokenizer gives it"
        return self.vocab_size * self.channels

    def matmul_parameters(self) -> int:
        """Return the weights that multiply each token: of linear layers and the lm_head."""
        return sum(count * block.multiplied for block, count in self.kinds) + self._embedding()

    def parameters(self) -> int:
        """Return the trainable parameters, a tied embedding once."""
        blocks = sum(n * part.parameters for block, n in self.kinds for part in block.parts())
        last = self.norm("norm", "norm").parameters
        return self._embedding() * (1 if self.tied else 2) + blocks + last

    @cached_property
    def frozen_matrices(self) -> Counter[tuple[int, int]]:
        """Return rows and columns of the matrices that lora.base can pack, with their number."""
        linears = [linear for block in self.blocks for linear in block.linears.values()]
        return Counter((linear.outputs, linear.columns) for linear in linears if linear.packs)

    def lora_widths(self, of_token: bool = False) -> Mapping[str, int]:
        """Return rows plus columns of the matrices that LoRA can adapt, or of one token's."""
        widths = Counter[str]()
        for n, path, x in ((n, *item) for block, n in self.kinds for item in block.linears.items()):
            matrices = n * (x.active if of_token else x.experts)
            widths[path.rpartition(".")[2]] += matrices * (x.columns + x.outputs // x.experts)
        return widths

    def flops_per_token(self, pairs_per_token: float, adapters: int = 0) -> float:
        """Return the FLOPs of forward, a third, and backward for a token that sees so many keys: 6
        per matmul weight (PaLM, arXiv 2204.02311, appendix B), 12 per visible pair, head and
        channel; hidden pairs and recomputation do not count. LoRA adds 6 per weight of its
        `adapters`, and every other weight then takes 4: it is not trained.
        """
        weights = (4 if adapters else 6) * self.matmul_parameters() + 6 * adapters
        return weights + sum(n * block.attention.flops(pairs_per_token) for block, n in self.kinds)

    # A model that transformers computes answers in its own way. Each way to a model proves it.

    def with_vocabulary(self, size: int) -> GPTConfig:
        """Return the model with `size` tokens; ValueError if it cannot have other ones."""
        return replace(self, vocab_size=size)

    def accepted(self, request: Any) -> Any:
        """Return the training `request` as the model decides it; ValueError for keys it lacks."""
        return request

    def check_length(self, tokens: int, key: str) -> None:
        """Raise ValueError if the model has no positions for sequences of so many `tokens`."""

    def prove(self, device: str, precision: str, seq_len: int, packing: bool = False) -> None:
        """Raise ValueError unless ours is the model's own attention, of documents if `packing`."""

    def packs(self, device: str, precision: str, seq_len: int, is_shared: bool) -> bool:
        """Prove it; return False if each document needs a sequence of its own, which is an error if
        ranks share sequences (`is_shared`).
        """
        return True

    def measured(self, step: Any, say: Callable[[str], None]) -> Any:
        """Return the bytes of the layers of `step` if they are measured, not known."""
        return {}


def weights_reader() -> Any:
    """Return what reads Hugging Face folders: hf, which the core does not import."""
    return resolve_name("longctx.hf.model_folder")


LORA_TARGETS = tuple(linear.name for linear in GPTConfig().block(0).linears.values())


@dataclass
class LoraConfig:
    """Training of low-rank additions to frozen weights: lora.rank=16.

    base: format of frozen matrices: nf4 (QLoRA, by bitsandbytes); null: that of products
    """

    rank: int | None = positive(None, "of the additions; null: all weights train", limit=4096)
    scaling: float = key(2.0, "factor of the additions, elsewhere alpha / rank", needs="rank")
    rslora: bool = key(False, "divide alpha, scaling · rank, by √rank, not rank", needs="rank")
    targets: list[str] = key(
        list(LORA_TARGETS), "layers; a mixer may have others", distinct=True, needs="rank"
    )
    base: str | None = key(None, choices=("nf4",), needs="rank")

    @property
    def factor(self) -> float:
        """Return the factor of the additions."""
        return self.scaling * math.sqrt(self.rank or 1) if self.rslora else self.scaling

    def parameters(self, model: GPTConfig, of_token: bool = False) -> int:
        """Return the parameters that LoRA adds to `model`, or to one token's matrices."""
        widths = model.lora_widths(of_token)
        return (self.rank or 0) * sum(widths.get(target, 0) for target in self.targets)

    def frozen_bytes(self, model: GPTConfig, each: int) -> int:
        """Return the bytes of the weights of `model`, with `each` of one that is not packed."""
        matrices = model.frozen_matrices.items() if self.base is not None else []
        saved = (n * r * (each * columns - packed_width(columns)) for (r, columns), n in matrices)
        return each * model.parameters() - sum(saved)

    def check_model(self, model: GPTConfig) -> None:
        """Raise ValueError for a chosen target or a format that `model` cannot have."""
        has = [*model.lora_widths()] or ["none"]
        # A model need not have each of the usual targets
        is_usual = self.targets == list(LORA_TARGETS)
        for chosen in [self.targets] if is_usual else [[x] for x in self.targets]:
            is_missing = self.rank is not None and not {*has} & {*chosen}
            refuse((is_missing, f"lora.targets={','.join(chosen)}: the model has {', '.join(has)}"))
        for _, columns in model.frozen_matrices if self.base is not None else []:
            given = f"lora.base={self.base}: a matrix has {columns} columns, and the format takes a"
            refuse((columns % NF4_BLOCK, f"{given} multiple of {NF4_BLOCK}; leave lora.base out"))
