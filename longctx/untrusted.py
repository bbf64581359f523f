"""Files that others may have made: opened only if regular, of bounded size and in their folder.

Model folders, tokenizers, caches, configurations and documents come from anywhere. A FIFO would
wait for ever, a link to /dev/zero never end, a link out of a folder reveal a file of the user's.
Every refusal is one line that begins with the file.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, BinaryIO

MIB = 1 << 20
# Of the largest known models: config.json 0.1 MiB, an index of shards 9 MiB, tokenizer.json 33 MiB.
SETTINGS_SIZE = 16 * MIB  # bytes of a JSON file of settings, or of a YAML or a template
TOKENIZER_SIZE = 40 * MIB
YAML_SIZE = MIB
YAML_DEPTH = 32
# What PyYAML raises for !!int x, !!int '', !!bool x, !!timestamp x, !!set [1]
WRONG_VALUE = (ValueError, IndexError, KeyError, AttributeError, TypeError)


def open_file(path: Path, limit: int | None = None, within: Path | None = None) -> BinaryIO:
    """Open a regular file of at most `limit` bytes (None: any size) that really is in `within`.

    Raises FileNotFoundError if there is none, and ValueError for anything else.
    """
    try:
        if within is not None:
            _check_within(path, within)
        # O_NONBLOCK: opening a FIFO does not wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:  # a loop of links, a socket, no permission
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    status = os.fstat(descriptor)
    problem = ""
    if not stat.S_ISREG(status.st_mode):
        problem = "not a regular file; take it out"
    elif limit is not None and status.st_size > limit:
        problem = f"{status.st_size:,} bytes; such a file has at most {limit:,}"
    if problem:
        os.close(descriptor)
        raise ValueError(f"{path}: {problem}")
    return os.fdopen(descriptor, "rb")


def check_file(path: Path, limit: int | None = None, within: Path | None = None) -> None:
    """Raise as `open_file`, for a file that something else opens by its name."""
    open_file(path, limit, within).close()


def read_text(path: Path, limit: int = SETTINGS_SIZE, within: Path | None = None) -> str:
    """Return the text of a file in UTF-8; raise as `open_file`."""
    with open_file(path, limit, within) as file:
        try:
            # A file may grow after its size was checked.
            return file.read(limit).decode("utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise ValueError(f"{path}: cannot be read as text in UTF-8 ({error})") from error


def read_json(
    path: Path, limit: int = SETTINGS_SIZE, within: Path | None = None, **options: Any
) -> Any:
    """Return the content of a JSON file, by json.loads with `options`; raise as `open_file`."""
    text = read_text(path, limit, within)
    try:
        return json.loads(text, **options)
    except (ValueError, RecursionError) as error:  # thousands of digits, or of nested brackets
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from error


def read_yaml(path: Path, within: Path | None = None) -> str:
    """Return the text of a YAML file that is harmless to load; raise as `open_file`.

    It is bounded in size and depth and has no aliases, which can stand for one another until they
    fill the memory. No key is given twice: a loader would drop the first one.
    """
    import yaml

    text = read_text(path, YAML_SIZE, within)
    # For each open mapping its keys, and an iterator that tells if the next node is a key; None for
    # a list.
    opened: list[tuple[set[str], Iterator[bool]] | None] = []
    try:
        for event in yaml.parse(text, getattr(yaml, "CLoader", yaml.Loader)):
            if isinstance(event, yaml.NodeEvent) and opened and opened[-1] is not None:
                names, is_key = opened[-1]
                if next(is_key) and isinstance(event, yaml.ScalarEvent):
                    if event.value in names:
                        raise ValueError(f"{path}: {event.value} is given twice; leave one out")
                    names.add(event.value)
            if isinstance(event, yaml.CollectionStartEvent):
                is_mapping = isinstance(event, yaml.MappingStartEvent)
                opened.append((set(), cycle([True, False])) if is_mapping else None)
            elif isinstance(event, yaml.CollectionEndEvent):
                opened.pop()
            if len(opened) > YAML_DEPTH or isinstance(event, yaml.AliasEvent):
                raise ValueError(
                    f"{path}: an alias, or nested more than {YAML_DEPTH} deep; write the values out"
                )
    except yaml.YAMLError as error:
        raise _not_yaml(path, error) from error
    return text


def load_yaml(path: Path, within: Path | None = None) -> Any:
    """Return the content of a YAML file; raise as `read_yaml`."""
    import yaml

    text = read_yaml(path, within)
    try:
        # CSafeLoader is ten times as fast, if PyYAML was built with it
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, *WRONG_VALUE) as error:
        raise _not_yaml(path, error) from error


def _not_yaml(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}")


def copy_file(source: Path, target: Path, limit: int, within: Path) -> None:
    """Copy a file of at most `limit` bytes that really is in `within`; raise as `open_file`."""
    with open_file(source, limit, within) as file:
        target.write_bytes(file.read(limit))


def _check_within(path: Path, within: Path) -> None:
    """Raise ValueError for a path that leads out of the folder `within`."""
    real = Path(os.path.realpath(path, strict=True))
    folder = within.resolve()
    # Hugging Face's cache: snapshots/COMMIT/FILE is a link to blobs/HASH
    blobs = [folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else []
    if not any(real.is_relative_to(root) for root in (folder, *blobs)):
        raise ValueError(
            f"{path}: a link to {real}, outside of its folder; put a copy of the file there"
        )
