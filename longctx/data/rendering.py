"""Chat templates at work: run in a child process with little time and memory, since a template is a
program of a stranger and may explode on one conversation only.

The child gets a number of conversations, one a line, and answers each with a line. Its processor
time is a leaky bucket: SECONDS at most, filled again by what is written, so that an honest template
never runs out and one without end is killed by the kernel, also inside of `10**10**9`. It runs
jinja2's immutable sandbox, on plain data, and without the date (templates that ask for one have a
default), so that the same conversation is always the same text.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longctx import python_child

Span = tuple[int, int]  # characters first .. end - 1

SECONDS = 3.0  # of processor time
EARNED = 1e-5  # of them, for a byte of a conversation that is written; jinja2 takes a thirtieth
MEMORY = 768 << 20  # bytes beyond what the child has once it has started
WAIT = 60  # seconds for a conversation; a busy machine takes longer than processor time
BATCH = 256 << 10  # bytes of conversations that the child is asked for together
TEXT = 16 << 20  # characters that a conversation is written as, or TIMES its bytes
TIMES = 8


class Request(NamedTuple):
    """A conversation to be written as text, and what to call it in messages."""

    name: str
    place: str
    line: bytes  # JSON of messages and tools

    @classmethod
    def of(cls, name: str, place: str, messages: Sequence[Any], tools: Any) -> Request:
        """The request for `messages`, which are plain values."""
        line = json.dumps({"messages": messages, "tools": tools or None}).encode()
        return cls(name, place, line)


class Written(NamedTuple):
    """The text of a conversation, and the parts of it that are the assistant's."""

    name: str
    text: str
    spans: list[Span]


class Renderer:
    """Writes conversations as text by the chat template `source` of `folder`.

    The child starts with the first conversation and ends with this object.
    """

    def __init__(self, folder: Path, source: str, tokens: Mapping[str, str]) -> None:
        self.folder = folder
        self.setup = {"source": source, "tokens": tokens}
        self.child: subprocess.Popen[bytes] | None = None

    def write(self, requests: Iterable[Request]) -> Iterator[Written]:
        """Write each conversation, asking for BATCH bytes of them together.

        Raises ValueError, one line that begins with the place of the conversation or the folder,
        once those before it are written.
        """
        for batch in _batches(requests):
            child = self.child = self.child or self._start()
            self._tell(child, str(len(batch)).encode(), *(request.line for request in batch))
            left = len(batch)
            try:
                for request in batch:
                    place = request.place
                    answer = self._answer(child, f"{place}: the chat template of {self.folder}")
                    if "refused" in answer:
                        raise ValueError(f"{place}: {answer['refused']}")
                    left -= 1
                    spans = [(first, end) for first, end in answer["spans"]]
                    yield Written(request.name, answer["text"], spans)
            finally:
                if left and self.child is child:  # it still has answers that nobody waits for
                    self.child = None
                    _end(child)

    def _start(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            python_child.command("longctx.data.rendering"),
            env=python_child.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        weakref.finalize(self, _end, child)
        self._tell(child, json.dumps(self.setup).encode())
        answer = self._answer(child, f"{self.folder}: its chat template")
        if "refused" in answer:
            raise ValueError(f"{self.folder}: its chat template {answer['refused']}")
        return child

    def _tell(self, child: subprocess.Popen[bytes], *lines: bytes) -> None:
        assert child.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, as the answer will say
            child.stdin.write(b"\n".join((*lines, b"")))
            child.stdin.flush()

    def _answer(self, child: subprocess.Popen[bytes], subject: str) -> dict[str, Any]:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line.endswith(b"\n"):
            self.child = None
            _end(child)
            raise ValueError(
                f"{subject} takes more than {SECONDS:.0f} s or {MEMORY >> 20} MiB for one "
                "conversation; use another"
            )
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer


def _batches(requests: Iterable[Request]) -> Iterator[list[Request]]:
    batch: list[Request] = []
    size = 0
    try:
        for request in requests:
            batch.append(request)
            size += len(request.line)
            if size > BATCH:
                yield batch
                batch, size = [], 0
    except Exception:
        if batch:  # those before the one that cannot be read come first
            yield batch
        raise
    if batch:
        yield batch


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        with suppress(BrokenPipeError):  # of what it was not told
            assert pipe is not None
            pipe.close()


def _conversation(
    template: jinja2.Template,
    tokens: Mapping[str, str],
    request: bytes,
    limit: python_child.TimeLimit,
) -> dict[str, Any]:
    """What is answered to a request: the text and its spans, or why there are none."""
    row = json.loads(request)
    messages, most = row["messages"], max(TEXT, TIMES * len(request))

    def written(count: int, prompt: bool = False) -> str:
        size = len(request) * count // len(messages)
        some = row | {"messages": messages[:count], "documents": None}
        text: str = limit.run(
            lambda: template.render(**some, **tokens, add_generation_prompt=prompt), EARNED * size
        )
        if len(text) > most:
            raise ValueError(f"it makes {len(text):,} characters of {size:,} bytes")
        return text

    try:
        text = written(len(messages))
        spans = []
        for n, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, upto = written(n, prompt=True), written(n + 1)
            if not (text.startswith(upto) and upto.startswith(before)):
                return {
                    "refused": f"message {n + 1} is written differently by the chat template when "
                    "others follow it or when it is asked for, so the assistant's text cannot be "
                    "told apart; use another template"
                }
            spans.append((len(before), len(upto)))
    except MemoryError:
        return {"refused": f"the chat template takes more than {MEMORY >> 20} MiB; use another"}
    except Exception as error:  # somebody else's program: it can raise anything
        return {"refused": f"the chat template does not take it ({_short(error)})"}
    return {"text": text, "spans": spans}


def _short(error: Exception) -> str:
    """What an error says, on one line of bounded length."""
    text = " ".join(str(error)[:2000].split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."


class _Generation(Extension):
    """{% generation %} … {% endgeneration %}, which other tools use: renders what stands inside."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def main() -> None:
    """Answer the requests on stdin: first the template, then conversations."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent ends this process
        signal.signal(number, signal.SIG_IGN)
    python_child.limit_memory(MEMORY)
    limit = python_child.TimeLimit(SECONDS, WAIT)

    def answer(content: dict[str, Any]) -> None:
        sys.stdout.buffer.write(json.dumps(content).encode() + b"\n")
        sys.stdout.buffer.flush()

    setup = json.loads(sys.stdin.buffer.readline())
    try:  # jinja2 computes what is constant when it compiles
        template = limit.run(lambda: _environment().from_string(setup["source"]), 0.0)
    except (jinja2.TemplateError, RecursionError) as error:
        return answer({"refused": f"is not one ({_short(error)})"})
    answer({})
    for count in sys.stdin.buffer:
        # All are read before the first is answered, so that nobody waits for the other's pipe
        for request in [sys.stdin.buffer.readline() for _ in range(int(count))]:
            answer(_conversation(template, setup["tokens"], request, limit))


if __name__ == "__main__":
    main()
