"""The model: a GPT in Llama's architecture. Neither the package nor its config imports torch."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longctx.model.gpt import GPT as GPT
    from longctx.spec.model_config import GPTConfig as GPTConfig


def __getattr__(name: str) -> Any:
    # The config, too: it imports the descriptions of mixers, which are in this package
    paths = {"GPT": "longctx.model.gpt:GPT", "GPTConfig": "longctx.spec.model_config:GPTConfig"}
    if name not in paths:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve_name(paths[name])
