"""What is evaluated: a model with its tokenizer, and the documents that it is scored on.

The model is that of a run, one of its checkpoints, or a Hugging Face folder. Documents are scored
as they are, uncut, in the model's tokens: those of the run's own split or of any other source.
Bytes and words are counted in the text after the first token, which is not scored. Of a run's
conversations the tokens that it learns are scored, as in its val_loss.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from longctx import hub_snapshot
from longctx.attention.description import AttentionConfig
from longctx.config.eval_config import EvalRequest
from longctx.config.model_config import GPTConfig
from longctx.data import DataConfig, Tokenizer, load, read_documents
from longctx.evaluation.weights import build_model
from longctx.evaluation.windows import Document
from longctx.model import GPT, huggingface
from longctx.runs import checkpoints, run_folder
from longctx.untrusted import read_settings

OURS = Path("evaluations")  # for results of models that are no runs
TOGETHER = 32  # texts that are tokenized at a time, on all cores


class Subject(NamedTuple):
    """A trained model that is evaluated or generates text, and where it lies."""

    model: GPTConfig
    tokenizer: Tokenizer
    folder: Path  # of the run, or the Hugging Face folder
    file: Path  # the checkpoint, or the Hugging Face folder
    seq_len: int  # tokens per sequence that the model trained at, or is made for
    run: dict[str, Any] | None  # configuration of its run; None: a Hugging Face folder
    hub: hub_snapshot.ModelName | None = None  # with its commit, where the folder is of the Hub

    @property
    def name(self) -> str:
        """What its results are named after."""
        if self.run:
            return self.file.stem
        return self.file.name if self.hub is None else self.hub.name

    @property
    def end_tokens(self) -> set[int]:
        """The tokens that end a text: the tokenizer's own, and those of generation_config.json,
        which chat models have, or where it names none of config.json, as in transformers.
        """
        files = (self.folder / name for name in ("generation_config.json", "config.json"))
        stated = next(
            (x for file in files if (x := read_settings(file).get("eos_token_id")) is not None),
            None,
        )
        named = stated if isinstance(stated, list) else [stated]
        return {self.tokenizer.eos_id, *(x for x in named if type(x) is int)}

    @property
    def home(self) -> Path:
        """The folder that has the folder of its results: its run. A model's folder is not written
        into; one in the current folder stands for it.
        """
        if self.run:
            return self.folder
        if self.hub is not None:
            return OURS / f"{self.hub.repo.replace('/', '--')}-{(self.hub.revision or '')[:8]}"
        place = hashlib.sha256(str(self.file).encode()).hexdigest()[:6]  # others have such a name
        return OURS / f"{self.file.name}-{place}"


def open_subject(request: EvalRequest) -> Subject:
    """The run, checkpoint or Hugging Face folder that `checkpoint` names; ValueError for anything
    else.
    """
    config = request.config
    if not config.checkpoint:
        raise ValueError("checkpoint=: names nothing; give a run, such as checkpoint=runs/NAME")
    path = place_of(config.checkpoint)
    is_hugging_face = run_folder.is_hugging_face(path)
    brings_texts = config.passkey.enabled or config.ruler.enabled or config.tasks
    if is_hugging_face and not request.other_data and not brings_texts:
        raise ValueError(
            f"checkpoint={path}: a Hugging Face folder has no documents of its own; "
            "add data=text data.path=..."
        )
    if is_hugging_face and "split" in request.overrides:
        raise ValueError(
            f"split={config.split}: a Hugging Face folder has no documents of its own to split; "
            "leave it out"
        )
    return open_model(config.checkpoint, path)


def open_model(checkpoint: str, path: Path) -> Subject:
    """The model of the run, checkpoint or Hugging Face folder at `path`, as `checkpoint` names it;
    none of its weights is read yet.
    """
    if not run_folder.is_hugging_face(path):
        file, folder, run = open_run(path)
        model = GPTConfig.of_saved(run["model"])
        return Subject(model, Tokenizer.load(folder), folder, file, run["seq_len"], run)
    model = huggingface.read_config(path)
    huggingface.check_weights(model, path)
    hub, file = hub_snapshot.model_name(checkpoint), path.resolve()
    return Subject(model, Tokenizer.load(path), path, file, model.context or 1, None, hub)


def place_of(checkpoint: str) -> Path:
    """The path that `checkpoint` means; a model of the Hub with its commit lies in the cache, with
    its weights.
    """
    if hub_snapshot.model_name(checkpoint) is None:
        return Path(checkpoint)
    return huggingface.with_weights(checkpoint, "checkpoint")


def load_model(
    path: str | Path,
    device: torch.device | str = "cpu",
    attention: AttentionConfig | str | None = None,
) -> tuple[GPT, Tokenizer, dict[str, Any]]:
    """The trained model, its tokenizer and its configuration, from a run's folder or one checkpoint
    file.

    A folder means its newest checkpoint. `attention` replaces the backend that the run trained
    with. Raises ValueError naming `path` where there is no such thing, or one that is no longer
    what was written.
    """
    file, folder, config = open_run(Path(path))
    backend = AttentionConfig(**config["attention"]) if attention is None else attention
    backend = AttentionConfig(backend) if isinstance(backend, str) else backend
    return build_model(file, backend, device), Tokenizer.load(folder), config


def open_run(path: Path) -> tuple[Path, Path, dict[str, Any]]:
    """The checkpoint that `path` means, whole as it was written, its run's folder, and what the run
    was configured to be; raises as `load_model`.
    """
    file = run_folder.checkpoint_of(path)
    checkpoints.verify(file)
    config: dict[str, Any] = checkpoints.read(file)["longctx"]["config"]
    if file == path:  # or a link to one
        file = path.resolve()
    folder = file.parent.parent
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"checkpoint={path}: {folder} has no tokenizer.json; leave checkpoints in the "
            "run's folder"
        )
    return file, folder, config


def documents_of(subject: Subject, request: EvalRequest) -> Iterator[Document]:
    """The documents that `request` scores, at most as many as it says."""
    config = request.config
    if subject.run is None or request.other_data:
        return of_source(config.data, subject.tokenizer, config.documents)
    fingerprint = checkpoints.read(subject.file)["longctx"]["data"]
    return of_run(subject.folder, subject.run, config.split, fingerprint, config.documents)


def of_run(
    folder: Path, run: dict[str, Any], split: str, fingerprint: str, most: int | None = None
) -> Iterator[Document]:
    """The first `most` (None: all) documents of `split` of the data that the run in `folder`
    trained on; ValueError if there are none.

    A line on stderr says where they are no longer those of `fingerprint`, which the run began with.
    """
    config = replace(DataConfig(**run["data"]), tokenizer=str(folder))
    data = load(config, run["seq_len"])
    if not len(data.split[split]):
        raise ValueError(
            f"split={split}: the run has no such documents; use the other split or "
            "data=text data.path=..."
        )
    if data.fingerprint != fingerprint:
        print(
            f"data: the documents are not those that {folder} began with; "
            "it may have seen some of them",
            file=sys.stderr,
        )
    tokenizer = data.tokenizer
    for name, ids, n_bytes, scored in islice(data.documents(split), most):
        after = ids[1:-1] if ids[-1] == tokenizer.eos_id else ids[1:]
        scored_bytes = n_bytes - tokenizer.n_bytes(int(ids[0]))
        if scored is not None:  # a conversation, in whose text special tokens are written
            text = tokenizer.decode(ids[1:][scored[1:]], special=False)
            scored_bytes, n_words = len(text.encode()), len(text.split())
        else:
            n_words = len(tokenizer.decode(after).split())
        yield Document(name, ids, scored_bytes, n_words, scored)


def of_source(
    config: DataConfig, tokenizer: Tokenizer, most: int | None = None
) -> Iterator[Document]:
    """The first `most` (None: all) documents of `config`, which names files or a data set; nothing
    is cached. Those without text are left out, which a line on stderr says.
    """
    if config.source == "mix":
        raise ValueError(
            "data=mix: an evaluation scores one source; name one, such as data=text data.path=..."
        )
    if config.chat:
        raise ValueError("data.chat=true: an evaluation scores plain text; leave data.chat out")
    texts = islice(read_documents(config), most)
    scored = empty = 0
    while group := list(islice(texts, TOGETHER)):
        encoded = tokenizer.encode_documents([text for _, text in group])
        for (name, text), ids in zip(group, encoded, strict=True):
            if len(ids) < tokenizer.shortest:
                empty += 1
                continue
            scored += 1
            raw = text.encode()
            first = tokenizer.n_bytes(int(ids[0]))
            words = len(raw[first:].decode(errors="replace").split())
            yield Document(name, ids.astype(np.int64), len(raw) - first, words)
    if empty and not scored:
        raise ValueError(
            f"documents: none of the {empty} has 2 tokens or more, so there is nothing to score; "
            "give others"
        )
    if empty:
        left_out = "1 document without text is" if empty == 1 else f"{empty:,} without text are"
        print(f"data: {left_out} left out", file=sys.stderr)
