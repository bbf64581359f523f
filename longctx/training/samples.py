"""A short sample of text while a run trains: sample_every=N.

It continues sample_prompt=, or the beginning of a validation document, the same one each time and
with the same chances, so that samples of a run differ by its weights alone. Every rank computes all
of it, a fixed number of tokens, so that weights may be sharded.
"""

from __future__ import annotations

from typing import Any

import torch

from longctx.data import Data, Mixture, Tokenizer
from longctx.distributed import sharding
from longctx.distributed.parallel import Parallel
from longctx.evaluation.scorer import in_eval_mode
from longctx.model.decoder import Decoder, continuations
from longctx.model.sampling import Sampler
from longctx.training.run import Run

PROMPT = 16  # tokens of a document that stand for a prompt
NEW = 64  # tokens of a sample
TEMPERATURE = 0.8


def sample(module: Any, data: Data | Mixture, run: Run, parallel: Parallel) -> str:
    """The prompt and what the model now continues it with: NEW tokens, or fewer where it ends."""
    tokenizer, seed = data.tokenizer, run.config.seed
    prompt = prompt_of(run.config.sample_prompt, data)
    choose = Sampler([0], TEMPERATURE, seed=seed)
    with (
        in_eval_mode(module),
        sharding.unsharded(module.model),
        parallel.autocast(),
        torch.compiler.set_stance("force_eager"),
    ):
        decoder = Decoder(module.model, 1, len(prompt) + NEW, "torch", graphs=False)
        # On the CPU: with deterministic=true torch has no cumulative sum on a GPU.
        rows = continuations(decoder, [prompt], NEW, lambda logits: choose(logits.cpu()))
        new = [row[0] for row in rows]
    ids = [token for token in new if token is not None]
    ids = ids[: ids.index(tokenizer.eos_id)] if tokenizer.eos_id in ids else ids
    return shown(tokenizer, prompt) + tokenizer.decode(ids)


def prompt_of(text: str | None, data: Data | Mixture) -> list[int]:
    """The tokens of `text`, as a document begins with it, or of the beginning of a document."""
    tokenizer = data.tokenizer
    if text is None:
        split = "val" if len(data.split["val"]) else "train"
        ids = next(iter(data.documents(split))).ids[:PROMPT].tolist()
        return ids[:-1] if ids[-1] == tokenizer.eos_id and len(ids) > 1 else ids
    return tokenizer.encode_prompt(text)


def shown(tokenizer: Tokenizer, prompt: list[int]) -> str:
    """The text of a prompt, without the token that begins it."""
    special = (tokenizer.bos_id, tokenizer.eos_id)
    return tokenizer.decode(prompt[1:] if prompt[0] in special else prompt)
