"""The boundary of trust: files of others are opened here, or not at all.

Model folders, tokenizers, caches, configurations and documents come from anywhere. A FIFO would
wait for ever, a link to /dev/zero never end, a link out of a folder reveal a file of the user's.
So a file must be regular, of bounded size, and really in its folder. Every refusal is one line that
begins with the file.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from longctx.files import one_line

MIB = 1 << 20
# Of the largest known models: config.json 0.1 MiB, an index of shards 9 MiB, tokenizer.json 33 MiB.
SETTINGS_SIZE = 16 * MIB  # bytes of a JSON file of settings, or of a YAML or a template
TOKENIZER_SIZE = 40 * MIB
YAML_SIZE = MIB
YAML_DEPTH = 32
PLAIN = {  # values without quotes: their type and its pattern
    "null": r"(~|null|Null|NULL|)$",
    "bool": r"(?i:true|false)$",
    "float": r"(?i:[-+]?([0-9]+\.[0-9]*|\.[0-9]+)(e[-+][0-9]+)?|[-+]?\.inf|\.nan)$",
    "int": r"[-+]?(0|[1-9][0-9]*)$",
}
# PyYAML raises these for !!int x, !!int '', !!bool x, !!timestamp x, !!set [1]
WRONG_VALUE = (ValueError, LookupError, AttributeError, TypeError)


@contextmanager
def named(
    prefix: object, problem: str = "{}", errors: tuple[type[Exception], ...] = (ValueError,)
) -> Iterator[None]:
    """Turn `errors` of the block into a ValueError of one line that begins with `prefix`.

    problem: a description of the mistake; {} stands for the text of the error.
    """
    try:
        yield
    except errors as error:
        reason = getattr(error, "strerror", None) or one_line(error)[:300]
        raise ValueError(f"{prefix}: {problem.replace('{}', reason)}") from error


@contextmanager
def opened(path: Path, *names: object) -> Iterator[None]:
    """Turn whatever the content of `path`, such as a checkpoint, raises in the block into one line
    that names it; mistakes that name it, or one of `names`, stay as they are.

    Its checksums may be right, and its values still of another type, or of any size.
    """
    try:
        yield
    except Exception as error:
        kind, is_mistake = type(error).__name__, isinstance(error, ValueError | OSError)
        is_named = is_mistake and any(str(name) in str(error) for name in (path, *names))
        of_memory = isinstance(error, MemoryError) or kind == "OutOfMemoryError"
        if is_named or of_memory or isinstance(error, BrokenPipeError):
            raise
        raise ValueError(f"{path}: cannot be used ({kind}: {one_line(error)})") from error


def open_file(path: Path, limit: int | None = None, within: Path | None = None) -> BinaryIO:
    """Open a regular file of at most `limit` bytes (None: any size) that really is in `within`.

    Raises FileNotFoundError if there is none, and ValueError for anything else.
    """
    try:
        if within is not None:
            real, folder = Path(os.path.realpath(path, strict=True)), within.resolve()
            # Hugging Face's cache: snapshots/COMMIT/FILE is a link to blobs/HASH
            blobs = [folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else []
            if not any(real.is_relative_to(root) for root in (folder, *blobs)):
                problem = f"a link to {real}, outside of its folder; put a copy of the file there"
                raise ValueError(f"{path}: {problem}")
        # O_NONBLOCK: opening a FIFO does not wait for its writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:  # a loop of links, a socket, no permission
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        problem = "not a regular file; take it out"
    elif limit is not None and status.st_size > limit:
        problem = f"{status.st_size:,} bytes; such a file has at most {limit:,}"
    else:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise ValueError(f"{path}: {problem}")


def read_text(path: Path, limit: int = SETTINGS_SIZE, within: Path | None = None) -> str:
    """Return the text of a file in UTF-8; raise as `open_file`."""
    problem = "cannot be read as text in UTF-8 ({})"
    with open_file(path, limit, within) as file, named(path, problem, (ValueError, OSError)):
        # A file may grow after its size was checked.
        return file.read(limit).decode("utf-8")


def read_json(
    path: Path, limit: int = SETTINGS_SIZE, within: Path | None = None, **options: Any
) -> Any:
    """Return the content of a JSON file, by json.loads with `options`; raise as `open_file`."""
    text = read_text(path, limit, within)
    # RecursionError: thousands of nested brackets
    with named(path, "cannot be read as JSON ({})", (ValueError, RecursionError)):
        return json.loads(text, **options)


def read_settings(path: Path, limit: int = SETTINGS_SIZE) -> dict[str, Any]:
    """Return the object in a JSON file of a model's folder, {} if the file is missing."""
    if not os.path.lexists(path):
        return {}
    content = read_json(path, limit, within=path.parent)
    return content if isinstance(content, dict) else {}


class Loader(yaml.SafeLoader):
    """YAML bounded in depth, without aliases, which can stand for one another until they fill the
    memory. A key that is given twice is an error; PyYAML would drop the first value.

    Plain values mean what they mean on the command line: PyYAML, which follows YAML 1.1, also reads
    no as false, 010 as 8, 1:30 as 90, and 1:30.5 as 90.5.
    """

    depth = 0
    yaml_implicit_resolvers: dict[Any, Any] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > YAML_DEPTH or self.check_event(yaml.AliasEvent):
            raise ValueError(f"an alias, or nested over {YAML_DEPTH} deep; write the values out")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for name in (name for name, count in names.items() if count > 1):
            raise ValueError(f"{name} is given twice; leave one out")
        return super().construct_mapping(node, deep)


for tag, pattern in PLAIN.items():
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), None)


def load_yaml(path: Path, within: Path | None = None) -> Any:
    """Return the content of a YAML file that is harmless to load; raise as `open_file`."""
    text = read_text(path, YAML_SIZE, within)
    not_yaml = (yaml.YAMLError, *WRONG_VALUE[1:])
    with named(path), named("cannot be read as YAML", errors=not_yaml):
        return yaml.load(text, Loader)
