"""Reading of a config.json, key by key. A mistake is one ValueError with file, key and value.

Of multimodal folders, such as Gemma 3 from 4B up and Mistral 3, the text model is read and trained;
an export is a folder of its own.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from longctx import untrusted
from longctx.config.rope_config import ORIGINAL, SHARE, is_number

TABLES = tomllib.loads((Path(__file__).parent / "families.toml").read_text(encoding="utf-8"))
WRAPPERS: dict[str, str] = TABLES.pop("wrappers")
PREFIXES: dict[str, str] = TABLES.pop("prefixes")
OLDER: dict[str, str] = TABLES.pop("older_kinds")
TARGETS: dict[str, str] = TABLES.pop("targets")
QWEN2_SPLIT: str = TABLES.pop("qwen2_split")
# Keys that change the computation → the values for GPT. A missing key has the first
COVERED: dict[str, tuple[Any, ...]] = {key: tuple(x) for key, x in TABLES.pop("covered").items()}
COVERED |= {key: (*values, None) for key, values in TABLES.pop("covered_or_null").items()}


class ConfigJson(dict[str, Any]):
    """The keys of the config.json in `file`."""

    def __init__(self, file: Path, keys: Mapping[str, Any]) -> None:
        super().__init__(keys)
        self.file = file

    def with_keys(self, /, **keys: Any) -> ConfigJson:
        """Return the same with `keys` in the place of its own."""
        return ConfigJson(self.file, self | keys)

    def text_model(self) -> ConfigJson:
        """Return the config.json of the text model, which may be all of it."""
        default = WRAPPERS.get(str(self.get("model_type")))
        if default is None:
            return self
        text, tied = self.get("text_config"), self.get("tie_word_embeddings")
        if not isinstance(text, dict):
            raise self.error(f"text_config={text!r} must be an object")
        shared = {} if tied is None else {"tie_word_embeddings": tied}
        return ConfigJson(self.file, {"model_type": default, **text, **shared})

    def size(self, key: str) -> int:
        """Return a whole number from 1 up."""
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise self.error(f"{key}={value!r} must be a whole number from 1 up")
        return value

    def number(self, key: str, default: Any = None) -> Any:
        """Return a number above 0, or `default`, which a missing or null one has."""
        return self.above_0(key, self.get(key), default)

    def flag(self, key: str) -> bool:
        """Return true or false; false if it is missing or null."""
        value = False if self.get(key) is None else self[key]
        if not isinstance(value, bool):
            raise self.error(f"{key}={value!r} must be true or false")
        return value

    def kinds(self, key: str, layers: int, *known: str) -> list[str] | None:
        """Return the kind of each layer, one of those `known`, if the file has `key`."""
        kinds = self.get(key)
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise self.error(f"{key}={_short(kinds)} must be a list of {layers}, one a layer")
        kinds = [OLDER.get(kind, kind) for kind in kinds]
        for n, kind in enumerate(kinds):
            self.refuse_unless(f"{key}[{n}]", kind, known)
        return kinds

    @property
    def rope_key(self) -> str:
        """Return the key of RoPE's parameters: the older one comes first, as in transformers."""
        return "rope_scaling" if self.get("rope_scaling") else "rope_parameters"

    def rope(self) -> tuple[float, dict[str, Any]]:
        """Return RoPE's base and scaling, {} for none, with transformers' defaults filled in."""
        place = self.rope_key
        rope = self.get(place) or {}
        for key, value in rope.items():
            if isinstance(value, dict):
                shown = f"{place}.{key}={_short(value)}"
                raise self.error(f"{shown} is not covered yet; one rope for all layers")
        owner = rope if "rope_theta" in rope else self
        theta = self.above_0("rope_theta", owner.get("rope_theta"), 10000.0)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return theta, {}
        is_share = kind != "proportional"  # which has it among its own keys
        not_scaling = ("type", "rope_type", "rope_theta", *[SHARE] * is_share)
        scaling = {"rope_type": kind} | {
            key: value
            for key, value in rope.items()
            if key not in not_scaling and value is not None and not key.startswith("mrope_")
        }
        if kind in ("llama3", "yarn", "longrope"):
            outer = self.get(ORIGINAL)
            inner = scaling.get(ORIGINAL, outer)
            if outer is not None and outer != inner:
                raise self.error(f"{ORIGINAL}={outer} differs from {place}.{ORIGINAL}={inner}")
            default = self["max_position_embeddings"] if outer is None else outer
            scaling.setdefault(ORIGINAL, default)
        return theta, scaling

    def rotary_share(self, is_covered: bool) -> float:
        """Return the share of a head's channels that rotate; all, unless `is_covered`."""
        place, rope = self.rope_key, self.get(self.rope_key) or {}
        value, shown = self.get(SHARE), SHARE
        if rope.get("rope_type") == "proportional":
            return 1.0
        if rope.get(SHARE) is not None:
            value, shown = rope[SHARE], f"{place}.{SHARE}"
        if not is_covered:
            self.refuse_unless(shown, value, (1.0, None))
        return self.above_0(shown, value, 1.0)

    def refuse_uncovered(
        self, read: Collection[str], harmless: Collection[str], covered: dict[str, Any]
    ) -> None:
        """Raise for the first key that is not among `read`, and is not known to change nothing."""
        # `covered` adds to COVERED. A key that is null says nothing, so it is let through.
        covered = COVERED | covered
        for key, values in covered.items():
            if key not in read and key not in harmless:
                self.refuse_unless(key, self.get(key, values[0]), values)
        for key, value in self.items():
            known = key in read or key in harmless or key in covered or key.startswith("_")
            if not known and value is not None:
                problem = f"{key}={_short(value)} is not covered yet"
                raise self.error(f"{problem}; take it out if the model computes the same without")

    def refuse_unless(self, key: str, value: Any, covered: tuple[Any, ...]) -> None:
        """Raise unless `value` of `key` is one of those `covered`."""
        if not any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in covered):
            wanted = covered[0] if isinstance(covered[0], str) else json.dumps(covered[0])
            problem = f"{key}={_short(value)} is not covered yet; only {wanted} is"
            raise self.error(f"{problem}, but transformers=always may compute it")

    def error(self, message: str) -> ValueError:
        """Return a ValueError that begins with the file."""
        return ValueError(f"{self.file}: {message}")

    def above_0(self, key: str, value: Any, default: Any = None) -> Any:
        """Return a `value` of `key` that is a number above 0, or `default` for null."""
        if value is None or (is_number(value) and value == default):
            return default
        if not is_number(value) or value <= 0:
            raise self.error(f"{key}={value!r} must be a number above 0")
        return float(value)


def wraps(folder: Path) -> bool:
    """Return True if the text model of `folder` is one model among others."""
    return untrusted.read_settings(folder / "config.json").get("model_type") in WRAPPERS


def text_name(name: str) -> str | None:
    """Return the name that a tensor has in a folder of the text model alone, or None."""
    prefix = next(filter(name.startswith, PREFIXES), None)
    return None if prefix is None else PREFIXES[prefix] + name.removeprefix(prefix)


def _short(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:80]
