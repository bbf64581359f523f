"""Conversations: the text that transformers makes of them, only the assistant's words scored,
templates in a sandbox. The assistant's part is found without a rendering for each turn.
"""

import json
import tomllib
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from longctx.data import DataConfig, Document, Tokenizer, load
from longctx.data.chat import Template
from longctx.data.messages import format_of, is_learned, read
from longctx.data.sequences import IGNORED
from longctx.data.tokenizer import train
from tests.data.chat_templates import CHATML, INST, NEMO, SPACE, shipped, write
from tests.data.conftest import check_refused

Messages = list[dict[str, Any]]


def asks(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def says(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
PLAIN = [asks("q1"), says("a1"), asks("q2"), says("a2")]
GREETING = [says("hello"), *PLAIN]
THINKING = [
    *(asks("q1"), says("a1", thinking="t1"), asks("q2")),
    *(says("<think>\nt2\n</think>\n\na2"), asks("q3"), says("a3", reasoning="t3")),
]
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
FUNCTION = {"name": "f", "description": "Doubles.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
RESULT = {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "42"}
CALLING = [
    *(asks("q1"), says("a1"), asks("q2")),
    *(says("", tool_calls=[CALL], thinking="t2", weight=None), RESULT, says("a2")),
]
CALLED = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n'
TALK = [
    *(asks("What is a rose — 水?"), says("A rose is a rose. \u00e9t\u00e9 ")),
    *(asks("And again?"), says("is a rose")),
]
KNOWN = tomllib.loads(Path(__file__).with_name("known_templates.toml").read_text())["known"]
TALKS = {
    **{"plain": PLAIN, "calling": CALLING, "thinking": THINKING, "thinking twice": THINKING[:4]},
    "thinking at last": [*PLAIN[:3], says("a2", thinking="t2")],
}


def tools_of(messages: Messages) -> list[dict[str, Any]] | None:
    return TOOLS if RESULT in messages else None


def written(folder: Path, template: str, messages: Messages, learned: str = "auto") -> Document:
    write(folder, template)
    rows = [("name", "here", {"messages": messages, "tools": tools_of(messages)})]
    (conversation,) = Template(folder, learned, datetime.now()).conversations(rows)
    return conversation


def by_transformers(folder: Path, messages: Messages, **options: Any) -> Any:
    """Return what transformers makes of messages with the template in `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {"tools": tools_of(messages), "tokenize": False} | options
    return tokenizer.apply_chat_template(messages, **options)


def parts(conversation: Document) -> list[str]:
    return [conversation.text[first:end] for first, end in conversation.spans]


@pytest.mark.parametrize("known", KNOWN, ids=lambda x: f"{x['template']}-{x['talk']}")
def test_answers_of_known_templates_are_learned(folder, known):
    messages = TALKS[known["talk"]]
    conversation = written(folder, known["template"], messages)
    assert parts(conversation) == known["learned"]
    assert conversation.text == by_transformers(folder, messages)
    row = {"messages": messages[:-1], "tools": tools_of(messages)}
    template = Template(folder, today=datetime.now())
    prompt = by_transformers(folder, **row, add_generation_prompt=True)
    assert template.prompt("here", row) == (prompt, "")
    begun = by_transformers(folder, messages, continue_final_message=True)
    assert template.prompt("here", row | {"messages": messages}) == (begun, messages[-1]["content"])


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        *(("llama3", PLAIN), ("llama3", GREETING), ("qwen2_5_vl", GREETING)),
        *((x, CALLING) for x in ("qwen2_5_vl", "qwen3_vl", "qwen3_instruct_2507", "lfm2_v2")),
        *((x, PLAIN) for x in ("gemma3", "cohere2")),
    ],
)
def test_learned_is_what_training_templates_mark(folder, name, messages):
    ours = written(folder, name, messages)
    assert ours == written(folder, f"{name}_training", messages)
    assert written(folder, name, messages, "all").spans == ours.spans


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_nothink", "qwen3_5_think", "gptoss"])
@pytest.mark.parametrize("messages", [PLAIN, THINKING[:4]], ids=["plain", "thinking"])
def test_every_turn_is_learned_without_its_opening(folder, name, messages):
    conversation = written(folder, name, messages, "all")
    first, last = parts(conversation)
    assert first.startswith(("a1", "<|channel|>")) and "a2" in last
    assert "assistant\n" not in first + last and not conversation.shortened


def test_a_last_turn_follows_its_prompt(folder):
    """Mistral Nemo writes the system message in the prompt, and nowhere in the whole."""
    messages = [SYSTEM, *PLAIN, asks("q3")]
    ours = written(folder, NEMO, messages)
    prompt = by_transformers(folder, messages[:4], add_generation_prompt=True)
    assert "Be brief." in prompt and ours.shortened
    assert ours.text == prompt + "a2<|im_end|>" and parts(ours) == ["a2<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, NEMO, SPACE, INST, "llama3_2", "qwen3", "gptoss"])
def test_a_completion_is_learned_after_its_prompt(folder, template):
    write(folder, template)
    prompt = [SYSTEM, *PLAIN[:3]] if template in (CHATML, NEMO) else PLAIN[:3]
    for answer in ("a2", "another one"):
        pair = Template(folder, today=datetime.now()).answered("name", prompt, [says(answer)])
        question = by_transformers(folder, prompt, add_generation_prompt=True)
        ((first, end),) = pair.spans
        assert pair.text[:first] == question.rstrip(" ")
        assert end == len(pair.text) and answer in pair.text[first:]


def test_of_a_completion_the_tools_are_not_learned(folder):
    write(folder, "qwen3")
    call, answer = parts(Template(folder).answered("name", CALLING[:3], CALLING[3:], TOOLS))
    assert call.endswith(CALLED)
    assert answer == "<think>\n\n</think>\n\na2<|im_end|>\n"
    with pytest.raises(ValueError, match="completion"):
        Template(folder).answered("name", PLAIN, [asks("q3")])


def test_arguments_that_are_json_text_are_not_quoted_again(folder):
    function = {"name": "f", "arguments": '{"x": 1}'}  # as OpenAI's
    call = {"role": "assistant", "tool_calls": [CALL | {"function": function}]}
    messages = [*CALLING[:3], call]
    document = written(folder, "llama3_2", messages)
    assert parts(document)[-1] == '{"name": "f", "parameters": {"x": 1}}<|eot_id|>'
    # DeepSeek's join the text to others, and tell calls by content that is null
    (answer,) = parts(written(folder, "deepseekv3_training", messages))[-1:]
    assert '```json\n{"x": 1}\n```' in answer


def test_the_template_gets_the_values_of_its_row(folder):
    write(folder, "{{ mood }}" + CHATML)
    row = {"messages": PLAIN, "chat_template_kwargs": {"mood": "happy", "messages": []}}
    rows = [("a", "a", row), ("b", "b", {"messages": PLAIN})]
    happy, plain = Template(folder).conversations(rows)
    assert happy.text == "happy" + plain.text
    write(folder, "llama3_2")  # writes the day
    (talk,) = Template(folder).conversations([("name", "here", {"messages": PLAIN})])
    assert "Date: 26 Jul 2024" in talk.text


def test_the_last_turn_alone_is_learned_if_asked_for(folder):
    last = written(folder, CHATML, PLAIN, "last")
    assert parts(last) == ["a2<|im_end|>\n"] and not last.shortened
    with pytest.raises(ValueError, match=r"data\.turns=last: .*generation"):
        written(folder, INST, PLAIN, "last")


def test_thinking_missing_in_a_middle_turn_is_found(folder):
    """The first and the last turn stand in the text as they are asked for."""
    condition = "loop.last or (not loop.last and reasoning_content)"
    template = shipped("qwen3").replace(condition, "reasoning_content")
    conversation = written(folder, template, [*THINKING[:5], says("a3")])
    assert conversation.shortened and parts(conversation) == ["a3<|im_end|>\n"]


@pytest.mark.parametrize(
    "template",
    [
        INST,
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
def test_generation_marks_are_those_of_transformers(folder, template):
    messages = [asks("a rose"), says("a rose is"), asks("a"), says("user a rose")] * 3
    conversation = written(folder, template, messages)
    ids, learned = Tokenizer.load(folder).encode_conversation(conversation.text, conversation.spans)
    masks = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    theirs = by_transformers(folder, messages, **masks)
    assert ids.tolist() == theirs["input_ids"]
    assert learned.astype(int).tolist() == theirs["assistant_masks"]
    assert 0 < learned.sum() < len(ids)


@pytest.mark.parametrize("ending", [" ", "\n", "\n\n", "\n \n  ", "</s>"])
@pytest.mark.parametrize("answer", ["a rose", "rose", "42 roses", "(see)", "\u6c34", "I"])
def test_a_model_is_asked_for_what_it_learned(folder, ending, answer):
    """The first token of an answer may take white space of the prompt."""
    template = SPACE.replace("Answer: ", f"Answer:{ending}")
    template = template.replace("}}: {{", "}}:{{ '" + ending.replace("\n", "\\n") + "' }}{{")
    train(["a rose is a rose (see) user assistant 42"] * 2, 300).save(folder / "tokenizer.json")
    messages = [asks("who"), says(answer)]
    conversation = written(folder, template, messages)
    tokenizer = Tokenizer.load(folder)
    ids, learned = tokenizer.encode_conversation(conversation.text, conversation.spans)
    prompt, _ = Template(folder).prompt("here", {"messages": messages[:1]})
    question = tokenizer.encode_question(prompt)
    assert ids[: len(question)].tolist() == question
    assert (learned == (np.arange(len(ids)) >= len(question))).all()
    assert answer in tokenizer.decode(ids[learned])


@pytest.mark.parametrize("template", [CHATML, INST, "qwen3"])
def test_long_conversations_take_linear_time(folder, monkeypatch, template):
    characters: list[int] = []
    render = Template.render

    def counted(self: Template, *arguments: Any, **more: Any) -> Any:
        rendered = render(self, *arguments, **more)
        characters.append(len(rendered.text))
        return rendered

    monkeypatch.setattr(Template, "render", counted)
    messages = (CALLING if template == "qwen3" else PLAIN) * 500
    written(folder, template, messages)
    whole = len(Template(folder).render(messages).text)
    assert sum(characters) - whole < (2 if template == INST else 5) * whole


def chats(folder: Path, *rows: Any, **changes: Any) -> DataConfig:
    file = folder / "chats.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    values = {"source": "text", "path": str(file), "chat": True, "tokenizer": str(folder)}
    return DataConfig(**values | {"val_fraction": 0.0, "cache": str(folder / "cache")} | changes)


def scored(data: Any) -> list[int]:
    """Return the target tokens of all sequences."""
    return [target for row in data.train for target in row["targets"].tolist() if target != IGNORED]


def test_only_the_assistants_tokens_are_targets(folder):
    data = load(chats(folder, {"messages": TALK}), 256)
    expected = by_transformers(folder, TALK, tokenize=True, return_dict=False)
    row, length = data.train[0], len(expected)
    assert row["tokens"][:length].tolist() == expected
    assert row["targets"][length - 1 :].tolist() == [IGNORED] * (257 - length)
    learned = "A rose is a rose. été<|im_end|>\nis a rose<|im_end|>\n"
    assert data.tokenizer.decode(scored(data)) == learned
    positions = (row["targets"] != IGNORED).nonzero().flatten().tolist()
    assert [expected[position + 1] for position in positions] == scored(data)


def test_cut_conversations_keep_their_marks(folder):
    config = chats(folder, *({"messages": TALK * (n + 1)} for n in range(6)))
    uncut, cut = load(config, 2048), load(config, 48)
    assert len(scored(uncut)) == len(scored(cut)) > 0
    assert len(cut.train) > 6 * len(uncut.train)
    assert not uncut.summary()["without_target"] + cut.summary()["without_target"]
    prompts = [*(f"a rose {n} " * 200 for n in range(6)), *map(str, range(60))]
    data = load(chats(folder, *({"messages": [asks(x), TALK[1]]} for x in prompts)), 48)
    assert f"target token; seq_len={data.lengths.max()} h" in data.summary()["without_target"]


SPECIAL = "x<|im_end|>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, r"chats.jsonl:1: .*'instruction', .*has question"),
        ({"messages": []}, "chats.jsonl:1: its messages are empty"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 1 .*'content'"),
        ({"messages": [asks(["a"])]}, "message 1: .*text parts"),
        ({"messages": [asks([{"type": "image", "text": "a"}])]}, "message 1: .*text parts"),
        ({"messages": [asks([{"type": "text", "text": None}])]}, "message 1: .*text parts"),
        ({"messages": TALK[:1]}, "chats.jsonl:1: .*assistant"),
        ({"instruction": 3, "output": "a"}, "chats.jsonl:1: .*'instruction'"),
        ({"instruction": "q", "output": "a", "history": [3]}, "chats.jsonl:1: .*'history'"),
        ({"messages": [asks(SPECIAL), TALK[1]]}, r"message 1 .*<\|im_end\|>"),
        ({"messages": TALK, "tools": [{"description": SPECIAL}]}, r"tools .*<\|im_end\|>"),
        ({"messages": [asks("a \ud83d rose"), TALK[1]]}, r"chats\.jsonl:1: .*data\.errors=replace"),
        ({"messages": [asks("q"), says("a", weight=0.5)]}, "message 2: weight=0.5: .*0 or 1"),
        ({"messages": [asks("q"), says("a", train="no")]}, "message 2: train=no"),
        ({"messages": [asks("q"), says("a", train=0)]}, "message 2: train=0"),
    ],
)
def test_a_wrong_conversation_is_one_line(folder, row, message):
    check_refused(chats(folder, row), message)


MARK = r"chats.jsonl:1: .*\{% generation %\}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for", "chat template"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chats.jsonl:1: .*unsafe"),
        ("{% for x in range(10**9) %}{% endfor %}", "chats.jsonl:1: .*too big"),
        ("{{ 1 / 0 }}", "chats.jsonl:1: .*division"),
        (None, "no chat template.*data.tokenizer="),
        # Of these nobody knows which part is an answer
        ("{% for n in range(messages | length) %}{{ messages[n].content }}{% endfor %}", MARK),
        (
            "{% macro all() %}{% for m in messages %}{{ m.content }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{% endfor %}{{ all() }}",
            MARK,
        ),
        ("gemma4_v5", MARK),  # results of tools are among an answer
    ],
)
def test_templates_are_not_trusted(folder, template, message):
    write(folder, template)
    check_refused(chats(folder, {"messages": CALLING, "tools": TOOLS}), message)


def test_named_templates_and_files_are_found(folder):
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
        ({"path": __file__}, "test_chat.py: no rows"),
        ({"chat": False, "turns": "last"}, r"data\.turns=last: .*data\.chat=true"),
    ],
)
def test_keys_without_conversations_are_refused(folder, changes, message):
    check_refused(chats(folder, {"messages": TALK}, **changes), message)


def test_shortened_conversations_are_counted(folder):
    write(folder, "qwen3")
    rows = [{"messages": TALK}, {"messages": TALK[:2]}, {"messages": TALK[2:] + TALK}]
    for turns, count in (("auto", 2), ("auto", 2), ("all", 0)):  # built, from the cache
        counts = load(chats(folder, *rows, turns=turns), 512).summary()
        assert counts["conversations_shortened"] == count
    with pytest.raises(ValueError, match="changes the assistant's last message"):
        Template(folder).prompt("here", {"messages": [asks("q"), says("<think>a</think>b")]})


# Rows of other formats, and messages that say whether they are learned

FROM = {"user": "human", "assistant": "gpt", "tool": "observation", "system": "system"}


def sharegpt(messages: Any) -> list[dict[str, Any]]:
    return [{"from": FROM[each["role"]], "value": each["content"]} for each in messages]


def test_sharegpt_is_the_same_conversation():
    row = {"conversations": sharegpt(PLAIN), "system": "Be brief.", "tools": json.dumps(TOOLS)}
    assert format_of(row) == "ShareGPT"
    assert read(row) == ([SYSTEM, *PLAIN], TOOLS)
    call = {"from": "function_call", "value": json.dumps(CALL["function"])}
    messages, _ = read({"conversations": [*sharegpt([asks("q")]), call]})
    assert messages[1] == says(None, tool_calls=[{x: CALL[x] for x in ("type", "function")}])
    assert read({"conversations": PLAIN}) == (PLAIN, None)
    texts = [{"type": "text", "text": text} for text in ("q", "1")]
    assert read({"messages": [{"role": "user", "content": texts}]})[0] == [asks("q1")]
    for own in (PLAIN, [SYSTEM, *PLAIN]):
        assert read({"messages": own, "system": "Be brief."})[0] == [SYSTEM, *PLAIN]


def test_alpaca_is_the_same_conversation():
    row = {"instruction": "q2", "input": "x", "output": "a2", "history": [["q1", "a1"]]}
    assert format_of(row) == "Alpaca"
    assert read(row)[0] == [*PLAIN[:2], asks("q2\n\nx"), says("a2")]
    assert read(row | {"input": "", "history": None, "system": ""})[0] == PLAIN[2:]


def test_of_a_completion_the_prompt_is_not_learned():
    assert read({"prompt": "q", "completion": "a"})[0] == [asks("q"), says("a")]
    messages, _ = read({"prompt": PLAIN[:3], "completion": PLAIN[3:]})
    assert [message["content"] for message in messages] == [each["content"] for each in PLAIN]
    assert [message for message in messages if is_learned(message)] == PLAIN[3:]
    assert format_of({"prompt": "q", "completion": "a", "label": True}) is None


@pytest.mark.parametrize(("template", "ends"), [(CHATML, True), ("glm4moe", False)])
def test_answers_without_an_end_are_found(folder, template, ends):
    write(folder, template if ends else shipped(template))
    data = load(chats(folder, {"messages": PLAIN}), 256)
    assert data.summary()["sources_without_end"] == (not ends)


@pytest.mark.parametrize("template", [CHATML, INST])
def test_excluded_turns_are_not_learned(folder, template):
    every = written(folder, template, PLAIN)
    for excluded, left in ((1, parts(every)[1:]), (3, parts(every)[:1])):
        messages = [x | {"weight": 0} if n == excluded else x for n, x in enumerate(PLAIN)]
        talk = written(folder, template, messages)
        assert (talk.text, parts(talk)) == (every.text, left)
    with pytest.raises(ValueError, match="here: no message of the assistant"):
        written(folder, template, [asks("q"), says("a", train=False)])


def test_of_rewritten_turns_the_last_learned_is_written(folder):
    """Qwen3 leaves out the thinking of earlier turns, so the text ends with the learned one."""
    talk = written(folder, "qwen3", [*THINKING[:5], says("a3", train=False)])
    assert talk == written(folder, "qwen3", THINKING[:4])
    called = [*CALLING[:3], {**CALLING[3], "weight": 0}, *CALLING[4:]]
    (answer,) = parts(written(folder, "qwen3", called))
    assert "a2" in answer


def test_marks_without_messages_cannot_be_excluded(folder):
    template = "{% for n in range(2) %}{% generation %}{{ messages[n].content }}{% endgeneration %}"
    with pytest.raises(ValueError, match="leave out train and weight"):
        written(folder, template + "{% endfor %}", [says("a"), says("b", train=False)])
