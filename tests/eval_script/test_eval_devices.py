"""eval.py on several devices: the same files as on one, one line for a mistake."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from longctx.config.eval_config import EvalConfig
from longctx.config.layout_config import StrategyConfig
from longctx.evaluation.evaluate import choose_strategy
from longctx.runs import checkpoints, run_folder
from longctx.spec.hardware import GIB, Chip, Machine
from longctx.spec.model_config import GPTConfig
from tests.eval_script.sample import write_tasks
from tests.processes import FORKED, ROOT, children, environment, finished, free_ports

MARKED = Path(__file__).with_name("marked_evaluation.py")
# Four ranks that somebody else has started
RANKS = {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1"}
DOCUMENTS = ["split=train", "documents=7", "seq_len=61", "batch_size=3", "contexts=[9,61]"]
PASSKEYS = ["passkey=true", "passkey.samples=3"]
PASSKEYS += ["passkey.lengths=[600,501]", "passkey.depths=[0,1]"]
TASKS = ["tasks=[my_choice,my_text,my_answer]", "tasks_path={tasks}", "seq_len=61", "batch_size=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "layout", "ranks"),
    [
        (DOCUMENTS, ["context=2", "strategy=fsdp"], RANKS),
        (PASSKEYS, ["devices=2", "context=2"], {}),
        (TASKS, ["devices=2", "strategy=fsdp"], {}),
    ],
)
def test_several_devices_write_what_one_writes(
    run, evaluate, overrides, layout, ranks, tmp_path, monkeypatch
):
    """Lengths and numbers of texts divide by no number of devices."""
    if overrides is TASKS:
        pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install lm-eval")
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tasks = write_tasks(tmp_path / "tasks")
    overrides = [word.format(tasks=tasks) for word in overrides]
    one, _ = evaluate(*overrides)
    before = sorted((run / "eval").iterdir())
    words = [str(MARKED), f"checkpoint={run}", "device=cpu", *overrides, *layout]
    script, *words = [str(FORKED), "4", *words] if ranks else words
    process = finished(script, words, run, **ranks, MARKS=tmp_path, MASTER_PORT=free_ports(1)[0])
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr and "Warning" not in process.stderr
    assert sorted((run / "eval").iterdir()) == before, "in the place of one device's"
    assert process.stdout.count(f"{run}/eval") == 1
    held = [int(file.read_text()) for file in tmp_path.glob("[0-3]")]
    if "strategy=fsdp" in layout:
        assert max(held) < 1.1 * sum(held) / len(held) and len(held) > 1
        saved = checkpoints.read(run_folder.checkpoint_of(run))["longctx"]["config"]["model"]
        assert sum(held) == GPTConfig.of_saved(saved).parameters()
    several = json.loads(Path(process.stdout.split()[-1]).read_text())
    for measured in (one, several):
        for place in ("seconds", "tokens_per_second", "devices"):
            measured.pop(place, None)
    # Every float of it nearly
    near = json.loads(json.dumps(one), parse_float=lambda x: pytest.approx(float(x), 1e-6, 1e-6))
    assert several == near


@pytest.mark.slow
def test_a_lost_process_ends_the_evaluation(run, tmp_path):
    (tmp_path / "long.txt").write_text("a rose is a rose is a violet\n" * 100_000)
    overrides = ["data=text", f"data.path={tmp_path / 'long.txt'}", "stride=1", "devices=2"]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MARKS": str(tmp_path)}
    command = [sys.executable, str(MARKED), f"checkpoint={run}", "device=cpu", *overrides]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=os.environ | own, **pipes)
    while not (tmp_path / "1").exists():
        assert process.poll() is None
        time.sleep(0.1)
    [second] = [pid for pid in children(process.pid) if "RANK=1" in environment(pid)]
    os.kill(second, signal.SIGKILL)
    _, error = process.communicate()
    assert process.returncode == 1
    (line,) = [x for x in error.splitlines() if not x.startswith("scoring tokens: ")]
    assert line.startswith("error: ") and "resume=" not in line


LARGE = GPTConfig(  # the shape of Llama 3.1 8B, 15.0 GiB in bf16
    layers=32, heads=32, kv_heads=8, channels=4096, ffn=14336, vocab_size=128256, tied=False
)
DECIDED = [(80, 2, "auto", "ddp"), (24, 2, "auto", "fsdp"), (24, 1, "auto", "none")]


@pytest.mark.parametrize(("gib", "devices", "asked", "used"), [*DECIDED, (80, 2, "fsdp", "fsdp")])
def test_devices_hold_slices_if_copies_do_not_fit(gib, devices, asked, used):
    config = EvalConfig("runs/a", devices=devices, strategy=StrategyConfig(asked))
    machine = Machine(devices, Chip("H100", gib * GIB, None, None, 0.0), 2.0**40)
    assert choose_strategy(config, LARGE, machine, torch.bfloat16) == used
