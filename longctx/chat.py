"""`longctx chat`: a conversation with a trained model, on a terminal or through a pipe.

Each line of stdin is a message. The chat template of the model's folder writes the whole
conversation before each answer, and the model reads it anew: the template may write earlier answers
differently once others follow, so a cache of keys and values could be wrong.
"""

from __future__ import annotations

import sys
from datetime import datetime

from longctx.config.command_config import ChatConfig
from longctx.data.chat import Template
from longctx.data.messages import Message
from longctx.generation import AnswerFile, Engine, Prompt, say, write


def chat(config: ChatConfig) -> int:
    """Answer the lines of stdin until its end, each after all messages before it; return the exit
    code.

    Raises ValueError or OSError, one line, if the model cannot chat.
    """
    engine = Engine(config)
    template = Template(engine.trained.folder, today=datetime.now())
    messages: list[Message] = []
    if config.system is not None:
        messages = [{"role": "system", "content": config.system}]
    with engine.within_memory():
        engine.load()
        while (line := read_line()) is not None:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                text = template.prompt("chat", {"messages": asked})
            # Such as a special token: only this message is lost
            except ValueError as error:
                say(f"error: {error}")
                continue
            prompt = Prompt(engine.tokenizer.encode_question(text), asked)
            engine.warn_of_length(len(prompt.ids) + config.max_new_tokens)
            (answer,) = engine.write_batch([prompt], [0], AnswerFile(None))
            config.seed += 1  # else each answer draws the same random numbers
            # The next prompt would be refused with a special token in it
            for token in template.special:
                answer = answer.replace(token, "")
            messages = [*asked, {"role": "assistant", "content": answer}]
    return engine.exit_code


def read_line() -> str | None:
    """Return the next line of stdin that is not empty; None at its end."""
    while True:
        if sys.stdin.isatty():
            write("> ")
        line = sys.stdin.readline()
        if not line or line.strip():
            return line.strip() or None
