"""`longctx generate` writes the text of transformers; each mistake is one line."""

import io
import json
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import longctx
from longctx import cli
from longctx.data import Tokenizer
from longctx.generation import Completion
from tests.hf.families.parity import SIZES, reference, write_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama of random weights with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(**SIZES | {"vocab_size": 300}, num_key_value_heads=2, eos_token_id=0)
    reference(config).save_pretrained(path)
    write_tokenizer(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def generate(folder: Path, *arguments: str) -> int:
    return cli.main(["generate", str(folder), "device=cpu", f"max_new_tokens={NEW}", *arguments])


def expected(folder: Path, prompt: str | list[dict[str, str]]) -> str:
    """What transformers makes of a text, or of the messages of a chat, by tokens with a text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    text = prompt
    if not isinstance(prompt, str):
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    keys = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
    (out,) = model.generate(ids, **keys, suppress_tokens=[*range(len(tokenizer), 300)])
    new = out[ids.shape[1] :]
    return str(tokenizer.decode(new[new != 0]))


@pytest.mark.parametrize("chat", ["true", "false"])
def test_text_is_that_of_transformers(folder, chat, capfd):
    text = "a rose, ${it} is\nin 18"
    prompt = [{"role": "user", "content": text}] if chat == "true" else text
    assert generate(folder, f"prompt={text}", f"chat={chat}", "temperature=0") == 0
    printed = capfd.readouterr()
    # Of a text the last line is shown first.
    shown = "" if chat == "true" else "in 18"
    assert printed.out == f"{shown}{expected(folder, prompt)}\n"
    assert "tokens/s" in printed.err


def test_python_writes_the_text_of_the_command(folder, capfd):
    model, tokenizer = longctx.load(folder, device="cpu", attention="naive")
    for prompt in ("a rose", [{"role": "user", "content": "a rose"}]):
        text = longctx.generate(model, tokenizer, prompt, NEW, temperature=0)
        assert text == expected(folder, prompt)
    assert generate(folder, "prompt=a", "temperature=1", "top_k=50", "seed=3") == 0
    chance = {"temperature": 1, "top_k": 50}
    texts = [longctx.generate(model, tokenizer, "a", NEW, **chance, seed=seed) for seed in (3, 4)]
    assert capfd.readouterr().out == f"a{texts[0]}\n" != f"a{texts[1]}\n"
    with pytest.raises(ValueError, match="top_p=2"):
        longctx.generate(model, tokenizer, "a", top_p=2)
    for wrong in (["a", "b"], None):
        with pytest.raises(ValueError, match="prompt: "):
            longctx.generate(model, tokenizer, wrong)
    with pytest.raises(ValueError, match="precision=int4"):
        longctx.load(folder, precision="int4")
    model.norm.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="it gives NaN"):
        longctx.generate(model, tokenizer, "a")


def test_prompts_of_a_file_are_answered_in_their_order(folder, tmp_path):
    chat = [{"role": "user", "content": "who is in 1812?"}]
    prompts: list[Any] = ["a", chat, "a rose is a rose in 20", "a\u2028b"]
    rows = [{"prompt": x} if isinstance(x, str) else {"messages": x} for x in prompts]
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    file.write_bytes(f"\ufeff{text}\r\n".encode())  # as editors on Windows write it
    for size in ("batch_size=2", "batch_size=3"):
        assert generate(folder, f"prompts={file}", f"out={out}", size, "temperature=0") == 0
        answers = [json.loads(line) for line in out.read_text().strip().split("\n")]
        assert [row["prompt"] for row in answers] == prompts
        assert [row["text"] for row in answers] == [expected(folder, x) for x in prompts]
    file.write_text('{"prompt": "a rose"}\n{"prompt": "a rose", "messages": null}\n')
    assert generate(folder, f"prompts={file}", f"out={out}", "chat=true") == 0
    asked = [json.loads(line)["prompt"] for line in out.read_text().splitlines()]
    assert asked == 2 * [[{"role": "user", "content": "a rose"}]]


def test_a_chat_remembers_what_was_said(folder, capfd, monkeypatch):
    """But a message that would end its own turn, or is not UTF-8, which is refused alone."""
    monkeypatch.setattr("sys.stdin", io.StringIO("a rose\n\n<eos>\n\udcff\n<special> \nin 18"))
    system = {"role": "system", "content": "be brief"}
    words = ("device=cpu", f"max_new_tokens={NEW}", "temperature=0", "system=be brief")
    assert cli.main(["chat", str(folder), *words]) == 0
    said, answers = [system], []
    for message in ("a rose", "<special>", "in 18"):
        said.append({"role": "user", "content": message})
        answers.append(expected(folder, said))
        said.append({"role": "assistant", "content": answers[-1]})
    printed = capfd.readouterr()
    assert printed.out == "".join(f"{answer}\n" for answer in answers)
    assert "<eos>" in printed.err and "text: has characters that are not UTF-8" in printed.err


def limit_memory(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """Let the machine have `left` bytes more than this process takes."""
    status = Path("/proc/self/status").read_text()
    used = int(re.findall(r"VmData:\s+(\d+) kB", status)[0]) << 10
    limit = (used + left) // 9 * 10
    monkeypatch.setattr("longctx.spec.hardware.host_memory", lambda: float(limit))


def test_out_of_memory_costs_no_text_that_is_done(folder, tmp_path, monkeypatch, capsys):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts = ["a rose", "in 18", "a rose is " * 1500]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit_memory(monkeypatch, 128 << 20)
    few = ("batch_size=2", "attention=naive", "temperature=0")
    assert generate(folder, f"prompts={file}", f"out={out}", *few) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert all(part in error for part in ("out of memory", "attention=flash", "max_new_tokens"))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["text"] for row in rows] == [expected(folder, text) for text in prompts[:2]]
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_model_larger_than_the_memory_is_one_line(tmp_path, monkeypatch, capsys):
    config = LlamaConfig(**SIZES | {"vocab_size": 300_000}, num_key_value_heads=2)
    reference(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    capsys.readouterr()
    limit_memory(monkeypatch, 16 << 20)
    assert generate(tmp_path, "prompt=a", f"out={tmp_path / 'out.jsonl'}") == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert "out of memory while the model loads" in error and "precision=bf16" in error
    assert not (tmp_path / "out.jsonl").exists()


def test_mistakes_are_one_line(folder, refused, tmp_path, capsys):
    (full := tmp_path / "full.jsonl").symlink_to("/dev/full")
    assert generate(folder, "prompt=a", f"out={full}") == 74
    assert capsys.readouterr().err.startswith(f"error: out={full}: No space left on device")
    file = tmp_path / "prompts.jsonl"
    for line in ("{", '{"text": "a"}', '{"messages": []}', '{"messages": [{"role": 1}]}'):
        file.write_text('{"prompt": "a"}\n\n' + line)
        refused(generate(folder, f"prompts={file}"), f"{file}:3")


@pytest.mark.parametrize(("before", "text"), [("a rose", " is a"), ("", "is a")])
def test_a_completion_keeps_the_space_before_it(before, text):
    """With the decoder of Llama 2, which drops the space of a first word."""
    vocabulary = {"▁a": 0, "▁is": 1, "▁rose": 2, "</s>": 3}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="</s>")
    sentencepiece = tokenizers.Tokenizer(model)
    sentencepiece.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    sentencepiece.decoder = decoders.Sequence(parts)
    completion = Completion(Tokenizer(sentencepiece, "</s>"), [], before, before)
    for token in (1, 0):
        completion.add(token)
    assert completion.text == text


def test_streamed_text_has_whole_characters(folder):
    tokenizer = Tokenizer.load(folder)
    text = "a rose é 水 😀 in 2024"
    ids = tokenizer.encode(text)
    assert all(len(tokenizer.encode(x)) > 1 for x in "é水😀")
    completion = Completion(tokenizer, [], "")
    for token in ids:
        completion.add(token)
        assert text.startswith(completion.text)
    completion.add(tokenizer.eos_id, is_end=True)
    assert completion.text == text and completion.is_done
    broken = Completion(tokenizer, [], "")
    for token in ids[: ids.index(tokenizer.encode("水")[0]) + 1]:
        broken.add(token)
    assert broken.text == "a rose é "
    broken.end()
    assert broken.text == "a rose é \ufffd"
