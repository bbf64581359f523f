"""`longctx data`: its counts are right, and its overrides are checked."""

from longctx.cli import main
from tests.hf.families.parity import write_tokenizer
from tests.processes import ROOT


def test_a_mix_is_printed(corpus, tmp_path, capsys):
    overrides = [f"data.mix.recall.path={corpus}", "data.mix.recall.documents=4"]
    overrides += ["data=mix", f"data.mix.long.path={corpus}", "data.mix.long.weight=3"]
    overrides += ["data.vocab_size=400", f"data.cache={tmp_path / 'c'}", "seq_len=64"]
    assert main(["data", *overrides]) == 0
    printed = capsys.readouterr().out
    assert "recall 1 4" in " ".join(printed.split())
    assert "1 without text left out" in printed


def test_a_recipe_shows_the_preferred_answer(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    write_tokenizer(tmp_path)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    words = ["examples/dpo.yaml", f"init={tmp_path}", f"data.cache={tmp_path}/cache"]
    assert main(["data", *words]) == 0
    assert "cross in April?⟦No. Until" in capsys.readouterr().out
