"""Which attention backend a run uses, and its options."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class AttentionConfig:
    """Which backend computes attention, and how."""

    backend: str = "flash"  # set by attention=NAME
    options: dict[str, Any] = field(default_factory=dict)  # the backend's own: attention.options.kernel=cudnn of sdpa
