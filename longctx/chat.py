"""`longctx chat`: a conversation with a trained model, on a terminal or through a pipe.

Each line of stdin is a message. The chat template of the model's folder writes the whole
conversation before each answer, and the model reads it anew: the template may write earlier answers
differently once others follow, so a cache of keys and values could be wrong.
"""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Any

from longctx.config.command_config import ChatConfig
from longctx.data.chat import Template
from longctx.generation import (
    AnswerFile,
    Prompt,
    Speed,
    find_source,
    load_model,
    say,
    too_little_memory,
    warn_of_length,
    write,
    write_batch,
)
from longctx.parallel.devices import (
    choose_device,
    is_out_of_memory,
    this_machine,
    within_memory,
)

Message = dict[str, Any]


def chat(config: ChatConfig) -> int:
    """Answer the lines of stdin until its end, each after all messages before it; return the exit
    code.

    Raises ValueError or OSError, one line, if the model cannot chat.
    """
    device = choose_device(config, this_machine())
    source = find_source(config, device)
    tokenizer = source.trained.tokenizer
    template = Template(source.trained.folder, today=datetime.now())
    messages = [] if config.system is None else [message("system", config.system)]
    length, sequences, speed = 0, 0, Speed()
    try:
        with within_memory(device):
            model = load_model(source, device)
            while (line := read_line()) is not None:
                asked = [*messages, message("user", line)]
                try:
                    text = template.prompt("chat", {"messages": asked})
                # Such as a special token: only this message is lost
                except ValueError as error:
                    say(f"error: {error}")
                    continue
                prompt = Prompt(tokenizer.encode_question(text), asked)
                length, sequences = len(prompt.ids) + config.max_new_tokens, 1
                warn_of_length(source, length)
                nowhere = AnswerFile(None)
                (answer,) = write_batch(config, model, source, [prompt], [0], nowhere, speed)
                # The next prompt would be refused with a special token in it
                for token in template.special:
                    answer = answer.replace(token, "")
                messages = [*asked, message("assistant", answer)]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        say(f"error: {too_little_memory(source, sequences, length, device)}")
        return 1
    say(str(speed))
    return 0


def message(role: str, content: str) -> Message:
    """Return a message as chat templates take it."""
    return {"role": role, "content": content}


def read_line() -> str | None:
    """Return the next line of stdin that is not empty; None at its end."""
    while True:
        if sys.stdin.isatty():
            write("> ")
        line = sys.stdin.readline()
        if not line or line.strip():
            return line.strip() or None
