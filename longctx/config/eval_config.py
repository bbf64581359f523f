"""The keys of eval.py, checked as far as that needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from longctx.config.data_config import DataConfig
from longctx.config.fields import check, group, key
from longctx.config.model_config import AttentionConfig
from longctx.config.parallel_config import ContextConfig, StrategyConfig

KINDS = ("passkey", "needle")  # of facts: one number, or one number among others
SHORTEST = 128  # tokens of a text with facts
RULER_TASKS = [
    *("niah_single_1", "niah_single_2", "niah_single_3"),
    *("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery"),
    *("vt", "cwe", "fwe", "qa_1", "qa_2"),
]
QUESTIONS = {"qa_1": "squad", "qa_2": "hotpotqa"}  # tasks → the keys of their files
TOKENS_PER_BATCH = {"cuda": 65536, "cpu": 4096}


def _check_lists(config: PasskeyConfig | RulerConfig, prefix: str, *names: str) -> None:
    """Raise ValueError for a list of `config` that is empty or has a value twice."""
    for name in names:
        values = getattr(config, name)
        if values is not None and not values:
            raise ValueError(f"{prefix}{name}=[]: an empty list; give a value, or leave it out")
        if len(set(values or [])) < len(values or []):
            raise ValueError(f"{prefix}{name}={values}: a value is there twice; give each once")


@dataclass
class PasskeyConfig:
    """Facts hidden in long texts and asked for at the end: passkey=true."""

    enabled: bool = key(False, "set by passkey=true", short=True)
    lengths: list[int] | None = key(
        None,
        "tokens of a text; null: 1,024, 2,048 … seq_len, below 8,192 from about an eighth; in "
        "training seq_len alone",
        between=(SHORTEST, float("inf")),
    )
    depths: list[float] | None = key(
        None,
        "where the fact is hidden: 0 the beginning, 1 the end; null: 11 depths, in training 5",
        between=(0, 1),
    )
    samples: int = key(10, "texts for each length, depth and kind", between=(1, 10**6))
    kinds: list[str] = key(
        list(KINDS), "passkey: one number | needle: one among others", choices=KINDS
    )

    def validate(self) -> None:
        """Raise ValueError naming the first key whose value makes no sense."""
        check(self, "passkey.")
        _check_lists(self, "passkey.", "lengths", "depths", "kinds")


@dataclass
class RulerConfig:
    """RULER's 13 tasks (arXiv 2404.06654), made from a seed and your own text: ruler=true."""

    enabled: bool = key(False, "set by ruler=true", short=True)
    lengths: list[int] | None = key(
        None,
        "tokens of a text with its answer; null: 4,096, 8,192 … seq_len",
        between=(SHORTEST, float("inf")),
    )
    samples: int = key(20, "texts for each task and length; RULER takes 500", between=(1, 10**6))
    tasks: list[str] | None = key(None, "null: all 13", choices=RULER_TASKS)
    seed: int = key(42, "of the texts", between=(0, 2**63 - 1))
    squad: str | None = key(
        None, "JSON in SQuAD's form for qa_1; null: questions are made from your own text"
    )
    hotpotqa: str | None = key(
        None, "JSON in HotpotQA's form for qa_2; null: questions are made from your own text"
    )

    @property
    def chosen(self) -> list[str]:
        """The tasks that run."""
        return RULER_TASKS if self.tasks is None else self.tasks

    @property
    def made(self) -> list[str]:
        """The tasks whose questions are made from one's own text."""
        return [task for task in self.chosen if task in QUESTIONS and self.file_of(task) is None]

    def file_of(self, task: str) -> str | None:
        """The file with the questions of `task`, qa_1 or qa_2."""
        file: str | None = getattr(self, QUESTIONS[task])
        return file

    def validate(self) -> None:
        """Raise ValueError naming the first key whose value makes no sense."""
        check(self, "ruler.")
        _check_lists(self, "ruler.", "lengths", "tasks")
        for task, name in QUESTIONS.items():
            file = getattr(self, name)
            if file is not None and task not in self.chosen:
                raise ValueError(
                    f"ruler.{name}={file}: its questions are those of {task}, which is not among "
                    "ruler.tasks; leave one of them out"
                )
            if file is not None and not Path(file).is_file():
                raise ValueError(f"ruler.{name}={file}: no such file")


@dataclass
class EvalConfig:
    """One evaluation of one checkpoint."""

    checkpoint: str | None = key(
        None,
        "runs/NAME (its newest checkpoint), one of its checkpoints, a Hugging Face folder, or a "
        "model of the Hub: OWNER/NAME, OWNER/NAME@REVISION",
    )
    seq_len: int | None = key(
        None,
        "tokens that the model sees at most; null: the length that the run trained at",
        between=(1, 10**12),
    )
    stride: int | None = key(
        None,
        "tokens from one window to the next; null: half of seq_len, in tasks seq_len",
        between=(1, 10**12),
    )
    split: str = key(
        "val", "which of the run's own documents: val | train", choices=("val", "train")
    )
    documents: int | None = key(None, "documents to score at most", between=(1, 10**12))
    contexts: list[int] | None = key(
        None,
        "context lengths to score the same tokens at; null: 1024, 2048 … seq_len, below 8192 from "
        "about an eighth; []: none",
        between=(2, float("inf")),
    )
    batch_size: int | None = key(
        None,
        "windows per forward; null: 65,536 tokens on a GPU, 4,096 on a CPU",
        between=(1, 10**12),
    )
    device: str = key(
        "auto", "auto: a GPU if there is one | cpu | cuda", choices=("auto", "cpu", "cuda")
    )
    devices: int = key(1, "GPUs, or processes on a CPU", between=(1, 4096))
    precision: str = key(
        "auto", "auto: bf16 on a GPU, fp32 on a CPU | bf16 | fp32", choices=("auto", "bf16", "fp32")
    )
    compile: bool = key(
        False,
        "torch.compile of each block: takes seconds, then a third faster; for millions of tokens",
    )
    wandb: str = key(
        "disabled",
        "send the result there too: disabled | auto | online | offline",
        choices=("disabled", "auto", "online", "offline"),
    )
    tasks: list[str] = key([], "run these of lm-evaluation-harness instead, such as [wikitext]")
    tasks_path: str | None = key(None, "folder with the YAML files of further tasks")
    fewshot: int | None = key(
        None,
        "solved examples before each question of a task; null: as the task says",
        between=(0, 10**6),
    )
    attention: AttentionConfig = group(AttentionConfig)
    passkey: PasskeyConfig = group(PasskeyConfig)
    ruler: RulerConfig = group(RulerConfig)
    data: DataConfig = group(DataConfig)  # the run's own documents unless data= is given
    strategy: StrategyConfig = group(StrategyConfig)
    context: ContextConfig = group(ContextConfig)

    def validate(self) -> None:
        """Raise ValueError naming the first key whose value makes no sense.

        What depends on the run is checked where the run is opened.
        """
        if self.checkpoint is None:
            raise ValueError("checkpoint is not set; give a run, such as checkpoint=runs/NAME")
        check(self)
        check(self.strategy, "strategy.")
        check(self.context, "context.")
        if self.context.degree == "auto":
            raise ValueError("context=auto: is chosen for training; give eval.py a number")
        if self.devices > 1:  # else a launcher may have started more
            self.context.validate(self.devices)
        if self.context.check:
            raise ValueError(
                "context.check=true: compares a step of training; give it to train.py, or leave "
                "it out"
            )
        self.passkey.validate()
        self.ruler.validate()
        self._validate_passkey()
        self._validate_ruler()
        self._validate_tasks()
        self.data.validate()

    def _validate_passkey(self) -> None:
        if not self.passkey.enabled:
            return
        if self.tasks:
            raise ValueError(
                f"tasks=[{','.join(self.tasks)}]: another evaluation than passkey=true; "
                "call eval.py once for each"
            )
        if self.passkey.lengths is not None and self.seq_len is not None:
            raise ValueError(
                f"seq_len={self.seq_len}: passkey.lengths gives the lengths of the texts; "
                "leave one of them out"
            )
        self._check_unused("passkey=true", "stride", "contexts", "batch_size")

    def _validate_ruler(self) -> None:
        if not self.ruler.enabled:
            return
        if self.tasks or self.passkey.enabled:
            other = f"tasks=[{','.join(self.tasks)}]" if self.tasks else "passkey=true"
            raise ValueError(
                f"{other}: another evaluation than ruler=true; call eval.py once for each"
            )
        if self.ruler.lengths is not None and self.seq_len is not None:
            raise ValueError(
                f"seq_len={self.seq_len}: ruler.lengths gives the lengths of the texts; "
                "leave one of them out"
            )
        if self.context.degree != 1:
            raise ValueError(
                f"context={self.context.degree}: with ruler=true each device answers texts of its "
                "own; leave context out"
            )
        if self.compile:
            raise ValueError("compile=true: does nothing with ruler=true; leave compile out")
        self._check_unused("ruler=true", "stride", "contexts", "batch_size")

    def _validate_tasks(self) -> None:
        if not self.tasks:
            for name in ("tasks_path", "fewshot"):
                value = getattr(self, name)
                if value is not None:
                    raise ValueError(
                        f"{name}={value}: does nothing without tasks; name them too, "
                        "such as tasks=[wikitext]"
                    )
            return
        self._check_unused("tasks", "contexts")
        if find_spec("lm_eval") is None:
            raise ValueError(
                f"tasks=[{','.join(self.tasks)}]: lm-evaluation-harness is not installed; "
                "pip install -e '.[lm-eval]'"
            )

    def _check_unused(self, kind: str, *names: str) -> None:
        """ValueError where one of `names` is set, which this kind of evaluation ignores."""
        for name in names:
            value = getattr(self, name)
            if value is not None:
                raise ValueError(f"{name}={value}: does nothing with {kind}; leave {name} out")


class EvalRequest(NamedTuple):
    """An evaluation that the command line asks for, as far as it can be checked without torch."""

    config: EvalConfig
    overrides: dict[str, str]  # key → value as typed
    other_data: bool  # whether data= names the documents; otherwise they are the run's own

    @classmethod
    def of(cls, config: EvalConfig, overrides: dict[str, str]) -> EvalRequest:
        """The request of a checked `config`; ValueError for overrides that contradict it."""
        other_data = names_data(overrides)
        for key_name in ("data", "split"):
            if config.tasks and key_name in overrides:
                raise ValueError(
                    f"{key_name}={overrides[key_name]}: tasks bring their own documents; "
                    f"leave {key_name} out"
                )
        return cls(config, overrides, other_data)


def names_data(overrides: dict[str, str]) -> bool:
    """Whether the overrides, key → value, name other documents than the run's own.

    ValueError where they only half do, or set what an evaluation ignores.
    """
    for name, reason in (
        ("data.tokenizer", "the checkpoint brings its tokenizer"),
        ("data.vocab_size", "the checkpoint brings its tokenizer"),
        ("data.cache", "an evaluation stores nothing of data="),
    ):
        if name in overrides:
            raise ValueError(f"{name}={overrides[name]}: {reason}; leave {name} out")
    keys = [name for name in overrides if name == "data" or name.startswith("data.")]
    if keys and "data" not in overrides:
        raise ValueError(f"{keys[0]}={overrides[keys[0]]}: say which source too, such as data=text")
    if "data.val_fraction" in overrides:
        raise ValueError(
            f"data.val_fraction={overrides['data.val_fraction']}: all documents of data= are "
            "scored; leave data.val_fraction out"
        )
    if keys and "split" in overrides:
        raise ValueError(
            f"split={overrides['split']}: only the run's own data is split; leave out split, or "
            "data"
        )
    return bool(keys)


def default_lengths(limit: int) -> list[int]:
    """Powers of two, then `limit`: from 1,024, or where `limit` is under 8,192 from an eighth of
    the largest power within it; [] for a limit under 16.
    """
    if limit < 16:
        return []
    first = 1024 if limit >= 8192 else 1 << (limit.bit_length() - 4)
    lengths = []
    while first < limit:
        lengths.append(first)
        first *= 2
    return [*lengths, limit]
