"""A smoke test of each benchmark, tiny and on a CPU, and what one computes once."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import arena, attention, caps, cards, context, points, processes, reference, steps
from benchmarks.points import point, training_run
from benchmarks.words import BENCHMARKS, main
from longctx.attention import Mask
from longctx.attention import attention as longctx_attention
from longctx.attention.description import SCORES
from longctx.config import fields
from longctx.config.eval_config import EvalConfig
from longctx.config.train_config import TrainConfig
from longctx.parallel import devices
from longctx.planner.peak_memory import predict
from longctx.spec import hardware
from longctx.spec.hardware import GIB
from tests.model.test_mixers import loaded
from tests.processes import ROOT
from tests.test_docs import blocks

TINY = ["model=tiny", "model.layers=1", "model.channels=32", "model.ffn=48", "workers=0"]
TINY += ["model.vocab_size=300", "compile=false"]
NANOGPT = """
from types import SimpleNamespace as GPTConfig
import torch
from torch.nn.functional import cross_entropy

class GPT(torch.nn.Embedding):
    def __init__(self, config):
        super().__init__(config.vocab_size, config.n_embd)

    def forward(self, idx, targets):
        logits = super().forward(idx) @ self.weight.T
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas)
"""
# Command line → the key or the value that the message names
MISTAKES = {
    "atention": "atention",
    "arena mixers=fix": "mixers=fix",
    "attention channels=100": "channels=100",
    "cards attention=flash": "attention=flash",
    "extension seq_len=512": "stages=",
    "caps caps=25": "caps=25",
    "steps seq_len=4096": "lengths=",
    "tune head_sizes=96,128": "head_sizes=96,128",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(words, refused):
    refused(main(words.split()), MISTAKES[words])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_help(name, capsys):
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith("Measure ")


@pytest.mark.no_gpu
def test_attention_is_measured_or_skipped(monkeypatch):
    few = ("flash", "flash-portable", "sdpa-flash", "flex")
    sizes = {"lengths": (64, 100), "head_sizes": (32,), "channels": 64, "row_tokens": 128}
    options = attention.Options(**sizes, window=16, repeats=3, seconds=30, backends=few)
    rows = list(attention.rows_of(options, 100.0, "cpu"))
    assert len(rows) == 4 * 2 * len(few)
    flash, portable, sdpa, flex = rows[:4]
    assert (flash["batch"], flash["heads"], flash["kernel"]) == (2, 2, "torch-tiled")
    assert flash["both_ms"] == pytest.approx(flash["forward_ms"] + flash["backward_ms"], abs=1e-3)
    assert sdpa["forward_ratio"] == sdpa["both_ratio"] == 1.0
    assert portable["skipped"] and flex["skipped"]


def fake_packages(off: int):
    """Return modules with the calls of FlashAttention-4 and of cuDNN's flex attention as their
    packages document them, computed by naive; windows are `off` too long.
    """

    def flash_attn_func(q, k, v, causal, window_size, learnable_sink, softcap):
        window = None if window_size == (None, None) else window_size[0] + 1 + off
        assert causal and window_size[1] in (None, 0)
        more = {"sinks": learnable_sink, "softcap": softcap or None, "return_lse": True}
        return longctx_attention(q, k, v, mask=Mask.causal(window), backend="naive", **more)

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, **more):
        lengths = cu_seqlens_q.diff()
        assert cu_seqlens_k.equal(cu_seqlens_q) and max_seqlen_q == more.pop("max_seqlen_k")
        assert max_seqlen_q == lengths.max()
        pieces = zip(*(x[None].split(lengths.tolist(), 1) for x in (q, k, v)), strict=True)
        outs = [flash_attn_func(*piece, **more)[0][0] for piece in pieces]
        return torch.cat(outs), None

    def flex_attn_func(q, k, v, mask_plan):
        nothing, first, end = mask_plan[0].unflatten(1, q.shape[:2])
        assert not nothing.any() and end.dtype == torch.int32
        return longctx_attention(q, k, v, mask=Mask.intervals(first, end - 1), backend="naive")

    flash_attn, cudnn = ModuleType("flash_attn.cute"), ModuleType("cudnn.flex_attention")
    flash_attn.flash_attn_func = flash_attn_func
    flash_attn.flash_attn_varlen_func = flash_attn_varlen_func
    cudnn.create_mask_plan, cudnn.flex_attn_func = lambda ends, q, k, v: ends, flex_attn_func
    return {"flash_attn.cute": flash_attn, "cudnn.flex_attention": cudnn}


@pytest.mark.no_gpu
def test_layers_of_models_are_measured_by_each_peer(monkeypatch, capsys):
    few = ("flash", "flash-pruned", "flash-attention-4", "sdpa-flash", "cudnn-flex")
    small = {}
    for name, case in attention.MODELS.items():
        heads = {"heads": min(case.heads, 8), "kv_heads": min(case.kv_heads, 2), "head_size": 16}
        mask = {"window": case.window and 9, "document": case.document and 33, "tokens": 66}
        small[name] = case._replace(**heads, **mask, batch=1)
    small["fox-64"] = small["fox-64"]._replace(half_lives=(0.01, 0.02))
    monkeypatch.setattr(attention, "MODELS", small)
    options = attention.Options(models=("all",), repeats=3, seconds=60, backends=few)
    for name, module in fake_packages(0).items():
        monkeypatch.setitem(sys.modules, name.partition(".")[0], ModuleType("parent"))
        monkeypatch.setitem(sys.modules, name, module)
    rows = {(row["model"], row["backend"]): row for row in attention.rows_of(options, 1.0, "cpu")}
    for name, case in small.items():
        ran = {"flash", "flash-pruned" if case.half_lives else "flash-attention-4"}
        ran |= set() if case.sinks or case.softcap or case.half_lives else {*few[3:]}
        assert {peer for peer in few if "skipped" not in rows[name, peer]} == ran
    lines = attention.table(list(rows.values())).splitlines()
    assert [line.split()[1] for line in lines[2:]] == list(small)
    assert lines[2].startswith("| gpt-oss-window | 8/2 of 16 | 66, window 9 | flash, ")
    assert rows["fox-64", "flash-pruned"]["kernel"] == "torch-tiled, 3% of pairs"
    # A peer that reads its arguments otherwise is in no table
    monkeypatch.setitem(sys.modules, "flash_attn.cute", fake_packages(1)["flash_attn.cute"])
    of_phi, of_olmo = (
        list(attention.rows_of(replace(options, models=(name,)), 1.0, "cpu"))[2]
        for name in ("phi-3-mini-full", "olmo-3-7b-window")
    )
    assert "skipped" not in of_phi and "off those of the first" in of_olmo["skipped"]


@pytest.mark.slow
@pytest.mark.no_gpu
def test_steps_of_each_peer_are_a_row(result_of, tmp_path):
    (tmp_path / "model.py").write_text(NANOGPT)
    shape = ["model=tiny", "model.layers=2", "model.channels=96", "model.kv_heads=4"]
    shape += ["model.ffn=256", "model.vocab_size=512", "workers=0"]
    peers = [x for x in (*steps.OURS, *steps.OTHERS) if x not in ("longctx-sdpa", "longctx-fp8")]
    own = ["lengths=33", "step_tokens=70", "warm=1", "steps=2", f"nanogpt={tmp_path}"]
    result = result_of("steps", f"peers={','.join(peers)}", *own, *shape)
    rows = {row["peer"]: row for row in result["rows"]}
    assert list(rows) == peers
    for name in ("longctx", "nanogpt", "transformers"):
        assert (rows[name]["rows"], rows[name]["tokens"], len(rows[name]["ms"])) == (2, 33, 2)
        speed = rows["longctx"]["tokens_per_second"] / rows[name]["tokens_per_second"]
        assert rows[name]["longctx_over_it"] == pytest.approx(speed)
    assert rows["transformers"]["parameters"] == rows["longctx"]["parameters"]
    assert rows["transformers-liger"]["how"].startswith("skipped: ")
    assert "commit" in result


@pytest.mark.no_gpu
def test_a_point_is_measured_in_a_child():
    run = training_run([*TINY, "seq_len=64", "batch_size=1"], "cpu")
    row = point(run, 1, 2, document=32, validate=True, gib=1.0)
    assert row["failed"] is None and len(row["ms"]) == 2
    assert row["tokens_per_second"] > 0
    assert point(run, 1, 1, seconds=0.01)["failed"]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 that takes what is predicted; naive attention runs out of its memory."""
    machine = hardware.Machine(1, hardware.chip("NVIDIA H200", 139.8 * GIB), 2048 * GIB)

    def made_up(run, warm, timed, *rest, **others):
        row, peak = points.expected(run), predict(run.workload).peak / GIB
        if row["backend"] == "naive":
            return row | {"failed": "out of memory", "error": None}
        row |= {"failed": None, "error": 0.01, "measured_gib": peak, "memory_peak_gib": peak}
        return row | {"tokens_per_second": 2.0 * row["tokens"], "mfu": 0.5}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (130 * GIB, 140 * GIB))
    monkeypatch.setattr(devices, "this_machine", lambda: machine)
    monkeypatch.setattr(devices, "check_attention", lambda config, model, device: None)
    for module in (context, caps):
        monkeypatch.setattr(module, "point", made_up)
    monkeypatch.setattr(context, "machine", lambda: {"gpu": "made up"})
    monkeypatch.setattr(caps, "in_child", lambda machine: {"gpu": "made up"})


def test_context_has_a_row_for_each_length(card, result_of):
    own = ["model=124m", "memory=balanced", "shortest=65536", "longest=300000"]
    result = result_of("context", "backends=naive,flash", *own)
    rows = {(row["backend"], row["tokens"]): row for row in result["rows"]}
    assert [n for backend, n in rows if backend == "flash"] == [65536, 131072, 262144, 300000]
    assert rows["naive", 131072]["failed"] == "out of memory"


@pytest.mark.parametrize("layers", [0, 4])
def test_caps_leave_a_step_what_the_search_leaves_it(layers, card, result_of):
    words = ["caps=24,48", "hosts=64", "models=8b", f"layers={layers}", "random=3"]
    rows = result_of("caps", *words)["rows"]
    assert len(rows) == 2 * 2 + 3
    for row in rows:
        assert row["predicted_gib"] <= max(0.95 * row["cap_gib"], row["cap_gib"] - 0.4)
    assert min(row["tokens"] for row in rows if row.get("way") == "LoRA on nf4") == 64 * 8192


def test_decoding_is_measured_after_each_prompt(result_of):
    sizes = ["model.vocab_size=99", "prompts=5,9", "new=2", "repeats=1", "rows=2"]
    rows = result_of("decoding", *TINY[:4], *sizes)["results"]
    assert [row["prompt"] for row in rows] == [5, 9]
    for row in rows:
        assert row["first_over_forward"] == row["first_token_ms"] / row["forward_ms"]
        assert row["tokens_per_second"] > 0


@pytest.mark.slow
@pytest.mark.no_gpu
def test_preferences_are_measured(result_of):
    rows = result_of("preferences", "tiny=true", "attentions=sdpa", "lengths=32,64")["results"]
    assert [row["case"] for row in rows] == [*["longctx"] * 2, *["trl sdpa"] * 2]
    assert [row["failed"] for row in rows] == [None] * len(rows)


def test_pages_are_what_the_code_says(monkeypatch):
    """One of three amounts of host memory is searched again; each card and way has all three."""
    written = [line.strip("| ").split(" | ") for line in cards.PAGE.read_text().splitlines()]
    cells = {tuple(row[:2]): row[2:] for row in written if len(row) == 2 + len(cards.HOSTS)}
    search = cards.longest_cell

    def one_of_three(case, gb, host):
        n = cards.HOSTS.index(host)
        if (cards.CASES.index(case) + cards.SHOWN.index(gb)) % len(cards.HOSTS) == n:
            return search(case, gb, host)
        return cells[case.name, cards.of(gb)][n]

    monkeypatch.setattr(cards, "longest_cell", one_of_three)
    assert cards.PAGE.read_text() == cards.page()
    result = json.loads((ROOT / "results/attention-models.json").read_text())
    assert attention.table(result["rows"]) in (ROOT / "docs/results.md").read_text()
    pages = reference.pages()
    for name, text in pages.items():
        assert (ROOT / "docs" / name).read_text() == text, "run python -m benchmarks reference"
    for schema in (TrainConfig, EvalConfig):
        leaves = {name for name, key in fields.keys(schema).items() if not key.is_group}
        assert {name for name in leaves if f"| `{name}` |" not in pages["keys.md"]} == set()


@pytest.mark.slow
@pytest.mark.no_gpu
def test_a_small_card_is_measured(tmp_path):
    own = ["measure=true", "lengths=64", "tokens=64", "minutes=60"]
    assert main(["cards", *own, f"out={tmp_path}", *TINY]) == 0
    card = json.loads((tmp_path / "none.json").read_text())
    assert [row["backend"] for row in card["steps"]] == ["flash", "sdpa", "naive"]
    (line,) = cards.step_rows("x.json", card)
    assert line["`flash`"] == f"{card['steps'][0]['tokens_per_second']:,.0f} (unknown card)"


def test_every_entrant_of_the_arena_is_a_model():
    plain = training_run(arena.USUAL["cpu"].split(), "cpu").workload
    words = {x: arena.settings(x, plain) for x in arena.SETTINGS}
    models = {x: training_run([*arena.USUAL["cpu"].split(), *words[x]], "cpu") for x in words}
    assert len({repr(x.workload.model) for x in models.values()}) == len(words)
    assert models["window-full"].workload.model.windows() == {64: 3, None: 1}
    assert arena.check("flash", 0) == [arena.LATE]  # the minutes are over
    # Data workers of a spawned process are not spawned in their turn
    assert processes.in_child(eval, "__import__('multiprocessing').get_start_method()") != "spawn"


def test_arena_refuses_a_model_before_the_others_train(tmp_path, refused, monkeypatch):
    monkeypatch.setattr("longctx.config.train_config.find_spec", lambda package: None)
    words = ["arena", "mixers=softmax,gdn-softmax", "model.layers=2", "minutes=0.001"]
    refused(main([*words, f"out={tmp_path}/arena"]), "model.layers=2")
    assert not (tmp_path / "arena").exists()
    (tmp_path / "arena" / "softmax").mkdir(parents=True)
    refused(main([*words, f"out={tmp_path}/arena"]), "arena: has softmax already; give another")


@pytest.mark.slow  # runs, readings, checks and steps, each in a process of its own
def test_arena_writes_a_page_of_mixers_and_plugins(tmp_path, monkeypatch, capsys, refused):
    for code in blocks("extend.md", "python")[:4]:
        (tmp_path / code.split()[1]).write_text(code)
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    names, files = ["slopes", "alibi"], "plugins=[my_slopes.py,my_scores.py]"
    words = ["arena", f"mixers={','.join(names)}", "tokens=256", "lengths=64", files, *TINY[:-2]]
    words += ["passkeys=256", "data.vocab_size=300", "data.documents=20", "seq_len=64"]
    words += ["batch_size=1", "accumulate=1", "val_rows=2", "compile=false", "device=cpu"]
    with loaded(tmp_path / "my_slopes.py"), loaded(tmp_path / "my_scores.py", SCORES):
        assert main(words) == 0
    page = json.loads((tmp_path / "runs/arena/page.json").read_text())
    assert [row["mixer"] for row in page["rows"]] == names
    assert not any(row["failed"] for row in page["rows"]), page["rows"]
    assert all(set(row["losses"]) >= {"1", "32"} for row in page["rows"])
    assert all(row["tokens/s of steps"]["64"] > 0 for row in page["rows"])
    assert all(len(row[arena.KEYS_FOUND]["256"]) == 5 for row in page["rows"]), page["rows"]
    assert [Path(name).name for name in page["check"]] == ["my_slopes.py", "my_scores.py"]
    text = (tmp_path / "runs/arena/page.md").read_text()
    assert "| alibi |" in text and (tmp_path / "runs/arena/page.png").is_file()
