"""The model: a GPT in Llama's architecture. Importing the package, or its config, does not import
torch.
"""

from typing import TYPE_CHECKING, Any

from longctx.spec.model_config import GPTConfig as GPTConfig

if TYPE_CHECKING:
    from longctx.model.gpt import GPT as GPT


def __getattr__(name: str) -> Any:
    if name == "GPT":
        from longctx.model.gpt import GPT

        return GPT
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
