"""Plugins: Python files of the user's own, `plugins=[my_backend.py]`, that register attention
backends, optimizers, data sources and objectives; docs/extend.md has one of each.

A plugin is code, so only the command line can name one. A file that names plugins, such as
config.yaml of a run with their paths and hashes, is refused until the command line names them too.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longctx import untrusted
from longctx.attention.description import DESCRIPTIONS, AttentionConfig
from longctx.runs import run_folder

HASH = "@sha256:"  # between the path of a recorded plugin and its hash


def load(plugins: Sequence[str]) -> list[str]:
    """Import each plugin once, and return them as config.yaml records them: PATH@sha256:HASH.

    ValueError or OSError, one line, for a file that is missing, fails, or is not the recorded one.
    """
    return [_load(*plugin.partition(HASH)[::2]) for plugin in plugins]


def _load(argument: str, expected: str) -> str:
    path = Path(argument).expanduser().absolute()
    if not path.is_file():
        raise FileNotFoundError(f"plugins={argument}: no such file; give a Python file of yours")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if expected not in ("", digest):
        raise ValueError(f"plugins={argument}: changed while the run started; start it again")
    # Pickled objects name their module, so it stays in sys.modules. The hash keeps names apart.
    name = f"{path.stem}_{digest[:12]}"
    if name not in sys.modules:
        _import(name, path, argument)
    return f"{path}{HASH}{digest}"


def _import(name: str, path: Path, argument: str) -> None:
    """Import the file at `path` as the module `name`; ValueError names the line that fails."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"plugins={argument}: not a Python file; give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        # The last line in this file; a SyntaxError has its own
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        where = f"line {getattr(error, 'lineno', None) or lines[-1]}"
        raise ValueError(f"plugins={argument}: {where}: {type(error).__name__}: {error}") from error


def check_named(recorded: Any, given: Sequence[str] | None, place: Path) -> None:
    """Raise ValueError if the file or run at `place` names plugins and the command line has no
    plugins=. `given` are those of the command line, as `load` returns them.

    Warn if one has changed since it was recorded.
    """
    if not recorded:
        return
    recorded = recorded if isinstance(recorded, list) else [recorded]
    if given is None:
        raise ValueError(
            f"{place}: names plugins, which run only if the command line names them too: "
            f"{shlex.quote(as_typed(recorded))}, or plugins=[] to go without"
        )
    names = {Path(path).name for path in _paths(recorded)}
    for entry in given:
        path, _, digest = entry.partition(HASH)
        if HASH in str(recorded) and Path(path).name in names and digest not in str(recorded):
            print(f"warning: plugins={path}: changed since {place} recorded it", file=sys.stderr)


def as_typed(recorded: Sequence[Any]) -> str:
    """Return the argument that names the plugins of a run, as `recorded` there."""
    return f"plugins=[{','.join(_paths(recorded))}]"


def _paths(recorded: Sequence[Any]) -> list[str]:
    return [str(entry).partition(HASH)[0] for entry in recorded]


def check_checkpoint(checkpoint: Path, given: Sequence[str] | None) -> None:
    """Do as `check_named` for the run of `checkpoint`, which elsewhere has no config.yaml."""
    folder = checkpoint.resolve().parent.parent
    if (folder / "config.yaml").is_file():
        check_named(run_folder.read_config(folder).get("plugins"), given, folder)


def attention_of(
    run: Mapping[str, Any] | None, file: Path, asked: AttentionConfig | None = None
) -> AttentionConfig:
    """Return the attention that computes the model of `file`: `asked`, else that of its `run`, else
    flash.

    Raises ValueError if a plugin that is not loaded brings the run's, or if the run's is not exact
    and another is asked for.
    """
    run = run or {}
    with untrusted.opened(file, "attention="):
        own = AttentionConfig(**run.get("attention", {}))
        if own.backend not in DESCRIPTIONS:
            recorded = run.get("plugins") or ["FILE.py"]
            raise ValueError(
                f"{file}: trained with attention={own.backend}, which a plugin brings; name it: "
                f"{as_typed(recorded)}"
            )
        own.validate()
        if asked is not None and asked.backend != own.backend and not own.description.exact:
            raise ValueError(
                f"attention={asked.backend}: {file} was trained with attention={own.backend}, "
                "which computes something else; leave attention out"
            )
    return asked or own
