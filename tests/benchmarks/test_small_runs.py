"""Benchmarks that run models of their own, tiny and on a CPU."""

import json
import math
from pathlib import Path

import pytest
import torch

import train
from benchmarks.decoding import bytes_of_token
from benchmarks.extension import draw
from benchmarks.optimizers import shared_target, tokens_to
from benchmarks.outgrown import Watched
from benchmarks.preference_curve import questions, quoted_share
from benchmarks.waits import step_seconds
from benchmarks.words import main
from longctx.attention import Mask
from longctx.config.model_config import GPTConfig
from longctx.model import GPT
from longctx.model.decoder import KVCache
from tests.processes import ROOT, finished

TINY = ["model=tiny", "model.layers=1", "model.channels=32", "model.ffn=48", "seq_len=64"]
TINY += ["batch_size=2", "accumulate=1", "device=cpu", "compile=false", "workers=0"]
PNG = b"\x89PNG"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the keys of 30 documents; the cache is apart."""
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        lines = (f"line {i * number} of {number} dull texts" for i in range(20 + 5 * number))
        (folder / f"{number}.txt").write_text("\n".join(lines))
    return ["data=text", f"data.path={folder}", "data.vocab_size=300"]


@pytest.mark.slow
def test_extension_writes_report_and_plot(data, tmp_path):
    sizes = ["short=256", "long=512", "layers=1", "channels=64", "vocab=512", "tokens=1024"]
    own = ["steps=2", "tune_steps=1", "documents=40", "samples=1", "device=cpu"]
    texts, out = data[1].removeprefix("data."), tmp_path / "out"
    assert main(["extension", *sizes, *own, texts, f"out={out}"]) == 0
    report = json.loads((out / "extension.json").read_text())
    assert list(report["models"]) == ["as pretrained", "YaRN, not trained", "YaRN, fine-tuned"]
    for model in report["models"].values():
        grid = model["recall"]["passkey"]
        assert (grid["lengths"], len(grid["depths"])) == ([256, 512], 11)
        assert model["by_position"][0]["first"] == 1
    assert report["options"]["long"] == 512
    assert (out / "extension.png").read_bytes().startswith(PNG)
    rope = json.loads((out / "long" / "config.json").read_text())["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 2.0)
    assert rope["original_max_position_embeddings"] == 256
    draw(report, tmp_path / "again.png")
    assert main(["extension", f"out={out}"]) == 2
    given = [f"init={out / 'short'}", "lora=2", "long=512", "tokens=1024", *own[1:]]
    again = tmp_path / "again"
    assert main(["extension", *given, texts, f"out={again}"]) == 0
    report = json.loads((again / "extension.json").read_text())
    assert report["options"]["short"] == 256 and "pretraining" not in report["seconds"]
    assert (again / "long" / "model.safetensors").exists()


def test_tokens_to_a_loss_are_interpolated():
    losses = [(0, 6.0), (100, 4.0), (200, 3.0), (300, 3.5)]
    expected = {6.5: 0, 5.0: 50, 3.25: 175, 2.9: None}
    assert {loss: tokens_to(losses, loss) for loss in expected} == expected


def test_the_target_is_a_loss_that_each_reaches():
    ends = {("a", 1): 3.0, ("a", 2): 2.5, ("b", 1): 2.7, ("b", 2): None}
    rows = [
        {"optimizer": name, "lr": lr, "last_loss": loss, "validations": [(9, loss)] if loss else []}
        for (name, lr), loss in ends.items()
    ]
    assert shared_target(rows) == 2.7
    with pytest.raises(ValueError, match="optimizers=b"):
        shared_target([row for row in rows if row["optimizer"] == "a" or row["lr"] == 2])


@pytest.mark.slow
def test_optimizers_are_compared_once(data, tmp_path):
    out = tmp_path / "out" / "optimizers.json"
    data.append("data.val_fraction=0.2")
    own = ["rates=0.001", "steps=4", "val_every=2", f"out={out}", f"runs={tmp_path / 'r'}"]
    for note in (None, "was there already"):
        assert main(["optimizers", *own, *TINY, *data]) == 0
        result = json.loads(out.read_text())
        pairs = [(row["optimizer"], row["lr"]) for row in result["runs"]]
        assert pairs == [("adamw", 0.001), ("muon", 0.001)]
        for row in result["runs"]:
            assert row.get("note") == note
            assert [tokens for tokens, _ in row["validations"]] == [0, 256, 512]
        assert all(best["tokens_to_target"] <= 512 for best in result["best"].values())
        assert out.with_suffix(".png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_waits_of_real_runs_are_timed(data, tmp_path, result_of):
    result = result_of("waits", *TINY, *data, "steps=6", "starts=1", f"folder={tmp_path}/f")
    for start in (result["cold"], *result["warm"]):
        assert 0 < start["first_line"] < start["step_1"]
    end = result["end"]
    assert 0 < end["checkpoint"] <= end["prompt"]
    assert end["bytes"] > 4 * 32 * 48  # more than one matrix
    assert list(result["disk"]) == ["1", "4"]
    assert not (tmp_path / "f").exists()


def test_waits_that_fail_write_nothing(tmp_path, refused):
    """A run that fails, and a folder with other things in it."""
    (tmp_path / "mine").write_text("x")
    own = [*TINY, "data=text", "data.path=nowhere.txt", f"out={tmp_path}/w"]
    for folder, message in ((tmp_path / "f", "nowhere.txt"), (tmp_path, "folder=")):
        refused(main(["waits", *own, f"folder={folder}"]), message)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_step_after_a_save_is_timed_with_it():
    rows = [{"step": n, "seconds": n + 5.0 * (n > 3), "ms_per_step": 1000.0} for n in range(1, 6)]
    assert step_seconds([{"step": 0, "val_loss": 2.0}, *rows]) == {2: 1, 3: 1, 4: 6, 5: 1}


# Decoding


def test_both_are_measured_after_each_prompt(result_of):
    sizes = ["model=tiny", "model.layers=1", "model.channels=32", "model.ffn=48"]
    sizes += ["model.vocab_size=99", "prompts=5,9", "new=2", "repeats=1", "rows=2"]
    rows = result_of("decoding", *sizes)["results"]
    expected = [(prompt, peer) for prompt in (5, 9) for peer in ("longctx", "transformers")]
    assert [(row["prompt"], row["peer"]) for row in rows] == expected
    for row in rows:
        assert row["first_over_forward"] == row["first_token_ms"] / row["forward_ms"]
        assert row["tokens_per_second"] > 0
        assert row["gb_per_token"] == rows[0 if row["prompt"] == 5 else 2]["gb_per_token"]


def test_a_token_reads_weights_and_cache_once():
    sizes = {"layers": 2, "channels": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab_size": 99}
    tied, own = (GPTConfig(**sizes, tied=tied) for tied in (True, False))
    cache = KVCache.bytes_of(tied, 3, 70, torch.bfloat16)
    weights = sum(2 * weight.numel() for weight in GPT(tied).parameters())
    # Of `own` an lm_head, and one row of the embedding
    assert bytes_of_token(tied, 3, 70, 2) == bytes_of_token(own, 3, 70, 2) == weights + cache
    windowed = GPTConfig(**sizes, tied=True, window=7)
    assert bytes_of_token(windowed, 3, 70, 2) == weights + cache // 10


# A card


@pytest.mark.slow
@pytest.mark.no_gpu
def test_a_small_card_is_measured(tmp_path):
    shape = ["model=tiny", "model.layers=1", "model.vocab_size=300", "compile=false", "workers=0"]
    own = ["lengths=32,64", "tokens=64", "head_sizes=16", "channels=32", "minutes=1"]
    assert main(["card", *own, f"out={tmp_path}", *shape]) == 0
    result = json.loads((tmp_path / "cpu.json").read_text())
    assert len({row["mask"] for row in result["attention"]}) == 3
    ran = [row for row in result["attention"] if "skipped" not in row]
    assert {row["backend"] for row in ran} == {"flash", "sdpa-flash"}
    assert all(row["forward_spread"] >= 0 for row in ran)
    points = [(row["tokens"], row["backend"]) for row in result["steps"]]
    assert points == [(n, name) for n in (32, 64) for name in ("flash", "sdpa", "naive")]
    for row in result["steps"]:
        assert row["failed"] is None
        assert row["tokens_per_second"] == pytest.approx(64e3 / row["ms"])


# The demo


@pytest.fixture
def demo_words(model: Path, tmp_path: Path) -> list[str]:
    """Return what makes the demo small."""
    prose = "\n\n".join(f"Paragraph {n} tells about {n * n}." for n in range(999))
    (tmp_path / "prose.md").write_text(prose)
    own = ["context=1024", "seq_len=256", "steps=2", "lengths=[512,1024]", "depths=2"]
    own += [f"init={model}", f"path={tmp_path / 'prose.md'}", f"out={tmp_path / 'out'}"]
    return [*own, "device=cpu", "precision=fp32"]


@pytest.mark.slow
def test_a_model_reads_before_and_after(demo_words, tmp_path):
    assert main(["demo", *demo_words]) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["before"]["context"] == 512
    for when in ("before", "after"):
        assert result[when]["perplexity"][-1]["last"] == 1024
        assert all(row["perplexity"] > 1 for row in result[when]["perplexity"])
        assert result[when]["passkeys"]["accuracy"] == [[0, 0], [0, 0]]
    assert (tmp_path / "out" / "result.png").read_bytes().startswith(PNG)
    trained = (tmp_path / "out" / "prose.jsonl").read_text()
    assert "Paragraph 1 tells" in trained and "Paragraph 998 tells" not in trained
    assert main(["demo", *demo_words]) == 2


def test_too_little_prose_is_refused(demo_words, tmp_path, refused):
    longer = [word.replace("[512,1024]", "[512,8192]") for word in demo_words]
    refused(main(["demo", *longer]), "give more of it")
    assert not (tmp_path / "out").exists()


# A curve of preferences


def test_questions_are_answered_by_their_text():
    for question, answer in questions(30):
        assert answer.startswith("The text says: “")
        assert quoted_share(answer, question) > 0.6


def test_words_in_runs_of_five_are_quoted():
    text = "One two three four five six, seven."
    shares = {"": 0, "one two three four": 0, "He says: TWO three, four five six": 5 / 7, text: 1}
    assert {answer: quoted_share(answer, text) for answer in shares} == pytest.approx(shares)


@pytest.mark.slow
def test_a_model_is_drawn_before_and_after(model, tmp_path):
    out = tmp_path / "out"
    words = [f"init={model}", "texts=24", "steps=2", "device=cpu", f"out={out}"]
    assert main(["preference_curve", *words]) == 0
    result = json.loads((out / "result.json").read_text())
    validations = [row["step"] for row in result["curve"] if "val_rewards/margins" in row]
    assert validations == [0, 1, 2]
    assert len(result["samples"]) == result["pairs"]["held_out"] > 0
    assert all(0 <= result["quoted"][when] <= 1 for when in ("before", "after"))
    assert (out / "result.png").read_bytes().startswith(PNG)
    assert main(["preference_curve", *words]) == 2


# Preferences


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "cases"),
    [
        (["ours"], ["longctx"]),
        (["lora", "whole"], ["dpo cached", "cross_entropy", "dpo step", "dpo cached"]),
        (["packed"], ["nf4", "fp8"]),
        (["speed", "trl"], ["longctx", *["trl sdpa"] * 4, "trl sdpa, longest"]),
    ],
)
def test_preferences_are_measured(result_of, parts, cases):
    sizes = ["lengths=32", "shortest=16", "longest=64", "step=16", "side=32", "layers=2"]
    own = [f"parts={','.join(parts)}", "tiny=true", "attentions=sdpa"]
    rows = result_of("preferences", *own, *sizes)["results"]
    measured = [row for row in rows if row["case"] != "all of it"]
    assert [row["case"] for row in measured] == cases
    assert not any(row.get("failed") for row in measured)


# Scores that outgrow the kept maximum


@pytest.mark.slow
def test_the_rows_of_a_run_are_counted(data, tmp_path, monkeypatch):
    model = ["model=tiny", "model.layers=2", "model.channels=128", "model.heads=2"]
    model += ["model.kv_heads=1", "model.ffn=64", "device=cpu", "compile=false", "max_steps=2"]
    own = [
        "data.val_fraction=0",
        f"runs={tmp_path}",
        "name=r",
        "seq_len=512",
        "batch_size=1",
        "wandb.mode=disabled",
    ]
    assert train.main([*model, *data, *own]) == 0
    # The Hopper kernel is read for its tiles, and has no interpreter.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    count = ["outgrown", f"checkpoint={tmp_path}/r", "rows=3", f"out={tmp_path}/o"]
    done = finished("-m", ["benchmarks", *count], ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "o.json").read_text())
    assert [layer["rows"] for layer in result["layers"]] == [3 * 512 * 2] * 2
    assert result["tiles"] == 2 * 3 * 2 * math.ceil(512 / 192)
    assert result["outgrown_tiles"] == 0
    assert all(0 < layer["largest_nats"] < 22 for layer in result["layers"])


@pytest.mark.parametrize(("documents", "outgrown"), [([64], 32), ([32, 32], 0)], ids=str)
def test_a_far_key_that_draws_all_weight_outgrows(documents, outgrown):
    """The rows of the second tile outgrow the maximum of their own tile, if they see that key."""
    q, k = torch.ones(1, 64, 1, 8), torch.zeros(1, 64, 1, 8)
    k[0, 0] = 30 * 8**-0.5  # 30 nats above the others
    ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))[None]
    watched = Watched(lambda q, k, v, mask: q, (32, 16))
    watched(q, k, k, Mask.documents(ids))
    assert (watched.rows, watched.outgrown_rows) == (64, outgrown)
    assert (watched.tiles, watched.outgrown_tiles) == (2, outgrown // 32)
    assert watched.largest_nats == pytest.approx(30 if outgrown else 0, abs=0.1)
