"""Folders that transformers writes: what they compute here, what of them is refused, and what comes
back out.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from longctx.model import GPT, GPTConfig
from longctx.model.export import export
from longctx.model.families.qwen2 import QWEN2_SPLIT
from longctx.model.huggingface import check_weights, load_weights, pretrained, read_config

SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
SPECIAL: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 0}
OLD = "original_max_position_embeddings"
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, OLD: 32, "beta_fast": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        OLD: 32,
    },
    "longrope": {
        **{"rope_type": "longrope", "factor": 2.0, OLD: 32},
        **{"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 2.0, 4.0, 8.0]},
    },
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama 2": LlamaConfig(**SIZES, num_key_value_heads=6),
    "llama 3": LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=10),
    "smollm2": LlamaConfig(**SIZES, num_key_value_heads=3, tie_word_embeddings=True),
    "llama, biases": LlamaConfig(
        **SIZES, num_key_value_heads=2, attention_bias=True, mlp_bias=True
    ),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=None, head_dim=16),
    "mistral, window": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=9, head_dim=16),
    "smollm3": SmolLM3Config(**SIZES, num_key_value_heads=3, no_rope_layer_interval=2, **SPECIAL),
    "smollm3, window": SmolLM3Config(
        **SIZES | {"num_hidden_layers": 3},
        **{
            "num_key_value_heads": 2,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 7,
        },
        **{"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
        **SPECIAL,
    ),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2),
    "qwen2, tied": Qwen2Config(**SIZES, num_key_value_heads=1, tie_word_embeddings=True),
    "qwen2, half windowed": Qwen2Config(
        **SIZES,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=11,
        max_window_layers=1,
    ),
    "qwen3, layer types": Qwen3Config(
        **SIZES | {"num_hidden_layers": 3},
        **{"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True},
        **{"use_sliding_window": True, "sliding_window": 5},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),
    "qwen3, tied": Qwen3Config(
        **SIZES, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True
    ),
}


def stretched(kind: str, rope: str) -> PreTrainedConfig:
    """A small model of a family whose positions are stretched."""
    build = {
        "llama": LlamaConfig,
        "mistral": MistralConfig,
        "qwen2": Qwen2Config,
        "qwen3": Qwen3Config,
    }
    more = SPECIAL | {"no_rope_layers": [1, 0]} if kind == "smollm3" else {}
    more |= (
        {"head_dim": 8} if kind == "qwen3" else {"sliding_window": 40} if kind == "mistral" else {}
    )
    keys = {
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_theta": 5000.0} | ROPES[rope],
    } | more
    return build.get(kind, SmolLM3Config)(**SIZES | keys)


for kind in ("llama", "mistral", "qwen2", "qwen3", "smollm3"):
    FAMILIES |= {f"{kind}, {rope}": stretched(kind, rope) for rope in ROPES}
Change = Callable[..., Path]


def reference(config: PreTrainedConfig) -> Any:
    """A model of transformers with random weights; norms and biases too, whose ones and zeros would
    hide mistakes.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.3 if parameter.ndim == 1 else 0.0, std=0.2)
    return model


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE that splits words as Qwen2 does."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.normalizer = tokenizers.normalizers.NFC()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN2_SPLIT), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["a rose is a rose in 1812 and in 2024"], trainer)
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    reference(FAMILIES["llama 3"]).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def changed(llama: Path, tmp_path: Path) -> Change:
    """A copy of the folder whose config.json has other keys; None takes a key away."""

    def change(**keys: Any) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(llama, folder)
        config = json.loads((folder / "config.json").read_text()) | keys
        (folder / "config.json").write_text(
            json.dumps({k: v for k, v in config.items() if v != "absent"})
        )
        return folder

    return change


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_gradients_and_the_way_back(family: str, tmp_path: Path) -> None:
    theirs = reference(FAMILIES[family])
    theirs.save_pretrained(tmp_path / "in")
    write_tokenizer(tmp_path / "in")
    model = pretrained(tmp_path / "in")
    tokens = torch.randint(301, (2, 101))
    expected = theirs(tokens, labels=tokens)
    error = (model(tokens) - expected.logits).abs().max() / expected.logits.abs().max()
    assert error < 1e-4
    loss = model(tokens, torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], dim=1))
    torch.testing.assert_close(loss, expected.loss, rtol=1e-4, atol=0)
    loss.backward()
    expected.loss.backward()
    ours, there = model.embed.weight.grad, theirs.get_input_embeddings().weight.grad
    assert (ours - there).abs().max() < 1e-3 * there.abs().max()
    gate = theirs.model.layers[1].mlp.gate_proj.weight.grad
    assert (
        model.blocks[1].mlp.gate_up.weight.grad[:80] - gate
    ).abs().max() < 1e-3 * gate.abs().max()
    q = theirs.model.layers[0].self_attn.q_proj.weight.grad
    assert (
        model.blocks[0].attention.qkv.weight.grad[: len(q)] - q
    ).abs().max() < 1e-3 * q.abs().max()

    export(model, tmp_path / "in", tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    ).eval()
    assert {k: v.tolist() for k, v in again.state_dict().items()} == {
        k: v.tolist() for k, v in theirs.state_dict().items()
    }
    assert torch.equal(again(tokens).logits, expected.logits)
    back = pretrained(tmp_path / "out")
    assert back.config == model.config == read_config(tmp_path / "in")
    for (name, a), (_, b) in zip(back.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    if family != "mistral":  # it goes out as the Llama that it is
        assert type(again) is type(theirs)
        kept = (again.config.to_dict(), theirs.config.to_dict())
        for key in set(kept[0]) - {
            "architectures",
            "dtype",
            "no_rope_layer_interval",
            "bos_token_id",
            "eos_token_id",
            "_name_or_path",
        }:
            assert kept[0][key] == kept[1][key], key
    text = "In 1812 a rose is 20 roses"
    ids = tokenizers.Tokenizer.from_file(str(tmp_path / "in" / "tokenizer.json")).encode(text).ids
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] == ids
    assert again.generation_config.eos_token_id == again.config.eos_token_id


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_hold_what_one_file_holds(llama: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    model = pretrained(llama, dtype=dtype)
    export(model, llama, tmp_path / "one")
    export(model, llama, tmp_path / "many", shard_bytes=40_000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "many").glob("model-*"))
    assert len(files) > 2
    assert files == sorted(set(index["weight_map"].values()))
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in model.parameters())
    one, many = pretrained(tmp_path / "one"), pretrained(tmp_path / "many")
    assert one.embed.weight.dtype == many.embed.weight.dtype == dtype
    for a, b, c in zip(model.parameters(), one.parameters(), many.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "many")
    assert torch.equal(opened.lm_head.weight, model.unembedding)


def test_the_older_form_of_config_json_is_the_same_model(changed: Change, llama: Path) -> None:
    folder = changed(
        rope_parameters="absent", rope_theta=5000.0, rope_scaling=None, torch_dtype="float32"
    )
    assert read_config(folder) == read_config(llama)


def test_scaling_of_the_older_form_is_read_as_transformers_reads_it(changed: Change) -> None:
    older = {"type": "yarn", "factor": 4.0}
    folder = changed(rope_parameters="absent", rope_theta=1000000.0, rope_scaling=older)
    opened = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert read_config(folder).rope_scaling == {"rope_type": "yarn", "factor": 4.0, OLD: 64}
    tokens = torch.randint(301, (1, 150))
    expected = opened(tokens).logits
    assert (pretrained(folder)(tokens) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_missing_key_has_the_value_that_transformers_gives_it(tmp_path: Path) -> None:
    for kind, build in (
        *(("llama", LlamaConfig), ("qwen2", Qwen2Config), ("qwen3", Qwen3Config)),
        *(("mistral", MistralConfig), ("smollm3", SmolLM3Config)),
    ):
        sizes = {k: SIZES[k] for k in ("vocab_size", "num_hidden_layers", "intermediate_size")}
        sizes |= {"hidden_size": 64, "num_attention_heads": 32} | (
            SPECIAL if kind == "smollm3" else {}
        )
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes}))
        ours, theirs = read_config(tmp_path), build(**sizes)
        assert ours.head_size == getattr(theirs, "head_dim", 2)
        assert (ours.kv_heads, ours.norm_eps, ours.tied) == (
            theirs.num_key_value_heads,
            theirs.rms_norm_eps,
            theirs.tie_word_embeddings,
        )
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
        assert ours.window == (4096 if kind == "mistral" else None)
        assert ours.nope_layers == [
            n for n, rotary in enumerate(getattr(theirs, "no_rope_layers", [])) if not rotary
        ]
        assert (ours.context, ours.init_std) == (
            theirs.max_position_embeddings,
            theirs.initializer_range,
        )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"model_type": "gemma"},
            "model_type=gemma is not covered yet; there are llama, mistral, qwen2, qwen3, smollm3",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}},
            r"config.json: rope_parameters.low_freq_factor is missing, which rope_type=llama3 needs",
        ),
        (
            {"rope_parameters": {"rope_type": "proportional"}},
            "rope_parameters.rope_type=proportional is not covered",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling.factor is missing, which rope_type=linear needs",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": "2"}},
            "rope_scaling.factor='2' must be a number above 0",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta": 1}},
            "rope_scaling.beta=1 is not covered for",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, OLD: 1.5}},
            "rope_scaling.original_max_position_emb.*=1.5",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 5}},
            "rope_scaling.short_factor must be a list of 5 numbers",
        ),
        ({"rope_scaling": {"type": 3}}, "rope_scaling.rope_type=3 must be a word"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            "rope_parameters.full_attention=",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor=0.5 is not",
        ),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5 is not covered yet; only 1.0 is",
        ),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window=0 must be a whole number"),
        (
            {"model_type": "qwen3", "use_sliding_window": 3},
            "use_sliding_window=3 must be true or false",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types\[1\]=sliding_attention is not",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention"]},
            r"layer_types=.* must be a list of 2",
        ),
        (
            {"model_type": "smollm3", "no_rope_layers": [1]},
            r"no_rope_layers=\[1\] must be a list of 2 times 0 or 1",
        ),
        (
            {"model_type": "smollm3", "no_rope_layer_interval": 0},
            "no_rope_layer_interval=0 must be a whole number",
        ),
        ({"hidden_act": "gelu"}, "hidden_act=gelu is not covered yet; only silu is"),
        ({"attention_bias": 1}, "attention_bias=1 must be true or false"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={.*} is not covered yet"),
        ({"hidden_size": "absent"}, "hidden_size=None must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True must be a whole number"),
        (
            {"num_key_value_heads": 4},
            "config.json: model.heads=6 is not a multiple of model.kv_heads=4",
        ),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps='tiny' must be a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 must be true or false"),
    ],
)
def test_what_is_not_covered_is_refused_by_key_and_value(
    changed: Change, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_config(changed(**keys))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_hidden_layers": 3}, r"no tensor model\.layers\.2\.input_layernorm\.weight"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\.\S+ has no place in the model"),
        (
            {"intermediate_size": 81},
            r"gate_proj.weight is \[80, 48\], by config.json it is \[81, 48\]",
        ),
        ({"num_key_value_heads": 6}, r"k_proj.weight is \[20, 48\]"),
        ({"tie_word_embeddings": True}, r"lm_head.weight differs from model.embed_tokens.weight"),
        ({"model_type": "qwen3"}, r"no tensor model.layers.0.self_attn.q_norm.weight"),
        ({"model_type": "qwen2"}, r"no tensor model.layers.0.self_attn.q_proj.bias"),
        ({"mlp_bias": True}, r"no tensor model.layers.0.mlp.gate_proj.bias"),
        ({"attention_bias": True}, r"no tensor model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_every_tensor_is_accounted_for(changed: Change, keys: dict[str, Any], message: str) -> None:
    folder = changed(**keys)
    with pytest.raises(ValueError, match=message) as caught:
        pretrained(folder)
    assert "\n" not in str(caught.value)


def test_old_buffers_and_a_copy_of_a_tied_head_are_no_mistake(tmp_path: Path) -> None:
    reference(FAMILIES["smollm2"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    assert pretrained(tmp_path).head is None


def test_a_larger_vocabulary_keeps_its_own_rows(llama: Path) -> None:
    config = read_config(llama)
    config.vocab_size = 320
    model = GPT(config)
    before = model.embed.weight[301:].clone()
    load_weights(model, llama)
    small = pretrained(llama)
    assert torch.equal(model.embed.weight[:301], small.embed.weight)
    assert torch.equal(model.unembedding[:301], small.unembedding)
    assert torch.equal(model.embed.weight[301:], before)
    config.vocab_size = 300
    with pytest.raises(ValueError, match=r"model.vocab_size=300: .* has weights for 301 tokens"):
        check_weights(config, llama)
    with pytest.raises(ValueError, match="describes another model"):
        load_weights(GPT(GPTConfig(vocab_size=301)), llama)


def test_a_pickle_is_not_read(llama: Path, changed: Change) -> None:
    folder = changed()
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(
        FileNotFoundError, match=r"no model\.safetensors .*pytorch_model\.bin is not read: a pickle"
    ):
        pretrained(folder)


@pytest.mark.parametrize(
    "name", ["../../x.safetensors", "/x.safetensors", "a/b.safetensors", "..", "x.bin", 3]
)
def test_an_index_names_only_safetensors_beside_it(changed: Change, name: Any) -> None:
    folder = changed()
    shutil.move(folder / "model.safetensors", folder.parent.parent / "x.safetensors")
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is not the name of a safetensors file beside it"):
        pretrained(folder)


def test_shards_that_are_not_what_the_index_says(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    export(pretrained(llama), llama, folder, shard_bytes=40_000)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first, last = sorted(set(content["weight_map"].values()))[
        :: len(set(content["weight_map"].values())) - 1
    ]
    moved = content["weight_map"] | {"model.norm.weight": first}
    index.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(ValueError, match="not where the index says"):
        pretrained(folder)
    index.write_text(json.dumps({"weight_map": content["weight_map"] | {"model.extra": first}}))
    with pytest.raises(
        ValueError,
        match=r"no tensor model\.extra, which model\.safetensors\.index\.json places there",
    ):
        pretrained(folder)
    index.write_text(json.dumps(content))
    whole = (folder / last).read_bytes()
    (folder / last).write_bytes(whole[:-4])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        pretrained(folder)
    (folder / last).unlink()
    with pytest.raises(FileNotFoundError, match="no such file, but the index names it"):
        pretrained(folder)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, "\udcff"])
def test_a_broken_config_is_one_line(changed: Change, content: str) -> None:
    folder = changed()
    (folder / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(
        ValueError, match=r"config\.json: (cannot be read as JSON|not a JSON object)"
    ) as caught:
        read_config(folder)
    assert "\n" not in str(caught.value)
