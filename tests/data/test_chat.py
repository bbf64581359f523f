"""Conversations: the text that transformers makes of them, only the assistant's words scored,
templates in a sandbox. The assistant's part is found without a rendering for each turn.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from longctx.data import DataConfig, Document, Tokenizer, load
from longctx.data.chat import Template
from longctx.data.rows import IGNORED
from longctx.data.tokenizer import train
from longctx.training.run_log import learned_turns
from tests.data import chat_templates
from tests.data.chat_templates import CHATML, INST, QWEN3, write, write_tokenizer

MODELS = ("CHATML", "LLAMA3", "QWEN3", "NEMO", "GPT_OSS", "SPACE")


def asks(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def says(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
PLAIN = [asks("q1"), says("a1"), asks("q2"), says("a2")]
THINKING = [
    asks("q1"),
    says("a1"),
    asks("q2"),
    says("<think>\nt2\n</think>\n\na2"),
    asks("q3"),
    says("a3", reasoning="t3"),
]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLING = [
    *PLAIN[:2],
    asks("q2"),
    says(None, tool_calls=[CALL], reasoning_content=None),
    {"role": "tool", "content": "42", "tool_calls": None},
    says("a2", thinking="t2"),
]
ALL = ["a1", "a2"]


TALK = [
    {"role": "user", "content": "What is a rose — 水?"},
    {"role": "assistant", "content": "A rose is a rose. \u00e9t\u00e9 "},
    {"role": "user", "content": "And again?"},
    {"role": "assistant", "content": "is a rose"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a tokenizer's folder with a chat template."""
    write_tokenizer(tmp_path)
    write(tmp_path, CHATML)
    return tmp_path


def written(
    folder: Path, template: str, messages: Any, tools: Any = None, learned: str = "auto"
) -> Document:
    write(folder, template)
    rows = [("name", "here", {"messages": messages, "tools": tools})]
    (conversation,) = Template(folder, learned, datetime.now()).conversations(rows)
    return conversation


def parts(conversation: Document) -> list[str]:
    return [conversation.text[first:end] for first, end in conversation.spans]


@pytest.mark.parametrize("name", MODELS)
def test_text_is_that_of_transformers(folder: Path, name: str) -> None:
    template = getattr(chat_templates, name)
    for messages, tools in ((PLAIN, None), (PLAIN[:2], None), (THINKING, None), (CALLING, TOOLS)):
        ours = written(folder, template, messages, tools)
        theirs = AutoTokenizer.from_pretrained(folder)
        assert ours.text == theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        row = {"messages": messages[:-1], "tools": tools}
        prompt = theirs.apply_chat_template(
            messages[:-1], tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert Template(folder, today=datetime.now()).prompt("here", row) == prompt


@pytest.mark.parametrize(
    ("name", "messages", "tools", "learned"),
    [
        ("CHATML", PLAIN, None, ["a1<|im_end|>\n", "a2<|im_end|>\n"]),
        (
            "LLAMA3",
            CALLING,
            TOOLS,
            ["a1<|eot|>", '{"name": "f", "parameters": {"x": 1}}<|eot|>', "a2<|eot|>"],
        ),
        ("SPACE", PLAIN, None, [" a1\n", " a2\n"]),
        ("NEMO", PLAIN, None, ["a1<|im_end|>", "a2<|im_end|>"]),
        # Earlier turns are written differently than they were asked for
        ("NEMO", [SYSTEM, *PLAIN], None, ["a2<|im_end|>"]),
        ("QWEN3", PLAIN, None, ["<think>\n\n</think>\n\na2<|im_end|>\n"]),
        ("QWEN3", THINKING, None, ["<think>\nt3\n</think>\n\na3<|im_end|>\n"]),
        ("QWEN3", THINKING[:5], None, ["<think>\nt2\n</think>\n\na2<|im_end|>\n"]),
        (
            "QWEN3",
            CALLING,
            TOOLS,
            [
                '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n',
                "<think>\nt2\n</think>\n\na2<|im_end|>\n",
            ],
        ),
        (
            "GPT_OSS",
            CALLING,
            TOOLS,
            [
                ' to=f<|channel|>commentary<|message|>{"x": 1}<|call|>',
                "<|channel|>analysis<|message|>t2<|end|>"
                "<|start|>assistant<|channel|>final<|message|>a2<|return|>",
            ],
        ),
    ],
)
def test_answers_of_known_templates_are_learned(
    folder: Path, name: str, messages: Any, tools: Any, learned: list[str]
) -> None:
    assert parts(written(folder, getattr(chat_templates, name), messages, tools)) == learned


def test_a_last_turn_follows_its_prompt(folder: Path) -> None:
    messages = [SYSTEM, *PLAIN, asks("q3")]
    ours = written(folder, chat_templates.NEMO, messages)
    prompt = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages[:4], tokenize=False, add_generation_prompt=True
    )
    assert "Be brief." in prompt
    assert ours.text == prompt + "a2<|im_end|>"
    assert ours.shortened


@pytest.mark.parametrize("name", [*MODELS, "INST"])
def test_a_completion_is_learned_after_its_prompt(folder: Path, name: str) -> None:
    write(folder, getattr(chat_templates, name))
    template = Template(folder, today=datetime.now())
    theirs = AutoTokenizer.from_pretrained(folder)
    prompt = [SYSTEM, *PLAIN[:3]] if name in ("CHATML", "NEMO") else PLAIN[:3]
    for answer in (says("a2"), says("another one")):
        pair = template.answered("name", prompt, [answer])
        question = theirs.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ((first, end),) = pair.spans
        assert pair.text[:first] == question.rstrip(" ")
        assert end == len(pair.text)
        assert answer["content"] in pair.text[first:]


def test_of_a_completion_the_tools_are_not_learned(folder: Path) -> None:
    write(folder, chat_templates.QWEN3)
    pair = Template(folder).answered("name", CALLING[:3], CALLING[3:], TOOLS)
    call, answer = parts(pair)
    assert call.startswith("<tool_call>")
    assert answer == "<think>\nt2\n</think>\n\na2<|im_end|>\n"
    with pytest.raises(ValueError, match="completion"):
        Template(folder).answered("name", PLAIN, [asks("q3")])


def test_turns_key_decides_which_are_learned(folder: Path) -> None:
    every = written(folder, chat_templates.QWEN3, THINKING, learned="all")
    assert [part.split("<|im_end|>")[0] for part in parts(every)[:2]] == ALL
    last = written(folder, chat_templates.CHATML, PLAIN, learned="last")
    assert parts(last) == ["a2<|im_end|>\n"]
    assert not every.shortened
    assert not last.shortened
    with pytest.raises(ValueError, match=r"data\.turns=last: .*generation"):
        written(folder, chat_templates.INST, PLAIN, learned="last")


def test_thinking_missing_in_a_middle_turn_is_found(folder: Path) -> None:
    """The first and the last turn stand in the text as they are asked for."""
    template = chat_templates.QWEN3.replace("(loop.last or thinking)", "thinking")
    conversation = written(folder, template, [*THINKING[:5], says("a3")])
    assert conversation.shortened
    assert parts(conversation) == ["a3<|im_end|>\n"]


@pytest.mark.parametrize(
    "template",
    [
        chat_templates.INST,
        # The first token of an answer begins before the mark
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}\n{% endgeneration %}{% else %}{{ m.content }}\n"
        "{% endif %}{% endfor %}",
        # Some answers, and of one two parts
        "{% for m in messages %}{{ m.role }}{% if m.role == 'assistant' and not loop.last %}"
        "{%- generation -%}[{{ m.content }}{%- endgeneration -%} | {%- generation -%}]"
        "{%- endgeneration -%}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_generation_marks_are_those_of_transformers(folder: Path, template: str) -> None:
    messages = [asks("a rose"), says("a rose is"), asks("a"), says("user a rose")] * 3
    conversation = written(folder, template, messages)
    ids, learned = Tokenizer.load(folder).encode_conversation(conversation.text, conversation.spans)
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids.tolist() == theirs["input_ids"]
    assert learned.astype(int).tolist() == theirs["assistant_masks"]
    assert 0 < learned.sum() < len(ids)


@pytest.mark.parametrize("ending", [" ", "\n", "\n\n", "\n \n  ", "</s>"])
@pytest.mark.parametrize("answer", ["a rose", "rose", "42 roses", "(see)", "\u6c34", "I"])
def test_a_model_is_asked_for_what_it_learned(folder: Path, ending: str, answer: str) -> None:
    """The first token of an answer may take white space of the prompt."""
    template = chat_templates.SPACE.replace("Answer: ", f"Answer:{ending}")
    template = template.replace("}}: {{", "}}:{{ '" + ending.replace("\n", "\\n") + "' }}{{")
    (folder / "tokenizer.json").unlink()
    train(["a rose is a rose (see) user assistant 42"] * 2, 300).save(folder / "tokenizer.json")
    messages = [asks("who"), says(answer)]
    conversation = written(folder, template, messages)
    tokenizer = Tokenizer.load(folder)
    ids, learned = tokenizer.encode_conversation(conversation.text, conversation.spans)
    prompt = Template(folder).prompt("here", {"messages": messages[:1]})
    question = tokenizer.encode_question(prompt)
    assert ids[: len(question)].tolist() == question
    assert not learned[: len(question)].any()
    assert learned[len(question) :].all()
    assert answer in tokenizer.decode(ids[learned])


@pytest.mark.parametrize("name", ["CHATML", "INST", "QWEN3", "LLAMA3"])
def test_long_conversations_take_linear_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    characters: list[int] = []
    render = Template.render

    def counted(self: Template, *arguments: Any, **more: Any) -> Any:
        rendered = render(self, *arguments, **more)
        characters.append(len(rendered.text))
        return rendered

    monkeypatch.setattr(Template, "render", counted)
    tools = name in ("QWEN3", "LLAMA3")
    messages = (CALLING if tools else PLAIN) * 1000
    written(folder, getattr(chat_templates, name), messages, TOOLS if tools else None)
    whole = len(Template(folder).render(messages).text)
    assert sum(characters) - whole < (2 if name == "INST" else 5) * whole


@pytest.mark.parametrize(
    "template",
    [
        "{% for n in range(messages | length) %}{{ messages[n].content }}{% endfor %}",
        "{% macro all() %}{% for m in messages %}{{ m.content }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{% endfor %}{{ all() }}",
    ],
)
def test_answers_without_an_opening_are_refused(folder: Path, template: str) -> None:
    with pytest.raises(ValueError, match=r"here: .*\{% generation %\}"):
        written(folder, template, PLAIN)


def test_training_writes_the_same_day(folder: Path) -> None:
    write(folder, chat_templates.LLAMA3)
    (talk,) = Template(folder).conversations([("name", "here", {"messages": PLAIN})])
    assert "Today: 26 Jul 2024" in talk.text


def chats(folder: Path, *rows: Any, **changes: Any) -> DataConfig:
    file = folder / "chats.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    values = {"source": "text", "path": str(file), "chat": True, "tokenizer": str(folder)}
    return DataConfig(**values | {"val_fraction": 0.0, "cache": str(folder / "cache")} | changes)


def scored(data: Any) -> list[int]:
    """Return the target tokens of all sequences."""
    return [target for row in data.train for target in row["targets"].tolist() if target != IGNORED]


@pytest.mark.parametrize(
    ("template", "learned"),
    [
        (CHATML, "A rose is a rose. été<|im_end|>\nis a rose<|im_end|>\n"),
        (INST, " A rose is a rose. été <|im_end|> is a rose<|im_end|>"),
    ],
)
def test_only_the_assistants_tokens_are_targets(folder: Path, template: str, learned: str) -> None:
    write(folder, template)
    data = load(chats(folder, {"messages": TALK}), 256)
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(TALK, tokenize=True, return_dict=False)
    row = data.train[0]
    length = len(expected)
    assert row["tokens"][:length].tolist() == expected
    assert row["targets"][length - 1 :].tolist() == [IGNORED] * (257 - length)
    assert theirs.decode(scored(data)) == learned
    at = [n for n, target in enumerate(row["targets"].tolist()) if target != IGNORED]
    assert [expected[n + 1] for n in at] == scored(data)


def test_cut_conversations_keep_their_marks(folder: Path) -> None:
    config = chats(folder, *({"messages": TALK * (n + 1)} for n in range(6)))
    uncut, cut = load(config, 2048), load(config, 48)
    assert len(scored(uncut)) == len(scored(cut)) > 0
    assert len(cut.train) > 6 * len(uncut.train)


SPECIAL = "x<|im_end|>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, r"chats.jsonl:1: .*question"),
        ({"messages": []}, "'messages'"),
        ({"messages": [3]}, "message 1 .*role"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "message 1 .*'content'"),
        ({"messages": TALK[:1]}, "chats.jsonl:1: .*assistant"),
        ({"messages": [asks(SPECIAL), TALK[1]]}, r"message 1 .*<\|im_end\|>"),
        ({"messages": TALK, "tools": [{"description": SPECIAL}]}, r"tools .*<\|im_end\|>"),
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
        ("{% for x in range(10**9) %}{% endfor %}", "chats.jsonl:1: .*too big"),
        ("{{ 1 / 0 }}", "chats.jsonl:1: .*division"),
        (None, "no chat template.*data.tokenizer="),
    ],
)
def test_templates_are_not_trusted(folder: Path, template: Any, message: str) -> None:
    write(folder, template)
    with pytest.raises(ValueError, match=message) as caught:
        load(chats(folder, {"messages": TALK}), 64)
    assert "\n" not in str(caught.value)


def test_named_templates_and_files_are_found(folder: Path) -> None:
    write(folder, [{"name": "default", "template": CHATML}, {"name": "other", "template": INST}])
    first = Template(folder)
    (folder / "chat_template.jinja").write_text(INST)
    second = Template(folder)
    assert first.fingerprint != second.fingerprint
    (talk,) = second.conversations([("a", "here", {"messages": TALK})])
    assert talk.text.startswith("<|endoftext|>[INST]")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "embedded", "path": None}, "data.chat=true: data=embedded "),
        ({"tokenizer": None}, "data.chat=true: .*data.tokenizer="),
        ({"path": "notes.txt"}, "data.chat=true: notes.txt"),
        ({"chat": False, "turns": "last"}, r"data\.turns=last: .*data\.chat=true"),
    ],
)
def test_keys_without_conversations_are_refused(
    folder: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    Path("notes.txt").touch()
    with pytest.raises(ValueError, match=message):
        load(chats(folder, {"messages": TALK}, **changes), 64)


def test_half_of_a_surrogate_pair_is_an_error(folder: Path) -> None:
    messages = [asks("a \ud83d rose"), says("rose \ud83d")]
    with pytest.raises(ValueError, match=r"chats\.jsonl:1: .*data\.errors=replace"):
        load(chats(folder, {"messages": messages}), 64)
    data = load(chats(folder, {"messages": messages}, errors="replace"), 64)
    assert data.tokenizer.decode(scored(data)) == "rose ?<|im_end|>\n"


def test_shortened_conversations_are_counted(folder: Path) -> None:
    write(folder, QWEN3)
    rows = [{"messages": TALK}, {"messages": TALK[:2]}, {"messages": TALK[2:] + TALK}]
    for turns, count in (("auto", 2), ("auto", 2), ("all", 0)):  # built, from the cache
        counts = load(chats(folder, *rows, turns=turns), 512).summary()
        assert counts["conversations_shortened"] == count
        assert ("data.turns=all" in learned_turns(counts)) == bool(count)
