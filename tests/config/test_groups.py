"""Groups of keys, bounds of every declared key, and answers to those of other projects."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from longctx import cli
from longctx.config import presets
from longctx.config.eval_config import EvalConfig, GenerateConfig
from longctx.config.fields import Group, build, declared_as, key, keys
from longctx.config.layout_config import ContextConfig, MemoryConfig
from longctx.config.other_names import NAMES, NOTES, OF_OTHERS, VALUES
from longctx.config.train_config import TrainConfig
from longctx.spec.model_config import LORA_TARGETS

REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())
SCHEMAS = [keys(schema) for schema in (TrainConfig, EvalConfig, GenerateConfig)]


@dataclasses.dataclass
class Declared(Group):
    share: float = key(0.5, "a share", between=(0, 0.99))
    norm: float | None = key(None, "a norm")
    sizes: list[int] = key([4], "sizes", between=(1, 8))
    length: int | str = key(2, "a length", between=(2, 9), unit=1024, word="max")
    words: list[str] = key([], "words", choices=("a", "b"))
    pair: tuple[float, float] = key((0.1, 0.2), "a pair")


@pytest.mark.parametrize(
    ("values", "message"),
    [*REFUSED["declared"], ({"share": 10**400}, "share=.*: must be a number")],
)
def test_a_value_outside_its_declaration_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        build(Declared, values).validate()


@pytest.mark.parametrize(
    ("name", "resume", "names", "compared"),
    [
        ("max_steps", True, False, True),
        ("lr_decay_share", True, True, True),
        ("memory.offload", True, False, True),  # as its group
        ("attention.options.kernel", False, True, True),  # as the open key
        ("runs", False, False, False),
        ("of.a.plugin", False, True, True),
    ],
)
def test_a_key_says_what_resume_may_change(name, resume, names, compared):
    found = declared_as(TrainConfig, name)
    assert (found.resume, found.names, found.compared) == (resume, names, compared)


@pytest.mark.parametrize("value", ["all", "0", "null", "4"])
def test_a_context_degree_divides_the_devices(value):
    for auto in ("auto", "3"):
        config = cli.compose("train", [f"context.degree={auto}", "devices=6"]).config
        assert str(config.context.degree) == auto
    with pytest.raises(ValueError, match=r"context(\.degree)?="):
        cli.compose("train", [f"context.degree={value}", "devices=6"])


def test_auto_offers_what_is_possible_and_a_choice_itself():
    auto, ulysses = ContextConfig(degree="auto"), ContextConfig(degree=4, method="ulysses")
    choices = [(x.degree, x.method) for x in auto.layouts(4, heads=6, takes_intervals=True)]
    assert choices == [(1, "auto"), (2, "ulysses"), (2, "allgather"), (4, "allgather")]
    # refused by name later, not replaced
    assert ulysses.layouts(4, heads=6, takes_intervals=True) == [ulysses]


def test_a_changed_policy_is_not_called_by_its_name_alone():
    assert str(MemoryConfig("balanced", recompute="none")) == "balanced memory.recompute=none"
    assert str(MemoryConfig("fast")) == "fast"
    assert str(MemoryConfig("balanced").filled("balanced")) == "balanced"
    assert str(MemoryConfig("auto", recompute="none")) == "auto memory.recompute=none"


def test_every_answer_is_a_key_or_a_value_of_ours():
    for ours in (*NAMES, *NOTES):
        assert any(ours in known for known in SCHEMAS), ours
    for name, ours in OF_OTHERS:
        assert any(ours in known and name not in known for known in SCHEMAS), name
    choices = {choice for known in SCHEMAS for key in known.values() for choice in key.choices}
    choices |= {name for group in presets.GROUPS for name in presets.names(group)} | {*LORA_TARGETS}
    assert set(VALUES.values()) <= choices
    assert not choices & VALUES.keys()
