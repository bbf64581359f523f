"""Checkpoints that tests write."""

from longctx.runs.checkpoint_write import Saving


def write(saving: Saving) -> None:
    """Write a checkpoint and wait until it is on disk; all its ranks call it."""
    saving.begin()
    saving.end()
