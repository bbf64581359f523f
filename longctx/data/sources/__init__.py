"""Sources of documents, which register themselves as `data=NAME`, and the names for one's own."""

from longctx.config.data_config import SOURCES as SOURCES
from longctx.data.documents import Corpus as Corpus
from longctx.data.documents import Document as Document
from longctx.data.documents import Shard as Shard
from longctx.data.documents import exact_key as exact_key
from longctx.data.sources import embedded, hub, mix, repository, text  # noqa: F401
from longctx.data.sources.registry import Source as Source
from longctx.data.sources.registry import register as register

__all__ = ["Corpus", "Document", "Shard", "Source", "exact_key", "register"]
