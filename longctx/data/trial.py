"""Tokenizers of strangers, tried in a child process before they are used.

They are programs: thirty doubling normalizers turn one letter into a gigabyte. The child has little
time and memory, so what does such things ends there, in one line.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from longctx import python_child

SECONDS = 3  # of processor time
MEMORY = 768 << 20  # bytes beyond what the child has once it has started
WAIT = 60  # seconds; a busy machine starts a child slowly
GROWTH = 24  # characters that normalizers may make of one; Unicode's compatibility forms make 18
WORD = 10_000  # characters of a WordPiece word, whose time is their square; BERT's is 100
PROBE = (
    "".join(map(chr, range(32, 127))) + "\n\tÄöß é 水 αβγ 😀 1234567890 " + "a" * 200 + " " * 200
)
_REFUSED = 3  # exit code; the reason is the last line on stderr
_tried: set[bytes] = set()


def check(file: Path, text: str) -> None:
    """Raise ValueError, naming `file`, unless the child gets through with its `text`."""
    content = text.encode("utf-8", "surrogatepass")
    key = hashlib.sha256(content).digest()
    if key in _tried:
        return
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    try:
        process = subprocess.run(
            python_child.command("longctx.data.trial"),
            env=python_child.environment(TOKENIZERS_PARALLELISM="false", **threads),
            input=content,
            capture_output=True,
            timeout=WAIT,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{file}: this tokenizer does not come to an end; use another") from None
    if process.returncode == _REFUSED:
        reason = process.stderr.decode(errors="replace").strip().splitlines()[-1]
        raise ValueError(f"{file}: this tokenizer {reason}; use another")
    if process.returncode != 0:
        raise ValueError(
            f"{file}: this tokenizer takes more than {SECONDS} s or {MEMORY >> 20} MiB for a few "
            "words; use another"
        )
    _tried.add(key)


def growth(normalizer: Any) -> float:
    """How many characters the replacements of a tokenizer.json's normalizer make of one."""
    if not isinstance(normalizer, dict):
        return 1.0
    inner = normalizer.get("normalizers")
    if isinstance(inner, list):
        return functools.reduce(lambda product, one: product * growth(one), inner, 1.0)
    if normalizer.get("type") == "Precompiled":
        # SentencePiece's: the size of a table, the table, then all replacements, each ended by 0
        content = base64.b64decode(str(normalizer.get("precompiled_charsmap")))
        texts = content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")
        return float(max([1, *(len(text.decode(errors="replace")) for text in texts)]))
    if normalizer.get("type") != "Replace":
        return 1.0
    pattern = normalizer.get("pattern")
    replaced = pattern.get("String") if isinstance(pattern, dict) else None
    return max(1.0, len(str(normalizer.get("content"))) / len(replaced or "x"))


def _try_tokenizer(text: str) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(text)
    content = json.loads(text)
    reason = None
    if growth(content.get("normalizer")) > GROWTH:
        reason = f"makes more than {GROWTH} characters of one"
    elif (content["model"].get("max_input_chars_per_word") or 0) > WORD:
        reason = f"takes words of more than {WORD:,} characters"
    if reason:
        sys.stderr.write(f"{reason}\n")
        raise SystemExit(_REFUSED)
    ids = tokenizer.encode(PROBE).ids
    tokenizer.decode(ids, skip_special_tokens=False)


def main() -> int:
    """Try what stands on stdin: 0 where it is harmless, even if it cannot be used."""
    import tokenizers  # noqa: F401  # before the limit: libraries are large

    text = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    spent = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    python_child.limit_memory(MEMORY)
    resource.setrlimit(resource.RLIMIT_CPU, (int(spent) + SECONDS, int(spent) + SECONDS))
    signal.alarm(WAIT)
    try:
        _try_tokenizer(text)
    except MemoryError:
        return 1
    except Exception:  # what it cannot do, its user says when it is used
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
