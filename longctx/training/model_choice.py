"""The model of a run: a preset, the weights of init=, or the model of a resumed run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from longctx.config import presets
from longctx.config.data_config import DataConfig
from longctx.config.presets import Request
from longctx.config.train_config import TrainConfig
from longctx.data.sources.registry import pinned
from longctx.model import packed
from longctx.model.context_extension import extended
from longctx.spec.model_config import GPTConfig
from longctx.spec.step import precision_of
from longctx.training import pretrained
from longctx.training.batches import data_config

SOME_LENGTH = 4096  # tokens of seq_len=max, for choices that are made before the length is known


@dataclass(frozen=True)
class Choice:
    """The model of a run, and its keys as the model decides them."""

    config: TrainConfig
    device: str
    model: GPTConfig
    data: DataConfig  # with the tokenizer that the run reads
    name: str = ""  # for the name of the folder
    source: str = ""  # such as "tiny (model=auto)" or "weights of FOLDER"
    weights: Path | None = None  # the folder of trained weights, with settings for exports

    @property
    def seq_len(self) -> int:
        """Return the tokens per sequence, or SOME_LENGTH for seq_len=max."""
        return SOME_LENGTH if self.config.seq_len == "max" else int(self.config.seq_len)

    def stretched(self, seq_len: int) -> Choice:
        """Return the choice with positions of trained weights stretched to `seq_len` by rope=."""
        if self.weights is None:
            return self
        model, rope = extended(self.model, self.config.rope, seq_len)
        return replace(self, model=model, source=self.source + (f", rope {rope}" if rope else ""))


def choose_model(request: Request[TrainConfig], device: str) -> Choice:
    """Choose the model, and check that it can be trained as `request` asks."""
    config, overrides = request.config, request.overrides
    data = data_config(config)
    if config.resume:
        # The method of the run may not suit the new degree
        if {"context.degree", "context.method"} & overrides.keys() == {"context.degree"}:
            config = replace(config, context=replace(config.context, method="auto"))
        choice = Choice(config, device, config.model, data)
    else:
        # The Hub's commit, so that every process and every resume reads the same documents
        config = replace(config, data=pinned(data))
        if config.seq_len == "max":
            config = replace(config, batch_size=config.batch_size or 1)
        if config.init is not None:
            weights = pretrained.model_of(config, overrides)
            choice = Choice(weights[0], device, weights.model, weights[0].data, *weights[2:])
        else:
            decided = presets.with_model(request, gpu=device == "cuda")
            name = decided.choices.get("model", "")
            source = f"{name} (model=auto)" if request.choices.get("model") == "auto" else name
            choice = Choice(config, device, decided.config.model, config.data, name, source)
    config = choice.model.accepted(choice.config)
    # Ranks that share a sequence split documents, so layers must not mix tokens either
    packing = config.data.packing or config.context.degree != 1
    precision = precision_of(config.precision, device)
    choice.model.prove(device, precision, choice.seq_len, packing)
    config.check_model(choice.model)
    if config.lora.base is not None:
        packed.bitsandbytes()
    choice = replace(choice, config=config)
    return choice if config.seq_len == "max" else choice.stretched(choice.seq_len)
