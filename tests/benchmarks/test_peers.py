"""Steps next to other trainers': each point has a speed or a reason, for the same workload."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from benchmarks import peers, trainers
from benchmarks.words import main, training_run
from longctx.parallel import devices
from longctx.spec import hardware
from longctx.spec.hardware import GIB
from longctx.training import dry_run
from longctx.training.dry_run import OUT_OF_MEMORY

TINY = [
    *("model=tiny", "model.layers=2", "model.channels=96", "model.kv_heads=4", "model.ffn=256"),
    *("model.vocab_size=512", "workers=0"),
]
NANOGPT = """
from types import SimpleNamespace as GPTConfig
import torch
from torch import nn

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.dropout == 0 and not config.bias
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        x = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        logits = x @ self.wte.weight.T
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas)
"""


def job(overrides: list[str], **changes: Any) -> trainers.Job:
    work = training_run([*TINY, *overrides], "cpu").workload
    values = {"trainer": "transformers", "device": "cpu", "bf16": False}
    values |= {"model": dataclasses.asdict(work.model), "lora": dataclasses.asdict(work.lora)}
    values |= {"rows": 2, "tokens": 33, "warm": 1, "timed": 2, "lrs": [1e-3] * 3}
    values |= {"betas": (0.9, 0.95), "weight_decay": 0.1, "clip": 1.0}
    return trainers.Job(**values | changes)


@pytest.mark.slow
def test_every_peer_is_a_row(result_of, tmp_path, capsys):
    """But those which are longctx by another recipe, see below."""
    measured = [name for name in peers.PEERS if name not in peers.OTHERWISE]
    (tmp_path / "model.py").write_text(NANOGPT)
    own = [f"peers={','.join(measured)}", "lengths=33", "step_tokens=70", "steps=2"]
    result = result_of("peers", *own, f"nanogpt={tmp_path}", *TINY)
    rows = {row["peer"]: row for row in result["rows"]}
    assert list(rows) == measured
    for name in ("longctx", "longctx-bare", "nanogpt", "transformers"):
        row = rows[name]
        assert (row["rows"], row["tokens"], len(row["ms"])) == (2, 33, 2)
        speed = 66 / (sum(row["ms"]) / 2 / 1000)  # the median of two
        assert row["tokens_per_second"] == pytest.approx(speed)
        assert row["longctx_over_it"] == pytest.approx(rows["longctx"]["tokens_per_second"] / speed)
        assert row["attention"]
    parameters = {rows[name]["parameters"] for name in ("longctx", "transformers")}
    assert parameters == {result["parameters"]}
    assert rows["nanogpt"]["parameters"] == 512 * 96  # without its positions
    for key in ("parameters", "attention"):
        assert rows["longctx-bare"][key] == rows["longctx"][key]
    if not torch.cuda.is_available():
        assert rows["transformers-liger"]["how"].startswith("skipped: ")
    assert "2 × 33 tokens, longctx: " in capsys.readouterr().out


@pytest.mark.parametrize("checkpointing", [False, True])
def test_random_tokens_teach_nothing(checkpointing):
    result = trainers.measure(job([], checkpointing=checkpointing))
    assert result["failed"] is None
    assert result["loss"] == pytest.approx(math.log(512), rel=0.1)
    assert result["attention"].startswith("scaled_dot_product_flash")
    assert set(result["versions"]) == {"transformers"}


def test_other_trainers_get_the_rates_of_a_run(monkeypatch):
    requests: list[dict[str, Any]] = []
    monkeypatch.setattr(dry_run, "in_child", lambda _, request, __: requests.append(request) or "x")
    run = training_run([*TINY, "seq_len=33", "batch_size=2", "warmup_steps=3"], "cpu")
    peers.of_other("transformers", run, peers.Options(steps=4), [], 9.0)
    run = dataclasses.replace(run, max_steps=7)  # three warm steps and four
    assert requests[0]["lrs"] == [run.schedule.rate(n) for n in range(7)]
    assert len(set(requests[0]["lrs"])) > 3


def test_peft_trains_what_our_lora_trains():
    with_lora = job(["lora.rank=4", "lora.targets=[qkv,down]"], checkpointing=True)
    model, optimizer, loss = trainers.transformers(with_lora)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[-4] for name in trained} == {"q_proj", "k_proj", "v_proj", "down_proj"}
    assert all("lora_" in name for name in trained)
    loss(torch.randint(512, (2, 34))).backward()
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    assert len(grads) == len(trained) and all(
        grad is not None and grad.isfinite().all() for grad in grads
    )


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return requests to an H200 on which transformers needs checkpointing from 16k tokens on."""
    requests: list[dict[str, Any]] = []

    def in_child(module: str, request: dict[str, Any], seconds: float) -> dict[str, Any] | str:
        requests.append(request)
        if request["tokens"] >= 131072:
            return "RuntimeError: it broke"
        if request["tokens"] >= 16384 and not request["checkpointing"]:
            return {"ms": [], "failed": OUT_OF_MEMORY, "memory_peak_gib": 139.0}
        step = {"ms": [100.0] * request["timed"], "failed": None, "attention": "made up"}
        return step | {"parameters": 1_235_814_400}

    machine = hardware.Machine(1, hardware.chip("NVIDIA H200", 139.8 * GIB), 2048 * GIB)
    monkeypatch.setattr(devices, "this_machine", lambda: machine)
    monkeypatch.setattr(dry_run, "in_child", in_child)
    monkeypatch.setattr(peers, "version", lambda package: "1.0")
    return requests


def points(
    peer: str, lengths: tuple[int, ...], overrides: list[str], **options: Any
) -> list[dict[str, Any]]:
    """`peer` at each of `lengths`, one after another, on that GPU."""
    chosen = peers.Options(lengths=lengths, **options)
    rows: list[dict[str, Any]] = []
    for tokens in lengths:
        run = peers.shaped(chosen, overrides, tokens, "cuda")
        rows.append(peers.point(peer, run, chosen, overrides, rows, 1e12))
    return rows


def test_checkpointing_begins_when_memory_ends(card):
    rows = points("transformers-liger", (4096, 16384, 65536, 131072), ["model=1b"])
    tried = [(request["tokens"], request["rows"], request["checkpointing"]) for request in card]
    assert tried[:3] == [(4096, 4, False), (16384, 1, False), (16384, 1, True)]
    # 65,536 tokens are more than those that did not fit: not tried again
    assert tried[3:] == [(65536, 1, True), (131072, 1, True)]
    suffix = ", gradient checkpointing"
    assert [row["how"] for row in rows[:3]] == ["made up", f"made up{suffix}", f"made up{suffix}"]
    assert "RuntimeError: it broke" in rows[3]["how"]
    assert "ms" not in rows[-1]
    assert rows[1]["tokens_per_second"] == 163840
    assert rows[1]["mfu"] == pytest.approx(rows[1]["mfu_6n"], rel=0.01)


@pytest.mark.parametrize(
    ("peer", "words", "options", "reason"),
    [
        ("nanogpt", "model=124m", {}, "give nanogpt=FOLDER"),
        ("nanogpt", "model=1b", {"nanogpt": "there"}, "as many kv_heads"),
        ("nanogpt", "model=124m lora.rank=4", {"nanogpt": "there"}, "no LoRA"),
        ("nanogpt", "model=124m", {"nanogpt": "there"}, "made up"),
        ("longctx-bare", "model=1b accumulate=2", {}, "a bare step is one micro-batch"),
        ("transformers-liger", "model=1b model.qkv_bias=true", {}, "another family"),
        ("transformers", "model.qk_norm=head model.mlp_bias=true", {}, "model.mlp_bias=true"),
    ],
)
def test_a_peer_that_cannot_run_says_why(card, peer, words, options, reason):
    assert reason in points(peer, (4096,), words.split(), **options)[0]["how"]


def test_interruption_keeps_the_measured_points(tmp_path, monkeypatch):
    def interrupted(peer: str, *rest: Any) -> dict[str, Any]:
        if peer == "nanogpt":
            raise KeyboardInterrupt
        return {"peer": peer, "tokens": 32, "rows": 1, "how": "made up"}

    monkeypatch.setattr(peers, "point", interrupted)
    argv = ["peers", *TINY, "peers=longctx,nanogpt", "lengths=32", f"out={tmp_path / 'result'}"]
    assert main(argv) != 0
    kept = json.loads((tmp_path / "result.json").read_text())
    assert [row["peer"] for row in kept["rows"]] == ["longctx"]
