"""eval.py on the command line: a run in, a table and a JSON out; a mistake is a line and code 2."""

import errno
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from matplotlib.image import imread

import eval as evaluation
from longctx import files
from longctx.cli import main as longctx
from longctx.data import DataConfig, load
from longctx.runs import checkpoints, evaluations, run_folder
from longctx.runs.checkpoint_write import Saving
from tests.data.chat_templates import CHATML
from tests.data.chat_templates import write as write_template
from tests.eval_script.sample import SCRIPT, write_tasks
from tests.processes import ROOT, finished, without_writes
from tests.written import WITHOUT_OPTIMIZER, alone, write

VT = ["ruler=true", "ruler.tasks=[vt]"]


def test_a_mistake_on_several_devices_is_one_line(run):
    """One that rank 0 finds while another rank waits for sequences to compute."""
    keys = [f"checkpoint={run}", "devices=2", "device=cpu", *VT, "ruler.lengths=[200]"]
    process = finished(SCRIPT, keys, ROOT, LONGCTX_ARRIVAL_SECONDS=500)
    assert process.returncode == 2
    errors = [line for line in process.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1 and errors[0].startswith("error: ruler.lengths=[200]")


def test_a_run_is_scored_on_its_validation_documents(run, evaluate):
    content, output = evaluate("batch_size=4")
    assert (content["context"], content["stride"]) == (64, 32)
    assert content["attention"] == "naive"  # as in training
    assert 0 < len(content["documents"]) < 30
    # Random weights: close to a uniform guess among the 320 tokens of the vocabulary.
    assert content["total"]["perplexity"] == pytest.approx(320, rel=0.2)
    assert f"{content['total']['perplexity']:,.3f}" in output and "scoring tokens: " in output
    assert " tokens/s through the model" in output and "warning" not in output
    assert [row["context"] for row in content["by_context"]] == [8, 16, 32, 64]
    assert content["by_position"][0]["first"] == 1


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FAULTS = [
    ("evaluate.measure", lambda *_: torch.empty(1 << 60), 1, "out of memory on process 0; "),
    ("results.save", FULL, files.FULL_DISK, ""),
]


@pytest.mark.parametrize(("function", "fault", "code", "message"), FAULTS)
def test_a_fault_has_its_exit_code(run, monkeypatch, capsys, function, fault, code, message):
    monkeypatch.setattr(f"longctx.evaluation.{function}", Mock(side_effect=fault))
    assert evaluation.main([f"checkpoint={run}", "device=cpu", "documents=2"]) == code
    assert f"error: {message}" in capsys.readouterr().err


def test_numbers_that_are_not_finite_are_null(run, evaluate, tmp_path, refused):
    path = run_folder.checkpoint_path(run, 3)
    intact = path.rename(tmp_path / "intact")
    checkpoint = checkpoints.read(intact)
    weights = {name: x[:] for name, x in checkpoint["state_dict"].items()}
    weights["model.embed.weight"][:, 3] = math.inf
    tensors = {name: alone(x) for name, x in weights.items()}
    content = {name: checkpoint[name] for name in ("longctx", "random")}
    write(Saving(path, content | WITHOUT_OPTIMIZER, tensors))
    try:
        result, _ = evaluate("documents=3")
        words = ["data=text", f"data.path={run.parents[1] / 'docs'}", "short=16", "device=cpu"]
        refused(longctx(["score", str(run), *words, f"out={tmp_path}/a.jsonl"]), "no finite number")
    finally:
        files.remove(path)
        intact.rename(path)
    json.dumps(result, allow_nan=False)
    assert result["total"]["perplexity"] is None and result["total"]["tokens"] > 0
    assert len(result["documents"]) == 3
    (file,) = [x for x in (run / "eval").glob("*.json") if json.loads(x.read_text()) == result]
    listed = evaluations.read_evaluations(run)
    assert file.name in [x["file"] for x in listed.perplexities]
    file.unlink()


def test_splits_lengths_limits_and_backends(run, evaluate):
    file, scores = run / "checkpoints" / "last.ckpt", {}
    for attention in ("naive", "flash", "auto"):
        overrides = ["seq_len=200", "stride=50", "split=train", "documents=4"]
        content, output = evaluate(*overrides, f"attention={attention}", checkpoint=file)
        assert "warning: 200 tokens" in output
        assert content["checkpoint"].endswith("step-00000003.ckpt")
        assert (content["context"], content["stride"], len(content["documents"])) == (200, 50, 4)
        assert content["attention"] == attention.replace("auto", "sdpa")
        scores[attention] = content["total"]["nats"]
    assert list(scores.values()) == pytest.approx([scores["naive"]] * 3, rel=1e-5)


MISTAKES = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())


@pytest.mark.parametrize(("words", "message"), MISTAKES.items())
def test_mistake_is_one_line_and_writes_nothing(run, refused, monkeypatch, words, message):
    monkeypatch.setattr("longctx.config.eval_config.find_spec", lambda name: "installed")
    monkeypatch.setattr("longctx.evaluation.score.Scorer._forward", None)  # before all scoring
    folders = {"run": run, "docs": run.parents[1] / "docs"}
    before = sorted(run.rglob("*"))
    argv = [word.format(**folders) for word in [*words.split(), "device=cpu"]]
    refused(longctx(argv), f"error: {message.format(**folders)}")
    assert sorted(run.rglob("*")) == before


def test_a_place_or_package_that_cannot_be_had_is_one_line(run, tmp_path, refused, monkeypatch):
    other = Path(shutil.copytree(run, tmp_path / "other", ignore=shutil.ignore_patterns("eval")))
    (other / "eval").write_text("")
    refused(evaluation.main([f"checkpoint={other}", "device=cpu"]), f"{other}/eval")
    monkeypatch.setattr("longctx.config.eval_config.find_spec", lambda name: None)
    assert "pip install lm" in refused(longctx(["eval", str(run), "tasks=[a,b]"]), "tasks=[a,b]: ")


def test_tasks_run_from_the_command_line(run, tmp_path, monkeypatch, capsys, evaluate):
    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install lm-eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tasks = write_tasks(tmp_path / "tasks")
    content, output = evaluate("tasks=[my_text]", f"tasks_path={tasks}", "documents=2")
    assert 0 < content["results"]["my_text"]["bits_per_byte,none"] < 20
    assert "bits_per_byte" in output and content["documents"] == 2
    missing = f"tasks_path={tmp_path}/none"
    assert evaluation.main([f"checkpoint={run}", "device=cpu", missing, "tasks=[my_text]"]) == 2
    assert f"{missing}: " in capsys.readouterr().err


def test_passkeys_of_a_run_and_of_its_export(run, tmp_path, evaluate, refused, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    keys = ["passkey=true", "passkey.samples=2", "passkey.depths=[0,0.5,1]"]
    content, output = evaluate(*keys, "passkey.lengths=[600,500]")
    assert Path(output.split()[-1]).name.startswith("passkey-step-00000003-600-naive")
    assert content["filler"] == "val split of the run's data"
    assert content["kinds"]["passkey"]["lengths"] == [500, 600]
    assert all(text in output for text in ("passkey: ", "600", "50%"))

    assert longctx(["export", str(run), str(tmp_path / "out")]) == 0
    keys += ["device=cpu", "passkey.lengths=[600]"]
    texts = ["data=text", f"data.path={ROOT / 'README.md'}"]
    assert evaluation.main(["checkpoint=out", *keys, *texts]) == 0
    assert len([*Path("evaluations").glob("out-*/eval/passkey-out-600-flash.json")]) == 1
    assert not Path("out/eval").exists() and capsys.readouterr()
    wrong = "passkey.lengths=[128000]"
    refused(evaluation.main([f"checkpoint={run}", *keys, wrong]), f"error: {wrong}: ")


def test_the_results_of_a_read_only_run_are_written_here(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with without_writes(run):
        assert evaluation.main([f"checkpoint={run}", "device=cpu", "documents=2"]) == 0
    assert f"{run}: no file can be made there, so the results" in capsys.readouterr().out
    assert len([*Path("evaluations").glob("step-*/eval/*.json")]) == 1


@pytest.mark.parametrize("kind", ["run", "export", "base"])
def test_answers_to_any_file_are_scored(kind, run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = shutil.copytree(run, tmp_path / "run")
    (tmp_path / "templates").mkdir()
    shutil.copy(run / "tokenizer.json", tmp_path / "templates")
    write_template(tmp_path / "templates" if kind == "base" else model, CHATML)
    keys = ["data.tokenizer=templates"] if kind == "base" else []
    if kind != "run":
        assert longctx(["export", str(model), "out"]) == 0
        model = Path("out")
    turns = [{"role": role, "content": "a rose"} for role in ("user", "assistant")]
    Path("chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    words = [str(model), "device=cpu", "data.chat=true", "data.path=chats.jsonl", *keys]
    assert evaluation.main(words) == 0
    (row,) = json.loads(Path(capsys.readouterr().out.split()[-1]).read_text())["documents"]
    assert 1 < row["tokens"] < 30
    without = evaluation.main([word for word in words if not word.startswith("data.tok")])
    assert without == (2 if kind == "base" else 0)


def test_ruler_of_a_run(evaluate):
    keys = ["ruler=true", "ruler.tasks=[niah_single_2,fwe]", "ruler.samples=2"]
    keys += ["ruler.lengths=[900,800]"]
    content, output = evaluate(*keys)
    assert Path(output.split()[-1]).name.startswith("ruler-step-00000003-900-naive")
    assert all(text in output for text in ("warning: 900 tokens", "niah_single_2", "800"))
    assert content["ruler"]["lengths"] == [800, 900]
    assert list(content["ruler"]["scores"]) == ["niah_single_2", "fwe"]
    assert all(0 < row["tokens"] < row["length"] for row in content["answers"])
    assert evaluate(*keys)[0]["answers"] == content["answers"], "by the seed alone"


def test_gains_choose_the_documents_of_a_run(run, evaluate, tmp_path):
    docs, file = run.parents[1] / "docs", tmp_path / "scored.jsonl"
    words = ["data=text", f"data.path={docs}"]
    scored = [*words, "seq_len=64", "short=16", f"out={file}"]
    long, printed = evaluate(*scored, command="score")
    assert "best and worst" in printed and "gain by position" in printed
    assert imread(file.with_suffix(".png")).ndim == 3 and long["by_context"] == []
    short, _ = evaluate(*words, "seq_len=16", "contexts=[]")
    far = sum(row["gain"] * row["tokens"] for row in long["gain_by_position"])
    assert far == pytest.approx(short["total"]["nats"] - long["total"]["nats"], abs=0.05)
    assert [row["tokens before"] for row in long["gain_by_position"]][:2] == ["16", "32"]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["name"] for row in rows] == [row["name"] for row in long["documents"]]
    for row, far, near in zip(rows, long["documents"], short["documents"], strict=True):
        saved = (near["nats"] - far["nats"]) / far["tokens"]
        assert row["gain"] == pytest.approx(saved, abs=1e-4)
        assert row["loss"] == pytest.approx(far["nats"] / far["tokens"])
    config = DataConfig("text", str(docs), vocab_size=300, cache=str(tmp_path), filter=str(file))
    kept = names_of(load(config, 64))
    best = sorted(rows, key=lambda row: row["gain"])[-15:]
    assert sorted(kept) == sorted(row["name"] for row in best)
    assert len(names_of(load(replace(config, keep=0.1), 64))) == 3
    file.write_text(file.read_text().partition("\n")[2])
    with pytest.raises(ValueError, match="1 of 30 documents have no score"):
        load(config, 64)
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"scored\.jsonl:1: not a score"):
        load(config, 64)


def names_of(data):
    return [data.parts[""].store.name(n) for n in range(len(data.lengths))]
