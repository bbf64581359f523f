"""Which attention backend a run uses, and its options."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class AttentionConfig:
    """`backend` is a name of the registry; `options` are that backend's own, for example `kernel` of sdpa."""

    backend: str = "flash"
    options: dict[str, Any] = field(default_factory=dict)
