"""Documents in, sequences of tokens out: sources, tokenizer, packing, and the order of samples.

Some names are imported when first used: reading a DataConfig does not wait for torch or pyarrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from longctx.config.data_config import DataConfig as DataConfig
from longctx.data.documents import Document as Document
from longctx.data.sources.registry import read_documents as read_documents

if TYPE_CHECKING:
    from longctx.data.dataset import Data as Data
    from longctx.data.dataset import load as load
    from longctx.data.dataset import open_tokenizer as open_tokenizer
    from longctx.data.tokenizer import Tokenizer as Tokenizer

_HOME = {
    "Data": "longctx.data.dataset",
    "load": "longctx.data.dataset",
    "open_tokenizer": "longctx.data.dataset",
    "Tokenizer": "longctx.data.tokenizer",
}
__all__ = ["DataConfig", "Document", "read_documents", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
