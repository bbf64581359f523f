"""Chat templates: of well-known models as TRL ships them, and what Mistral Nemo's does, written
anew and without the parts that no test reaches.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from longctx.data.tokenizer import train

CHATML = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Marks, a question's spaces inside of the prompt
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}"
    "{% generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
# The system message stands before the last question: of a prompt, and of no whole conversation
NEMO = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "[INST]{{ messages[0].content + ' ' if loop.last and messages[0].role == 'system' }}"
    "{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
# A prompt that ends in a space, which the first token of an answer may take
SPACE = (
    "{% for m in messages %}{{ 'Question' if m.role == 'user' else 'Answer' }}: {{ m.content }}"
    "\n{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}"
)


def shipped(name: str) -> str:
    """Return the template of TRL by its name, such as qwen3 or qwen3_training."""
    trl = find_spec("trl")
    if trl is None or trl.origin is None:
        pytest.skip("trl is not installed")
    return Path(trl.origin).with_name("chat_templates").joinpath(f"{name}.jinja").read_text()


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE in which " a" and " rose" are tokens."""
    file = folder / "tokenizer.json"
    train(["a rose is a rose user assistant system"], 298).save(file)
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(file))


def write(folder: Path, template: Any) -> None:
    """Write the settings of the tokenizer in `folder`, with a chat template or one of TRL's."""
    if isinstance(template, str) and "{" not in template:
        template = shipped(template)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|endoftext|>",
    }
    content = json.dumps(settings | {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(content)
