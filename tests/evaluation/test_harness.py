"""Requests of lm-evaluation-harness against one forward per token; local tasks from YAML and JSON,
without a network.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install lm-eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from longctx.data import Tokenizer
from longctx.data.chat import Template
from longctx.data.tokenizer import train
from longctx.evaluation.harness import Harness, TaskPrompt, evaluate_tasks
from longctx.evaluation.load import open_model
from longctx.evaluation.score import Scorer
from longctx.hf.export import export
from longctx.model import GPT, GPTConfig
from tests.data.chat_templates import CHATML, write_tokenizer
from tests.data.chat_templates import write as write_template
from tests.eval_script.sample import TEXT, write_tasks
from tests.evaluation.conftest import SHAPE
from tests.evaluation.test_load import with_begin


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train([TEXT * 9], 300)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=tokenizer.vocab_size, **SHAPE), "naive").eval()


def harness(model: GPT, tokenizer: Tokenizer, context: int = 32) -> Harness:
    return Harness(Scorer(model), tokenizer, context, batch_size=3)


def requests_of(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, arguments=each, idx=n) for n, each in enumerate(arguments)]


def ln_p(model: GPT, before: list[int], after: list[int]) -> float:
    """ln p of `after`, by one forward over all tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([before + after[:-1]]))[0, len(before) - 1 :]
    logp = logits.double().log_softmax(-1)
    return float(logp.gather(1, torch.tensor(after)[:, None]).sum())


def test_answers_beyond_the_context_or_sampled_are_refused(model, tokenizer):
    lm = harness(model, tokenizer, 64)
    with pytest.raises(ValueError, match="seq_len=256"):
        lm.generate_until([SimpleNamespace(args=("a", {"max_gen_toks": 64}))])
    with pytest.raises(ValueError, match="seq_len=65"):
        lm._loglikelihood_tokens([(("", ""), [7], [5] * 65)])
    with pytest.raises(ValueError, match="sampling"):
        lm.generate_until([SimpleNamespace(args=("a", {"do_sample": True, "temperature": 0.7}))])


def test_answers_of_several_limits_stay_in_the_context(model, tokenizer):
    """The first prompt is cut for 4 new tokens, so it has no room for the 20 of another."""
    settings = {"do_sample": False, "until": []}
    limits = {"a rose is " * 20: 4, "a": 20, "is": 4}
    asked = [SimpleNamespace(args=(x, settings | {"max_gen_toks": n})) for x, n in limits.items()]
    lm = harness(model, tokenizer)
    assert lm.generate_until(asked) == [lm.generate_until([each])[0] for each in asked]


def test_log_likelihoods_are_those_of_hflm(tmp_path):
    """A small Llama of transformers whose tokenizer puts <s> before every text."""
    plain = train([TEXT * 9], 300)
    begins = with_begin(plain)
    begin = begins.bos_id
    begins.save(tmp_path / "tokenizer.json")
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=begins.vocab_size, **SHAPE), "naive").eval()
    export(model, tmp_path, tmp_path / "hf", context=64)

    theirs = HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32", batch_size=1)
    ours = harness(model, Tokenizer.load(tmp_path / "hf"), 64)
    pairs = [
        ("a rose is", " a rose"),
        ("", "a violet"),
        ("a violet ", "is"),
        ("<s>a rose", " is"),
        (TEXT * 9, " rose"),
        *((TEXT[:size], TEXT[size : 4 * size]) for size in (3, 9, 20)),
        ("a", plain.decode(plain.encode(TEXT * 9)[:63])),  # as long as the context
    ]
    requests = requests_of("loglikelihood", pairs)
    answers = zip(ours.loglikelihood(requests), theirs.loglikelihood(requests), strict=True)
    for pair, ((ln_p, greedy), (want, wanted_greedy)) in zip(pairs, answers, strict=True):
        assert ln_p == pytest.approx(want, rel=1e-4), pair
        assert greedy == wanted_greedy
    settings = {"until": ["\n"], "max_gen_toks": 9, "do_sample": False}
    asked = [("a rose is", settings), (TEXT * 9, settings)]  # the second is too long
    for n, most in [(4, 5), (30, 9), (9, 1), (52, 11), (7, 12)]:
        until = ["e", "is a"] if n % 2 else ["\n"]
        asked.append((TEXT[:n], settings | {"until": until, "max_gen_toks": most}))
    requests = requests_of("generate_until", asked)
    answers = ours.generate_until(requests)
    assert answers == theirs.generate_until(requests)

    # A second end token, whose text HFLM leaves in unless it is special; a special token.
    end = ours.vocabulary.encode(answers[0])[3]
    settings_file = tmp_path / "hf" / "generation_config.json"
    saved = json.loads(settings_file.read_text())
    settings_file.write_text(json.dumps(saved | {"eos_token_id": [plain.eos_id, end]}))
    theirs = HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32", batch_size=1)
    opened = open_model(str(tmp_path / "hf"))
    ours = Harness(Scorer(model), opened.tokenizer, 64, 3)
    (shorter,) = ours.generate_until(requests[:1])
    assert len(shorter) < len(answers[0])
    assert [shorter + plain.decode([end])] == theirs.generate_until(requests[:1])
    assert ours._text(TaskPrompt(0, [], [], 9), [65, begin, 66])[0] == plain.decode([65, 66])


def test_prompts_of_a_chat_template_are_those_of_hflm(tmp_path, monkeypatch):
    write_tokenizer(tmp_path)
    write_template(tmp_path, CHATML)
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=Tokenizer.load(tmp_path).vocab_size, **SHAPE), "naive").eval()
    export(model, tmp_path, tmp_path / "hf", context=64)
    folder = tmp_path / "hf"
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)
    tokenizer = Tokenizer.load(folder)
    ours = Harness(Scorer(model), tokenizer, 64, 3, Template(folder))
    asked, begun = {"role": "user", "content": "a rose"}, {"role": "assistant", "content": " is"}
    prompt = ours.apply_chat_template([asked])
    assert prompt == theirs.apply_chat_template([asked])
    prefix = ours.apply_chat_template([asked, begun], add_generation_prompt=False)
    assert prefix == theirs.apply_chat_template([asked, begun], add_generation_prompt=False)
    spaced = begun | {"content": " is "}  # the space is of the answer that a task scores
    assert ours.apply_chat_template([asked, spaced], add_generation_prompt=False) == prefix + " "
    assert ours.tok_encode(prompt) == theirs.tok_encode(prompt)
    requests = requests_of("loglikelihood", [(prompt, "a rose"), (prefix, " a")])
    both = ours.loglikelihood(requests), theirs.loglikelihood(requests)
    for mine, other in zip(*both, strict=True):
        assert mine == pytest.approx(other, rel=1e-4)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tasks = write_tasks(tmp_path / "tasks")
    output = evaluate_tasks(ours, ["my_choice", "my_answer"], tmp_path, tasks, fewshot=1)
    assert output["results"].keys() == {"my_choice", "my_answer"}


def test_texts_are_scored_in_the_windows_of_hflm(model, tokenizer, tmp_path):
    """Texts of less than a window, of several, and of one token more than two."""
    tokenizer.save(tmp_path / "tokenizer.json")
    export(model, tmp_path, tmp_path / "hf", context=32)
    theirs = HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32", batch_size=1)
    ours = harness(model, tokenizer)
    texts = ["", "a rose", TEXT * 9, tokenizer.decode(tokenizer.encode(TEXT * 9)[: 2 * 32 + 1])]
    requests = requests_of("loglikelihood_rolling", [(text,) for text in texts])
    want = theirs.loglikelihood_rolling(requests)
    assert ours.loglikelihood_rolling(requests) == pytest.approx(want, rel=1e-4)


def test_padding_does_not_stretch_a_model(tokenizer):
    torch.manual_seed(0)
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    config = GPTConfig(vocab_size=tokenizer.vocab_size, rope_scaling=scaling, context=8, **SHAPE)
    model = GPT(config, "naive").eval()
    rng = np.random.default_rng(0)
    requests = [(("", ""), rng.integers(256, size=n).tolist(), [5]) for n in (30, 3, 12, 19)]
    together = harness(model, tokenizer)._loglikelihood_tokens(requests)
    for (_, before, after), (total, _) in zip(requests, together, strict=True):
        assert total == pytest.approx(ln_p(model, before, after), rel=1e-4)
    empty = [requests[0], (("", ""), [7, 8], [])]
    assert harness(model, tokenizer)._loglikelihood_tokens(empty)[1] == (0.0, True)
