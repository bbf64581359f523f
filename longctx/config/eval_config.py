"""The keys of eval.py, `longctx score`, `generate` and `chat`: a trained model, and its task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

from longctx.attention.description import DESCRIPTIONS, AttentionConfig
from longctx.config import fields
from longctx.config.data_config import DataConfig
from longctx.config.fields import DEVICE, MODEL, PLUGINS, PRECISION, Group, group, key, positive
from longctx.config.layout_config import ContextConfig, StrategyConfig

SHORTEST = 128  # tokens of a text with pass keys
LENGTHS: dict[str, Any] = {"between": (SHORTEST, inf), "unit": 1024, "distinct": True}
RULER_TASKS = [
    *(f"niah_{kind}_{number}" for kind in ("single", "multikey") for number in (1, 2, 3)),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"),
]
MORE_TASKS = ["graphwalks", "mrcr", "oolong"]
TOKENS_PER_BATCH = {"cuda": 65536, "cpu": 4096}


@dataclass
class PasskeyConfig:
    """Pass keys hidden in long texts and asked for at the end: passkey=true.

    lengths: tokens of a text; null: 1,024, 2,048 … seq_len, below 8,192 from about an eighth; in
        training seq_len alone
    depths: position of the fact: 0 the beginning, 1 the end; null: 11 depths, in training 5
    """

    enabled: bool = key(False, "set by passkey=true", short=True)
    lengths: list[int] | None = key(None, **LENGTHS)
    depths: list[float] | None = key(None, between=(0, 1), distinct=True)
    samples: int = positive(10, "texts for each length and depth", limit=10**6)


@dataclass
class RulerConfig:
    """RULER's tasks (arXiv 2404.06654), made from a seed and your own text: ruler=true.

    lengths: tokens of a text with its answer; null: 4,096, 8,192 … seq_len
    tasks: null: the 11 of RULER; the others are like GraphWalks, MRCR and OOLONG
    """

    enabled: bool = key(False, "set by ruler=true", short=True)
    lengths: list[int] | None = key(None, **LENGTHS)
    samples: int = positive(20, "texts for each task and length; RULER takes 500", limit=10**6)
    tasks: list[str] | None = key(None, choices=[*RULER_TASKS, *MORE_TASKS], distinct=True)
    seed: int = key(42, "of the texts", between=fields.SEEDS)

    @property
    def chosen(self) -> list[str]:
        """Return the tasks that run."""
        return RULER_TASKS if self.tasks is None else self.tasks


@dataclass
class EvalConfig(Group):
    """Evaluate a run, a checkpoint or a Hugging Face folder.

    python eval.py runs/NAME seq_len=16384
    python eval.py OWNER/NAME data=text data.path=docs/
    The same: longctx eval key=value ...

    seq_len: tokens that the model sees at most; null: the length that the run trained at
    stride: tokens from one window to the next; null: half of seq_len
    contexts: lengths to score the same tokens at; null: 1024 (or an eighth) … seq_len; []: none
    batch_size: windows per forward; null: 65,536 tokens on a GPU, 4,096 on a CPU
    wandb: send the result there too: disabled | auto | online | offline
    chat_template: write prompts of tasks or ruler with it; null: those of tasks, if there is one
    """

    checkpoint: str | None = key(None, MODEL, positional=True, compared=False)
    seq_len: int | None = positive(None, limit=10**12, unit=1024)
    stride: int | None = positive(None, limit=10**12, unit=1024)
    split: str = key("val", "the run's own documents: val | train", choices=("val", "train"))
    documents: int | None = positive(None, "documents to score at most", limit=10**12)
    contexts: list[int] | None = key(None, between=(2, inf), unit=1024)
    batch_size: int | None = positive(None, limit=10**12, compared=False)
    device: str = key("auto", DEVICE, choices=("auto", "cpu", "cuda"), compared=False)
    devices: int = positive(1, "GPUs, or processes on a CPU", limit=4096, compared=False)
    precision: str = key("auto", PRECISION, choices=("auto", "bf16", "fp32"))
    wandb: str = key("disabled", choices=("disabled", "auto", "online", "offline"), compared=False)
    tasks: list[str] = key([], "run these of lm-evaluation-harness instead, such as [wikitext]")
    tasks_path: str | None = key(None, "folder with the YAML files of the tasks", needs="tasks")
    fewshot: int | None = key(None, "per question; null: task's", between=(0, 10**6), needs="tasks")
    chat_template: bool | None = key(None)
    plugins: list[str] | None = key(None, PLUGINS)
    attention: AttentionConfig = group(AttentionConfig)
    passkey: PasskeyConfig = group(PasskeyConfig)
    ruler: RulerConfig = group(RulerConfig)
    data: DataConfig = group(DataConfig)  # the run's own documents unless data= is given
    strategy: StrategyConfig = group(StrategyConfig, compared=False)
    context: ContextConfig = group(ContextConfig, compared=False)

    def problems(self) -> Iterator[str]:
        """Yield a message for keys that contradict each other in any evaluation."""
        if self.context.degree == "auto":
            yield "context=auto: is chosen for training; give eval.py a number"
        if self.context.check:
            yield "context.check=true: compares a step of training; give it to train.py"
        tasks = f"tasks=[{','.join(self.tasks)}]"
        if self.tasks and find_spec("lm_eval") is None:
            yield f"{tasks}: lm-evaluation-harness is not installed; pip install lm-eval"
        kinds = {tasks: bool(self.tasks)}
        kinds |= {"passkey=true": self.passkey.enabled, "ruler=true": self.ruler.enabled}
        chosen = [kind for kind, is_chosen in kinds.items() if is_chosen]
        if len(chosen) > 1:
            yield f"{chosen[0]}: another evaluation than {chosen[1]}; call eval.py once for each"
        ignored = [] if not chosen else ["contexts", "stride"]
        ignored += ["batch_size"] if chosen and not self.tasks else []
        ignored = [name for name in ignored if getattr(self, name) is not None]
        if self.chat_template is not None and not (self.tasks or self.ruler.enabled):
            yield "chat_template=: does nothing without tasks= or ruler=true; leave it out"
        # Each device answers texts of its own
        if self.ruler.enabled and self.context.degree != 1:
            ignored.append("context")
        for name in ignored:
            yield f"{name}=: does nothing with {chosen[0]}; leave {name} out"
        for name, texts in (("passkey", self.passkey), ("ruler", self.ruler)):
            if texts.lengths is not None and self.seq_len is not None:
                yield f"seq_len={self.seq_len}: {name}.lengths gives the lengths; leave one out"


@dataclass
class ScoreConfig(EvalConfig):
    """Write how much each document gains from a long context.

    longctx score OWNER/NAME data=text data.path=docs/ seq_len=32k short=4k
    longctx train data=text data.path=docs/ data.filter=scored.jsonl

    out: gets a line per document: nats per token that seq_len gains over short; picture: .png
    short: tokens of the short context; null: 1,024, or an eighth of a seq_len below 8,192
    """

    out: Path = key(Path("scored.jsonl"), suffix=".jsonl", compared=False)
    short: int | None = key(None, between=(2, inf), unit=1024)
    contexts: list[int] | None = key([], between=(2, inf), unit=1024)

    def problems(self) -> Iterator[str]:
        """Yield a message for keys that contradict each other, or score no documents."""
        if self.tasks or self.passkey.enabled or self.ruler.enabled:
            yield "tasks=, passkey=, ruler=: score no documents; give them to longctx eval"
        out, *paths = (Path(x).expanduser().resolve() for x in [str(self.out), *self.data.paths()])
        if any(out.is_relative_to(path) or fnmatch(str(out), str(path)) for path in paths):
            yield f"out={self.out}: the scores would be among the documents; give another file"
        yield from super().problems()


def check_overrides(config: EvalConfig, overrides: Mapping[str, str]) -> None:
    """Raise ValueError for one of the `overrides`, key → value as typed, that `config` ignores."""
    data_keys = [name for name in overrides if name.partition(".")[0] == "data"]
    reasons = {
        "data.vocab_size": "the checkpoint brings its tokenizer",
        "data.cache": "an evaluation stores nothing of data=",
        "data.packing": "windows share a sequence if the model keeps them apart",
        "data.preferences": "an evaluation scores plain text",
    }
    selecting = ("val_fraction", "lengths", "min_tokens", "max_tokens", "filter", "keep")
    reasons |= {f"data.{name}": "all documents of data= are scored" for name in selecting}
    if not config.data.chat:  # else its chat template is read
        reasons["data.tokenizer"] = "the checkpoint brings its tokenizer"
    if data_keys:
        reasons["split"] = "only the run's own data is split; leave out split, or data"
    if data_keys and "data" not in overrides:
        reasons |= dict.fromkeys(data_keys, "a source goes with it, such as data=text")
    if config.context.degree == 1:
        reasons["context.method"] = "does nothing with context=1"
    if config.tasks:
        reasons |= dict.fromkeys(("data", "split"), "tasks bring their own documents")
    fields.refuse_first(
        f"{name}={overrides[name]}: {reason}; leave {name} out"
        for name, reason in reasons.items()
        if name in overrides
    )


def default_lengths(limit: int) -> list[int]:
    """Return powers of two, then `limit`; none for a limit under 16."""
    # They begin at 1,024, or for a limit under 8,192 at an eighth of the largest power within it
    if limit < 16:
        return []
    shortest = 10 if limit >= 8192 else limit.bit_length() - 4
    powers = [1 << exponent for exponent in range(shortest, limit.bit_length())]
    return [*(power for power in powers if power < limit), limit]


@dataclass
class SampleConfig(Group):
    """A trained model, and how its text is chosen.

    top_k: choose among the k likeliest tokens; null: among all
    top_p: choose among the likeliest that together have this probability; null: among all
    """

    checkpoint: str = key("", MODEL, positional=True)
    max_new_tokens: int = positive(200, "of each text; fewer if it ends", limit=2**31)
    temperature: float = key(0.8, "0: always the likeliest; 1: unchanged", between=(0.0, 100.0))
    top_k: int | None = positive(None, limit=2**31, needs="temperature")
    top_p: float | None = key(None, above=0, between=(0, 1), needs="temperature")
    seed: int = key(1, "of the choices", between=fields.SEEDS)
    device: str = key("auto", DEVICE, choices=("auto", "cpu", "cuda"))
    precision: str = key("auto", PRECISION, choices=("auto", "bf16", "fp32"))
    attention: str | None = key(None, "backend; null: the run's, or flash", choices=DESCRIPTIONS)
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

    prompt: str | None = key(None, "text to continue; null: a document's start", literal=True)
    prompts: Path | None = key(None, suffix=".jsonl")
    chat: bool = key(False, "the prompt is a message, for the model's chat template")
    batch_size: int = positive(8, "prompts at a time", limit=2**20)
    out: Path | None = key(None, "write prompts and texts to this .jsonl too", suffix=".jsonl")

    def problems(self) -> Iterator[str]:
        """Yield a message for keys that contradict each other."""
        if self.prompts is None and self.prompt is None and self.chat:
            yield "chat=true: give the message, as in prompt='Who are you?'"
        if self.prompts is None:
            return
        if self.prompt is not None:
            yield f"prompts={self.prompts}: prompt= is given too; leave one of them out"
        if self.out is not None and self.out.resolve() == self.prompts.resolve():
            yield f"out={self.out}: the answers would replace the prompts; give another file"
        if not self.prompts.is_file():
            yield f"prompts={self.prompts}: no such file"
