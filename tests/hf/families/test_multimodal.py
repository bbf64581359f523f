"""The text model of a multimodal folder is trained and exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    Mistral3Config,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
)

from longctx.attention import Mask
from longctx.hf.export import export
from longctx.hf.model_folder import pretrained
from tests.hf.families.parity import write_tokenizer
from tests.hf.families.test_families import family_tests

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "patch_size": 14}
VISION |= {"num_attention_heads": 2, "image_size": 28}


def text(kind: str) -> dict[str, Any]:
    """Return a random text_config."""
    keys = {"tie_word_embeddings": kind.startswith("gemma"), "pad_token_id": 0}
    return dict(family_tests(kind)().config(0, **keys).to_dict())


def mistral3(kind: str) -> Mistral3Config:
    vision = {"model_type": "pixtral", "head_dim": 8, **VISION}
    more = {"image_token_index": 300, "tie_word_embeddings": False}
    return Mistral3Config(text_config=text(kind), vision_config=vision, **more)


def qwen(wrapper: Any, kind: str) -> Any:
    vision = VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": text(kind)["hidden_size"]}
    ids = {"image_token_id": 300, "video_token_id": 299}
    ids |= {"vision_start_token_id": 298, "vision_end_token_id": 297}
    return wrapper(text_config=text(kind), vision_config=vision, **ids)


CONFIGS = {
    "gemma3": Gemma3Config(
        text_config=text("gemma3_text") | {"final_logit_softcapping": None},
        vision_config={"model_type": "siglip_vision_model", **VISION},
        **{"mm_tokens_per_image": 4, "image_token_index": 300},
        **{"boi_token_index": 298, "eoi_token_index": 299},
    ),
    "gemma4": Gemma4Config(
        text_config=text("gemma4_text"),
        vision_config=VISION | {"head_dim": 8, "global_head_dim": 8, "num_key_value_heads": 2},
        **{"image_token_id": 300, "video_token_id": 299, "audio_token_id": 296},
    ),
    **{kind: mistral3(kind) for kind in ("mistral", "ministral3", "mistral4")},
    "qwen3_5": qwen(Qwen3_5Config, "qwen3_5_text"),
    "qwen3_5_moe": qwen(Qwen3_5MoeConfig, "qwen3_5_moe_text"),
}


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    theirs = AutoModelForImageTextToText.from_config(CONFIGS[request.param])
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


def test_names_as_in_memory_are_read(folder):
    names = {"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head"}
    before, tensors = pretrained(folder).state_dict(), load_file(folder / "model.safetensors")
    for old, new in names.items():
        tensors = {name.replace(old, new): x for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    torch.testing.assert_close(pretrained(folder).state_dict(), before, rtol=0, atol=0)


def test_an_export_is_the_text_model(folder, tmp_path):
    model, tokens = pretrained(folder), torch.randint(290, (1, 40))
    export(model, folder, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert "vision" not in str(theirs.state_dict().keys())
    torch.testing.assert_close(theirs.eval()(tokens).logits, opened(folder)(tokens).logits)
