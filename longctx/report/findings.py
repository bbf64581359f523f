"""What lies in a run's folder beside its rows: evaluations, passkey maps, the kernel lock. All of
it may be absent.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# A line of points for the page, such as loss over tokens before.
Line = dict[str, list[float]]


def evaluations(folder: Path) -> tuple[list[Row], list[Row], list[Row], list[Path]]:
    """What eval.py left in `folder`: perplexities, passkey maps, scores of tasks, and the files
    that are none of them.
    """
    scores, maps, done, wrong = [], [], [], []
    for path in (*sorted((folder / "eval").glob("*.json")), folder / "passkey.json"):
        if path.name == "passkey.json" and not path.is_file():
            continue
        try:
            content = json.loads(
                path.read_text(encoding="utf-8"), parse_float=number, parse_constant=number
            )
            if "kinds" in content or "accuracy" in content:
                maps += passkeys(content, path.name)
            elif "results" in content:
                done += tasks(content)
            else:
                scores.append(evaluation(content, path.name))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            wrong.append(path)
    return scores, maps, done, wrong


def evaluation(content: Row, name: str) -> Row:
    """A perplexity without its single documents."""
    total = content["total"]
    return {
        "file": printable(name),
        "context": int(content["context"]),
        "stride": int(content["stride"]),
        "tokens": int(total["tokens"]),
        **{
            key: None if total.get(key) is None else float(total[key])
            for key in ("perplexity", "word_perplexity", "bits_per_byte")
        },
        "positions": line(content.get("by_position", []), "first"),
        "contexts": line(content.get("by_context", []), "context"),
    }


def line(rows: Iterable[Row], x: str) -> Line:
    """The losses of an evaluation over the key `x`."""
    rows = list(rows)
    return {
        "x": [int(row[x]) for row in rows],
        "y": [float(f"{float(row['loss']):.5g}") for row in rows],
    }


def passkeys(content: Row, name: str) -> list[Row]:
    """The maps of one file: right answers as [length][depth], one map for each kind of fact."""
    grids = content.get("kinds", {"passkey": content})
    found = []
    for kind, grid in grids.items():
        lengths, depths = [int(x) for x in grid["lengths"]], [float(x) for x in grid["depths"]]
        accuracy = [[float(x) for x in row] for row in grid["accuracy"]]
        if len(accuracy) != len(lengths) or any(len(row) != len(depths) for row in accuracy):
            raise ValueError(f"{name}: accuracy is not [length][depth]")
        found.append(
            {"file": printable(name), "kind": printable(kind), "lengths": lengths, "depths": depths}
        )
        found[-1]["accuracy"] = accuracy
    return found


def tasks(content: Row) -> list[Row]:
    """The scores of lm-evaluation-harness, one for each task and metric."""
    found = []
    for task, values in content["results"].items():
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            if metric.isdigit() and value == -1:  # RULER's word for a length that was not asked
                continue
            name = f"{task} {metric}" if filtered == "none" else f"{task} {metric} ({filtered})"
            found.append(
                {"name": printable(name), "value": float(value), "context": int(content["context"])}
            )
    return found


def number(text: str) -> float:
    """A number of a JSON; ValueError for what a page cannot hold: NaN, infinity and what is beyond
    a float.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number")
    return value


def kernel_lock(folder: Path) -> dict[str, str]:
    """kernel.lock.json as lines of a table: what the kernel is, its sources and results by a short
    hash, the machine.

    {} where there is none; raises OSError or ValueError where it cannot be read.
    """
    path = folder / "kernel.lock.json"
    if not path.is_file():
        return {}
    lock = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(lock, dict):
        raise ValueError(f"{path}: not a kernel lock")
    found: dict[str, str] = {}
    for key, value in lock.items():
        if key == "machine" and isinstance(value, dict):
            found |= {
                printable(str(name)): printable(str(version)) for name, version in value.items()
            }
        elif isinstance(value, dict | list):
            if key not in ("compiled", "earlier", "not_reproducible"):
                found[printable(key)] = hashlib.sha256(
                    json.dumps(value, sort_keys=True).encode()
                ).hexdigest()[:10]
        elif key not in ("format", "backend"):
            found[printable(key)] = printable(str(value))
    return found


def lock_differences(locks: Iterable[tuple[str, Row, dict[str, str]]]) -> list[str]:
    """One line for each field in which runs of one backend ran other kernels; of (label,
    configuration, lock).

    Fingerprints are compared among runs of the same model, precision and length, on which they
    depend.
    """
    by_backend: dict[str, list[tuple[str, Row, dict[str, str]]]] = {}
    for label, config, lock in locks:
        if lock:
            by_backend.setdefault(str(config.get("attention.backend")), []).append(
                (label, config, lock)
            )
    said = []
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
                    said.append(f"warning: kernel locks of {backend} differ in {key}: {text}")
    return said


def _shape(config: Row) -> tuple[Any, ...]:
    keys = (
        "seq_len",
        "precision",
        *(f"model.{key}" for key in ("channels", "heads", "kv_heads", "head_dim")),
    )
    return tuple(config.get(key) for key in keys)


def _names(labels: list[str]) -> str:
    return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")


def printable(text: str) -> str:
    """Text that moves no cursor and breaks no encoding: names of folders are anybody's."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
