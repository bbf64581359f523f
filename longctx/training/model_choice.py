"""The model of a run: a preset, the weights of init=, or the model of a resumed run."""

from __future__ import annotations

from dataclasses import replace

from longctx.attention.description import AUTO
from longctx.config import presets
from longctx.config.fields import refuse
from longctx.config.presets import Request
from longctx.config.train_config import TrainConfig
from longctx.data.sources.registry import pinned
from longctx.model import packed
from longctx.model.context_extension import extended
from longctx.parallel.devices import able_backends, check_attention
from longctx.spec.step import precision_of
from longctx.training.pretrained import Choice, model_of

NO_LONGEST = "seq_len=max: finds what fits a GPU, and this run is on a CPU; give a number of tokens"


def choose_model(request: Request[TrainConfig], device: str) -> Choice:
    """Choose the model, and check that it can be trained as `request` asks."""
    config, overrides = request.config, request.overrides
    data = config.data_as_read
    if config.resume:
        # The method of the run may not suit the new degree
        if {"context.degree", "context.method"} & overrides.keys() == {"context.degree"}:
            config = replace(config, context=replace(config.context, method="auto"))
        choice = Choice(config, device, config.model, data)
    else:
        # The Hub's commit, so that every process and every resume reads the same documents
        config = replace(config, data=pinned(data))
        if config.seq_len == "max":
            # Other programs share a CPU's memory: there is no such length
            refuse((device == "cpu", NO_LONGEST))
            config = replace(config, batch_size=config.batch_size or 1)
        if config.init is not None:
            choice = model_of(config, device, overrides)
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
    # Before a tokenizer is trained for 16 s
    is_open = config.attention.backend == AUTO
    if not is_open:
        check_attention(config, choice.model, device)
    able = able_backends(config, choice.model, device) if is_open or device == "cuda" else []
    if config.lora.base is not None:
        packed.bitsandbytes()
    choice = replace(choice, config=config, able=able)
    if choice.weights is None or config.seq_len == "max":
        return choice
    model, rope = extended(choice.model, config.rope, choice.seq_len)
    return replace(choice, model=model, rope=rope)
