"""Objectives: `objective=NAME`, what a step minimizes. Torch-free until one is computed.

A new one is a file that calls `register` with its description, see `Objective`. Loop, step and
checkpoints know no objective by name.
"""

from longctx.config.doors import OBJECTIVES, Objective
from longctx.training.objectives import preferences as preferences
from longctx.training.objectives.next_token import cross_entropy, cross_entropy_of_each, perplexity

__all__ = ["Objective", "cross_entropy", "cross_entropy_of_each", "perplexity", "register"]

register = OBJECTIVES.register
