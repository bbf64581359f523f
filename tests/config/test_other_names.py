"""Keys and values of other projects are answered with ours."""

import pytest

from longctx import cli
from longctx.config import presets
from longctx.config.command_config import GenerateConfig
from longctx.config.eval_config import EvalConfig
from longctx.config.fields import keys
from longctx.config.other_names import NAMES, NOTES, OF_OTHERS, VALUES
from longctx.config.train_config import TrainConfig

SCHEMAS = [keys(schema) for schema in (TrainConfig, EvalConfig, GenerateConfig)]


def test_every_answer_is_a_key_or_a_value_of_ours():
    for ours in (*NAMES, *NOTES):
        assert any(ours in known for known in SCHEMAS), ours
    for name, ours in OF_OTHERS:
        assert any(ours in known and name not in known for known in SCHEMAS), name
    choices = {choice for known in SCHEMAS for key in known.values() for choice in key.choices}
    choices |= {name for group in presets.GROUPS for name in presets.names(group)}
    assert set(VALUES.values()) <= choices
    assert not choices & VALUES.keys()


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("train learning_rate=1e-3 n_layer=2", "here it is lr; n_layer: here it is model.layers"),
        ("train model.n_embd=64", "here it is model.channels"),
        ("train warmup_ratio=0.1", "here it is warmup_steps, a number of steps"),
        ("train lora.targets=[q_proj]", "lora.targets=q_proj: one of qkv, "),
        ("train device=gpu", "here it is cuda"),
        ("train checkpoint=runs/a", "here it is resume, or init"),
        ("train dropout=0.1", "no dropout"),
        ("train objective=grpo", "objective=dpo, orpo"),
        ("train model=meta-llama/Llama-3.2-1B", "give init=meta-llama/Llama-3.2-1B"),
        ("plan seq_len=128k,256k", "several values; give one"),
        ("train --learning-rate=1e-3", "write lr=1e-3"),
        ("train attention.kernel=hopper", "attention.kernel is not a key"),
        ("train data=books/", "data=text data.path=books/"),
        ("generate runs/a max_tokens=4", "here it is max_new_tokens"),
    ],
)
def test_an_argument_of_others_is_answered(words, answer, refused):
    refused(cli.main(words.split()), answer)
