"""Local files: every format gives the same texts, and every fault one line that names the file and
what is wrong.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import resource
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from longctx.data import DataConfig, load, read_documents

TEXTS = ["first document\nof two lines", "zweites — mit Ümläuten", "第三个文件 😀"]


TWO_COLUMNS = io.BytesIO()
pyarrow.parquet.write_table(
    pyarrow.table([pyarrow.array(TEXTS)] * 2, names=["text", "text"]), TWO_COLUMNS
)


def read(path, **options):
    return list(read_documents(DataConfig(source="text", path=path, **options)))


def zst(data: bytes) -> bytes:
    return pyarrow.Codec("zstd").compress(data, asbytes=True)


COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zst,
}


def jsonl(texts, field="text") -> bytes:
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", [".txt", ".md", ".jsonl", ".ndjson", ".parquet"])
def test_every_format_compressed_or_not(tmp_path, kind, suffix) -> None:
    if kind == ".parquet":
        pyarrow.parquet.write_table(
            pyarrow.table({"text": TEXTS, "id": [1, 2, 3]}), tmp_path / "plain"
        )
        data = (tmp_path / "plain").read_bytes()
    else:
        data = jsonl(TEXTS) if kind in (".jsonl", ".ndjson") else TEXTS[1].encode()
    file = tmp_path / f"file{kind}{suffix}"
    file.write_bytes(COMPRESS[suffix](data))
    documents = read(str(file))
    if kind in (".txt", ".md"):
        assert documents == [(file.name, TEXTS[1])]
    else:
        assert [document.text for document in documents] == TEXTS
        assert [document.name for document in documents] == [
            f"{file.name}:{number}" for number in (1, 2, 3)
        ]


def test_a_folder_is_read_in_order_with_what_lies_in_it(tmp_path) -> None:
    for name in (
        "b/2.txt",
        "b/10.md",
        "a/x.jsonl",
        "c.txt",
        "skip.png",
        ".hidden.txt",
        ".git/config.txt",
    ):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(jsonl(["j"]) if file.suffix == ".jsonl" else b"t")
    names = ["a/x.jsonl:1", "b/10.md", "b/2.txt", "c.txt"]
    assert [document.name for document in read(str(tmp_path))] == names
    assert [document.name for document in read([str(tmp_path / "b"), str(tmp_path)])] == [
        "10.md",
        "2.txt",
        names[0],
        names[3],
    ]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.py", ["a.py"]),
        ("**/*.py", ["a.py", "sub/b.py", "sub/deep/c.py"]),
        ("sub/*.py", ["b.py"]),
        ("sub/**", ["b.py", "deep/c.py", "deep/d.txt"]),
        ("*/deep/*", ["sub/deep/c.py", "sub/deep/d.txt"]),
        ("**.py", ["a.py"]),
    ],
)
def test_globs_find_files_of_any_ending(tmp_path, pattern, names) -> None:
    for name in ("a.py", "sub/b.py", "sub/deep/c.py", "sub/deep/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [document.name for document in read(str(tmp_path / pattern))] == names


@pytest.mark.parametrize("pattern", ["", "**/*.txt"])
def test_loops_of_links_end_and_no_file_is_read_twice(tmp_path, pattern) -> None:
    folder = tmp_path / "docs"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a.txt").write_text("a")
    for number in range(4):
        (folder / f"loop{number}").symlink_to(folder)
        (folder / "sub" / f"loop{number}").symlink_to(folder / "sub")
    (folder / "z.txt").symlink_to(folder / "sub" / "a.txt")
    assert len(read(str(folder / pattern))) == 1
    (folder / "dead.txt").symlink_to(folder / "gone")
    with pytest.raises(FileNotFoundError, match=r"dead\.txt"):
        read(str(folder / pattern))


def test_a_limit_reads_the_first_documents(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl("abcdef") + b"broken, but never reached\n")
    assert [document.text for document in read(str(tmp_path), documents=4)] == list("abcd")


def test_a_byte_order_mark_is_no_text(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert read(str(tmp_path))[0].text == "hello"


def test_blank_lines_of_jsonl_are_nothing(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n" + jsonl(["x"]) + b"  \n")
    assert [document.text for document in read(str(tmp_path))] == ["x"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"abc\xff", "UTF-8 .byte 0xff at 3"),
        ("a.jsonl", jsonl(["x"]) + b"{broken\n", "a.jsonl:2: .*JSON"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: .*list"),
        ("a.jsonl", jsonl(["x"], "body"), "a.jsonl:1: .*'text' .*id, body.*data.text_column"),
        ("a.jsonl", jsonl([7]), "a.jsonl:1: 'text' .*int"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl:1: .*JSON"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl:1: .*data.errors=replace"),
        ("a.txt.gz", gzip.compress(b"hello" * 99, mtime=0)[:-9], "complete"),
        ("a.txt.gz", b"never compressed", "complete"),
        ("a.txt.xz", b"never compressed", "complete"),
        ("a.txt.zst", b"never compressed", "complete"),
        ("a.parquet", b"PAR1 but not really PAR1", ".parquet"),
        ("a.parquet", TWO_COLUMNS.getvalue(), "one field 'text' .*: text, text"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_a_broken_file_is_named_in_one_line(tmp_path, name, content, message) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        read(str(tmp_path))
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_that_is_not_utf8_is_told(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.txt")).write_text("x")
    with pytest.raises(ValueError, match=r"a\\udcff\.txt: .*not UTF-8; rename it"):
        read(str(tmp_path))


def test_parquet_without_the_column_or_without_strings(tmp_path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": [None, 7]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: .*'text' .*body"):
        read(str(tmp_path))
    with pytest.raises(ValueError, match=r"a\.parquet: row 2: 'body' .*int"):
        read(str(tmp_path), text_column="body")


@pytest.mark.parametrize(
    "kind", ["jsonl", "json of the Hub", "string", "large_string", "dictionary", "null"]
)
def test_null_texts_are_left_out_and_counted(tmp_path, kind) -> None:
    texts = ["many words of a text", None, "others of another", None]
    options = {"source": "text", "path": str(tmp_path / "docs"), "val_fraction": 0}
    (tmp_path / "docs").mkdir()
    if "json" in kind:
        (tmp_path / "docs" / "a.jsonl").write_bytes(jsonl(texts))
        if "Hub" in kind:
            options |= {"source": "hub", "path": "json", "files": f"{tmp_path}/docs/a.jsonl"}
    else:
        types = {
            "string": pyarrow.string(),
            "large_string": pyarrow.large_string(),
            "dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
            "null": pyarrow.null(),
        }
        if kind == "null":
            (tmp_path / "docs" / "b.jsonl").write_bytes(jsonl([texts[0], texts[2]]))
            texts = [None, None]
        column = pyarrow.array(texts, types[kind])
        pyarrow.parquet.write_table(
            pyarrow.table({"text": column}), tmp_path / "docs" / "a.parquet"
        )
    config = DataConfig(**options, vocab_size=300, cache=str(tmp_path / "cache"))
    counts = load(config, 16).summary()
    assert (counts["documents"], counts["documents_dropped"]) == (2, 2)


def test_a_string_of_parquet_that_is_not_utf8_is_named_or_replaced(tmp_path) -> None:
    fine, offsets, data = b"good", pyarrow.py_buffer(b"\0\0\0\0\4\0\0\0\7\0\0\0"), b"a\xffb"
    column = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(fine + data)]
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: row 2: .*UTF-8 .*0xff at 1"):
        read(str(tmp_path))
    assert [document.text for document in read(str(tmp_path), errors="replace")] == [
        "good",
        "a\ufffdb",
    ]


def test_replacing_undecodable_bytes_can_be_asked_for(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xffc")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "\\ud800x"}\n')
    assert [document.text for document in read(str(tmp_path), errors="replace")] == [
        "ab\ufffdc",
        "?x",
    ]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "data.path=missing: "),
        ("empty", "data.path=empty: "),
        ("empty/*.txt", "data.path=empty/.*txt: "),
        (None, "data.path is not set"),
        (3, "data.path=3"),
    ],
)
def test_a_path_without_documents_is_refused(tmp_path, monkeypatch, path, message) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "picture.png").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read(path)


def test_an_unreadable_folder_is_named(tmp_path, monkeypatch) -> None:
    (tmp_path / "closed").mkdir()
    real = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(OSError, match=r"Permission denied.*closed"):
        read(str(tmp_path))


def bomb(file: Path, kind: str) -> None:
    """Write a small file that unpacks to more than its readers take."""
    zeros = b"a" * (1 << 20)
    if kind == "parquet":
        text = pyarrow.DictionaryArray.from_arrays(np.zeros(1024, np.int32), ["a" * (1 << 20)])
        pyarrow.parquet.write_table(pyarrow.table({"text": text}), file)
        return
    with gzip.open(file, "wb", compresslevel=1) as stream:
        for _ in range(129):
            stream.write(zeros)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.parquet.gz", "a.parquet"])
def test_a_bomb_is_refused_before_it_fills_the_memory(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    bomb(file, name.rpartition(".")[2])
    assert file.stat().st_size < 2 << 20
    config = DataConfig(source="text", path=str(file))
    with pytest.raises(ValueError, match="holds more than 134,217,728 bytes"):
        for _ in read_documents(config):
            pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak < 2 << 20  # KiB, the test session's own included


def test_a_reader_of_parquet_may_stop_early(tmp_path: Path) -> None:
    texts = [f"text {n} " * 1000 for n in range(2000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    documents = read_documents(DataConfig(source="text", path=str(tmp_path)))
    assert next(documents).text == texts[0]
    assert [text for _, text in read(str(tmp_path))] == texts


@pytest.mark.parametrize("padding", [b"", b"\0" * 4, b"\0" * 40_000])
def test_streams_of_xz_follow_one_another(tmp_path: Path, padding: bytes) -> None:
    texts = [os.urandom(length).hex() for length in (1, 9000, 300_000)]
    packed = padding.join(lzma.compress(text.encode()) for text in texts)
    (tmp_path / "a.txt.xz").write_bytes(packed + padding)
    assert read(str(tmp_path)) == [("a.txt.xz", "".join(texts))]
    (tmp_path / "a.txt.xz").write_bytes(packed[:-1])
    with pytest.raises(ValueError, match=r"a\.txt\.xz: "):
        read(str(tmp_path))


@pytest.mark.parametrize("kind", ["fifo", "device", "loop"])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "a.txt"
    if kind == "fifo":
        os.mkfifo(file)
    else:
        file.symlink_to({"device": "/dev/zero", "loop": "a.txt"}[kind])
    with pytest.raises((ValueError, OSError), match=r"a\.txt"):
        list(read_documents(DataConfig(source="text", path=str(file))))
