"""Weights that ranks share, of which some stay in fp32 if the run computes in bf16."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.shapes import reference
from longctx import files
from longctx.runs import run_folder
from tests.processes import run_on, train_together
from tests.training.sample_run import check_equal_weights, figures, losses

PLUGIN = """
from torch import nn
from torch.nn.functional import linear
from longctx.model.mixers import Mixer, register


class Scaled(Mixer):
    exact = ("gates",)

    @classmethod
    def weights(cls, spec):
        matrix = (spec.size, spec.size)
        return {"gates": matrix, "out": matrix, "scale": (spec.size,)}

    def start(self, name, weight):
        nn.init.ones_(weight)

    def forward(self, x, batch):
        gates = (x.float()[..., None, :] * self.gates.weight).sum(-1)
        return self.out((gates * x * self.scale).to(x.dtype))


register("scaled", Scaled)
"""
SGD = """
from torch.optim import SGD
from longctx.training.optimizers import OptimizerTraits, register

register("sgd", OptimizerTraits(lambda model, run: SGD(model.parameters(), run.lr, momentum=0.9)))
"""
MODELS = [
    {"norm_plus_one": True, "norms": "sandwich", "qk_norm": "head"},
    {"sinks": True, "experts": {"count": 6, "per_token": 2, "ffn": 16, "router": "sigmoid_bias"}},
    {"norms": "parallel", "norm_form": "layer", "mlp_gate": False, "mlp_bias": True, "no_mlp": [0]},
    {"layers": 4, "mixer": ["mamba2", "kda", "mla", "scaled"], "no_mlp": [0, 3]},
]
OF_TRANSFORMERS = "deepseek_v3", "ernie4_5_moe", "minimax_m2"


def test_weights_in_fp32_stay_so_in_slices(tmp_path):
    (tmp_path / "scaled.py").write_text(PLUGIN)
    for kind in OF_TRANSFORMERS:
        theirs = reference(kind)
        for name, weight in theirs.state_dict().items():
            # Rounded to 16 bits, they lose what they differ by
            if "correction" in name:
                weight.normal_(10.0, 0.02)
            elif kind != "ernie4_5_moe" or "gate.weight" not in name:
                weight.copy_(weight.bfloat16())
        theirs.save_pretrained(tmp_path / kind)
    folders = (tmp_path / name for name in ("scaled.py", *OF_TRANSFORMERS))
    run_on(2, Path(__file__).with_name("sharded.py"), *folders, *map(json.dumps, MODELS))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_run_of_slices_in_bf16_resumes_exactly(optimizer, overrides, tmp_path):
    keys = {"precision": "bf16", "model.layers": 2, "model.mixer": "[gdn,mla]", "accumulate": 1}
    keys |= {"model.norm_plus_one": True, "checkpoint_every": 2, "max_steps": 4, "devices": 2}
    keys |= {"keep_checkpoints": 5, "memory": "balanced"}
    if optimizer == "sgd":
        (tmp_path / "sgd.py").write_text(SGD)
        keys |= {"optimizer": "sgd", "plugins": f"[{tmp_path / 'sgd.py'}]"}
    copies = overrides(name="copies", strategy="ddp", **keys | {"max_steps": 1})
    train_together(2, [copies, overrides(name="slices", strategy="fsdp", **keys)])
    runs = tmp_path / "runs"
    again = shutil.copytree(runs / "slices", runs / "again", symlinks=True)
    files.remove(run_folder.checkpoints(again)[-1])
    train_together(2, [[f"resume={again}", f"plugins={keys.get('plugins', [])}"]])
    # Weights are drawn in fp32; in 16 bits the first loss would be another
    assert losses(runs / "copies") == losses(runs / "slices")[:1]
    assert figures(again) == figures(runs / "slices")
    check_equal_weights(again, runs / "slices")
