"""Kernel locks of runs, compared: which kernels ran, and where runs of one backend ran others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longctx import untrusted
from longctx.runs.metrics import Row


def kernel_lock(folder: Path) -> dict[str, str]:
    """kernel.lock.json as one line of a table: the kernel, its sources and results by a short hash,
    the machine.

    {} where there is none; raises OSError or ValueError where it cannot be read.
    """
    path = folder / "kernel.lock.json"
    if not path.is_file():
        return {}
    lock = untrusted.read_json(path, within=folder)
    if not isinstance(lock, dict):
        raise ValueError(f"{path}: not a kernel lock")
    cells: dict[str, str] = {}
    for key, value in lock.items():
        if key == "machine" and isinstance(value, dict):
            cells |= {str(name): str(version) for name, version in value.items()}
        elif isinstance(value, dict | list):
            if key not in ("compiled", "earlier", "not_reproducible"):
                cells[key] = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[
                    :10
                ]
        elif key not in ("format", "backend"):
            cells[key] = str(value)
    return cells


def lock_differences(locks: Iterable[tuple[str, Row, dict[str, str]]]) -> list[str]:
    """A warning for each field in which locks of one backend differ; `locks` holds the (label,
    configuration, lock) of every run.

    Fingerprints are compared among runs of the same model, precision and length, on which they
    depend.
    """
    by_backend: dict[str, list[tuple[str, Row, dict[str, str]]]] = {}
    for label, config, lock in locks:
        if lock:
            by_backend.setdefault(str(config.get("attention.backend")), []).append(
                (label, config, lock)
            )
    warnings = []
    for backend, members in by_backend.items():
        for key in dict.fromkeys(key for _, _, lock in members for key in lock):
            groups: dict[Any, dict[str, list[str]]] = {}
            for label, config, lock in members:
                shape = _shape(config) if key == "fingerprint" else None
                groups.setdefault(shape, {}).setdefault(lock.get(key, "none"), []).append(label)
            for values in groups.values():
                if len(values) > 1:
                    text = "; ".join(
                        f"{value} ({_names(labels)})" for value, labels in values.items()
                    )
                    warnings.append(f"warning: kernel locks of {backend} differ in {key}: {text}")
    return warnings


def _shape(config: Row) -> tuple[Any, ...]:
    keys = (
        "seq_len",
        "precision",
        *(f"model.{key}" for key in ("channels", "heads", "kv_heads", "head_dim")),
    )
    return tuple(config.get(key) for key in keys)


def _names(labels: list[str]) -> str:
    return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")
