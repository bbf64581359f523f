"""Checkpoints and folders of the Hub that tests write, and a limit of what they write."""

import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from torch import Tensor

from longctx.runs.checkpoint_write import Saving, Sharded

WITHOUT_OPTIMIZER: dict[str, Any] = {"param_groups": [], "optimizer_scalars": {}}  # in a checkpoint


def write(saving: Saving, memory: list[Tensor] | None = None) -> None:
    """Write a checkpoint and wait until it is on disk; all its ranks call it."""
    with ThreadPoolExecutor(1) as thread:
        saving.begin(thread, memory)
    saving.written.result()


def alone(tensor: Tensor) -> Sharded:
    """Return `tensor` as the share of a rank that has all of it."""
    return Sharded(tensor, tensor.shape, [slice(0, len(tensor))])


def write_config(folder: Path, settings: dict[str, Any]) -> None:
    """Write the config.yaml of a run."""
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))


def to_hub_cache(folder: Path, commit: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Move a folder to the Hub's cache, offline, as me/small at `commit`; return the snapshot."""
    cache = folder.parent / "hub"
    model = cache / "models--me--small"
    snapshot = model / "snapshots" / commit
    for place in (snapshot, model / "blobs", model / "refs"):
        place.mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(model / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return snapshot


@contextmanager
def files_below(size: int) -> Iterator[None]:
    """As on a full disk: no file of this process grows beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
