"""`checkpoint=OWNER/NAME`: a model of the Hub is evaluated and continued from its cache, without a
network, and nothing is written into that.
"""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

import eval as evaluation
from longctx import cli
from tests.hf.families.parity import SIZES, reference, write_tokenizer
from tests.written import to_hub_cache

COMMIT = "c0ffee" + "0" * 34


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the model me/small in the Hub's cache; the current folder is another one."""
    made = tmp_path / "made"
    reference(LlamaConfig(**SIZES | {"vocab_size": 300}, eos_token_id=0)).save_pretrained(made)
    write_tokenizer(made)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return to_hub_cache(made, COMMIT, monkeypatch)


@pytest.mark.parametrize("name", ["me/small", f"me/small@{COMMIT}", "me/small@main"])
def test_a_model_of_the_hub_is_continued_as_its_folder(snapshot, name, capsys):
    texts = []
    for checkpoint in (str(snapshot), name):
        keys = ["prompt=a rose", "max_new_tokens=9", "temperature=0", "device=cpu"]
        assert cli.main(["generate", checkpoint, *keys]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


def test_a_hub_evaluation_records_the_commit(snapshot, capsys):
    before = sorted(snapshot.parents[1].rglob("*"))
    Path("a.txt").write_text("a rose is a rose in 1812\n" * 20)
    documents = ["data=text", "data.path=a.txt", "device=cpu"]
    assert evaluation.main(["checkpoint=me/small", *documents]) == 0
    [file] = Path("evaluations").glob("*/eval/*.json")
    assert str(file) in capsys.readouterr().out
    assert file.parts[1].startswith("small-")
    assert file.name.startswith("text-small-64-")
    assert COMMIT in json.loads(file.read_text())["checkpoint"]
    assert sorted(snapshot.parents[1].rglob("*")) == before


@pytest.mark.parametrize("command", [["generate"], ["eval", "checkpoint="]])
@pytest.mark.parametrize(
    ("name", "problem"), [("me/other", "folder here"), ("runs/no", "file or folder")]
)
def test_a_model_that_is_absent_is_one_line(snapshot, command, name, problem, refused):
    """A run that is absent is not looked for at the Hub."""
    words = [*command, name] if len(command) == 1 else [command[0], f"{command[1]}{name}"]
    refused(cli.main([*words, "device=cpu"]), f"checkpoint={name}: no such {problem}")
