"""longctx: train GPTs on long documents, with pluggable exact attention."""

__version__ = "0.1.0"
