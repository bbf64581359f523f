"""The keys of `longctx generate` and `chat`: a trained model, and how its text is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from longctx.attention.description import DESCRIPTIONS
from longctx.config.fields import DEVICE, MODEL, PLUGINS, PRECISION, SEEDS, Group, key, positive


@dataclass
class SampleConfig(Group):
    """A trained model, and how its text is chosen.

    top_k: choose among the k likeliest tokens; null: among all
    top_p: choose among the likeliest that together have this probability; null: among all
    """

    checkpoint: str = key("", MODEL, positional=True)
    max_new_tokens: int = positive(200, "of each text; fewer if it ends", limit=2**31)
    temperature: float = key(0.8, "0: always the likeliest; 1: as the model", between=(0.0, 100.0))
    top_k: int | None = positive(None, limit=2**31, needs="temperature")
    top_p: float | None = key(None, above=0, between=(0, 1), needs="temperature")
    seed: int = key(1, "of the choices", between=SEEDS)
    device: str = key("auto", DEVICE, choices=("auto", "cpu", "cuda"))
    precision: str = key("auto", PRECISION, choices=("auto", "bf16", "fp32"))
    attention: str | None = key(None, "of prompts; null: the run's, or flash", choices=DESCRIPTIONS)
    plugins: list[str] | None = key(None, PLUGINS)


@dataclass
class ChatConfig(SampleConfig):
    """Talk with a run or a model, by its chat template.

    longctx chat FOLDER
    longctx chat runs/NAME system='Answer in one sentence.' temperature=0
    """

    system: str | None = key(None, "message of the system, before yours", literal=True)


@dataclass
class GenerateConfig(SampleConfig):
    """Generate text from a run or a Hugging Face folder.

    longctx generate runs/NAME prompt='Once upon a time'
    longctx generate FOLDER prompt='Who are you?' chat=true temperature=0
    longctx generate OWNER/NAME@REVISION prompt='Once upon a time'
    longctx generate runs/NAME prompts=questions.jsonl out=answers.jsonl

    prompts: .jsonl file instead: a `prompt` on each line, or `messages` of a chat
    """

    prompt: str | None = key(None, "to continue; null: what a document begins with", literal=True)
    prompts: str | None = key(None, suffix=".jsonl")
    chat: bool = key(False, "the prompt is a message, for the model's chat template")
    batch_size: int = positive(8, "prompts at a time", limit=2**20)
    out: str | None = key(None, "write prompts and texts to this .jsonl too", suffix=".jsonl")

    def problems(self) -> Iterator[str]:
        """Yield a message for keys that contradict each other."""
        if self.prompts is None:
            if self.chat and self.prompt is None:
                yield "chat=true: give the message, as in prompt='Who are you?'"
            return
        if self.prompt is not None:
            yield f"prompts={self.prompts}: prompt= is given too; leave one of them out"
        if self.out is not None and Path(self.out).resolve() == Path(self.prompts).resolve():
            yield f"out={self.out}: the answers would replace the prompts; give another file"
        if not Path(self.prompts).is_file():
            yield f"prompts={self.prompts}: no such file"
