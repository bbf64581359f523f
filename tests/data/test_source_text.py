"""Local files: every format gives the same texts, and every fault one line that names the file."""

import bz2
import csv
import gzip
import io
import json
import os
import resource
from dataclasses import replace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from longctx.data import DataConfig, Document, load, read_documents
from longctx.data.preferences import CHOSEN, REJECTED
from longctx.data.sources import SOURCES
from longctx.data.sources.registry import open_corpus
from tests.data.chat_templates import CHATML, write

TEXTS = ["first document\nof two lines", "zweites — mit Ümläuten", "第三个文件 😀"]
COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda data: pyarrow.Codec("zstd").compress(data, asbytes=True),
}


def read(path, **options):
    return list(read_documents(DataConfig(source="text", path=path, **options)))


def texts(path, **options) -> list[str]:
    return [document.text for document in read(str(path), **options)]


def jsonl(texts, field="text") -> bytes:
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()


def table(mark: str) -> bytes:
    """Return a table with TEXTS in its last column."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=mark)
    writer.writerows([["id", "text"], *([1, text] for text in TEXTS)])
    return file.getvalue().encode()


def parquet(columns: list[Any], names: list[str]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns, names=names), file)
    return file.getvalue()


# The content of a file, and the lines of its texts. The header of a table is line 1, and the first
# text has two lines.
FORMATS = {
    **dict.fromkeys((".txt", ".md"), (TEXTS[1].encode(), None)),
    **dict.fromkeys((".jsonl", ".ndjson"), (jsonl(TEXTS), (1, 2, 3))),
    **{".csv": (table(","), (3, 4, 5)), ".tsv": (table("\t"), (3, 4, 5))},
    ".parquet": (parquet([TEXTS, [1, 2, 3]], ["text", "id"]), (1, 2, 3)),
}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_compressed_or_not(tmp_path, kind, suffix):
    content, numbers = FORMATS[kind]
    file = tmp_path / f"file{kind}{suffix}"
    file.write_bytes(COMPRESS[suffix](content))
    expected = [Document(file.name, TEXTS[1])]
    if numbers:
        expected = [Document(f"{file.name}:{n}", x) for n, x in zip(numbers, TEXTS, strict=True)]
    assert read(str(file)) == expected


def test_a_folder_is_read_in_order(tmp_path):
    names = ("b/2.txt", "b/10.md", "a/x.jsonl", "c.txt", "skip.png", ".hidden.txt", ".git/c.txt")
    for file in (tmp_path / name for name in names):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(jsonl(["j"]) if file.suffix == ".jsonl" else b"t")
    expected = ["a/x.jsonl:1", "b/10.md", "b/2.txt", "c.txt"]
    assert [document.name for document in read(str(tmp_path))] == expected
    twice = read([str(tmp_path / "b"), str(tmp_path)])
    assert [document.name for document in twice] == ["10.md", "2.txt", expected[0], expected[3]]
    (tmp_path / "latest").symlink_to("b")
    globs = {"b/**": ["10.md", "2.txt"], "**/*.txt": expected[2:], "**.png": ["skip.png"]}
    globs["l*/*.txt"] = ["latest/2.txt"]  # a second name of a folder
    for pattern, names in globs.items():  # files of any ending
        assert [document.name for document in read(str(tmp_path / pattern))] == names


KINDS = {
    "a.txt": "plain",
    "b.jsonl": '{"text": "x"}\n',
    "c.csv": "id,text\n1,NA\n",
    "d.tsv": "id\tname\n1\tx\n",
    "e.jsonl": '{"messages": [{"role": "user", "content": "q"}]}\n',
    "f.csv": "instruction,input,output\nq,,a\n",
    "g.jsonl": '{"prompt": "p", "chosen": "a", "rejected": "b"}\n',
    "h.csv": "prompt,completion,label\np,a,True\np,b,FALSE\n",
}


@pytest.mark.parametrize(
    ("options", "read", "left_out"),
    [
        ({}, "abc", "2 .jsonl, 2 .csv, 1 .tsv, 1 .parquet"),
        ({"chat": True}, "ef", "2 .jsonl, 2 .csv, 1 .txt, 1 .tsv, 1 .parquet"),
        ({"preferences": "pairs"}, "g", "3 .csv, 2 .jsonl, 1 .txt, 1 .tsv, 1 .parquet"),
        ({"preferences": "labels"}, "h", "3 .jsonl, 2 .csv, 1 .txt, 1 .tsv, 1 .parquet"),
    ],
)
def test_a_folder_is_read_by_kind(tmp_path, folder, options, read, left_out):
    files = tmp_path / "files"
    files.mkdir()
    for name, content in KINDS.items():
        (files / name).write_text(content)
    (files / "i.parquet").write_bytes(parquet([[1]], ["id"]))
    config = DataConfig(source="text", path=str(files), tokenizer=str(folder), **options)
    names = [shard.name for shard in open_corpus(config).shards]
    assert "".join(name[0] for name in names) == read
    assert SOURCES["text"].left_out(config).startswith(f"{left_out}; a glob reads texts")
    # Named, or in a folder of no other files, such a file is refused
    for path in (files / "d.tsv", files / "i.parquet"):
        with pytest.raises(ValueError, match=path.name):
            list(open_corpus(replace(config, path=str(path))).documents())


def test_cells_are_answers_and_conversations(tmp_path, folder):
    for name, content in KINDS.items():
        (tmp_path / name).write_text(content)
    values: dict[str, Any] = {"source": "text", "tokenizer": str(folder)}
    labels = DataConfig(**values, path=str(tmp_path / "h.csv"), preferences="labels")
    assert [document.side for document in read_documents(labels)] == [CHOSEN, REJECTED]
    (talk,) = read_documents(DataConfig(**values, path=str(tmp_path / "f.csv"), chat=True))
    assert [talk.text[first:end] for first, end in talk.spans] == ["a<|im_end|>\n"]
    # Parquet has all calls with the arguments of each, as null
    calls = [[{"arguments": values}] for values in ({"x": 1}, {"y": [None]})]
    talks = [[{"role": "assistant", "content": "a", "tool_calls": call}] for call in calls]
    (tmp_path / "m.parquet").write_bytes(parquet([talks, ["b", "c"]], ["messages", "text"]))
    write(folder, "{{ messages[0].tool_calls }}" + CHATML)
    rows = read_documents(DataConfig(**values, path=str(tmp_path / "m.parquet"), chat=True))
    assert [row.text.partition("<")[0] for row in rows] == [str(call) for call in calls]
    assert texts(tmp_path / "c.csv") == ["NA"]
    (tmp_path / "long.csv").write_text(f"text\n{'x' * 200_000}\n")
    assert [len(text) for text in texts(tmp_path / "long.csv")] == [200_000]


@pytest.mark.parametrize("pattern", ["", "**/*.txt"])
def test_loops_of_links_end(tmp_path, pattern):
    folder = tmp_path / "docs"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a.txt").write_text("a")
    for number in range(4):
        (folder / f"loop{number}").symlink_to(folder)
        (folder / "sub" / f"loop{number}").symlink_to(folder / "sub")
    (folder / "z.txt").symlink_to(folder / "sub" / "a.txt")
    assert texts(folder / pattern) == ["a"]
    (folder / "dead.txt").symlink_to(folder / "gone")
    with pytest.raises(FileNotFoundError, match=r"dead\.txt"):
        texts(folder / pattern)


@pytest.mark.parametrize(
    ("name", "content", "options", "expected"),
    [
        ("a.jsonl", jsonl("abcdef") + b"broken, not reached\n", {"documents": 4}, list("abcd")),
        ("a.txt", b"\xef\xbb\xbfhello", {}, ["hello"]),
        ("a.jsonl", b"\n" + jsonl(["x"]) + b"  \n", {}, ["x"]),
        ("a.txt", b"ab\xffc", {"errors": "replace"}, ["ab\ufffdc"]),
        ("a.jsonl", b'{"text": "\\ud800x"}\n', {"errors": "replace"}, ["?x"]),
        *(
            ("a.json", (mark + content).encode(), {}, expected)
            for mark in ("", "\ufeff")
            for content, expected in {
                '\n[ {"text": "x"}]': ["x"],
                '{"text": "x"}\n\n{"text": "y"}\n': ["x", "y"],
                '{"id": 1,\n "text": "x"}\n': ["x"],
            }.items()
        ),
    ],
)
def test_text_is_decoded(tmp_path, name, content, options, expected):
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path / name, **options) == expected


BUFFERS = None, pyarrow.py_buffer(b"\0\0\0\0\4\0\0\0\7\0\0\0"), pyarrow.py_buffer(b"gooda\xffb")
NOT_UTF8 = pyarrow.Array.from_buffers(pyarrow.string(), 2, BUFFERS)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"abc\xff", "UTF-8 .*0xff in position 3"),
        ("a.jsonl", jsonl(["x"]) + b"{broken\n", "a.jsonl:2: .*JSON"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: .*list"),
        ("a.jsonl", jsonl(["x"], "body"), "a.jsonl:1: .*'text' .*id, body.*data.text_column"),
        ("a.jsonl", b'{"chosen": "a", "rejected": "b"}\n', "a.jsonl:1: .*`train objective=dpo"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl:1: .*JSON"),
        ("a.txt.gz", gzip.compress(b"hello" * 99, mtime=0)[:-9], "complete"),
        ("a.txt.zst", b"never compressed", "complete"),
        ("a.json", b'{"text": 1}', "row 1: 'text' .*int"),
        *(("a.json", content, r"a\.json: ") for content in (b"[1]", b"{}", b"{")),
        ("a.json", b'[{"instruction": "a", "output": "b"}]', "row 1: .*data.chat=true"),
        ("a.tar.gz", gzip.compress(b"\0" * 257 + b"ustar", mtime=0), "unpack it"),
        ("a.csv", b"id,text\n1,a,b\n", "a.csv:2: more cells"),
        ("a.csv", b'id,text\n1,"a\n', "not a table .*end of data"),
        ("a.csv", b"id,text\n1,\xe9\n", "a.csv:2: not UTF-8"),
        ("a.csv", b"id;text\n1;a\n", "a.csv:2: no field 'text' .*id;text"),
        ("a.parquet", b"PAR1 but not really PAR1", ".parquet"),
        ("a.parquet", parquet([TEXTS], ["body"]), "'text' .*body"),
        ("a.parquet", parquet([[None, 7]], ["text"]), r"row 2: 'text' .*int"),
        ("a.parquet", parquet([NOT_UTF8], ["text"]), "0xff in position 1"),
        ("paper.txt", b"%PDF-1.7 \xff", "a PDF"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_a_broken_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        texts(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)


WORDS = ["many words of a text", None, "others of another", None]
WITH_NULLS = {
    "a.jsonl": jsonl(WORDS),
    "a.parquet": parquet([pyarrow.array(WORDS)], ["text"]),
    "b.parquet": parquet([pyarrow.array(WORDS).dictionary_encode()], ["text"]),
}


@pytest.mark.parametrize("name", WITH_NULLS)
def test_null_texts_are_left_out_and_counted(tmp_path, name):
    (tmp_path / name).write_bytes(WITH_NULLS[name])
    values = {"val_fraction": 0, "vocab_size": 300, "cache": str(tmp_path / "cache")}
    counts = load(DataConfig("text", str(tmp_path / name), **values), 16).summary()
    assert (counts["documents"], counts["documents_dropped"]) == (2, 2)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        *(("missing", "data.path=missing: "), ("empty/*.txt", "data.path=empty/.*txt: ")),
        ("empty", "data.path=empty: .*no file to read .*1 .pdf.*pdf-to-server"),
        *((None, "data.path is not set"), (3, "data.path=3")),
    ],
)
def test_a_path_without_documents_is_refused(tmp_path, monkeypatch, path, message):
    (tmp_path / "empty").mkdir()
    for name in ("a.pdf", ".hidden.txt"):
        (tmp_path / "empty" / name).write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read(path)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.parquet.gz"])
def test_a_bomb_is_refused(tmp_path, name):
    with gzip.open(tmp_path / name, "wb", compresslevel=1) as stream:
        stream.writelines([b"a" * (1 << 20)] * 129)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="holds more than 134,217,728 bytes"):
        read(str(tmp_path / name))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak - before < 1 << 20  # KiB; the tests before it have a peak of their own


@pytest.mark.parametrize("kind", ["fifo", "device", "loop"])
def test_an_irregular_file_is_refused(tmp_path, kind):
    file = tmp_path / "a.txt"
    if kind == "fifo":
        os.mkfifo(file)
    else:
        file.symlink_to({"device": "/dev/zero", "loop": "a.txt"}[kind])
    with pytest.raises((ValueError, OSError), match=r"a\.txt"):
        texts(file)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_compressed_streams_follow_one_another(tmp_path, suffix):
    expected = [os.urandom(length).hex() for length in (1, 9000, 300_000)]
    streams = [COMPRESS[suffix](text.encode()) for text in expected]
    packed = b"".join(streams)
    file = tmp_path / f"a.txt{suffix}"
    file.write_bytes(packed)
    assert texts(file) == ["".join(expected)]
    # Nothing is dropped without a word
    for broken in (packed[:-1], packed + b"no stream", (b"\0" * 4).join(streams)):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match=rf"a\.txt\{suffix}: "):
            texts(file)
