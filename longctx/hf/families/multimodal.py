"""Multimodal folders, such as Gemma 3 from 4B up and Mistral 3: a text model and what sees images.

The text model is trained, and an export is a folder of its own.
"""

from __future__ import annotations

from pathlib import Path

from longctx import untrusted
from longctx.hf.families.config_json import ConfigJson

# model_type of config.json → that of its text_config, if it has none
WRAPPERS = {"gemma3": "gemma3_text", "mistral3": "mistral"}
# Names as folders have them, and as transformers has them in memory; in a text model's own folder
PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}


def wraps(folder: Path) -> bool:
    """Return True if the text model of `folder` is one model among others."""
    return untrusted.read_settings(folder / "config.json").get("model_type") in WRAPPERS


def text_model(source: ConfigJson) -> ConfigJson:
    """Return the config.json of the text model of `source`, which may be all of it."""
    default = WRAPPERS.get(str(source.get("model_type")))
    if default is None:
        return source
    text = source.get("text_config")
    if not isinstance(text, dict):
        raise source.error(f"text_config={text!r} must be an object")
    tied = source.get("tie_word_embeddings")
    shared = {} if tied is None else {"tie_word_embeddings": tied}
    return ConfigJson(source.file, {"model_type": default, **text, **shared})


def text_name(name: str) -> str | None:
    """Return the name that a tensor has in a folder of the text model alone, or None."""
    prefix = next(filter(name.startswith, PREFIXES), None)
    return None if prefix is None else PREFIXES[prefix] + name.removeprefix(prefix)
