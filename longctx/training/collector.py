"""Python's garbage collector, kept from stopping a step to look through all of torch for cycles,
0.2 to 0.4 s each time.

It would do so at random, and on each rank at another step, for which all others wait.
"""

from __future__ import annotations

import gc
from typing import Any

import lightning.pytorch as pl


class QuietCollector(pl.Callback):
    """Collects after the first step and leaves what lives then, libraries and compiled code, out of
    later collections, which go on as ever over what is new. Undone at the end of the run, however
    it ends.
    """

    def __init__(self) -> None:
        self.frozen = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        if not self.frozen:
            gc.collect()
            gc.freeze()
            self.frozen = True

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._thaw()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._thaw()

    def _thaw(self) -> None:
        if self.frozen:
            gc.unfreeze()
            self.frozen = False
