"""The messages of a row, in the formats that conversations are published in.

    messages        {"messages": [{"role": "user", "content": …}, …], "system": …, "tools": […]}
    ShareGPT        {"conversations": [{"from": "human", "value": …}, …], "system": …, "tools": …}
    Alpaca          {"instruction": …, "input": …, "output": …, "system": …, "history": [[…, …]]}
    completion      {"prompt": …, "completion": …} of TRL, both texts or both lists of messages

ShareGPT and Alpaca with the columns that LLaMA-Factory reads. An assistant's message is learned
unless it has `"train": false`, as for axolotl, or `"weight": 0`, as for OpenAI's fine-tuning. The
template of each gets the row's `chat_template_kwargs`, as in TRL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from longctx.config.fields import refuse
from longctx.untrusted import named

Message = dict[str, Any]
Row = Mapping[str, Any]

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
}


def format_of(row: Row) -> str | None:
    """Return the name of the format of a row, as above; None for another."""
    if isinstance(row.get("messages"), list):
        return "messages"
    if isinstance(row.get("conversations"), list):
        return "ShareGPT"
    if {"prompt", "completion"} <= row.keys() and "label" not in row:
        return "completion"
    return "Alpaca" if {"instruction", "output"} <= row.keys() else None


def read(row: Row) -> tuple[list[Message], Any]:
    """Return the messages of a row and its tools; raise ValueError, one line, for another row."""
    layout, tools = format_of(row), row.get("tools")
    if layout == "ShareGPT":
        messages = [_of_sharegpt(*item) for item in enumerate(row["conversations"], start=1)]
    elif layout == "Alpaca":
        messages = _of_alpaca(row)
    elif layout == "completion":
        messages = _of_completion(row["prompt"], row["completion"])
    else:
        messages = row.get("messages") or []
        wanted = "'messages', 'conversations', 'instruction', or 'prompt' and 'completion'"
        found = ", ".join(list(row)[:8])
        problem = f"no conversation: give {wanted}; the row has {found}"
        refuse((layout is not None and not messages, "its messages are empty; leave it out"))
        refuse((not messages or not isinstance(messages, list), problem))
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    has_own = layout == "messages" and first.get("role") in ("system", "developer")
    if row.get("system") and not has_own:
        messages = [{"role": "system", "content": row["system"]}, *messages]
    if isinstance(tools, str):
        with named("tools", "not JSON ({})"):
            tools = json.loads(tools or "null")
    return [_checked(f"message {n}", message) for n, message in enumerate(messages, 1)], tools


def is_learned(message: Row) -> bool:
    """Return True if a message is the assistant's, and neither `train` nor `weight` excludes it."""
    is_excluded = message.get("train") is False or message.get("weight") == 0
    return bool(message["role"] == "assistant" and not is_excluded)


def as_templates_expect(
    message: Mapping[str, Any], reads_null: bool = False, joins_text: bool = False
) -> dict[str, Any]:
    """Return a copy of a message as transformers passes it on.

    Keys that hold null are left out, since templates would write "None"; but for the content, if
    the template `reads_null`. Thinking is there under both names that templates read. Arguments of
    calls are objects, unless the template `joins_text`. A copy, since reports know a message by its
    identity.
    """
    present: dict[str, Any] = {"content": None} if reads_null else {}
    present |= {key: value for key, value in message.items() if value is not None}
    if isinstance(present.get("tool_calls"), list) and not joins_text:
        present["tool_calls"] = [_with_object(call) for call in present["tool_calls"]]
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in present:
            thinking = present[name]
            return {"thinking": thinking, **present, "reasoning_content": thinking}
    return present


def _with_object(call: Any) -> Any:
    """Return a tool call with its arguments as an object, as servers pass it to the template."""
    # OpenAI writes them as JSON text. Most templates would quote that text a second time.
    if not isinstance(call, dict):
        return call
    if "function" in call:
        return {**call, "function": _with_object(call["function"])}
    with suppress(KeyError, TypeError, ValueError):
        values = json.loads(call["arguments"])
        if isinstance(values, dict):
            return {**call, "arguments": values}
    return call


def _checked(location: str, message: Any) -> Message:
    """Return a message with its text parts joined; raise ValueError for a mistake that most
    templates would take as it is.
    """
    has_role = isinstance(message, dict) and isinstance(message.get("role"), str)
    refuse((not has_role, f"{location} must be an object with a role"))
    content, train, weight = (message.get(key) for key in ("content", "train", "weight"))
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        are_texts = all(x.get("type") == "text" and isinstance(x.get("text"), str) for x in parts)
        refuse((not are_texts, f"{location}: 'content' must be text or text parts"))
        content = "".join(part["text"] for part in parts)
        message = {**message, "content": content}
    has_text = isinstance(content, str) or (content is None and message.get("tool_calls"))
    refuse((not has_text, f"{location} must have its text in 'content'"))
    whole = f"{location}: weight={weight}: a message is learned or not; give 0 or 1"
    refuse((weight not in (None, 0, 1), whole))
    refuse((not isinstance(train, bool | None), f"{location}: train={train}: give true or false"))
    return message


def _of_completion(prompt: Any, completion: Any) -> list[Message]:
    """Return the messages of a row of TRL; only its completion is learned."""
    if isinstance(prompt, list) and isinstance(completion, list):
        unlearned = [one | {"train": False} if isinstance(one, dict) else one for one in prompt]
        return unlearned + completion
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


def _of_sharegpt(number: int, entry: Any) -> Message:
    if not isinstance(entry, dict) or "from" not in entry:
        return entry  # Some rows with this column hold messages
    speaker, value = str(entry["from"]), entry.get("value")
    rest = {key: content for key, content in entry.items() if key not in ("from", "value")}
    message = {"role": ROLES.get(speaker, speaker), "content": value, **rest}
    if speaker != "function_call":
        return message
    with named(f"message {number}", "the call of a function is not JSON ({})"):
        calls = json.loads(str(value))
    calls = calls if isinstance(calls, list) else [calls]
    functions = [{"type": "function", "function": call} for call in calls]
    return {**message, "content": None, "tool_calls": functions}


def _of_alpaca(row: Row) -> list[Message]:
    roles = ("user", "assistant")
    fields = "'instruction' and 'input' must be text, 'history' pairs of texts"
    with named(fields, errors=(TypeError, ValueError)):
        question = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
        turns: Sequence[Any] = [*(row.get("history") or []), (question, row["output"])]
        return [
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(roles, turn, strict=True)
        ]
