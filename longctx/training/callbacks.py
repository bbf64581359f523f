"""Callbacks: the optional parts of a run, which watch it, print something and may end it.

Nothing here changes a gradient: with or without callbacks a run ends with the same weights. The
loop calls every method on every rank. A new one is a file with a subclass of `Callback` and a call
of `register`; every run has it from then on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from longctx.config.doors import Door
from longctx.data import Data
from longctx.model.decoder import Sampler, continuations, decoder_of
from longctx.parallel import sharding
from longctx.parallel.mesh import Parallel
from longctx.tables import count_of
from longctx.training.run import Run
from longctx.training.run_log import RunLog
from longctx.training.throughput import Meter
from longctx.training.train_step import TrainState
from longctx.training.validation import scoring

PROMPT_TOKENS = 16  # tokens of a document that serve as a prompt
NEW_TOKENS = 64
TEMPERATURE = 0.8
WINDOW = 128  # losses that a spike is compared with
FEWEST_VALUES = 8  # with fewer nothing is a spike
SIGMAS = 6.0
SHARE = 0.1  # a spike is above the mean by this share of it, or more


class Parts(NamedTuple):
    """The parts of a run that a callback may read."""

    run: Run
    data: Data
    parallel: Parallel
    state: TrainState
    meter: Meter
    log: RunLog


class Callback:
    """An optional part of a run. All methods do nothing by default."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    @classmethod
    def check(cls, run: Run, data: Data) -> None:
        """Raise ValueError, before there is a folder, if it cannot be part of the run."""

    def logged(self, row: dict[str, Any]) -> None:
        """Read a row of a step before it is written, or add keys to it."""

    def validated(self, step: int, row: dict[str, Any]) -> None:
        """Read the row of a validation before it is written, or add keys to it."""

    def stepped(self, step: int) -> None:
        """Do something between two steps; its time is not a step's."""

    def ends(self) -> bool:
        """Return True if the run ends after this step."""
        return False

    def ended(self) -> None:
        """Print something after the last step, when the run is saved."""

    def state(self) -> dict[str, Any]:
        """Return the plain values that a checkpoint holds of it."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""


CALLBACKS: Door[type[Callback]] = Door("callback", __name__)
register = CALLBACKS.register


class Callbacks:
    """Every callback of a run: `first`, then the registered ones, whose states checkpoints hold."""

    def __init__(self, first: Sequence[Callback], parts: Parts) -> None:
        self.registered = {name: build(parts) for name, build in CALLBACKS.items()}
        self.all = [*first, *self.registered.values()]

    def each(self, method: str, *arguments: Any) -> list[Any]:
        """Call `method` of every callback; return the results."""
        return [getattr(callback, method)(*arguments) for callback in self.all]

    def state(self) -> dict[str, Any]:
        return {name: state for name, x in self.registered.items() if (state := x.state())}

    def restore(self, state: dict[str, Any]) -> None:
        for name in state.keys() & self.registered.keys():
            self.registered[name].restore(state[name])


class EarlyStopping(Callback):
    """Follow the validation losses: keep the checkpoint of the lowest (keep_best=true), and end
    the run after `patience` validations without a lower one.
    """

    loss: float | None = None  # the lowest
    step = 0  # of the lowest loss
    since = 0  # validations since then
    kept: tuple[float, int] | None = None  # the lowest loss since keep_best=true, and its step

    def validated(self, step: int, row: dict[str, Any]) -> None:
        # Before the first step there is no checkpoint to keep
        if step == 0 or "val_loss" not in row:
            return
        if self.loss is None or row["val_loss"] < self.loss:
            self.loss, self.step, self.since = row["val_loss"], step, 0
        else:
            self.since += 1
        is_best = self.kept is None or row["val_loss"] < self.kept[0]
        if is_best and self.parts.run.config.keep_best:
            self.kept = row["val_loss"], step

    @property
    def kept_step(self) -> int:
        """Return the step whose checkpoint is not deleted; 0 for none."""
        return self.kept[1] if self.kept and self.parts.run.config.keep_best else 0

    def ends(self) -> bool:
        patience = self.parts.run.config.patience
        return patience is not None and self.since >= patience

    def ended(self) -> None:
        run, log = self.parts.run, self.parts.log
        log.more = " patience=null" if self.ends() else ""
        if self.ends() and log.steps_done < run.max_steps:
            ended = f"ended after step {log.steps_done:,}: {self.since:,} validations without"
            lowest = f"{self.loss:.4f} after step {self.step:,} (patience={run.config.patience})"
            log.say(f"{ended} a lower loss than {lowest}")

    def state(self) -> dict[str, Any]:
        kept = self.kept if self.parts.run.config.keep_best else None
        state = {"loss": self.loss, "step": self.step, "since": self.since, "kept": kept}
        return state | {"val_rows": self.parts.run.val_rows}

    def restore(self, state: dict[str, Any]) -> None:
        if state.get("val_rows") != self.parts.run.val_rows:
            return  # losses of other sequences are not compared
        self.loss = None if state["loss"] is None else float(state["loss"])
        self.step, self.since = int(state["step"]), int(state["since"])
        if kept := state["kept"]:
            self.kept = float(kept[0]), int(kept[1])


class Spikes(Callback):
    """Count and report the spikes of a run: logged losses far above those before.

    Like SkipStepAdamW of OLMo-core, compare a loss with the last 128 rows. It is a spike if

        loss > mean + 6 · standard deviation

    and loss > 1.1 · mean, or a nearly constant loss would raise an alarm.
    """

    found = 0  # since the run began

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.losses: deque[float] = deque(maxlen=WINDOW)

    def logged(self, row: dict[str, Any]) -> None:
        """Add their count to `row`, absent if there is none; warn if this loss is one."""
        if "loss" in row and is_outlier(row["loss"], self.losses):
            self.found += 1
            spikes = count_of(self.found, "spike")
            self.parts.log.say(f"warning: loss spike at step {row['step']:,} ({spikes} in all)")
        if math.isfinite(row.get("loss", math.nan)):
            self.losses.append(row["loss"])
        if self.found:
            row["loss_spikes"] = self.found

    def state(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "found": self.found}

    def restore(self, state: dict[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=WINDOW)
        self.found = int(state["found"])


def is_outlier(value: float, before: Sequence[float]) -> bool:
    """Return True if `value` is far above the values `before` it, or not finite."""
    if not math.isfinite(value):
        return True
    if len(before) < FEWEST_VALUES:
        return False
    mean = fmean(before)
    return value > mean + max(SIGMAS * pstdev(before, mean), SHARE * abs(mean))


class Samples(Callback):
    """Write a short sample of text every sample_every= steps.

    It continues sample_prompt=, or the beginning of a validation document, always the same one and
    with the same random numbers: samples of a run differ by its weights alone. Every rank computes
    all of a fixed number of tokens, so that weights may be sharded.
    """

    def stepped(self, step: int) -> None:
        every = self.parts.run.config.sample_every
        if every is not None and (step == self.parts.run.max_steps or step % every == 0):
            self.parts.log.sample(step, self.parts.meter.tokens_seen, self.text())

    def text(self) -> str:
        """Return the prompt and the model's continuation, up to its end-of-text token."""
        tokenizer, prompt = self.parts.data.tokenizer, self.prompt()
        choose = Sampler([0], TEMPERATURE, seed=self.parts.run.config.seed)
        module = self.parts.state.module
        with scoring(module, self.parts.parallel), sharding.unsharded(module.model):
            decoder = decoder_of(module.model, 1, len(prompt) + NEW_TOKENS, graphs=False)
            # On the CPU: with deterministic=true torch has no cumulative sum on a GPU
            tokens = continuations(
                decoder, [prompt], NEW_TOKENS, lambda x: choose(x[:, : tokenizer.vocab_size].cpu())
            )
            ids = [token[0] for token in tokens if token[0] is not None]
        ids = ids[: ids.index(tokenizer.eos_id)] if tokenizer.eos_id in ids else ids
        # A token that begins every text has none of its own
        begins = prompt[0] in (tokenizer.bos_id, tokenizer.eos_id)
        # Together: decoded alone, a first word of SentencePiece loses its space
        return tokenizer.decode([*prompt[begins:], *ids])

    def prompt(self) -> list[int]:
        """Return the tokens of sample_prompt=, or the first ones of a document."""
        data, tokenizer = self.parts.data, self.parts.data.tokenizer
        if (given := self.parts.run.config.sample_prompt) is not None:
            return tokenizer.encode_prompt(given)
        # Unseen text, if there is any; always the same document
        split = "val" if data.count("val") else "train"
        ids = next(iter(data.documents(split))).ids[:PROMPT_TOKENS].tolist()
        return ids[:-1] if ids[-1] == tokenizer.eos_id and len(ids) > 1 else ids


register("samples", Samples)
