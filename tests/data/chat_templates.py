"""Chat templates: of well-known models as TRL ships them, and in templates/ what Mistral Nemo's and
others do, written anew and without the parts that no test reaches.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from longctx.data.tokenizer import train

OWN = Path(__file__).with_name("templates")
FILES = (OWN / f"{name}.jinja" for name in ("chatml", "inst", "nemo", "space"))
CHATML, INST, NEMO, SPACE = (file.read_text() for file in FILES)


def shipped(name: str) -> str:
    """Return a template by its name: one of ours or of TRL, such as qwen3 or qwen3_training."""
    trl = find_spec("trl")
    if trl is None or trl.origin is None:
        pytest.skip("trl is not installed")
    folders = OWN, Path(trl.origin).with_name("chat_templates")
    files = (folder / f"{name}.jinja" for folder in folders)
    return next(file for file in files if file.exists()).read_text()


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE in which " a" and " rose" are tokens."""
    file = folder / "tokenizer.json"
    train(["a rose is a rose user assistant system"], 298).save(file)
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(file))


def write(folder: Path, template: Any) -> None:
    """Write the settings of the tokenizer in `folder`, with a chat template or one by its name."""
    if isinstance(template, str) and "{" not in template:
        template = shipped(template)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    content = json.dumps(settings | {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"})
    (folder / "tokenizer_config.json").write_text(content)
