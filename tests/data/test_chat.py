"""Conversations: the text that transformers makes of them, only the assistant's words scored,
templates in a sandbox.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from longctx.data import DataConfig, load
from longctx.data.chat import Template
from longctx.data.rows import IGNORED
from longctx.training.run_log import learned_turns
from tests.data.chat_templates import CHATML, INST, QWEN3, write, write_tokenizer

TALK = [
    {"role": "user", "content": "What is a rose — 水?"},
    {"role": "assistant", "content": "A rose is a rose. \u00e9t\u00e9 "},
    {"role": "user", "content": "And again?"},
    {"role": "assistant", "content": "is a rose"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer's folder with a chat template."""
    write_tokenizer(tmp_path)
    write(tmp_path, CHATML)
    return tmp_path


def chats(folder: Path, *rows: Any, **changes: Any) -> DataConfig:
    (folder / "chats.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    values = {
        "source": "text",
        "path": str(folder / "chats.jsonl"),
        "chat": True,
        "tokenizer": str(folder),
    }
    return DataConfig(**values | {"val_fraction": 0.0, "cache": str(folder / "cache")} | changes)


@pytest.mark.parametrize("template", [CHATML, INST])
def test_tokens_are_those_of_transformers_and_only_the_assistants_are_scored(
    folder: Path, template: str
) -> None:
    write(folder, template)
    data = load(chats(folder, {"messages": TALK}), 256)
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(TALK, tokenize=True, return_dict=False)
    row = data.train[0]
    length = len(expected)
    assert row["tokens"][:length].tolist() == expected
    assert row["targets"][length - 1 :].tolist() == [IGNORED] * (257 - length)
    scored = [t for t in row["targets"].tolist() if t != IGNORED]
    assert theirs.decode(scored) == (
        "A rose is a rose. été<|im_end|>\nis a rose<|im_end|>\n"
        if template == CHATML
        else " A rose is a rose. été <|im_end|> is a rose<|im_end|>"
    )
    at = [n for n, t in enumerate(row["targets"].tolist()) if t != IGNORED]
    assert [expected[n + 1] for n in at] == scored


def test_long_conversations_are_cut_with_their_marks(folder: Path) -> None:
    rows = [{"messages": TALK * (n + 1)} for n in range(6)]
    uncut, cut = load(chats(folder, *rows), 2048), load(chats(folder, *rows), 48)

    def scored(data: Any) -> int:
        return sum(
            int((row["targets"] != IGNORED).sum())
            for row in (data.train[n] for n in range(len(data.train)))
        )

    assert scored(uncut) == scored(cut) > 0
    assert len(cut.train) > 6 * len(uncut.train)


def test_tools_reach_the_template(folder: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f<&", "parameters": {}}}]
    talk = TALK[:1] + TALK[3:]
    (ours,) = Template(folder).conversations([("a", "here", {"messages": talk, "tools": tools})])
    theirs = AutoTokenizer.from_pretrained(folder)
    assert ours.text == theirs.apply_chat_template(talk, tools=tools, tokenize=False)
    assert (ours.name, len(ours.spans)) == ("a", 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, r"chats.jsonl:1: .*null"),
        ({"messages": []}, "'messages'"),
        ({"messages": [3]}, "message 1 .*role"),
        ({"messages": [{"role": "user"}]}, "message 1 .*'content'"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "message 1 .*'content'"),
        ({"messages": TALK[:1]}, "chats.jsonl:1: .*assistant"),
        (
            {"messages": [{"role": "user", "content": "x<|im_end|>"}, TALK[1]]},
            r"message 1 .*<\|im_end\|>",
        ),
        (
            {"messages": TALK, "tools": [{"name": "f", "description": "<|im_end|>"}]},
            r"tools .*<\|im_end\|>",
        ),
    ],
)
def test_a_wrong_conversation_is_one_line(folder: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(chats(folder, row), 64)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for", "chat template"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chats.jsonl:1: .*unsafe"),
        ("{{ messages.append(1) }}", "chats.jsonl:1: .*unsafe"),
        ("{% for x in range(10**9) %}{% endfor %}", "chats.jsonl:1: .*too big"),
        ("{{ 1 / 0 }}", "chats.jsonl:1: .*division"),
        ("{{ messages[9].role }}", "chats.jsonl:1: "),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
            "chats.jsonl:1: .*generation",
        ),
        (None, "no chat template.*data.tokenizer="),
        ([{"name": "other", "template": CHATML}], "no chat template.*data.tokenizer="),
    ],
)
def test_templates_are_not_trusted(folder: Path, template: Any, message: str) -> None:
    write(folder, template)
    with pytest.raises(ValueError, match=message) as caught:
        load(chats(folder, {"messages": TALK}), 64)
    assert "\n" not in str(caught.value)


def test_a_file_beside_the_settings_and_a_named_template_are_found(folder: Path) -> None:
    write(folder, [{"name": "default", "template": CHATML}, {"name": "other", "template": INST}])
    first = Template(folder)
    (folder / "chat_template.jinja").write_text(INST)
    second = Template(folder)
    assert first.fingerprint != second.fingerprint
    (talk,) = second.conversations([("a", "here", {"messages": TALK})])
    assert talk.text.startswith("<|endoftext|>[INST]")


def test_a_source_without_conversations_is_refused(folder: Path) -> None:
    for changes, message in (
        ({"source": "embedded", "path": None}, "data.chat=true: data=embedded "),
        ({"tokenizer": None}, "data.chat=true: .*data.tokenizer="),
        ({"path": str(folder / "tokenizer_config.json")}, "data.chat=true: .*tokenizer_config"),
    ):
        with pytest.raises(ValueError, match=message):
            load(chats(folder, {"messages": TALK}, **changes), 64)


def test_a_conversation_and_its_plain_text_are_different_data(folder: Path) -> None:
    talk = [
        {"role": "user", "content": "a rose is"},
        {"role": "assistant", "content": "a rose " * 40},
    ]
    config = chats(
        folder, *({"messages": [{**talk[0], "content": f"rose {n}"}, talk[1]]} for n in range(9))
    )
    chat = load(config, 32)
    text = [chat.tokenizer.decode(document.ids.tolist()) for document in chat.documents("train")]
    (folder / "plain.jsonl").write_text("\n".join(json.dumps({"text": one}) for one in text))
    plain = load(replace(config, path=str(folder / "plain.jsonl"), chat=False), 32)
    assert plain.fingerprint != chat.fingerprint
    for data in (chat, plain):
        assert int(data.packings["train"].length.sum()) == data.summary()["train_tokens"]


def test_half_of_a_surrogate_pair_stops_a_conversation_or_is_replaced(folder: Path) -> None:
    talk = [
        {"role": "user", "content": "a \ud83d rose"},
        {"role": "assistant", "content": "rose \ud83d"},
    ]
    with pytest.raises(ValueError, match=r"chats\.jsonl:1: .*data\.errors=replace"):
        load(chats(folder, {"messages": talk}), 64)
    data = load(chats(folder, {"messages": talk}, errors="replace"), 64)
    scored = [t for t in data.train[0]["targets"].tolist() if t != IGNORED]
    assert AutoTokenizer.from_pretrained(folder).decode(scored) == "rose ?<|im_end|>\n"


def test_shortened_conversations_are_counted_and_said(folder: Path) -> None:
    write(folder, QWEN3)
    rows = [{"messages": TALK}, {"messages": TALK[:2]}, {"messages": TALK[2:] + TALK}]
    for turns, count in (("auto", 2), ("auto", 2), ("all", 0)):  # built, from the cache
        counts = load(chats(folder, *rows, turns=turns), 512).summary()
        assert counts["conversations_shortened"] == count
        assert ("data.turns=all" in learned_turns(counts)) == bool(count)


def test_turns_of_plain_text_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.turns=last: .*data\.chat=true"):
        load(chats(folder, {"text": "a"}, chat=False, turns="last"), 64)
