"""Any text survives the tokenizer; documents end in its end-of-text token."""

import json
import random

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from longctx.data.tokenizer import EOS, Tokenizer, segments, train


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    text = "the rain fell on the stone bridge, and 1234 lights went out\n" * 40
    return train([text, "def f(x):\n    return x\n"], 320)


def word_level(*extra: str) -> tokenizers.Tokenizer:
    words = {word: number for number, word in enumerate(["a", "b", "c", "[UNK]", *extra])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(extra))
    return tokenizer


def arbitrary(rng: random.Random) -> str:
    ranges = [(0, 0x7F), (0x80, 0x24F), (0x300, 0x36F), (0x4E00, 0x4FFF), (0x1F300, 0x1F6FF)]
    ranges += [(0xE000, 0xE0FF), (9, 13)]
    return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randrange(60)))


def test_decode_undoes_encode_for_any_text(trained):
    rng = random.Random(0)
    odd = ["", " ", "\n\n", "\x00", "\r\n", "e\u0301", "\U0010ffff", "a" * 10_000]
    odd.append(f"before {EOS} after")
    for text in [*(arbitrary(rng) for _ in range(400)), *odd]:
        ids = trained.encode(text)
        assert trained.decode(ids) == text
        assert all(0 <= token < trained.vocab_size for token in ids)
        assert trained.eos_id not in ids


def test_splitting_a_long_text_changes_no_token(trained):
    rng = random.Random(1)
    pieces = ["rain", "the ", "12", "\n", "\n\n  ", " \n", "x_\n", "!\n", "été\n", "水\n", "\t"]
    pieces += ["'s\n", "\r\n"]
    for _ in range(50):
        text = "".join(rng.choice(pieces) for _ in range(300))
        parts = list(segments(text, 40))
        assert "".join(parts) == text
        assert len(parts) > 2
        assert [token for part in parts for token in trained.encode(part)] == trained.encode(text)


@pytest.mark.parametrize("run", ["x", "\t", "0123456789abcdef"])
def test_an_endless_run_can_be_trained_on(run) -> None:
    # Cut into parts, a fraction of a second; uncut, minutes, which the timeout of the suite ends.
    assert train(["some words", run * (200_000 // len(run))], 400).vocab_size <= 400


def test_save_and_load_keep_everything(trained, tmp_path):
    trained.save(tmp_path / "tokenizer.json")
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["tokenizer.json", "tokenizer_config.json"]
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        back = Tokenizer.load(path)
        for name in ("fingerprint", "eos_id", "vocab_size"):
            assert getattr(back, name) == getattr(trained, name)
        assert back.encode("the rain") == trained.encode("the rain")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == trained.eos_id
    ids = theirs.encode("the rain fell", add_special_tokens=False)
    assert ids == trained.encode("the rain fell")


ENDS = [
    *(("tokenizer_config.json", {"eos_token": x}) for x in ("<stop>", {"content": "<stop>"})),
    ("special_tokens_map.json", {"eos_token": "<stop>"}),
    *(("config.json", {"eos_token_id": x}) for x in (5, [5, 4])),
    ("generation_config.json", {"eos_token_id": 5}),
]


@pytest.mark.parametrize(("file", "content"), ENDS)
def test_end_of_text_is_found_and_saved(tmp_path, file, content):
    word_level("</s>", "<stop>").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / file).write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_id == 5
    run = tmp_path / "run"
    run.mkdir()
    tokenizer.save(run / "tokenizer.json")
    assert Tokenizer.load(run).eos == "<stop>"


def test_begin_of_text_is_that_of_the_post_processor(tmp_path):
    plain = word_level("<s>", "</s>")
    without = Tokenizer(plain, "</s>")
    assert without.bos_id is None
    assert without.encode_prompt("a b") == [0, 1] and without.encode_prompt("") == [5]
    special = [("<s>", 4), ("</s>", 5)]
    plain.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=special)
    plain.enable_truncation(3)
    plain.enable_padding(length=20)
    plain.save(str(tmp_path / "bos.json"))
    with_bos = Tokenizer.load(tmp_path / "bos.json")
    assert with_bos.bos_id == 4
    assert with_bos.encode_prompt("a b") == [4, 0, 1] and with_bos.encode_prompt("") == [4]
    assert with_bos.encode("a b c a b c") == [0, 1, 2, 0, 1, 2]
    assert with_bos.encode_documents(["a b c a b c"])[0].tolist() == [4, 0, 1, 2, 0, 1, 2, 5]


def test_a_mark_at_the_start_encodes_a_text_whole(tmp_path):
    words = {"▁": 0, "a": 1, "\n": 2, "</s>": 3, "b": 4, "c": 5, "d": 6, "▁a": 7}
    tokenizer = tokenizers.Tokenizer(models.BPE(words, [("▁", "a")]))
    tokenizer.normalizer = normalizers.Prepend("▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = Tokenizer.load(tmp_path).encode("a\n" * (1 + (1 << 19)))
    assert ids[0] == 7
    assert ids.count(7) + ids.count(0) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "tokenizer.json: no such file; a tokenizer is"),
        ("{}", "tokenizer.json: "),
        ("not json", "tokenizer.json: "),
        (word_level(), "tokenizer.json: .*eos_token"),
        (models.Unigram([("a", -1.0), (EOS, -2.0)]), "tokenizer.json: .*unknown token"),
        (models.BPE({"a": 0, EOS: 1}, [], dropout=0.5), "tokenizer.json: .*dropout"),
        (
            models.BPE({EOS: 0} | {str(n): n for n in range(1, 51)}, []),
            "51 tokens and the model 50",
        ),
    ],
)
def test_a_broken_tokenizer_is_named(tmp_path, content, message):
    file = tmp_path / "tokenizer.json"
    if isinstance(content, models.Model):
        content = tokenizers.Tokenizer(content)
    if isinstance(content, tokenizers.Tokenizer):
        content.save(str(file))
    elif content is not None:
        file.write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        Tokenizer.load(tmp_path, vocabulary=50)
    assert str(tmp_path) in str(caught.value)
