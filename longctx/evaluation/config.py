"""What an evaluation is told: the keys of eval.py. Torch-free; the comment beside a key is its help text."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec

from longctx.attention.config import AttentionConfig
from longctx.data.config import DataConfig
from longctx.data.needles import KINDS

SHORTEST = 128  # tokens of a text with facts
TOKENS_PER_BATCH = {"cuda": 65536, "cpu": 4096}


@dataclass
class PasskeyConfig:
    """Facts hidden in long texts and asked for at the end: passkey=true."""

    enabled: bool = False  # set by passkey=true
    lengths: list[int] | None = None  # tokens of a text; null: 1,024, 2,048 … seq_len; in training seq_len alone
    depths: list[float] | None = None  # places of the fact, 0 the beginning, 1 the end; null: 11, in training 5
    samples: int = 10  # texts for each length, depth and kind
    kinds: list[str] = field(default_factory=lambda: list(KINDS))  # passkey: one number | needle: one among others

    def validate(self) -> None:
        """Raise ValueError naming the first key whose value makes no sense."""
        if self.lengths is not None and (not self.lengths or min(self.lengths) < SHORTEST):
            raise ValueError(f"passkey.lengths={self.lengths}: lengths from {SHORTEST} tokens up, such as [4096,16384]")
        if self.depths is not None and (not self.depths or not all(0 <= depth <= 1 for depth in self.depths)):
            raise ValueError(f"passkey.depths={self.depths}: shares from 0 to 1, such as [0,0.5,1]")
        for key in ("lengths", "depths", "kinds"):
            values = getattr(self, key) or []
            if len(set(values)) < len(values):
                raise ValueError(f"passkey.{key}={values}: each once")
        if not 1 <= self.samples <= 10**6:
            raise ValueError(f"passkey.samples={self.samples}: a number from 1 up")
        if not self.kinds or set(self.kinds) - set(KINDS):
            raise ValueError(f"passkey.kinds={self.kinds}: of {', '.join(KINDS)}")


@dataclass
class EvalConfig:
    """One evaluation of one checkpoint."""

    checkpoint: str | None = None  # runs/NAME (its newest checkpoint), a file in its checkpoints, a Hugging Face folder
    seq_len: int | None = None  # tokens that the model sees at most; null: the length that the run trained at
    stride: int | None = None  # tokens that each window scores beyond the one before; null: half of seq_len
    split: str = "val"  # which of the run's own documents: val | train
    documents: int | None = None  # score at most so many documents
    contexts: list[int] | None = None  # score the same tokens at each; null: 1024, 2048 … seq_len; []: none
    batch_size: int | None = None  # windows per forward; null: 65,536 tokens on a GPU, 4,096 on a CPU
    device: str = "auto"  # auto: a GPU if there is one | cpu | cuda
    devices: int = 1  # GPUs, or processes on a CPU; each scores its own documents
    precision: str = "auto"  # auto: bf16 on a GPU, fp32 on a CPU | bf16 | fp32
    compile: bool = False  # torch.compile of each block: takes seconds, then a third faster; for millions of tokens
    wandb: str = "disabled"  # send the result there too: disabled | auto | online | offline
    tasks: list[str] = field(default_factory=list)  # run these of lm-evaluation-harness instead, such as [wikitext]
    tasks_path: str | None = None  # folder with the YAML files of further tasks
    fewshot: int | None = None  # solved examples before each question of a task; null: as the task says
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    passkey: PasskeyConfig = field(default_factory=PasskeyConfig)
    data: DataConfig = field(default_factory=DataConfig)  # the run's own documents unless data= is given

    def validate(self) -> None:
        """Raise ValueError naming the first key whose value makes no sense; what needs the run is checked later."""
        if self.checkpoint is None:
            raise ValueError("checkpoint is not set; give a run, such as checkpoint=runs/NAME")
        for key in ("seq_len", "stride", "documents", "batch_size"):
            value = getattr(self, key)
            if value is not None and not 1 <= value <= 10**12:
                raise ValueError(f"{key}={value}: a number from 1 up")
        if not 1 <= self.devices <= 4096:
            raise ValueError(f"devices={self.devices}: a number from 1 to 4,096")
        for context in self.contexts or []:
            if context < 2:
                raise ValueError(f"contexts={self.contexts}: lengths from 2 up")
        for key, allowed in (
            ("split", ("val", "train")),
            ("device", ("auto", "cpu", "cuda")),
            ("precision", ("auto", "bf16", "fp32")),
            ("wandb", ("disabled", "auto", "online", "offline")),
        ):
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key}={getattr(self, key)}: one of {', '.join(allowed)}")
        self.passkey.validate()
        if self.passkey.enabled and self.devices > 1:
            raise ValueError(f"devices={self.devices}: passkey=true runs on one device; leave devices out")
        self._validate_tasks()
        if self.passkey.enabled and self.passkey.lengths is not None and self.seq_len is not None:
            raise ValueError(
                f"seq_len={self.seq_len}: passkey.lengths says how long the texts are; leave one of them out"
            )
        unused = ("stride", "contexts", "batch_size") if self.passkey.enabled else ("contexts",) if self.tasks else ()
        for key in unused:
            if getattr(self, key) is not None:
                what = "tasks have" if self.tasks else "passkey=true has"
                raise ValueError(f"{key}={getattr(self, key)}: {what} no use for it; leave {key} out")
        self.data.validate_words()

    def _validate_tasks(self) -> None:
        if not self.tasks:
            for key in ("tasks_path", "fewshot"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{key}={getattr(self, key)}: name the tasks too, such as tasks=[wikitext]")
            return
        if self.fewshot is not None and self.fewshot < 0:
            raise ValueError(f"fewshot={self.fewshot}: a number from 0 up")
        if self.passkey.enabled:
            raise ValueError("tasks and passkey=true are two evaluations; call eval.py once for each")
        if self.devices > 1:
            raise ValueError(f"devices={self.devices}: tasks run on one device; leave devices out")
        if find_spec("lm_eval") is None:
            raise ValueError(
                f"tasks=[{','.join(self.tasks)}]: lm-evaluation-harness is not installed; pip install 'longctx[lm-eval]'"
            )


def names_data(changed: dict[str, str]) -> bool:
    """Whether the words, key → value, name other documents than the run's own; ValueError where they only half do."""
    for key in ("data.tokenizer", "data.vocab_size"):
        if key in changed:
            raise ValueError(f"{key}={changed[key]}: the checkpoint brings its tokenizer; leave {key} out")
    if "data.cache" in changed:
        raise ValueError(f"data.cache={changed['data.cache']}: nothing of data= is kept; leave data.cache out")
    keys = [key for key in changed if key == "data" or key.startswith("data.")]
    if keys and "data" not in changed:
        raise ValueError(f"{keys[0]}={changed[keys[0]]}: say which source too, such as data=text")
    if "data.val_fraction" in changed:
        raise ValueError(
            f"data.val_fraction={changed['data.val_fraction']}: all documents of data= are scored; leave it out"
        )
    if keys and "split" in changed:
        raise ValueError(f"split={changed['split']}: only the run's own data is split; leave out split, or data")
    return bool(keys)


def doubling(limit: int) -> list[int]:
    """The contexts that lead up to `limit`: 1,024, 2,048, …, or four halvings of a shorter limit; [] where it has none."""
    if limit < 16:
        return []
    first = 1024 if limit >= 8192 else 1 << (limit.bit_length() - 4)
    lengths = []
    while first < limit:
        lengths.append(first)
        first *= 2
    return [*lengths, limit]
