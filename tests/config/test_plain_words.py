"""What a run says of its memory policy, and settings that contradict each other."""

import pytest

from longctx.config.memory_config import MemoryConfig
from longctx.config.train_config import check_warmup


def test_a_policy_that_was_changed_is_not_called_by_its_name_alone() -> None:
    assert str(MemoryConfig("balanced", recompute="none")) == "recompute=none, all else as balanced"
    assert str(MemoryConfig("fast")) == "fast"
    assert str(MemoryConfig("balanced")) == "balanced, recompute=block"
    assert str(MemoryConfig("auto", recompute="mlp")) == "auto, recompute=mlp"


def test_warm_up_ends_within_the_run() -> None:
    check_warmup(10, 10)
    check_warmup(None, 3)
    check_warmup(100, None)
    with pytest.raises(ValueError, match="warmup_steps=100: the run has 10 steps"):
        check_warmup(100, 10)
