"""The model under evaluation with its tokenizer, and the documents that it is scored on.

The model is that of a run, one of its checkpoints, or a Hugging Face folder. Documents are scored
uncut, in the model's tokens: those of the run's own split or of any other source. Bytes are counted
in the text of the target tokens. Of conversations the answers are scored, as in the val_loss of a
run that learns them.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from longctx import hub_snapshot, plugins
from longctx.attention.description import AttentionConfig
from longctx.config import fields
from longctx.config.fields import refuse
from longctx.data import DataConfig, Tokenizer, load, read_documents
from longctx.data.dataset import EncodedDocument
from longctx.data.documents import exact_key
from longctx.data.store import has_marks
from longctx.model import GPT
from longctx.model.gpt import build
from longctx.model.mixers.description import MIXERS
from longctx.model.saved_weights import copy_weights
from longctx.parallel import sharding
from longctx.runs import checkpoints, run_folder
from longctx.spec.model_config import GPTConfig, weights_reader
from longctx.untrusted import opened

RESULTS = Path("evaluations")  # of models that are no runs, in the current folder
TOGETHER = 32  # texts that are tokenized at a time, on all cores


class TrainedModel(NamedTuple):
    """A trained model that is evaluated or generates text; none of its weights is read yet."""

    model: GPTConfig
    tokenizer: Tokenizer
    folder: Path  # of the run, or the Hugging Face folder
    file: Path  # the checkpoint, or the Hugging Face folder
    seq_len: int  # tokens per sequence that the model was trained at, or is made for
    run: dict[str, Any] | None  # configuration of its run; None: a Hugging Face folder
    hub: hub_snapshot.ModelName | None = None  # with its commit, if the folder is of the Hub

    @property
    def name(self) -> str:
        """Return the name of the model in its results."""
        own = self.file.stem if self.run else self.file.name
        return own if self.hub is None else self.hub.repo.partition("/")[2]

    @property
    def home(self) -> Path:
        """Return the parent of the folder of results: the run's, or one of the current folder."""
        # A model's folder is not written into, and that of a run may be read-only
        if self.run and os.access(self.folder, os.W_OK):
            return self.folder
        # Models in other folders have the same name, and commits of one of the Hub
        digest = hashlib.sha256(str(self.file).encode()).hexdigest()[:6]
        return RESULTS / f"{self.name}-{digest}"


def open_model(checkpoint: str) -> TrainedModel:
    """Open a run, a checkpoint, a Hugging Face folder, or a model of the Hub with its commit.

    Raises ValueError for anything else, and if a checkpoint has changed since it was written.
    """
    hub, reader = hub_snapshot.model_name(checkpoint), weights_reader()
    path = Path(checkpoint) if hub is None else reader.with_weights(checkpoint, "checkpoint")
    if run_folder.is_hugging_face(path):
        model = reader.read_config(path)
        reader.format_of(model).check_weights(model, path)
        tokenizer, seq_len = Tokenizer.load(path, model.vocab_size), model.context or 1
        return TrainedModel(model, tokenizer, path, path.resolve(), seq_len, None, hub)
    file = run_folder.checkpoint_of(path)
    checkpoints.verify(file)
    if file == path:  # or a link to one
        file = path.resolve()
    folder = file.parent.parent
    with opened(file, folder):
        run: dict[str, Any] = checkpoints.read(file)["longctx"]["config"]
        lacking = {*run["model"].get("mixer", [])} - MIXERS.keys()
        typed = plugins.as_typed(run.get("plugins") or ["FILE.py"])
        problem = f"{file}: model.mixer={','.join(lacking)} is of a plugin"
        refuse((lacking, f"{problem}: add {typed}, or in Python import the file"))
        model, seq_len = GPTConfig.of_saved(run["model"]), int(run["seq_len"])
        tokenizer = Tokenizer.load(folder, model.vocab_size)
        return TrainedModel(model, tokenizer, folder, file, seq_len, run)


def build_model(
    file: Path,
    attention: AttentionConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    shard: Callable[[GPT], None] = lambda model: None,
) -> GPT:
    """Build the model of `file`, a checkpoint or a Hugging Face folder, in eval mode on `device`;
    linear layers are in `dtype`.

    `shard` spreads the empty weights over ranks. Each rank then reads its rows, tensor by tensor,
    so that no process has more in memory than its rows and one tensor. Raises ValueError or
    OSError, one line, if the weights are not those of the model.
    """
    if is_hugging_face := run_folder.is_hugging_face(file):
        config = weights_reader().read_config(file)
    else:
        checkpoint = checkpoints.read(file)
        config = GPTConfig.of_saved(checkpoint["longctx"]["config"]["model"])
    with torch.device("meta"):
        model = build(config, attention)
    round_matrices(model, dtype)
    model.eval().requires_grad_(False)
    shard(model)
    model.to_empty(device=device)
    if is_hugging_face:
        weights_reader().load_weights(model, file)
    else:
        with opened(file):
            copy_weights(model, file, checkpoint, sharding.write)
    return model


def round_matrices(model: GPT, dtype: torch.dtype) -> None:
    """Round the weights of linear layers once, as autocast would in every forward."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and f"{name}.weight" not in model.exact:
            module.weight = nn.Parameter(module.weight.detach().to(dtype), requires_grad=False)


def of_run(
    folder: Path, run: dict[str, Any], split: str, fingerprint: str, limit: int | None = None
) -> Iterator[EncodedDocument]:
    """Yield the first `limit` documents of `split` of a run's data, without the answers that it was
    to avoid; ValueError if there are none.

    A line on stderr warns if they are no longer those of `fingerprint`, from the run's beginning.
    """
    with opened(folder, "data."):
        config = replace(fields.build(DataConfig, run["data"]), tokenizer=str(folder))
        data = load(config, run["seq_len"])
    advice = "use the other split, or data=text data.path=..."
    refuse((not data.count(split), f"split={split}: the run has no such documents; {advice}"))
    if data.fingerprint != fingerprint:
        problem = f"the documents are not those that {folder} began with"
        print(f"data: {problem}; it may have seen some of them", file=sys.stderr)
    wanted = (document for document in data.documents(split) if not document.is_rejected)
    for document in islice(wanted, limit):
        yield counted(data.tokenizer, document)


def of_source(
    config: DataConfig, tokenizer: Tokenizer, limit: int | None = None
) -> Iterator[EncodedDocument]:
    """Yield the first `limit` documents of files or a data set, without caching anything.

    Of conversations, written by the chat template of the model's folder, or of data.tokenizer, the
    answers are scored. A line on stderr counts documents without a target, which are left out.
    """
    if config.chat and config.tokenizer is None:
        config = replace(config, tokenizer=str(tokenizer.folder))
    texts, empty = islice(read_documents(config), limit), 0
    while group := list(islice(texts, TOGETHER)):
        encoded: Iterable[tuple[np.ndarray, np.ndarray | None]]
        if has_marks(config):
            encode = tokenizer.encode_conversation if config.chat else tokenizer.encode_answer
            encoded = [encode(x.text, x.spans or []) for x in group]
        else:
            encoded = ((x, None) for x in tokenizer.encode_documents([x.text for x in group]))
        for given, (ids, scored) in zip(group, encoded, strict=True):
            if len(ids) < tokenizer.shortest if scored is None else not scored[1:].any():
                empty += 1
                continue
            size, key = len(given.text.encode()), exact_key(given.whole)
            document = EncodedDocument(given.name, ids.astype(np.int64), size, scored, key=key)
            yield counted(tokenizer, document)
    if empty:
        print(f"data: documents without a token to score: {empty:,}, left out", file=sys.stderr)


def counted(tokenizer: Tokenizer, document: EncodedDocument) -> EncodedDocument:
    """Return a document with the bytes of its target tokens alone."""
    ids, scored = document.ids, document.scored
    if scored is None:
        return document._replace(n_bytes=document.n_bytes - tokenizer.n_bytes(int(ids[0])))
    # The text of a conversation has special tokens between its target tokens.
    text = tokenizer.decode(ids[1:][scored[1:]], special=False)
    return document._replace(n_bytes=len(text.encode()))
