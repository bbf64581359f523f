"""The corpus and the command lines of the tests of training."""

from tests.training.conftest import cache, corpus, overrides, overrides_in, trained

__all__ = ["cache", "corpus", "overrides", "overrides_in", "trained"]
