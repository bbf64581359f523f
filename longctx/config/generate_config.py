"""The keys of `longctx generate`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from longctx.config import presets
from longctx.config.fields import check, key, refuse

PROMPT_FILES = (".txt", ".jsonl")


@dataclass
class GenerateConfig:
    """The prompt, the model that continues it, and how tokens are chosen."""

    checkpoint: str = key(
        "",
        "a run (its newest checkpoint), one of its checkpoints, a Hugging Face folder, or a "
        "model of the Hub: OWNER/NAME, OWNER/NAME@REVISION",
        positional=True,
    )
    prompt: str | None = key(
        None, "text to continue, as it is typed; null: what a document begins with", literal=True
    )
    prompts: str | None = key(
        None,
        "file instead: .txt, one prompt; .jsonl, a `prompt` on each line, or `messages` of a chat",
    )
    chat: bool = key(
        False, "the prompt is a message; the answer is asked for by the model's chat template"
    )
    max_new_tokens: int = key(200, "of each prompt; fewer if its text ends", between=(1, 2**31))
    temperature: float = key(
        0.8, "0: always the likeliest token; 1: by the model's probabilities", between=(0.0, 100.0)
    )
    top_k: int | None = key(
        None, "choose among the k likeliest tokens; null: among all", between=(1, 2**31)
    )
    top_p: float | None = key(
        None,
        "choose among the likeliest that together have this probability; null: among all",
        above=0,
        between=(0, 1),
    )
    seed: int = key(1, "of the choices", between=(0, 2**63 - 1))
    batch_size: int = key(8, "prompts at a time", between=(1, 2**20))
    out: str | None = key(None, "write prompts and texts to this .jsonl too")
    device: str = key(
        "auto", "auto: a GPU if there is one | cpu | cuda", choices=("auto", "cpu", "cuda")
    )
    precision: str = key(
        "auto", "auto: bf16 on a GPU, fp32 on a CPU | bf16 | fp32", choices=("auto", "bf16", "fp32")
    )
    decode: str = key(
        "auto",
        "kernel of single tokens: auto: triton on a GPU, torch on a CPU | triton | torch",
        choices=("auto", "triton", "torch"),
    )
    attention: str = key("flash", "backend that computes the prompts: flash | sdpa | naive | …")

    def validate(self) -> None:
        """Raise ValueError for the first key that makes no sense, or whose file is missing."""
        check(self)
        backends = sorted(presets.names("attention"))
        out, file = Path("out.jsonl" if self.out is None else self.out), Path(self.prompts or "")
        refuse(
            *(
                (
                    self.temperature == 0 and value is not None,
                    f"{name}={value}: does nothing with temperature=0, which takes the likeliest "
                    "token; leave one of them out",
                )
                for name, value in (("top_k", self.top_k), ("top_p", self.top_p))
            ),
            (
                self.attention not in backends,
                f"attention={self.attention}: choose one of {', '.join(backends)}",
            ),
            (
                self.chat and self.prompt is None and self.prompts is None,
                "chat=true: give the message, as in prompt='Who are you?'",
            ),
            (out.suffix != ".jsonl", f"out={out}: a file that ends in .jsonl"),
            (
                not out.absolute().parent.is_dir(),
                f"out={out}: the folder {out.parent} is not there",
            ),
            (
                self.prompts is not None and self.prompt is not None,
                f"prompts={file}: prompt= is given too; leave one of them out",
            ),
            (
                self.prompts is not None
                and (file.suffix not in PROMPT_FILES or not file.is_file()),
                f"prompts={file}: no such file; give one that ends in {' or '.join(PROMPT_FILES)}",
            ),
        )
