"""Documents for evaluation: uncut, in the run's tokens, with the bytes of what is scored."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from longctx.attention import Mask
from longctx.data import DataConfig, Tokenizer, load
from longctx.data.sequences import IGNORED
from longctx.data.tokenizer import train
from longctx.evaluation.load import of_run, of_source
from longctx.evaluation.perplexity import perplexity
from longctx.evaluation.score import Scorer
from longctx.model import GPT, GPTConfig
from tests.data.chat_templates import CHATML, write, write_tokenizer

TEXTS = {
    f"{n:02d}.txt": f"# file {n}\n" + "a rose is a rose – naïve 𝄞\n" * (n + 1) for n in range(30)
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "docs" / name).write_text(text, encoding="utf-8")
    return tmp_path


def with_begin(plain: Tokenizer) -> Tokenizer:
    """The same tokenizer with <s> before every text."""
    begins = tokenizers.Tokenizer.from_str(plain._tokenizer.to_str())
    begins.add_special_tokens(["<s>"])
    begins.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begins.token_to_id("<s>"))]
    )
    return Tokenizer(begins, plain.eos)


def test_texts_end_at_the_tokens_that_transformers_ends_them_at(tmp_path, tokenizer):
    assert tokenizer.end_tokens == {tokenizer.eos_id}
    tokenizer.save(tmp_path / "tokenizer.json")
    model = Tokenizer.load(tmp_path)
    assert model.end_tokens == {tokenizer.eos_id}
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "generation_config.json").write_text('{"do_sample": false}')
    assert model.end_tokens == {tokenizer.eos_id, 5}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    assert model.end_tokens == {tokenizer.eos_id, 6, 7}


@pytest.mark.parametrize("learnt", [["abc"], ["😀 😁 😂 😃"] * 9])
def test_every_byte_is_counted_once_where_a_token_holds_part_of_a_character(tmp_path, learnt):
    tokenizer = train(learnt, 264)
    for text in ("é!", "😄 !", "\ufffd?", "a"):
        each = [tokenizer.n_bytes(token) for token in tokenizer.encode(text)]
        assert sum(each) == len(text.encode())
        (tmp_path / "x.txt").write_text(text, encoding="utf-8")
        (document,) = of_source(DataConfig(source="text", path=str(tmp_path)), tokenizer)
        assert document.n_bytes == sum(each[1:])
    sizes = {tokenizer.n_bytes(token) for token in tokenizer.encode("😄")}
    assert sizes == ({1} if learnt == ["abc"] else {1, 3})


def test_bytes_of_tokens_that_stand_for_bytes():
    """As in Llama 2: characters, and <0x..> for those that the vocabulary lacks."""
    words = ["<s>", "</s>", "<unk>", "a", "水", "\ufffd", *(f"<0x{n:02X}>" for n in range(256))]
    numbers = {word: n for n, word in enumerate(words)}
    model = tokenizers.models.BPE(numbers, [], unk_token="<unk>", byte_fallback=True)
    plain, decoders = tokenizers.Tokenizer(model), tokenizers.decoders
    plain.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(plain, "</s>")
    for text in ("a水é", "\ufffd😀"):
        assert sum(map(tokenizer.n_bytes, tokenizer.encode(text))) == len(text.encode())
    assert tokenizer.n_bytes(tokenizer.eos_id) == 0


def test_documents_without_text_are_left_out_and_said(tmp_path, capsys):
    plain = train(["abc"], 257)
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("abc")
    for tokenizer in (plain, with_begin(plain)):
        (document,) = of_source(DataConfig(source="text", path=str(tmp_path)), tokenizer)
        assert document.name == "b.txt"
        assert document.n_bytes == (2 if tokenizer is plain else 3)
        assert "data: documents" in capsys.readouterr().err


def test_documents_of_a_run_are_those_of_its_split(folder, tokenizer, capsys):
    (run := folder / "run").mkdir()
    tokenizer.save(run / "tokenizer.json")
    data = {"source": "text", "path": str(folder / "docs"), "cache": str(folder / "cache")}
    data |= {"val_fraction": 0.3}
    began = load(DataConfig(**data, tokenizer=str(run)), 64).fingerprint  # type: ignore[arg-type]
    asked = {"data": data, "seq_len": 64}
    splits = {split: list(of_run(run, asked, split, began)) for split in ("train", "val")}
    names = {split: {Path(x.name).name for x in documents} for split, documents in splits.items()}
    assert names["train"] | names["val"] == set(TEXTS)
    assert not names["train"] & names["val"]
    assert names["val"]
    for document in splits["val"]:
        assert tokenizer.decode(document.ids[:-1]) == TEXTS[Path(document.name).name]
        assert document.ids[-1] == tokenizer.eos_id
        assert document.n_bytes == len(tokenizer.decode(document.ids[1:-1]).encode())
    moved = {"data": data | {"path": str(folder / "moved")}, "seq_len": 64}
    with pytest.raises(FileNotFoundError, match=r"^data\.path=.*moved: no such file"):
        next(of_run(run, moved, "val", began))
    with pytest.raises(ValueError, match="split=val:"):
        list(of_run(run, {"data": {**data, "val_fraction": 0.0}, "seq_len": 64}, "val", began))
    assert str(run) not in capsys.readouterr().err
    (folder / "docs" / "new.txt").write_text("a new one")
    assert list(of_run(run, {"data": data, "seq_len": 64}, "train", began))
    assert str(run) in capsys.readouterr().err


def test_a_conversation_is_scored_as_its_val_loss(folder):
    (run := folder / "run").mkdir()
    write_tokenizer(run)
    write(run, CHATML)
    rows = []
    for n in range(20):
        question = {"role": "user", "content": f"a rose {n}"}
        answer = {"role": "assistant", "content": "user " * (n % 5 + 1)}
        rows.append(json.dumps({"messages": [question, answer] * (n % 3 + 1)}))
    (folder / "chats.jsonl").write_text("\n".join(rows))
    settings = {"source": "text", "path": str(folder / "chats.jsonl"), "chat": True}
    settings |= {"val_fraction": 0.4, "cache": str(folder / "cache")}
    data = load(DataConfig(**settings, tokenizer=str(run)), 512)
    torch.manual_seed(0)
    size = data.tokenizer.vocab_size
    config = GPTConfig(vocab_size=size, layers=1, channels=32, heads=4, init_std=0.3)
    model = GPT(config, "naive").eval().requires_grad_(False)
    nats, targets = 0.0, 0
    for row in (data.val[n] for n in range(len(data.val))):
        x, y, ids = (row[key][None] for key in ("tokens", "targets", "doc_ids"))
        nats += float(model(x, y, Mask.documents(ids), reduction="none").sum())
        targets += int((y != IGNORED).sum())
    documents = list(of_run(run, {"data": settings, "seq_len": 512}, "val", data.fingerprint))
    # So are those of any file, by the template of the model's folder
    plain = DataConfig(**settings | {"val_fraction": None, "cache": None})
    others = {x.name: x for x in of_source(plain, data.tokenizer)}
    assert len(others) == 20
    for document in documents:
        for mine, other in zip(document, others[document.name], strict=True):
            np.testing.assert_array_equal(mine, other)
    result = perplexity(Scorer(model), documents, 512, contexts=[16])
    assert result.total.tokens == targets < sum(len(document.ids) - 1 for document in documents)
    assert result.total.nats == pytest.approx(nats, rel=1e-5)
    # Windows that are shorter than the documents score the same tokens.
    assert sum(n for _, n in perplexity(Scorer(model), documents, 16).windows) == targets
    for document in documents:
        answers = data.tokenizer.decode(document.ids[document.scored], special=False)
        assert set(answers.split()) == {"user"}, "no letter of a special token"
        assert document.n_bytes == len(answers)
