"""Degrees and methods of context parallelism: what may be asked for, and what auto stands for."""

import pytest

from longctx import cli
from longctx.config.parallel_config import ContextConfig


def test_a_degree_is_a_number_or_auto() -> None:
    assert (
        cli.compose("train", ["context.degree=auto", "devices=6"]).config.context.degree == "auto"
    )
    for value in ("all", "0", "null"):
        with pytest.raises(ValueError, match=r"context\.degree"):
            cli.compose("train", [f"context.degree={value}"])
    with pytest.raises(ValueError, match="context=4: does not divide devices=6"):
        cli.compose("train", ["context.degree=4", "devices=6"])


def test_auto_stands_for_what_is_possible_and_a_choice_for_itself() -> None:
    auto = ContextConfig(degree="auto")
    choices = [(one.degree, one.method) for one in auto.each(4, heads=6, backend="flash")]
    assert choices == [
        (1, "auto"),
        (2, "ulysses"),
        (2, "allgather"),
        (4, "allgather"),
    ]
    assert [one.degree for one in auto.each(4, heads=6, backend="sdpa")] == [1, 2]
    ulysses = ContextConfig(degree=4, method="ulysses")
    assert ulysses.each(4, heads=6, backend="flash") == [ulysses]  # refused by name, not replaced
    with pytest.raises(ValueError, match=r"context\.method=ulysses"):
        ulysses.method_for(6)
