"""The demo, small: a random model, two steps, short texts."""

import json
from pathlib import Path

import pytest

from benchmarks.words import main


@pytest.fixture
def words(model: Path, tmp_path: Path) -> list[str]:
    """Return what makes the demo small."""
    prose = "\n\n".join(f"Paragraph {n} tells about {n * n}." for n in range(999))
    (tmp_path / "prose.md").write_text(prose)
    own = ["context=1024", "seq_len=256", "steps=2", "lengths=[512,1024]", "depths=2"]
    own += [f"init={model}", f"path={tmp_path / 'prose.md'}", f"out={tmp_path / 'out'}"]
    return [*own, "device=cpu", "precision=fp32"]


@pytest.mark.slow
def test_a_model_reads_before_and_after(words, tmp_path):
    assert main(["demo", *words]) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["before"]["context"] == 512
    for when in ("before", "after"):
        assert result[when]["perplexity"][-1]["last"] == 1024
        assert all(row["perplexity"] > 1 for row in result[when]["perplexity"])
        assert result[when]["passkeys"]["accuracy"] == [[0, 0], [0, 0]]
    assert (tmp_path / "out" / "result.png").read_bytes().startswith(b"\x89PNG")
    trained = (tmp_path / "out" / "prose.jsonl").read_text()
    assert "Paragraph 1 tells" in trained and "Paragraph 998 tells" not in trained
    assert main(["demo", *words]) == 2


def test_too_little_prose_is_refused(words, tmp_path, refused):
    refused(main(["demo", *words[:3], "lengths=[512,8192]", *words[4:]]), "give more of it")
    assert not (tmp_path / "out").exists()
