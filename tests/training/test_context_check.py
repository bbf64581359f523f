"""context.check passes correct layouts, and finds every fault that others had in silence."""

import json
from pathlib import Path
from typing import Any

import pytest

from longctx import cli
from longctx.config.asked import with_vocabulary, workload_of
from longctx.runs import metrics_file
from longctx.training import context_check
from longctx.training.run import scheduled
from tests.processes import ROOT, finished, run_on
from tests.training.checked_layouts import FAULTS
from tests.training.sample_run import steps

SCRIPT = Path(__file__).with_name("checked_layouts.py")
SHAPE: dict[str, Any] = {"model.layers": 2, "seq_len": 120, "accumulate": 1}
SHARED = {"devices": 2, "context": 2}


@pytest.mark.parametrize(
    "share", ["", pytest.param(" / model.context.ranks.count", marks=pytest.mark.slow)]
)
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
    assert process.returncode == (0 if share else 1), process.stderr
    if share:
        first, *others = metrics_file.read(tmp_path / "runs" / "r")
        assert 0 <= max(first[f"context_check/{name}"] for name in ("loss", "gradients")) < 1e-5
        assert not [key for row in others for key in row if key.startswith("context_check/")]
        for row in steps(tmp_path / "runs" / "r"):
            speed, of_device = (row[f"tokens_per_second{of}"] for of in ("", "_per_device"))
            assert of_device == pytest.approx(speed / 2) and row["communication_ms"] > 0
    else:
        (error,) = [line for line in process.stderr.splitlines() if "error" in line.lower()]
        assert error.startswith("error: context.check=true: the gradient of ")
        # nobody is left that could hold its output open, or `finished` would have waited
        assert not list((tmp_path / "runs").iterdir())


# What the runs of some faults have beside SHAPE and SHARED
OF_FAULTS: dict[str, dict[str, Any]] = {
    "no windows": {"model.window": 20},
    "means of ranks": {"context": 1},
    "no average": {"context": 1},
}
PARTS = {
    **{"model.sinks": True, "model.query_growth": "[0.5,20]", "model.rotary_share": 0.5},
    **{"model.multipliers.embedding": 3, "model.multipliers.residual": 0.4},
    **{"model.multipliers.logits": 0.2, "model.multipliers.logit_softcap": 5},
    **{"model.norms": "sandwich", "model.norm_plus_one": True, "model.attention_gate": "channel"},
    **{"model.qk_norm": "head", "model.qk_norm_after_rope": True},
}
EXPERTS: dict[str, Any] = {"model.experts.count": 4, "model.experts.router": "sigmoid_bias"}
EXPERTS |= {"model.experts.shared": 1, "model.attention_gate": "channel"}
# What must pass beside random layouts, which test_devices.py compares
PASSING: dict[str, dict[str, Any]] = {
    "bf16": SHARED | {"precision": "bf16"},
    "layers of several kinds": SHARED
    | {"model.layers": 3, "model.window": 30, "model.window_layers": "[1]"}
    | {"model.nope_layers": "[2]"},
    "LoRA in slices": SHARED | {"lora.rank": 4, "strategy": "fsdp", "precision": "bf16"},
    "parts of Granite and GLM-4, recomputed": SHARED | PARTS | {"memory": "balanced"},
    "the same by all-gather": SHARED | PARTS | {"context.method": "allgather", "model.window": 30},
    "the same in slices": PARTS | {"strategy": "fsdp", "memory": "balanced", "memory.offload": 0.6},
    "Gemma's norms in slices": SHARED
    | {"model.norms": "sandwich", "model.norm_plus_one": True, "memory": "balanced"}
    | {"strategy": "fsdp", "precision": "bf16"},
    "experts in slices": EXPERTS | {"strategy": "fsdp", "precision": "bf16"},
    "experts that are balanced": SHARED | {"model.experts.count": 4, "model.experts.balance": 0.01},
    "experts by Ulysses": SHARED | EXPERTS | {"memory": "balanced", "model.experts.beside": True},
    "long documents": SHARED | {"seq_len": 16},
    "rows longer than documents, and sums that cancel": SHARED
    | {"seq_len": 4096, "model.mixer": "[fox]", "plugins": f"[{ROOT}/examples/fox.py]"},
    "a norm of many numbers": {"strategy": "fsdp", "model.vocab_size": 30000},
}


def test_what_the_small_run_cannot_have_is_left_out():
    keys = ["model=tiny", "objective=dpo", "data=text", "data.path=x", "init=x", "device=cpu"]
    config = cli.compose("train", [*keys, "lora.rank=2", "lora.base=nf4"]).config
    run = scheduled(config, with_vocabulary(workload_of(config, "cpu", 128), 300))
    small = context_check.small(run)
    assert (small.config.objective.name, small.workload.lora.base) == ("cross_entropy", None)


@pytest.mark.slow
def test_correct_layouts_pass_and_every_fault_is_found(overrides, tmp_path):
    """All in one group of two processes."""
    cases = {
        name: {"fault": None, "keys": overrides(**SHAPE | {"devices": 2} | changes)}
        for name, changes in PASSING.items()
    }
    for precision, strategy, method in (("bf16", "ddp", "allgather"), ("fp32", "fsdp", "ulysses")):
        layout = {"precision": precision, "strategy": strategy, "context.method": method}
        for fault in FAULTS:
            changes = SHAPE | SHARED | layout | OF_FAULTS.get(fault, {})
            if (fault, strategy) != ("no average", "fsdp"):  # which averages in every backward
                name = f"{fault}, {strategy}"
                cases[name] = {"fault": fault, "keys": overrides(**changes)}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    run_on(2, SCRIPT, tmp_path / "cases.json", out := tmp_path / "out.json")
    answers: dict[str, str] = json.loads(out.read_text())
    assert answers.keys() == cases.keys()
    for name, answer in answers.items():
        if fault := cases[name]["fault"]:
            named = "gradient norm" if fault == "larger norm" else "gradient of"
            assert answer.startswith("failed: context.check=true: "), (name, answer)
            assert named in answer and "\n" not in answer, (name, answer)
        else:
            assert answer.startswith("{'loss'"), (name, answer)
