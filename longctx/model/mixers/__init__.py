"""Layers that mix tokens in another way than attention, one file each."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from longctx.model.mixers.description import Cost as Cost
from longctx.model.mixers.description import MixerSpec as MixerSpec
from longctx.model.mixers.description import register as register

if TYPE_CHECKING:
    from longctx.model.mixer import Batch as Batch
    from longctx.model.mixer import Mixer as Mixer


def __getattr__(name: str) -> Any:
    if name not in ("Batch", "Mixer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve_name(f"longctx.model.mixer:{name}")
