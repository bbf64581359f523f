"""The tests of every model family: what transformers computes from a folder, we compute, and the
folder that we write is the same model there. families.yaml has each family's own configurations.
"""

import functools
import json
import os
import random
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.models import mistral4

from longctx.attention import Mask
from longctx.hf.export import export
from longctx.hf.families import read_model, write_config
from longctx.hf.families.features import QWEN2_SPLIT
from longctx.hf.model_folder import pretrained, read_config
from longctx.model import GPT, lora
from longctx.spec.model_config import LORA_TARGETS, GPTConfig, LoraConfig

# transformers has it for images and text alone
AutoModelForCausalLM.register(mistral4.Mistral4Config, mistral4.Mistral4ForCausalLM, exist_ok=True)
TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text())
SHARED: dict[str, Any] = TABLES.pop("shared")
SIZES, COMMON, SPECIAL, ROPES = (SHARED[x] for x in ("sizes", "common", "special", "ropes"))
SMALL: dict[str, Any] = {**SIZES, **SPECIAL, "num_key_value_heads": 2, "num_hidden_layers": 4}
OLD = "original_max_position_embeddings"

# What transformers itself needs, or what says nothing of a forward pass.
STRUCTURE = {"model_type", "architectures", "dtype", "transformers_version", "return_dict"}
STRUCTURE |= {"id2label", "label2id", "problem_type", "output_hidden_states", "_name_or_path"}
STRUCTURE |= {"output_attentions", "is_encoder_decoder", "_attn_implementation"}


def others_than(value: Any) -> list[Any]:
    """Other values of the kind of a value in config.json."""
    others = {bool: lambda: not value, int: lambda: value + 1, float: lambda: value * 2 + 0.25}
    return [others[type(value)]()] if type(value) in others else [1] * (value is None)


def reference(config: PreTrainedConfig) -> Any:
    """Return a model with random weights; norms and biases too, or mistakes would hide."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    torch.manual_seed(0)  # now, since a key may change what the class draws
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.3 if parameter.ndim == 1 else 0.0, std=0.2)
    for layer in model.base_model.layers if hasattr(model.base_model, "layers") else ():
        getattr(layer, "layer_scalar", torch.ones(1)).uniform_(0.5, 1.5)
    return model


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE that splits text as Qwen2 does."""
    (folder / "tokenizer.json").write_text(small_tokenizer())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@functools.cache
def small_tokenizer() -> str:
    """Return the content of its tokenizer.json."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN2_SPLIT), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["a rose is a rose in 1812 and in 2024"], trainer)
    return str(tokenizer.to_str())


def check_parity(theirs: Any, tmp_path: Path, rewritten: Collection[str] = ()) -> GPT:
    """Logits, loss and gradients are those of transformers, and an export is the model again.

    It has the class and every key that the model came with; those of `rewritten` may have other
    values. Return our model.
    """
    config = theirs.config
    theirs.save_pretrained(tmp_path / "in")
    write_tokenizer(tmp_path / "in")
    model = check_computation(theirs, tmp_path / "in")

    export(model, tmp_path / "in", tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    tokens = torch.randint(301, (2, 101))
    weights, exported = theirs.state_dict(), again.state_dict()
    assert weights.keys() == exported.keys()
    assert [name for name, x in exported.items() if not torch.equal(x, weights[name])] == []
    # Not to the bit: weights from a file are aligned otherwise, and a product by one row shows it
    torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    back = pretrained(tmp_path / "out")
    assert back.config == model.config == read_config(tmp_path / "in")
    if config.model_type in ("gpt_neox", "starcoder2", "cohere2"):  # trained from scratch, too
        assert write_config(replace(back.config, source={}), 64)["model_type"] == config.model_type
    torch.testing.assert_close(back.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert type(again) is type(theirs)
    ours, want = again.config.to_dict(), theirs.config.to_dict()
    free = {"architectures", "dtype", "_name_or_path", "bos_token_id", "eos_token_id", *rewritten}
    assert {key for key in ours.keys() - free if ours[key] != want[key]} == set()
    text = "In 1812 a rose is 20 roses"
    ids = tokenizers.Tokenizer.from_file(str(tmp_path / "in" / "tokenizer.json")).encode(text).ids
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] == ids
    assert again.generation_config.eos_token_id == again.config.eos_token_id
    return model


def check_computation(theirs: Any, folder: Path) -> GPT:
    """Logits, loss and gradients of `folder`, which is returned, are those of `theirs`."""
    model = pretrained(folder)
    tokens = torch.randint(301, (2, 101))
    expected = theirs(tokens, labels=tokens)
    assert (model(tokens) - expected.logits).abs().max() < 1e-4 * expected.logits.abs().max()
    loss = model(tokens, torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], dim=1))
    want = expected.loss
    # The loss that balances experts has gradients, but is not added to ours
    if (balancing := getattr(expected, "aux_loss", None)) is not None:
        want = want - theirs.config.router_aux_loss_coef * balancing
    torch.testing.assert_close(loss, want, rtol=1e-4, atol=0)
    loss.backward()
    expected.loss.backward()
    family, source = read_model(folder)
    saved = saved_gradients(theirs, folder / "gradients").items()
    gradients = {family.named(name): gradient for name, gradient in saved}
    # A bias of k has no gradient but for rotation and rounding
    least = 1e-6 * theirs.get_input_embeddings().weight.grad.abs().max()
    for piece in family.tensors_of(source, gradients):
        weight = model.get_parameter(piece.ours)
        if not weight.requires_grad:
            continue
        ours = weight.grad[piece.rows]
        want = piece.fold.load(gradients[family.named(piece.theirs)])
        bar = 3e-3 if "qkvz" in piece.theirs else 1e-3  # one rounding changes it by 0.0017 there
        assert (ours - want).abs().max() < bar * want.abs().max() + least, piece.theirs
    return model


def saved_gradients(theirs: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The gradients of `theirs` by the names of its folder, which fuse and split otherwise."""
    copied = deepcopy(theirs)
    for q, p in zip(copied.parameters(), theirs.parameters(), strict=True):
        q.data = torch.zeros_like(p) if p.grad is None else p.grad
    copied.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


class FamilyTests:
    """The tests that each family inherits; its attributes are the family's expectations."""

    config_class: type[PreTrainedConfig]
    # key → values of which each configuration has one
    drawn: Mapping[str, Sequence[Any]] = {}
    # hidden sizes per head among which it has one
    widths: tuple[int, ...] = (6, 8, 14)
    # name → changes of SMALL that make another configuration
    cases: Mapping[str, Mapping[str, Any]] = {}
    # ids that the class would place beyond the small vocabulary
    special: Mapping[str, Any] = {}
    # sizes of the model whose keys are all tried; elsewhere the class has its own
    few: Mapping[str, Any] = {}
    # keys that an export may write otherwise
    rewritten: tuple[str, ...] = ()
    # scalings that its class has
    ropes: tuple[str, ...] = tuple(ROPES)[:-1]
    # keys of the model whose positions are stretched; its heads rotate 8 channels
    stretched: Mapping[str, Any] = {}
    # rope_parameters of windowed layers, in a family that has them for each kind of layer
    windowed_rope: Mapping[str, Any] | None = None
    # rope_parameters that stand next to the others
    growth: Mapping[str, Any] = {}
    lora_targets: tuple[str, ...] = LORA_TARGETS
    # relative difference that rounding to fp32 makes in packed documents
    rounding: float = 1e-5

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:  # five seeds pick each value; LONGCTX_SEEDS=15 more
            seeds = range(3, int(os.environ.get("LONGCTX_SEEDS", 5)))
            slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in seeds]
            metafunc.parametrize("case", [0, 1, 2, *slow, *self.cases])

    def rope_keys(self, rope: Mapping[str, Any]) -> dict[str, Any]:
        """Return rope_parameters with `rope` in layers without a window."""
        kinds = {"full_attention": dict(rope), "sliding_attention": deepcopy(self.windowed_rope)}
        return {"rope_parameters": {**rope, **self.growth} if self.windowed_rope is None else kinds}

    def pick(self, key: str, values: Sequence[Any], seed: int) -> Any:
        """Return one of `values`; as many seeds as there are values pick all of them."""
        turn, place = divmod(seed, len(values))
        draw = random.Random(f"{self.config_class.model_type} {key} {turn}")
        return deepcopy(draw.sample(values, len(values))[place])

    def config(self, seed: int, **changes: Any) -> PreTrainedConfig:
        """Return a random configuration of the family, with `changes`."""
        values = COMMON | {"width": self.widths} | self.drawn
        keys = {key: self.pick(key, each, seed) for key, each in values.items()}
        heads = keys["num_key_value_heads"] * keys.pop("group")
        sizes = {"num_attention_heads": heads, "hidden_size": heads * keys.pop("width")}
        rope = self.rope_keys({"rope_type": "default", "rope_theta": keys.pop("theta")})
        every = deepcopy(SIZES) | SPECIAL | dict(self.special)
        return self.config_class(**every | rope | sizes | keys | changes)

    def content(self) -> dict[str, Any]:
        """Return a config.json with every key that transformers writes."""
        keys = deepcopy(SIZES) | SPECIAL | {"num_key_value_heads": 2, "head_dim": 8}
        keys |= {**self.special, **self.few, **self.rope_keys(SIZES["rope_parameters"])}
        content = json.dumps(self.config_class(**keys).to_dict())  # with infinity as a number
        return dict(json.loads(content))

    @torch.no_grad()
    def check_packed(self, model: GPT, theirs: Any, tmp_path: Path) -> None:
        """Packed documents are each alone in transformers, in 32 and 16 bits, with LoRA, exported.
        In 16 bits it is the token in the middle: routers choose differently for some.
        """
        documents = torch.repeat_interleave(torch.arange(4), torch.tensor([37, 1, 24, 31]))[None]
        tokens, mask = torch.randint(301, documents.shape), Mask.documents(documents)

        def alone(theirs: Any) -> torch.Tensor:
            each = [theirs(tokens[documents == n][None]).logits for n in range(4)]
            return torch.cat(each, dim=1)

        def packed(model: GPT) -> torch.Tensor:
            return model(tokens, mask=mask)

        def error(logits: torch.Tensor, expected: torch.Tensor, of: Any = torch.mean) -> float:
            return float(of((logits - expected).norm(dim=-1) / expected.norm(dim=-1)))

        expected = alone(theirs)
        assert error(packed(model), expected) < self.rounding
        added = lora.add(model, LoraConfig(2, targets=[*self.lora_targets]))
        for layer in lora.layers(added):
            torch.nn.init.normal_(layer.lora_b, std=0.1)
        export(lora.merge(added), tmp_path / "in", tmp_path / "new")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "new", attn_implementation="eager")
        trained = packed(added)
        assert error(trained, alone(again)) < self.rounding < error(trained, expected)
        short, low = pretrained(tmp_path / "in", dtype=torch.bfloat16), alone(theirs.bfloat16())
        assert error(packed(short), expected, torch.median) < 2 * error(low, expected, torch.median)

    def test_computes_as_in_transformers_and_comes_back(self, case, tmp_path):
        is_drawn = isinstance(case, int)
        keys = {} if is_drawn else deepcopy(SMALL | dict(self.cases[case]))
        theirs = reference(self.config(case) if is_drawn else self.config_class(**keys))
        model = check_parity(theirs, tmp_path, self.rewritten)
        self.check_packed(model, theirs, tmp_path)

    def test_stretched_computes_as_in_transformers(self, tmp_path):
        """A scaling changes angles alone: the first is tried with gradients and export."""
        keys = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
        keys |= {"head_dim": 8} if "head_dim" in self.drawn else {}
        for rope in self.ropes:
            scaled = self.rope_keys({"rope_theta": 5000.0} | ROPES[rope])
            theirs = reference(self.config(0, **keys | scaled | dict(self.stretched)))
            if rope == self.ropes[0]:
                check_parity(theirs, tmp_path, self.rewritten)
                continue
            theirs.save_pretrained(folder := tmp_path / rope)
            model, tokens = pretrained(folder), torch.randint(301, (2, 101))
            with torch.no_grad():
                found, expected = model(tokens), theirs(tokens).logits
            assert (found - expected).abs().max() < 1e-4 * expected.abs().max(), rope
            (folder / "config.json").write_text(json.dumps(write_config(model.config, 64)))
            again = self.config_class.from_json_file(folder / "config.json")
            assert again.rope_parameters == theirs.config.rope_parameters, rope
            assert read_config(folder) == model.config, rope

    def test_missing_keys_are_those_of_transformers_and_unknown_ones_are_refused(self, tmp_path):
        keys = {k: SIZES[k] for k in ("vocab_size", "num_hidden_layers", "intermediate_size")}
        keys |= {"hidden_size": 64, "num_attention_heads": 32} | SPECIAL | dict(self.special)
        content = {"model_type": self.config_class.model_type, **keys}
        (tmp_path / "config.json").write_text(json.dumps(content))
        missing = read_config(tmp_path)
        longer = self.config_class.from_dict(write_config(missing, 8192))
        assert longer.max_position_embeddings == 8192
        self.config_class(**keys).to_json_file(tmp_path / "config.json", use_diff=False)
        assert missing == read_config(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(self.content() | {"clip_qkv": 0.5}))
        with pytest.raises(ValueError, match=r"config\.json: clip_qkv=0\.5 "):
            read_config(tmp_path)

    def test_keys_that_are_not_read_change_nothing_in_transformers(self, tmp_path):
        """Each field of the class in transformers is read, refused, or without effect."""
        content, file = self.content(), tmp_path / "config.json"

        def written(changes: Mapping[str, Any]) -> GPTConfig:
            file.write_text(json.dumps(content | dict(changes)))
            return read_config(tmp_path)

        before, ignored = written({}), {}
        for key, value in content.items():
            if key in STRUCTURE:
                continue
            for other in others_than(value):
                with suppress(ValueError):  # refused
                    if written({key: other}) == before:
                        ignored[key] = other
        assert {"attention_dropout", "use_cache"} <= ignored.keys()
        tokens = torch.randint(301, (1, 101))
        plain = reference(self.config_class.from_dict(content))(tokens).logits

        def changes_nothing(changes: Mapping[str, Any]) -> bool:
            changed = reference(self.config_class.from_dict(content | dict(changes)))
            return torch.equal(changed(tokens).logits, plain)

        if not changes_nothing(ignored):  # as two may that change nothing alone
            assert [key for key in ignored if not changes_nothing({key: ignored[key]})] == []
