"""The text model of a multimodal folder is trained, and all else comes back unchanged."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from longctx.attention import Mask
from longctx.cli import main as cli
from longctx.hf.export import export
from longctx.hf.model_folder import pretrained
from tests.hf.families.parity import SIZES, SPECIAL, write_tokenizer

TEXT = {**SIZES, **SPECIAL, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 9}
TEXT["num_hidden_layers"] = 3
del TEXT["rope_parameters"]
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "patch_size": 14}
VISION |= {"num_attention_heads": 2, "image_size": 28}


def gemma3() -> Gemma3ForConditionalGeneration:
    tokens = {"image_token_index": 300, "boi_token_index": 298, "eoi_token_index": 299}
    vision = {"model_type": "siglip_vision_model", **VISION}
    config = Gemma3Config(text_config=TEXT, vision_config=vision, mm_tokens_per_image=4, **tokens)
    return Gemma3ForConditionalGeneration(config)


def mistral3() -> Mistral3ForConditionalGeneration:
    text = {"model_type": "mistral", "tie_word_embeddings": False, **TEXT}
    vision = {"model_type": "pixtral", "head_dim": 8, **VISION}
    config = Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=300, tie_word_embeddings=False
    )
    return Mistral3ForConditionalGeneration(config)


def ministral3() -> Mistral3ForConditionalGeneration:
    keys = mistral3().config.to_dict()
    growth = {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16}
    rope = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, **growth}
    keys["text_config"] |= {"model_type": "ministral3", "rope_parameters": rope}
    return Mistral3ForConditionalGeneration(Mistral3Config(**keys))


@pytest.fixture(params=[gemma3, mistral3, ministral3])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    theirs = request.param()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path / "in")
    write_tokenizer(tmp_path / "in")
    return tmp_path / "in"


def opened(folder: Path) -> torch.nn.Module:
    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()


def test_the_text_model_computes_as_in_transformers(folder):
    documents = torch.repeat_interleave(torch.arange(2), torch.tensor([23, 14]))[None]
    tokens = torch.randint(290, documents.shape)
    theirs = opened(folder)
    expected = torch.cat([theirs(tokens[documents == n][None]).logits for n in range(2)], dim=1)
    logits = pretrained(folder)(tokens, mask=Mask.documents(documents))
    assert (logits - expected).norm() < 1e-5 * expected.norm()


def test_all_else_is_carried_through_an_export(folder, tmp_path):
    (folder / "preprocessor_config.json").write_text('{"size": 28}')
    model, out = pretrained(folder), tmp_path / "out"
    with torch.no_grad():
        model.blocks[1].mlp.down.weight += 0.125
    export(model, folder, out, shard_bytes=20_000, wrapper=folder)
    assert (out / "preprocessor_config.json").read_text() == '{"size": 28}'
    before, after = opened(folder), opened(out)
    assert type(after) is type(before)
    weights = before.state_dict()
    assert after.state_dict().keys() == weights.keys()
    changed = "model.language_model.layers.1.mlp.down_proj.weight"
    for name, x in after.state_dict().items():
        moved = 0.125 if name == changed else 0.0
        torch.testing.assert_close(x, weights[name] + moved, rtol=0, atol=2**-24)
        if "vision" in name or "projector" in name:
            assert torch.equal(x, weights[name])
    assert after.config.vision_config.to_dict() == before.config.vision_config.to_dict()


def test_names_as_in_memory_are_read(folder, tmp_path):
    config, out = (folder / "config.json").read_text(), tmp_path / "renamed"
    out.mkdir()
    (out / "config.json").write_text(config)
    renamed = {
        name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head", "lm_head"
        ): x
        for name, x in load_file(folder / "model.safetensors").items()
    }
    save_file(renamed, out / "model.safetensors")
    for a, b in zip(pretrained(folder).parameters(), pretrained(out).parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rank", [None, 4])
def test_a_run_exports_what_it_began_with(rank, folder, tmp_path, capsys):
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(8):
        (texts / f"{n}.txt").write_text(f"a rose is a rose in 1812 and in 202{n}\n" * 40)
    keys = [f"init={folder}", "data=text", f"data.path={texts}", "device=cpu", "workers=0"]
    keys += ["seq_len=32", "batch_size=1", "accumulate=1", "max_steps=1", "name=a"]
    keys += ["wandb.mode=disabled", f"runs={tmp_path / 'runs'}", f"data.cache={tmp_path / 'cache'}"]
    keys += [] if rank is None else [f"lora.rank={rank}"]
    assert cli(["train", *keys]) == 0, capsys.readouterr().err
    assert cli(["export", str(tmp_path / "runs" / "a"), str(tmp_path / "out")]) == 0
    assert "vision_tower" in str(opened(tmp_path / "out").state_dict().keys())
    assert "warning" not in capsys.readouterr().err
