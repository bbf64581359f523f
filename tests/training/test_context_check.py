"""context.check passes correct layouts, and finds every fault that others had in silence."""

import json
from pathlib import Path
from typing import Any

import pytest

import train
from longctx import cli
from longctx.config.asked import with_vocabulary, workload_of
from longctx.runs import metrics_file
from longctx.training import context_check
from longctx.training.run import scheduled
from tests.processes import finished, run_on
from tests.training.sample_run import steps
from tests.training.test_devices import ROOT, close, run

SCRIPT = Path(__file__).with_name("checked_layouts.py")
SHAPE: dict[str, Any] = {"model.layers": 2, "seq_len": 120, "accumulate": 1}
SHARED = {"devices": 2, "context": 2}


def answers_of(cases: dict[str, dict[str, Any]], ranks: int, tmp_path: Path) -> dict[str, str]:
    """What the check says in each case, all in one group of `ranks` processes."""
    request, out = tmp_path / "cases.json", tmp_path / "out.json"
    request.write_text(json.dumps(cases))
    run_on(ranks, SCRIPT, request, out)
    answers: dict[str, str] = json.loads(out.read_text())
    assert answers.keys() == cases.keys()
    return answers


def test_a_checked_run_trains_as_on_one_device(overrides, tmp_path):
    shape = {"seq_len": 63, "max_steps": 4, "batch_size": 1, "val_rows": 3}
    assert train.main(overrides(name="one", **shape)) == 0
    run(tmp_path, overrides(name="checked", context__check=True, **SHARED, **shape))
    close(tmp_path / "runs" / "checked", tmp_path / "runs" / "one")
    for row in steps(tmp_path / "runs" / "checked"):
        speed, of_device = (row[f"tokens_per_second{of}"] for of in ("", "_per_device"))
        assert of_device == pytest.approx(speed / 2) and row["communication_ms"] > 0
    first, *others = metrics_file.read(tmp_path / "runs" / "checked")
    assert 0 <= first["context_check/loss"] < 1e-5
    assert 0 <= first["context_check/gradients"] < 1e-5
    assert not [key for row in others for key in row if key.startswith("context_check/")]


def test_a_run_that_fails_the_check_does_not_begin(overrides, tmp_path):
    keys = overrides(name="r", context__check=True, **SHARED)
    process = finished(SCRIPT, ["train", "shifted labels", *keys], tmp_path)
    assert process.returncode == 1, process.stderr
    (error,) = [line for line in process.stderr.splitlines() if "error" in line.lower()]
    assert error.startswith("error: context.check=true: the gradient of ")
    assert "Traceback" not in process.stderr
    # nobody is left that could hold its output open, or `finished` would have waited
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("share", ["", " / model.context.ranks.count"])
def test_a_plugin_that_shares_sequences_is_checked(share, overrides, tmp_path):
    """Its objective takes logits, which every rank has of whole sequences."""
    (tmp_path / "mine.py").write_text(f"""
from torch.nn.functional import cross_entropy
from longctx.training.objectives import Objective, cross_entropy_of_each, perplexity, register

def loss(model, batch, keys):
    logits = model(batch.tokens, mask=batch.mask).flatten(0, 1).float()
    return cross_entropy(logits, batch.targets.flatten(), reduction="sum") * batch.weight{share}

register("mine", Objective(loss, cross_entropy_of_each, perplexity))
""")
    mine = [f"plugins=[{tmp_path}/mine.py]", "objective=mine"]
    process = finished(ROOT / "train.py", [*overrides(name="r", **SHARED), *mine], tmp_path)
    found = "error: context.check=true: the gradient of " in process.stderr
    assert (process.returncode, found) == ((0, False) if share else (1, True)), process.stderr


# fault → what else the run has, what the check names
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "full mask": ({}, "gradient of"),
    "rounded documents": ({}, "gradient of"),
    "shifted labels": ({}, "gradient of"),
    "rounded length": ({}, "gradient of"),
    "no windows": ({"model.window": 20}, "gradient of"),
    "stale keys": ({}, "gradient of"),
    "means of ranks": ({"context": 1}, "gradient of"),
    "counted twice": ({}, "gradient of"),
    "no number": ({}, "gradient of"),
    "larger norm": ({}, "gradient norm"),
    "no average": ({"context": 1}, "gradient of"),
    "rows of each rank": ({}, "gradient of"),
    "tokens of each rank": ({}, "gradient of"),
}


PARTS = {
    **{"model.sinks": True, "model.query_growth": "[0.5,20]", "model.rotary_share": 0.5},
    **{"model.multipliers.embedding": 3, "model.multipliers.residual": 0.4},
    **{"model.multipliers.logits": 0.2, "model.multipliers.logit_softcap": 5},
    **{"model.norms": "sandwich", "model.norm_plus_one": True, "model.attention_gate": "channel"},
    **{"model.qk_norm": "head", "model.qk_norm_after_rope": True},
}
EXPERTS = {
    **{"model.experts.count": 4, "model.experts.router": "sigmoid_bias"},
    **{"model.experts.shared": 1, "model.attention_gate": "channel"},
}
# What must pass beside random layouts, which test_devices.py compares: number of ranks → case →
# what it has beside SHAPE.
PASSING: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ulysses": SHARED,
        "bf16": SHARED | {"precision": "bf16"},
        "slices in bf16": SHARED | {"strategy": "fsdp", "precision": "bf16"},
        "layers of several kinds": SHARED
        | {"model.layers": 3, "model.window": 30, "model.window_layers": "[1]"}
        | {"model.nope_layers": "[2]"},
        "LoRA in slices": SHARED | {"lora.rank": 4, "strategy": "fsdp", "precision": "bf16"},
        "parts of Granite and GLM-4": SHARED | PARTS | {"model.window": 30},
        "the same, recomputed": SHARED | PARTS | {"memory": "balanced"},
        "the same by all-gather": SHARED | PARTS | {"context.method": "allgather"},
        "the same in slices": PARTS | {"strategy": "fsdp", "memory": "long"},
        "Gemma's norms in slices": SHARED
        | {"model.norms": "sandwich", "model.norm_plus_one": True, "memory": "balanced"}
        | {"strategy": "fsdp", "precision": "bf16"},
        "experts in slices": EXPERTS | {"strategy": "fsdp", "precision": "bf16"},
        "experts that are balanced": SHARED
        | {"model.experts.count": 4, "model.experts.balance": 0.01},
        "experts by Ulysses": SHARED | EXPERTS | {"memory": "balanced"},
        "long documents": SHARED | {"seq_len": 16},
        "rows longer than documents": SHARED | {"seq_len": 1000},
    },
    4: {
        "ulysses, slices in bf16": {"devices": 4, "context": 4}
        | {"strategy": "fsdp", "precision": "bf16"}
    },
}


def test_what_the_small_run_cannot_have_is_left_out():
    keys = ["model=tiny", "objective=dpo", "data=text", "data.path=x", "init=x", "device=cpu"]
    config = cli.compose("train", [*keys, "lora.rank=2", "lora.base=nf4"]).config
    run = scheduled(config, with_vocabulary(workload_of(config, "cpu", 128), 300))
    small = context_check.small(run)
    assert (small.config.objective.name, small.workload.lora.base) == ("cross_entropy", None)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", PASSING)
def test_correct_layouts_pass(ranks, overrides, tmp_path):
    cases = {
        name: {"fault": None, "keys": overrides(**SHAPE | {"devices": ranks} | changes)}
        for name, changes in PASSING[ranks].items()
    }
    for case, answer in answers_of(cases, ranks, tmp_path).items():
        assert answer.startswith("{'loss'"), (case, answer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "strategy", "method"), [("bf16", "ddp", "allgather"), ("fp32", "fsdp", "ulysses")]
)
def test_every_fault_is_found(precision, strategy, method, overrides, tmp_path):
    layout = {"precision": precision, "strategy": strategy, "context.method": method}
    cases = {
        fault: {"fault": fault, "keys": overrides(**SHAPE | SHARED | layout | changes)}
        for fault, (changes, _) in FAULTS.items()
        if (fault, strategy) != ("no average", "fsdp")  # which averages in every backward
    }
    for fault, answer in answers_of(cases, 2, tmp_path).items():
        assert answer.startswith("failed: context.check=true: "), (fault, answer)
        assert FAULTS[fault][1] in answer, (fault, answer)
        assert "\n" not in answer
