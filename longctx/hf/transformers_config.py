"""The description of a model that transformers computes. torch-free: it was counted when the
config.json was read, and a run records it.
"""

from __future__ import annotations

import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

from longctx.config.fields import key, refuse
from longctx.config.layout_config import OFF
from longctx.config.rope_config import RopeConfig
from longctx.spec.model_config import GPTConfig

THEIRS = "transformers computes this model"
KEPT = RopeConfig("keep")


@dataclass
class TransformersConfig(GPTConfig):
    """The sizes of a model that transformers computes, for predictions, and its config.json."""

    transformers: dict[str, Any] = key({}, "its config.json, and counts of its weights")

    implementation: ClassVar[str] = "longctx.hf.transformers_model:TransformersModel"
    folders: ClassVar[str] = "longctx.hf.transformers_folder"
    has_kernels: ClassVar[bool] = False
    remark: ClassVar[str] = (
        ", computed by transformers (with our attention and loss; without fused kernels, "
        "torch.compile, fp8 and Muon)"
    )

    @property
    def settings(self) -> dict[str, Any]:
        """Return its config.json."""
        return dict(self.transformers["config"])

    def with_vocabulary(self, size: int) -> GPTConfig:
        raise ValueError(f"model.vocab_size={size}: {THEIRS}, with its own vocabulary; leave it")

    def with_layers(self, chosen: Sequence[int]) -> Self:
        cut = self.settings
        for name, value in cut.items():
            if isinstance(value, list) and len(value) == self.layers:
                cut[name] = [value[layer] for layer in chosen]
        own = self.transformers | {"config": cut | {"num_hidden_layers": len(chosen)}}
        return replace(super().with_layers(chosen), transformers=own)

    def matmul_parameters(self) -> int:
        return int(self.transformers["products"])

    def parameters(self) -> int:
        return int(self.transformers["parameters"])

    @cached_property
    def frozen_matrices(self) -> Counter[tuple[int, int]]:
        return Counter((rows, columns) for rows, columns in self.transformers["matrices"])

    def lora_widths(self, of_token: bool = False) -> Mapping[str, int]:
        return {name: width for name, width in self.transformers["lora"].items() if width}

    def check_length(self, tokens: int, key: str) -> None:
        limit = self.transformers.get("positions")
        if limit is not None and tokens > limit:
            problem = f"the model has learned {limit:,} positions; use at most that"
            raise ValueError(f"{key}={tokens}: {problem}")

    def accepted(self, request: Any) -> Any:
        memory = request.memory
        used = {
            "precision=fp8": request.precision == "fp8",
            "compile=true": request.compile.lower() == "true",
            "graphs=true": request.graphs.lower() == "true",
            # Its matrices are not known
            f"optimizer={request.optimizer.name}": request.optimizer.traits.orthogonalizes,
            f"rope={request.rope.type}": request.rope not in (RopeConfig(), KEPT),
            **{f"memory.{x}": getattr(memory, x) not in (None, y) for x, y in OFF.items()},
        }
        refuse(*((x, f"{key}: {THEIRS} without it; leave it out") for key, x in used.items()))
        return replace(request, rope=KEPT, memory=replace(memory, **OFF))

    def prove(self, device: str, precision: str, seq_len: int, packing: bool = False) -> None:
        pkgutil.resolve_name("longctx.hf.proof:prove")(self, device, precision, seq_len, packing)

    def packs(self, device: str, precision: str, seq_len: int, is_shared: bool) -> bool:
        try:
            self.prove(device, precision, seq_len, packing=True)
        except ValueError:
            # Ranks that share a sequence split documents, so layers must not mix tokens either
            if is_shared:
                raise
            self.prove(device, precision, seq_len)
            print("each document has a sequence of its own: this model's layers would mix them")
            return False
        return True

    def measured(self, step: Any, say: Callable[[str], None]) -> Any:
        return pkgutil.resolve_name("longctx.hf.layer_memory:measured_layers")(step, say)
