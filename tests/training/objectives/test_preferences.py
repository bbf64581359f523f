"""Runs that learn preferences: one process and several, resumed, by LoRA, and what is refused."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet
from safetensors import numpy

import train
from longctx import cli
from longctx.config.doors import ObjectiveConfig
from longctx.evaluation.load import of_run, open_model
from longctx.spec.step import Workload
from longctx.training import resolve
from longctx.training.objectives import answers
from longctx.training.objectives.reference import FILE
from tests.processes import train_together
from tests.training.sample_run import check_resumes_exactly, losses, steps, validations
from tests.training.test_resolve import H200


def test_a_certain_answer_has_finite_odds(monkeypatch):
    logp = torch.tensor([[0.0, -5.0]], requires_grad=True)
    known = answers.LogP(logp, torch.ones(1, 2))
    monkeypatch.setattr(answers, "answers", lambda *_: known)
    monkeypatch.setattr(answers, "of_pairs", lambda *arguments: arguments[-1].sum())
    loss: Any = answers.orpo(None, None, ObjectiveConfig.of("orpo"))  # type: ignore[arg-type]
    loss.backward()
    assert loss.isfinite()
    assert logp.grad is not None
    assert logp.grad.isfinite().all()


FIGURES = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen")


def keys_of(objective: str, rows: Path) -> dict[str, Any]:
    path = rows / f"{'labels' if objective == 'kto' else 'pairs'}.jsonl"
    keys = {"objective": objective, "data__path": path, "data__val_fraction": 0.2, "lr": 0.002}
    return keys | {"seq_len": 160, "batch_size": 2, "accumulate": 2, "max_steps": 4}


@pytest.mark.parametrize("objective", ["dpo", "kto", "orpo"])
def test_a_run_learns_and_resumes_exactly(objective, rows, tuned):
    keys = keys_of(objective, rows) | {"checkpoint_every": 2}
    run = tuned(**keys)
    assert losses(run)[-1] < losses(run)[0]
    assert validations(run)[0].keys() >= {f"val_{key}" for key in FIGURES[:4]}
    if objective != "orpo":  # the model is its own reference at first
        assert abs(validations(run)[0]["val_rewards/margins"]) < 1e-5
    check_resumes_exactly(run)


@pytest.mark.slow
def test_two_processes_train_as_one(rows, tuned, start, tmp_path):
    # KTO's mean of unrelated answers is over the micro-batches of all ranks
    of_kto = keys_of("kto", rows) | {"batch_size": 4, "accumulate": 1}
    shapes: dict[str, dict[str, Any]] = {"dpo": keys_of("dpo", rows), "kto": of_kto}
    layouts: dict[str, dict[str, Any]] = {
        "dpo-context": {"context__degree": 2},
        "dpo-fsdp": {"strategy": "fsdp", "accumulate": 1},
        "kto-ddp": {"strategy": "ddp", "batch_size": 2},
    }
    train_together(2, [start(**shapes[n[:3]] | keys, name=n) for n, keys in layouts.items()])
    alone = {shape: tuned(shape, **keys) for shape, keys in shapes.items()}
    for name in layouts:
        one, two = alone[name[:3]], tmp_path / "runs" / name
        for here, there in zip(steps(one), steps(two), strict=True):
            for key in FIGURES:
                assert there[key] == pytest.approx(here[key], rel=1e-4, abs=1e-5), (name, key)
        for here, there in zip(validations(one), validations(two), strict=True):
            assert there["val_loss"] == pytest.approx(here["val_loss"], rel=1e-4), name


def test_lora_off_is_the_cached_reference(rows, tuned):
    keys = keys_of("dpo", rows) | {"lora__rank": 4, "lr": 0.02}
    by_step, cached = tuned("step", **keys), tuned("cached", objective__reference="cached", **keys)
    assert losses(by_step) == pytest.approx(losses(cached), rel=1e-5)
    assert losses(by_step)[-1] < 0.99 * losses(by_step)[0]
    assert not (by_step / FILE).exists() and (cached / FILE).exists()


def test_another_reference_is_not_resumed(rows, tuned, capsys):
    run = tuned(**keys_of("dpo", rows) | {"max_steps": 1})
    file = run / FILE
    tables = numpy.load_file(file)
    changes = {
        "cut": lambda: file.write_bytes(file.read_bytes()[:-8]),
        "of another run": lambda: numpy.save_file({"": tables[""] + 1}, file),
        "of other documents": lambda: numpy.save_file({"": tables[""][1:]}, file),
        "too large": lambda: os.truncate(file, 1 << 30),
        "lost": file.unlink,
        "a pipe": lambda: os.mkfifo(file),
    }
    for name, change in changes.items():
        change()
        assert train.main([f"resume={run}", "max_steps=2"]) == 2, name
        assert str(file) in capsys.readouterr().err, name


def test_undesirable_answers_are_not_scored(rows, tuned, tmp_path):
    """In a mix whose second file alone validates."""
    judge, keys = tmp_path / "judge.jsonl", keys_of("kto", rows) | {"data": "mix", "max_steps": 1}
    judge.write_text((rows / "labels.jsonl").read_text().replace("?", "!"))
    parts = {"own__path": keys.pop("data__path"), "own__val_fraction": 0, "judge__path": judge}
    parts |= {"judge__val_fraction": 0.99, "judge__weight": 0.001}
    run = tuned(**keys | {"data__path": None} | {f"data__mix__{x}": y for x, y in parts.items()})
    assert "val_rewards/chosen" in validations(run)[0]
    model = open_model(str(run))
    assert model.run is not None
    scored = [document.name for document in of_run(model.folder, model.run, "val", "")]
    labels = [json.loads(line)["label"] for line in (rows / "labels.jsonl").open()]
    assert all(labels[int(name.split(":")[1]) - 1] for name in scored)
    assert {name.partition("/")[0] for name in scored} == {"judge"}


def test_long_prompts_lose_their_beginnings_aloud(rows, tuned, start, refused, capsys):
    keys = keys_of("orpo", rows) | {"seq_len": 64}
    run = tuned("short", **keys)
    assert "prompts are left out, so that the answers fit seq_len=64" in capsys.readouterr().out
    assert losses(run)[-1] > 0
    # The tokens are in the cache by now, so the error is the only line
    refused(train.main(start(**keys | {"seq_len": 24})), "take")


def test_the_longest_length_holds_long_answers(tmp_path, start, monkeypatch):
    row = {"prompt": "a", "chosen": "b " * 5000, "rejected": "c " * 5000}
    (tmp_path / "long.jsonl").write_text(json.dumps(row))

    def found(*arguments: Any) -> Workload:
        step = arguments[-1][0](65536)
        return replace(step, memory=step.memory.filled("balanced"))

    monkeypatch.setattr("longctx.training.dry_run.longest_of", found)
    monkeypatch.setattr("longctx.training.model_choice.able_backends", lambda *_: ["naive"])
    keys = {"objective": "orpo", "data__path": tmp_path / "long.jsonl", "data__val_fraction": 0}
    keys |= {"attention": "naive", "device": "cuda", "kernel__lock": "off", "seq_len": "max"}
    run = resolve.resolve(cli.compose("train", start(**keys)), H200, print)
    assert run.workload.seq_len == 65536


def test_conversations_and_parquet_are_read_as_texts_are(rows, tuned, folder, tmp_path, capsys):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    pairs = [json.loads(line) for line in (rows / "pairs.jsonl").read_text().splitlines()]
    pairs.append(pairs[0] | {"rejected": pairs[0]["chosen"]})
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    turns = [{x: [{"role": roles[x], "content": pair[x]}] for x in roles} for pair in pairs]
    parquet.write_table(pyarrow.Table.from_pylist(turns), tmp_path / "turns.parquet")
    # The prompt in both answers
    implicit = [
        {"prompt": pair["prompt"]} | {key: turn["prompt"] + turn[key] for key in list(roles)[1:]}
        for pair, turn in zip(pairs, turns, strict=True)
    ]
    (tmp_path / "turns.jsonl").write_text("\n".join(map(json.dumps, implicit)))
    keys = keys_of("orpo", rows) | {"data__chat": "true", "max_steps": 1}
    paths = {kind: {"data__path": tmp_path / f"turns.{kind}"} for kind in ("parquet", "jsonl")}
    first, second = (losses(tuned(kind, **keys | path)) for kind, path in paths.items())
    assert first == second
    assert capsys.readouterr().out.count("(1 with equal answers left out)") == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init": None}, "objective=dpo: begins with trained weights"),
        ({"objective__reference": "step"}, "objective.reference=step: only LoRA"),
        ({"data__packing": "false"}, "objective=dpo with data.packing=false"),
        ({"data__preferences": "labels"}, "data.preferences=labels: objective=dpo"),
    ],
)
def test_what_does_not_go_together_is_one_line(changes, message, rows, start, refused):
    refused(train.main(start(**keys_of("dpo", rows) | changes)), message)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "no field 'rejected' (found prompt, chosen)"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "an answer is empty"),
        ({"chosen": "x y", "rejected": "z"}, "no common prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "system": "d"}, "'system' is not read"),
        ({"prompt": "a", "chosen": [], "rejected": "b"}, "'chosen' must be a text"),
    ],
)
def test_a_wrong_row_is_named(row, message, tmp_path, rows, start, refused):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    error = refused(train.main(start(**keys_of("dpo", rows) | {"data__path": file})), message)
    assert f"{file}:1: " in error


def test_pairs_that_are_all_equal_are_refused(tmp_path, rows, start, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "b"}\n')
    keys = keys_of("dpo", rows) | {"data__path": tmp_path / "rows.jsonl"}
    assert train.main(start(**keys)) == 2
    assert "has two different answers" in capsys.readouterr().err
