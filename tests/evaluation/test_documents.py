"""Documents for evaluation: whole, in the run's tokens, with the bytes of what is scored."""

from pathlib import Path

import pytest

from longctx.data import DataConfig, Tokenizer, load
from longctx.data.tokenizer import train
from longctx.evaluation.documents import Share, of_run, of_source

TEXTS = {
    f"{n:02d}.txt": f"# file {n}\n" + "a rose is a rose – naïve 𝄞\n" * (n + 1) for n in range(30)
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(TEXTS.values(), 300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "docs" / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_files_become_whole_documents_with_the_bytes_after_the_first_token(
    folder: Path, tokenizer: Tokenizer
) -> None:
    found = list(of_source(DataConfig(source="text", path=str(folder / "docs")), tokenizer))
    assert len(found) == len(TEXTS)
    for name, ids, n_bytes, n_words in found:
        text = TEXTS[Path(name).name]
        assert n_words == len(tokenizer.decode(ids[1:-1]).split())
        assert tokenizer.decode(ids[:-1]) == text
        assert ids[-1] == tokenizer.eos_id
        assert n_bytes == len(tokenizer.decode(ids[1:-1]).encode())


def test_a_first_token_that_is_part_of_a_character_is_one_byte(tmp_path: Path) -> None:
    tokenizer = train(["abc"], 260)
    (tmp_path / "x.txt").write_text("é!", encoding="utf-8")
    (document,) = of_source(DataConfig(source="text", path=str(tmp_path)), tokenizer)
    assert len(document.ids) == 4
    assert document.n_bytes == 2


def test_splits_of_a_run_are_its_own(
    folder: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "run"
    run.mkdir()
    tokenizer.save(run / "tokenizer.json")
    data = {
        "source": "text",
        "path": str(folder / "docs"),
        "val_fraction": 0.3,
        "cache": str(folder / "cache"),
    }
    began = load(DataConfig(**data, tokenizer=str(run)), 64).fingerprint  # type: ignore[arg-type]
    splits = {
        split: list(of_run(run, {"data": data, "seq_len": 64}, split, began))
        for split in ("train", "val")
    }
    names = {
        split: {Path(document.name).name for document in found} for split, found in splits.items()
    }
    assert names["train"] | names["val"] == set(TEXTS)
    assert not names["train"] & names["val"]
    assert names["val"]
    for document in splits["val"]:
        assert tokenizer.decode(document.ids[:-1]) == TEXTS[Path(document.name).name]
        assert document.n_words == len(tokenizer.decode(document.ids[1:-1]).split())
    with pytest.raises(ValueError, match="split=val: the run has no such documents"):
        list(of_run(run, {"data": {**data, "val_fraction": 0.0}, "seq_len": 64}, "val", began))
    assert "not those" not in capsys.readouterr().err
    (folder / "docs" / "new.txt").write_text("a new one")
    assert list(of_run(run, {"data": data, "seq_len": 64}, "train", began))
    assert "the documents are not those" in capsys.readouterr().err


def test_shares_are_disjoint_and_together_the_first_so_many(
    folder: Path, tokenizer: Tokenizer
) -> None:
    config = DataConfig(source="text", path=str(folder / "docs"))
    everything = [document.name for document in of_source(config, tokenizer)]
    shares = [
        [document.name for document in of_source(config, tokenizer, Share(n, 3, 20))]
        for n in range(3)
    ]
    assert shares == [everything[n:20:3] for n in range(3)]
