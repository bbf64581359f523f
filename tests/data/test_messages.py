"""Rows of other formats become the same conversation, and messages say whether they are learned."""

import json
from typing import Any

import pytest

from longctx.data import load
from longctx.data.messages import format_of, is_learned, read
from tests.data.chat_templates import CHATML, INST, shipped, write
from tests.data.test_chat import (
    CALL,
    CALLING,
    PLAIN,
    SYSTEM,
    THINKING,
    TOOLS,
    asks,
    chats,
    parts,
    says,
    written,
)

FROM = {"user": "human", "assistant": "gpt", "tool": "observation", "system": "system"}


def sharegpt(messages: Any) -> list[dict[str, Any]]:
    return [{"from": FROM[each["role"]], "value": each["content"]} for each in messages]


def test_sharegpt_is_the_same_conversation():
    row = {"conversations": sharegpt(PLAIN), "system": "Be brief.", "tools": json.dumps(TOOLS)}
    assert format_of(row) == "ShareGPT"
    assert read(row) == ([SYSTEM, *PLAIN], TOOLS)
    call = {"from": "function_call", "value": json.dumps(CALL["function"])}
    messages, _ = read({"conversations": [*sharegpt([asks("q")]), call]})
    function = {"type": "function", "function": CALL["function"]}
    assert messages[1] == says(None, tool_calls=[function])
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
        messages = [dict(message) for message in PLAIN]
        messages[excluded]["weight"] = 0
        talk = written(folder, template, messages)
        assert talk.text == every.text
        assert parts(talk) == left
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
