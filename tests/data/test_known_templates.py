"""The chat templates of Qwen3, Llama 3, gpt-oss, Gemma and others as TRL ships them: the text is
that of transformers, and what is learned is what TRL's training templates mark.
"""

from __future__ import annotations

from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from longctx.data.chat import Template
from longctx.data.sources import Document
from tests.data.chat_templates import write, write_tokenizer
from tests.data.test_chat import PLAIN, asks, parts, says

SPEC = find_spec("trl")
pytestmark = pytest.mark.skipif(SPEC is None, reason="trl is not installed")

ARGUMENTS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
FUNCTION = {"name": "f", "description": "Doubles.", "parameters": ARGUMENTS}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
RESULT = {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "42"}
THINKING = [asks("q1"), says("a1", thinking="t1"), asks("q2"), says("a2", reasoning_content="t2")]
CALLING = [*THINKING[:3], says("", tool_calls=[CALL], thinking="t2"), RESULT, says("a2")]
QWEN_CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    write(tmp_path, None)
    return tmp_path


def written(
    folder: Path, name: str, messages: Any, tools: Any = None, learned: str = "auto"
) -> Document:
    assert SPEC is not None and SPEC.origin is not None
    source = Path(SPEC.origin).with_name("chat_templates") / f"{name}.jinja"
    (folder / "chat_template.jinja").write_text(source.read_text())
    rows = [("name", "here", {"messages": messages, "tools": tools})]
    (conversation,) = Template(folder, learned, datetime.now()).conversations(rows)
    return conversation


@pytest.mark.parametrize(
    ("name", "messages", "learned"),
    [
        ("qwen3", PLAIN, ["<think>\n\n</think>\n\na2<|im_end|>\n"]),
        ("qwen3", THINKING, ["<think>\nt2\n</think>\n\na2<|im_end|>\n"]),
        (
            "qwen3",
            CALLING,
            [f"<think>\nt2\n</think>\n\n{QWEN_CALL}", "<think>\n\n</think>\n\na2<|im_end|>\n"],
        ),
        ("qwen3_instruct_2507", CALLING, ["a1<|im_end|>\n", QWEN_CALL, "a2<|im_end|>\n"]),
        # The prompt ends in an empty thinking
        ("qwen3_5_nothink", PLAIN, ["a2<|im_end|>\n"]),
        ("llama3_1", PLAIN, ["a1<|eot_id|>", "a2<|eot_id|>"]),
        (
            "llama3_1",
            CALLING,
            ["a1<|eot_id|>", '{"name": "f", "parameters": {"x": 1}}<|eot_id|>', "a2<|eot_id|>"],
        ),
        (
            "gptoss",
            THINKING,
            [
                "<|channel|>analysis<|message|>t2<|end|>"
                "<|start|>assistant<|channel|>final<|message|>a2<|return|>"
            ],
        ),
        (
            "gptoss",
            CALLING,
            [
                ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>',
                "<|channel|>final<|message|>a2<|return|>",
            ],
        ),
        # A macro with loops inside of the loop over messages
        ("gemma4_v5", PLAIN, ["a1<turn|>\n", "a2<turn|>\n"]),
    ],
)
def test_answers_of_known_models_are_learned(
    folder: Path, name: str, messages: Any, learned: list[str]
) -> None:
    tools = TOOLS if messages is CALLING else None
    talk = written(folder, name, messages, tools)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert talk.text == theirs.apply_chat_template(messages, tools=tools, tokenize=False)
    assert parts(talk) == learned
    row = {"messages": messages[:-1], "tools": tools}
    assert Template(folder, today=datetime.now()).prompt("here", row) == theirs.apply_chat_template(
        messages[:-1], tools=tools, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("llama3", PLAIN),
        ("qwen2_5_vl", CALLING),
        ("qwen3_vl", CALLING),
        ("qwen3_instruct_2507", CALLING),
        ("gemma3", PLAIN),
        ("cohere2", PLAIN),
        ("lfm2_v2", CALLING),
    ],
)
def test_learned_is_what_training_templates_mark(folder: Path, name: str, messages: Any) -> None:
    tools = TOOLS if messages is CALLING else None
    ours = written(folder, name, messages, tools)
    assert ours == written(folder, f"{name}_training", messages, tools)
    every = written(folder, name, messages, tools, "all")
    assert every.spans == ours.spans


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_nothink", "qwen3_5_think", "gptoss"])
def test_every_turn_is_learned_without_its_opening(folder: Path, name: str) -> None:
    for messages in (PLAIN, THINKING):
        first, last = parts(written(folder, name, messages, learned="all"))
        assert first.startswith(("a1", "<|channel|>"))
        assert "a2" in last
        assert "assistant\n" not in first + last


def test_results_of_tools_among_an_answer_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"here: .*results of tools.*\{% generation %\}"):
        written(folder, "gemma4_v5", CALLING, TOOLS)
