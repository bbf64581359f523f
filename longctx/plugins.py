"""Plugins: Python files of the user's own, `plugins=[my_backend.py]`, that register attention
backends, optimizers, data sources and objectives; docs/extend.md has one of each.

A plugin is code, so only the command line can name one. A file that names plugins, such as
config.yaml of a run with their paths and hashes, is refused until the command line names them too.
"""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from longctx import untrusted
from longctx.attention.description import DESCRIPTIONS, SCORES, AttentionConfig
from longctx.config.fields import refuse
from longctx.model.mixers.description import PLUGINS
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
    source = path.read_bytes()
    digest = hashlib.sha256(source).hexdigest()
    if expected not in ("", digest):
        raise ValueError(f"plugins={argument}: changed while the run started; start it again")
    # Pickled objects name their module, so it stays in sys.modules. The hash keeps names apart.
    name = f"{path.stem}_{digest[:12]}"
    if name not in sys.modules:
        module = sys.modules[name] = ModuleType(name)
        module.__file__ = str(path)
        PLUGINS.add(str(path))
        try:
            exec(compile(source, path, "exec", dont_inherit=True), vars(module))
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            # A SyntaxError has its own line, others the last one in this file; a zero byte has none
            lines = [x.lineno for x in extract_tb(error.__traceback__) if x.filename == str(path)]
            line = getattr(error, "lineno", None) or [1, *lines][-1]
            problem = f"line {line}: {type(error).__name__}: {error}"
            raise ValueError(f"plugins={argument}: {problem}") from error
    return f"{path}{HASH}{digest}"


def check_named(recorded: Any, given: Sequence[str] | None, source: Path) -> str:
    """Raise ValueError if the file or run `source` names plugins and the command line has no
    plugins=. `given` are those of the command line, as `load` returns them.

    Warn if one has changed since it was recorded. Return a text for a mistake {} in its keys.
    """
    recorded = recorded if isinstance(recorded, list) else [recorded] if recorded else []
    problem = f"{source}: names plugins, which run only if you name them too: add"
    remedy = f"{as_typed(recorded)}, or plugins=[] to go without"
    refuse((recorded and given is None, f"{problem} {remedy}"))
    entries = [str(entry).partition(HASH) for entry in recorded]
    known = {digest: Path(path).name for path, _, digest in entries if digest}
    for path, _, digest in (entry.partition(HASH) for entry in given or ()):
        if Path(path).name in known.values() and digest not in known:
            print(f"warning: plugins={path}: changed since {source} recorded it", file=sys.stderr)
    return "{}" if given or not recorded else "{}; if a plugin has that, add " + as_typed(recorded)


def as_typed(recorded: Sequence[Any]) -> str:
    """Return the argument that names the plugins of a run, as `recorded` there, for a shell."""
    return shlex.quote(f"plugins=[{','.join(str(x).partition(HASH)[0] for x in recorded)}]")


def check_checkpoint(checkpoint: Path, given: Sequence[str] | None) -> None:
    """Do as `check_named` for the run of `checkpoint`, which elsewhere has no config.yaml."""
    folder = checkpoint.resolve().parent.parent
    if (folder / "config.yaml").is_file():
        check_named(run_folder.read_config(folder).get("plugins"), given, folder)


def attention_of(
    run: Mapping[str, Any] | None, file: Path, asked: AttentionConfig | None = None
) -> AttentionConfig:
    """Return the attention that computes the model of `file`: `asked`, with the run's score
    function, else that of its `run`, else flash. Raises ValueError if the run's is of a plugin that
    is not loaded, or is not exact and another is asked for.
    """
    run = run or {}
    with untrusted.opened(file, "attention="):
        own = AttentionConfig(**run.get("attention", {}))
        variant = own.variant
        trained = f"{file} was trained with {variant or f'attention={own.label}'}"
        typed = as_typed(run.get("plugins") or ["FILE.py"])
        plugin = f"{trained}, of a plugin: add {typed}, or in Python import the file"
        is_known = {x.backend for x in own.each} <= DESCRIPTIONS.keys()
        refuse((not is_known or own.options.get("score", "none") not in SCORES, plugin))
        own.validate()
        if asked is not None and "score" in own.options and "score" in asked.description.options:
            asked = AttentionConfig(asked.backend, own.options | asked.options, asked.window)
            asked.validate()
        other = asked is not None and variant is not None and asked.variant != variant
        problem = f"attention={asked and asked.label}: {trained}, which computes something else"
        refuse((other, f"{problem}; leave attention out"))
    return asked or own
