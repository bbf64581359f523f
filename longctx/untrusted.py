"""Files that others may have made: opened only if regular, of bounded size and where they belong.

Model folders, tokenizers, caches, configurations and documents come from anywhere. A FIFO would
wait for ever, a link to /dev/zero never end, a link out of a folder hand over somebody's own file.
Every refusal is one line that begins with the file.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
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

_KINDS: dict[str, Callable[[int], bool]] = {
    "a folder": stat.S_ISDIR,
    "a FIFO": stat.S_ISFIFO,
    "a socket": stat.S_ISSOCK,
    "a device": stat.S_ISCHR,
    "a block device": stat.S_ISBLK,
}


def open_file(path: Path, most: int | None = None, within: Path | None = None) -> BinaryIO:
    """Open a regular file of at most `most` bytes (None: any size) that really lies in `within`.

    Raises FileNotFoundError where there is none and ValueError, one line, for anything else.
    """
    try:
        if within is not None:
            _check_within(path, within)
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # no wait for a FIFO
    except FileNotFoundError:
        raise
    except OSError as error:
        # a socket cannot be opened at all
        raise _unreadable(path, error) from error
    file = os.fdopen(number, "rb") if stat.S_ISREG(os.fstat(number).st_mode) else None
    if file is None:
        mode = os.fstat(number).st_mode
        os.close(number)
        kind = next((name for name, holds in _KINDS.items() if holds(mode)), "something else")
        raise ValueError(f"{path}: {kind}, where a regular file belongs; take it out")
    size = os.fstat(number).st_size
    if most is not None and size > most:
        file.close()
        raise ValueError(f"{path}: {size:,} bytes; files of its kind have at most {most:,}")
    return file


def check_file(path: Path, most: int | None = None, within: Path | None = None) -> None:
    """Raise as `open_file`, for a file that something else opens by its name."""
    open_file(path, most, within).close()


def read_text(path: Path, most: int = SETTINGS_SIZE, within: Path | None = None) -> str:
    """The text of a file in UTF-8; raises as `open_file`."""
    with open_file(path, most, within) as file:
        try:
            # one byte more than allowed shows a file that grew after its size was looked at
            content = file.read(most + 1)
            if len(content) > most:
                raise ValueError(f"{path}: grows while it is read")
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not text in UTF-8 ({error})") from error
        except OSError as error:
            raise _unreadable(path, error) from error


def read_json(
    path: Path, most: int = SETTINGS_SIZE, within: Path | None = None, **options: Any
) -> Any:
    """What a JSON file says, by json.loads with `options`; raises as `open_file`, and ValueError
    where it is no JSON.
    """
    text = read_text(path, most, within)
    try:
        return json.loads(text, **options)
    except (ValueError, RecursionError) as error:  # thousands of digits, or of nested brackets
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from error


def read_yaml(path: Path, within: Path | None = None) -> str:
    """Return the text of a YAML file that is harmless to load: bounded in size and depth, without
    aliases, which may stand for one another until they fill the memory, and with no key given
    twice, of which a loader drops the first. Raises as `open_file`.
    """
    import yaml

    text = read_text(path, YAML_SIZE, within)
    # The keys of each mapping that is open, and whether the next node in it is one; None: a list.
    opened: list[tuple[set[str], Iterator[bool]] | None] = []
    try:
        for event in yaml.parse(text, getattr(yaml, "CLoader", yaml.Loader)):
            if isinstance(event, yaml.NodeEvent) and opened and opened[-1] is not None:
                names, is_key = opened[-1]
                if next(is_key) and isinstance(event, yaml.ScalarEvent):
                    if event.value in names:
                        raise ValueError(
                            f"{path}: {event.value} is given twice; leave one of them out"
                        )
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
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be read as YAML: {reason}") from error
    return text


def load_yaml(path: Path, within: Path | None = None) -> Any:
    """What a YAML file says; raises as `read_yaml`, and ValueError for a value that is not of the
    type that it is said to have, such as a month 13.
    """
    import yaml

    text = read_yaml(path, within)
    try:
        # CSafeLoader is ten times as fast, where PyYAML was built with it
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, *WRONG_VALUE) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be read as YAML: {reason}") from error


def copy_file(source: Path, target: Path, most: int, within: Path) -> None:
    """Copy a file of at most `most` bytes that really lies in `within`; raises as `open_file`."""
    with open_file(source, most, within) as file:
        target.write_bytes(file.read(most))


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


def _unreadable(path: Path, error: OSError) -> ValueError:
    reasons = {errno.ELOOP: "a link that leads back to itself", errno.ENXIO: "a socket"}
    return ValueError(f"{path}: cannot be read ({reasons.get(error.errno or 0, error.strerror)})")
