"""Local files: every format gives the same texts, and every fault one line that names the file."""

import bz2
import csv
import gzip
import io
import json
import os
import resource
import tarfile
from dataclasses import replace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from longctx.data import DataConfig, Document, load, read_documents
from longctx.data.preferences import CHOSEN, REJECTED
from longctx.data.sources import SOURCES
from longctx.data.sources.registry import open_corpus

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


MARKS = {".csv": ",", ".tsv": "\t"}


def table(names: list[str], mark: str = ",") -> bytes:
    """Return a table with TEXTS in its last column."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=mark)
    writer.writerows([names, *([*range(1, len(names)), text] for text in TEXTS)])
    return file.getvalue().encode()


def parquet(columns: list[Any], names: list[str]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns, names=names), file)
    return file.getvalue()


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", [".txt", ".md", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet"])
def test_every_format_compressed_or_not(tmp_path, kind, suffix):
    content = {".parquet": parquet([TEXTS, [1, 2, 3]], ["text", "id"]), ".txt": TEXTS[1].encode()}
    content[".md"] = content[".txt"]
    content |= {ending: table(["id", "text"], mark) for ending, mark in MARKS.items()}
    file = tmp_path / f"file{kind}{suffix}"
    file.write_bytes(COMPRESS[suffix](content.get(kind, jsonl(TEXTS))))
    documents = read(str(file))
    if kind in (".txt", ".md"):
        assert documents == [Document(file.name, TEXTS[1])]
    else:
        # The header is line 1, and the first text has two lines
        numbers = (3, 4, 5) if kind in MARKS else (1, 2, 3)
        names = [f"{file.name}:{number}" for number in numbers]
        assert documents == list(map(Document, names, TEXTS))


def test_a_folder_is_read_in_order(tmp_path):
    names = ("b/2.txt", "b/10.md", "a/x.jsonl", "c.txt", "skip.png", ".hidden.txt", ".git/c.txt")
    for file in (tmp_path / name for name in names):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(jsonl(["j"]) if file.suffix == ".jsonl" else b"t")
    expected = ["a/x.jsonl:1", "b/10.md", "b/2.txt", "c.txt"]
    assert [document.name for document in read(str(tmp_path))] == expected
    twice = read([str(tmp_path / "b"), str(tmp_path)])
    assert [document.name for document in twice] == ["10.md", "2.txt", expected[0], expected[3]]
    globs = {"b/**": ["10.md", "2.txt"], "**/*.txt": expected[2:], "**.png": ["skip.png"]}
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
    source = SOURCES["text"]
    assert source.left_out(config) == left_out
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
    messages = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]]
    (tmp_path / "m.parquet").write_bytes(parquet([messages, ["b"]], ["messages", "text"]))
    (same,) = read_documents(DataConfig(**values, path=str(tmp_path / "m.parquet"), chat=True))
    assert (same.text, same.spans) == (talk.text, talk.spans)
    assert texts(tmp_path / "c.csv") == ["NA"]
    (tmp_path / "long.csv").write_text(f"text\n{'x' * 200_000}\n")
    assert [len(text) for text in texts(tmp_path / "long.csv")] == [200_000]


def test_objects_in_json_are_rows_archives_are_refused(tmp_path):
    file = tmp_path / "a.json"
    lines = '{"text": "x"}\n\n{"text": "y"}\n'
    array = '\n[ {"text": "x"}]'
    for content, expected in (
        (array, ["x"]),
        ("\ufeff" + array, ["x"]),
        (lines, ["x", "y"]),
        ("\ufeff" + lines, ["x", "y"]),
        ('{"id": 1,\n "text": "x"}\n', ["x"]),
    ):
        file.write_text(content)
        assert [document.text for document in read(str(file))] == expected
    for content in ("[1]", "{}", "{"):
        file.write_text(content)
        with pytest.raises(ValueError, match=r"a\.json: "):
            read(str(file))
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(file)
    with pytest.raises(ValueError, match="unpack it"):
        read(str(tmp_path / "a.tar.gz"))
    file.write_text('[{"instruction": "a", "output": "b"}]')
    with pytest.raises(ValueError, match=r"row 1: .*data.chat=true"):
        read(str(file))


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


def test_a_glob_finds_a_folder_with_a_second_name(tmp_path):
    (tmp_path / "v2").mkdir()
    (tmp_path / "v2" / "a.txt").write_text("a")
    (tmp_path / "latest").symlink_to("v2")
    for pattern in ("v*/*.txt", "l*/*.txt", "**/*.txt"):
        assert texts(tmp_path / pattern) == ["a"]


@pytest.mark.parametrize(
    ("name", "content", "options", "expected"),
    [
        ("a.jsonl", jsonl("abcdef") + b"broken, not reached\n", {"documents": 4}, list("abcd")),
        ("a.txt", b"\xef\xbb\xbfhello", {}, ["hello"]),
        ("a.jsonl", b"\n" + jsonl(["x"]) + b"  \n", {}, ["x"]),
        ("a.txt", b"ab\xffc", {"errors": "replace"}, ["ab\ufffdc"]),
        ("a.jsonl", b'{"text": "\\ud800x"}\n', {"errors": "replace"}, ["?x"]),
    ],
)
def test_text_is_decoded(tmp_path, name, content, options, expected):
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path, **options) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"abc\xff", "UTF-8 .*0xff in position 3"),
        ("a.jsonl", jsonl(["x"]) + b"{broken\n", "a.jsonl:2: .*JSON"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: .*list"),
        ("a.jsonl", jsonl(["x"], "body"), "a.jsonl:1: .*'text' .*id, body.*data.text_column"),
        ("a.jsonl", b'{"chosen": "a", "rejected": "b"}\n', "a.jsonl:1: .*objective=dpo"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl:1: .*JSON"),
        ("a.txt.gz", gzip.compress(b"hello" * 99, mtime=0)[:-9], "complete"),
        ("a.txt.zst", b"never compressed", "complete"),
        ("a.json", b'{"text": 1}', "row 1: 'text' .*int"),
        ("a.csv", b"id,text\n1,a,b\n", "a.csv:2: more cells"),
        ("a.csv", b'id,text\n1,"a\n', "not a table .*end of data"),
        ("a.csv", b"id,text\n1,\xe9\n", "a.csv:2: not UTF-8"),
        ("a.csv", b"id;text\n1;a\n", "a.csv:2: no field 'text' .*id;text"),
        ("a.parquet", b"PAR1 but not really PAR1", ".parquet"),
        ("a.parquet", parquet([TEXTS], ["body"]), "'text' .*body"),
        ("a.parquet", parquet([[None, 7]], ["text"]), r"row 2: 'text' .*int"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_a_broken_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        texts(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["jsonl", "string", "dictionary"])
def test_null_texts_are_left_out_and_counted(tmp_path, kind):
    words = ["many words of a text", None, "others of another", None]
    values = pyarrow.array(words)
    file = tmp_path / ("a.jsonl" if kind == "jsonl" else "a.parquet")
    if file.suffix == ".jsonl":
        file.write_bytes(jsonl(words))
    else:
        column = values.dictionary_encode() if kind == "dictionary" else values
        file.write_bytes(parquet([column], ["text"]))
    values = {"val_fraction": 0, "vocab_size": 300, "cache": str(tmp_path / "cache")}
    config = DataConfig("text", str(file), **values)
    counts = load(config, 16).summary()
    assert (counts["documents"], counts["documents_dropped"]) == (2, 2)


def test_parquet_strings_are_checked_for_utf8(tmp_path):
    offsets = pyarrow.py_buffer(b"\0\0\0\0\4\0\0\0\7\0\0\0")
    buffers = [None, offsets, pyarrow.py_buffer(b"gooda\xffb")]
    column = pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)
    (tmp_path / "a.parquet").write_bytes(parquet([column], ["text"]))
    with pytest.raises(ValueError, match=r"a\.parquet: .*0xff in position 1"):
        texts(tmp_path)
    (tmp_path / "a.parquet").unlink()
    (tmp_path / "paper.txt").write_bytes(b"%PDF-1.7 \xff")
    with pytest.raises(ValueError, match=r"paper\.txt: a PDF"):
        texts(tmp_path, errors="replace")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "data.path=missing: "),
        ("empty", "data.path=empty: .*no file to read .*1 .pdf.*pdf-to-server"),
        ("hidden", "data.path=hidden: .*no file to read"),
        ("empty/*.txt", "data.path=empty/.*txt: "),
        (None, "data.path is not set"),
        (3, "data.path=3"),
    ],
)
def test_a_path_without_documents_is_refused(tmp_path, monkeypatch, path, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.pdf").write_bytes(b"x")
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / ".hidden").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read(path)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.parquet.gz"])
def test_a_bomb_is_refused(tmp_path, name):
    file = tmp_path / name
    with gzip.open(file, "wb", compresslevel=1) as stream:
        for _ in range(129):
            stream.write(b"a" * (1 << 20))
    assert file.stat().st_size < 2 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="holds more than 134,217,728 bytes"):
        for _ in read_documents(DataConfig(source="text", path=str(file))):
            pass
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
