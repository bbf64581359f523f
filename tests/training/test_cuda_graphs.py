"""CUDA graphs of a step change no bit of a run, and what cannot be captured is refused by name."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from longctx import cli
from longctx.config.asked import with_vocabulary, workload_of
from longctx.model import GPT, GPTConfig
from longctx.spec.step import Workload
from longctx.training.batches import MicroBatch, micro_batch
from longctx.training.cuda_graphs import StaticBatch, StepGraphs
from tests.processes import ROOT, finished
from tests.training import sample_run
from tests.training.sample_run import FAULTY, check_equal_weights, figures, row, steps

LENGTH = 37


def packed(*lengths: int) -> MicroBatch:
    """Two sequences of documents of these lengths, then padding, with tokens of their own."""
    one = row(*lengths, padding=LENGTH - sum(lengths))
    return micro_batch([one, one | {"tokens": (one["tokens"] + 7 * len(lengths)) % 50}])


def gradients(model: GPT, micro: MicroBatch) -> list[Tensor]:
    """The loss of `micro`, then its gradients."""
    loss = model(micro.tokens, micro.targets, micro.mask, reduction="sum", scale=micro.weight)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("attention", ["flash", "naive"])
@pytest.mark.parametrize("memory", ["fast", "balanced"])
def test_a_batch_filled_in_place_gives_the_same_bits(attention, memory):
    torch.manual_seed(0)
    mixer = ["softmax", "mla"]
    config = GPTConfig(vocab_size=50, layers=4, window=9, window_layers=[0, 1], mixer=mixer)
    model = GPT(config, attention, memory)
    batches = [packed(5, 25), packed(1, 1, 1, 17, 13), packed(36)]
    static = StaticBatch(batches[0])
    places = [static.micro.tokens.data_ptr(), static.micro.mask.doc_ids.data_ptr()]
    for batch in batches:
        assert static.fill(batch)
        assert all(map(torch.equal, gradients(model, static.micro), gradients(model, batch)))
    assert places == [static.micro.tokens.data_ptr(), static.micro.mask.doc_ids.data_ptr()]


class Forgetful(torch.optim.SGD):
    """An optimizer that leaves no gradients behind, as some do."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.zero_grad(set_to_none=True)
        return loss


def test_graphs_follow_an_update_and_keep_gradients(monkeypatch):
    """Before an update, the optimizer has no averages."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    weight = torch.nn.Parameter(torch.ones(3))
    graphs = StepGraphs(None, None, Forgetful([weight], lr=0.5), None)
    weight.grad = torch.ones(3)
    graphs.zero_grad()
    assert not graphs.is_warm and weight.grad is None
    captured = weight.grad = torch.ones(3)
    graphs.gradients = [(weight, captured)]
    for left in (0.5, 0.0):
        graphs.update()
        assert graphs.is_warm and weight.grad is captured
        assert weight.tolist() == [left] * 3


def work(*keys: str, device: str = "cuda") -> Workload:
    fast = [] if "memory=balanced" in keys else ["memory=fast"]
    config = cli.compose("train", ["model=124m", *fast, *keys]).config
    return with_vocabulary(workload_of(config, device, config.seq_len), 50304)


def test_graphs_are_automatic_for_small_micro_batches():
    assert all(work("seq_len=1024", f"model.mixer=[{x}]").captured for x in ("softmax", "mla"))
    others = ["seq_len=65536"], ["seq_len=1024", "graphs=false"], ["model.mixer=[gdn]"]
    assert not any(work("batch_size=1", *keys).captured for keys in others)
    assert not work("seq_len=1024", "batch_size=4", device="cpu").captured


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (["attention=sdpa"], "attention=sdpa"),
        (["attention=flex"], "attention=flex"),
        (["devices=2"], "one GPU"),
        (["model.mixer=[mla,gdn]"], "mixer=gdn"),
        (["strategy=fsdp"], "one GPU"),
        (["memory=balanced", "memory.offload=1"], "memory.offload=0"),
        (["model.rope_scaling={rope_type: dynamic, factor: 2.0}", "model.context=64"], "dynamic"),
    ],
)
def test_uncapturable_steps_are_named(keys, named):
    automatic = work("seq_len=1024", "batch_size=4", *keys)
    assert automatic.is_host_bound
    assert not automatic.captured
    with pytest.raises(ValueError, match=f"graphs=true: .*{named}"):
        work("seq_len=1024", "batch_size=4", *keys, "graphs=true").check_graphs()


# On a GPU: a run with graphs beside the same without them

SMALL = {
    **{"device": "cuda", "deterministic": True, "compile": False, "memory": "fast"},
    **{"model.layers": 2, "model.channels": 128, "model.heads": 2, "model.kv_heads": 1},
    **{"model.ffn": 192, "seq_len": 256, "accumulate": 1, "max_steps": 10, "warmup_steps": 2},
    **{"clip": 0.5, "val_every": 4, "kernel.lock": "off"},
}
MIXED = {"model.mixer": "[mla,fox,xsa,differential]", "model.layers": 4, "model.kv_heads": 2}
MIXED |= {"plugins": "[examples/fox.py,examples/xsa.py,examples/differential.py]"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [
        MIXED,
        {"accumulate": 2, "compile": True, "workers": 1, "optimizer": "muon", "memory": "balanced"},
        {"attention": "naive", "model.tied": False},
        {"clip": "null", "memory.optimizer_state": "host", "precision": "fp32"},
        {"seq_len_schedule": "[[64,3],[128,3]]", "accumulate": 2},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_graphs_change_no_bit_of_a_run(trained, changes, capsys):
    without = trained("without", **SMALL | {"graphs": False} | changes)
    assert "CUDA graphs" not in capsys.readouterr().out
    captured = trained("captured", **SMALL | {"graphs": True} | changes)
    assert "CUDA graphs" in capsys.readouterr().out
    assert figures(captured) == figures(without)
    of_both = (sample_run.validations(run) for run in (captured, without))
    assert all(a["val_loss"] == b["val_loss"] for a, b in zip(*of_both, strict=True))
    check_equal_weights(captured, without)


@pytest.mark.gpu
def test_a_captured_run_resumes_bit_for_bit(trained):
    sample_run.check_resumes_exactly(trained(**SMALL, graphs=True, checkpoint_every=5))


@pytest.mark.gpu
def test_unordered_embedding_gradients_are_captured(trained):
    keys = SMALL | {"deterministic": False}
    runs = (trained(f"{x}", **keys, graphs=x) for x in (False, True))
    without, captured = map(sample_run.losses, runs)
    assert captured == pytest.approx(without, rel=1e-3)


@pytest.mark.gpu
def test_a_failed_capture_is_one_line(overrides):
    keys = overrides(**SMALL | {"deterministic": False, "graphs": True})
    # A process of its own: a capture that fails leaves torch's generators unusable.
    process = finished(FAULTY, ["wait", *keys], ROOT)
    assert process.returncode == 1 and "Traceback" not in process.stderr
    [line] = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert "use graphs=false" in line


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_captured_steps_fit_the_predicted_memory(trained, optimizer):
    """A graph's pool is in no tensor, so that the run is given no more memory than predicted."""
    shape = {"model": "124m", "model.vocab_size": 50304, "seq_len": 1024, "batch_size": 4}
    unset = dict.fromkeys(("model.channels", "model.heads", "model.kv_heads", "model.ffn"))
    keys = SMALL | shape | unset | {"graphs": True, "model.layers": 12, "max_steps": 6}
    keys |= {"compile": True, "deterministic": False, "optimizer": optimizer}
    keys |= {"val_every": 3, "val_rows": 8}
    predicted = steps(trained(**keys))[-1]["memory_predicted_gib"] * 2**30
    gc.collect()
    torch.cuda.empty_cache()
    left_over = torch.cuda.memory_reserved()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((left_over + 1.1 * predicted) / total)
    try:
        trained("capped", **keys)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
