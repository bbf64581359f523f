"""The Python and the commands that the documentation shows run as they stand."""

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, LlamaConfig

from longctx import cli
from longctx.runs import metrics_file
from tests.hf.families import parity
from tests.processes import ROOT, finished


def blocks(page: str, language: str) -> list[str]:
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return pattern.findall((ROOT / "docs" / page).read_text())


def commands(page: str) -> Iterator[list[str]]:
    """Yield the arguments of `longctx` in each command of a page."""
    for line in "".join(blocks(page, "sh")).splitlines():
        name, *arguments = shlex.split(line.removeprefix("python ").removeprefix("longctx "))
        yield [name.removesuffix(".py"), *arguments]


PAGES = [path for folder in (".", "docs", "tests") for path in (ROOT / folder).glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", re.sub(r"`[^`\n]*`", "", page.read_text()))
    paths = [link for link in links if "://" not in link]
    assert [path for path in paths if not (page.parent / path).exists()] == []


def test_faults_name_files_that_exist():
    named = re.findall(r"`([\w/]+(?:\.py|/))`", (ROOT / "tests" / "README.md").read_text())
    paths = [ROOT / "tests" / name for name in named if not name.startswith(("longctx", "docs"))]
    assert [path for path in paths if not path.exists()] == []


def test_each_promise_of_security_names_its_tests():
    table = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line[:2] == "| "]
    written = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for row in table[1:]:
        named = re.findall(r"`(test_\w+)`", row)
        assert named and all(f"def {name}(" in written for name in named), row


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and a Hugging Face folder of an untrained model, by the docs' names."""
    path = tmp_path_factory.mktemp("workspace")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("LONGCTX_CACHE", str(path / "cache"))
        data = ["data=text", f"data.path={ROOT / 'docs'}", "data.vocab_size=300"]
        assert cli.main(["train", "name=NAME", "model=tiny", "seq_len=64", *TINY, *data]) == 0
        assert cli.main(["export", "runs/NAME", "models/SmolLM2-135M-Instruct"]) == 0
    template = path / "models" / "SmolLM2-135M-Instruct" / "chat_template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return path


@pytest.mark.parametrize("code", blocks("python.md", "python"))
def test_a_block_of_the_docs_runs(code, workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    exec(compile(code, "docs/python.md", "exec"), {})


@pytest.mark.slow  # two small runs, of a few steps instead of a hundred, and an evaluation
def test_commands_of_the_tutorial_run_in_order(tmp_path, monkeypatch, capsys):
    (tmp_path / "longctx").symlink_to(ROOT / "longctx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    written = {}
    for arguments in commands("tutorial.md"):
        arguments = [re.sub("(max_steps)=.*", r"\1=4", word) for word in arguments]
        assert cli.main(arguments) == 0, f"{arguments}\n{capsys.readouterr().err}"
        printed = capsys.readouterr()
        assert "warning" not in printed.err, f"{arguments}\n{printed.err}"
        written[arguments[0]] = printed.out

    for run in ("short", "long"):
        assert (tmp_path / "runs" / run / "checkpoints" / "last.ckpt").exists()
    assert list((tmp_path / "runs" / "long" / "eval").glob("*.json"))
    assert (tmp_path / "compare.html").is_file()
    assert "def forward(self" in written["generate"]
    assert (tmp_path / "my-model" / "model.safetensors").is_file()


@pytest.mark.slow  # 10 s: a run and an evaluation
def test_pdfs_become_a_model_to_serve(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    (tmp_path / "pdfs" / "deeper").mkdir(parents=True)
    for name in list(topics)[:12]:
        page = Figure((8, 12))
        page.text(0, 0.1, topics[name].replace("$", "")[:4000], family="monospace")
        page.savefig(tmp_path / "pdfs" / "deeper" / f"{name}.pdf")
    Figure().savefig(tmp_path / "pdfs" / "scanned.pdf")
    (code,) = blocks("pdf-to-server.md", "python")
    exec(compile(code, "docs/pdf-to-server.md", "exec"), {})
    config = LlamaConfig(**parity.SIZES, **parity.SPECIAL)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "Qwen" / "Qwen3-1.7B")
    parity.write_tokenizer(tmp_path / "Qwen" / "Qwen3-1.7B")

    small = ["device=cpu", "seq_len=512"]
    written = []
    for command, *arguments in commands("pdf-to-server.md"):
        words = [word for word in arguments if not word.startswith("seq_len")]
        words += ["max_steps=2", "workers=0"] if command == "train" else []
        words += [] if command == "export" else small
        assert cli.main([command, *words]) == 0, f"{words}\n{capsys.readouterr().err}"
        written.append(capsys.readouterr().out)
    assert "nothing is trained" in written[0]
    assert (tmp_path / "manuals-model" / "model.safetensors").is_file()
    rows = map(json.loads, (tmp_path / "pdfs.jsonl").read_text().splitlines())
    texts = {Path(row["file"]).stem: row["text"] for row in rows}
    assert texts["scanned"] == "" and "AssertionError" in texts["assert"]


TINY = [
    *("model.layers=1", "max_steps=2", "batch_size=1", "accumulate=2", "workers=0"),
    *("val_rows=2", "device=cpu", "wandb.mode=disabled"),
]
# In one process, to import torch once. The family of the docs reads a Llama by another name.
RUN_ALL = """
import json, pathlib, sys
from longctx import cli
for arguments in json.loads(sys.argv[1]):
    assert cli.main(arguments) == 0, arguments
    if arguments[0] == "export":
        config = pathlib.Path("folder/config.json")
        config.write_text(config.read_text().replace('"llama"', '"renamed"'))
"""


@pytest.mark.slow  # half a minute: seven runs of two steps
def test_plugins_of_the_docs_train(tmp_path):
    for code in blocks("extend.md", "python"):
        (tmp_path / code.split()[1]).write_text(code)
    message = "From a@b Thu Jan  1 00:00:00 1970\n\n" + "A line of a message.\n" * 40
    (tmp_path / "archive.mbox").write_text("\n".join([message] * 30))
    (tmp_path / "docs.txt").write_text("\n".join(f"Line {n} of a text." for n in range(999)))

    text = ["data=text", "data.path=docs.txt", "data.vocab_size=300"]
    jobs = [["train", "name=base", "seq_len=64", *TINY, *text], ["export", "runs/base", "folder"]]
    for number, arguments in enumerate(commands("extend.md")):
        sizes = ["seq_len=64"] if "init=folder" in arguments else ["seq_len=64", text[2]]
        sizes = [] if arguments[0] == "check" else sizes
        if arguments[0] == "train":
            brings_model = "init=folder" in arguments
            sizes += [f"name=run{number}", *TINY[brings_model:]]
            # As many layers as kinds of them
            mixes = any(word.startswith(("model.mixer=", "model.nope")) for word in arguments)
            sizes = [word.replace("layers=1", "layers=4") if mixes else word for word in sizes]
            sizes += [] if any(word.startswith("data=") for word in arguments) else text[:2]
        jobs.append([*arguments, *sizes])
    words = [RUN_ALL, json.dumps(jobs)]
    process = finished("-c", words, tmp_path, LONGCTX_CACHE=tmp_path / "cache")
    assert process.returncode == 0, process.stderr
    assert (tmp_path / f"runs/run{len(jobs) - 4}" / "losses.csv").read_text().count(",") == 2
    rows = metrics_file.read(next(tmp_path.glob(f"runs/run{len(jobs) - 3}")))
    assert "host_load" in rows[-2] or "host_load" in rows[-1]


def test_messages_of_troubleshooting_are_in_the_code():
    texts = set()
    for path in (ROOT / "longctx").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (getattr(part, "value", "") for part in node.values)
                parts = (part if isinstance(part, str) else "…" for part in parts)
                texts.add(re.sub("…+", "…", "".join(parts)))
            elif isinstance(node, ast.Constant):
                texts.add(str(node.value))
    lines = [line for block in blocks("troubleshooting.md", "text") for line in block.splitlines()]
    assert lines and [line for line in lines if not any(line in text for text in texts)] == []
