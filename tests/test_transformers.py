"""Packed documents in models of transformers are each alone with eager attention."""

import copy
import json
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import create_causal_mask

from benchmarks.models import LENGTHS, documents, loss_alone, opened
from benchmarks.shapes import reference, settings_of
from longctx.transformers import check, refuse_broken_kernels
from tests.hf.families.parity import write_tokenizer
from tests.processes import ROOT, finished, install, newest_version

OFFSETS = torch.tensor([0, 17, 22, 52], dtype=torch.int32)
VARLEN = {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "max_length_q": 30}
KINDS = ("gemma3_text", "gpt_oss", "deepseek_v3", "gemma2", "qwen3")  # windows, sinks, MLA, softcap
EACH, TOKENS, _, _ = documents(LENGTHS)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
PADDING = torch.ones(2, 52, dtype=torch.long)
PADDING[0, :9] = 0


def ours(theirs: Any, name: str = "longctx") -> Any:
    """The same model with our attention."""
    model = copy.deepcopy(theirs)
    model.set_attn_implementation(name)
    return model


def alone(model: Any) -> Tensor:
    """The logits of each document alone."""
    return torch.cat([model(x, use_cache=False).logits for x in EACH], dim=1)


def assert_close(x: Tensor, y: Tensor, limit: float = 2e-5) -> None:
    assert (x - y).norm() <= limit * y.norm()


def assert_same_gradients(model: Any, theirs: Any) -> None:
    for x, y in zip(model.parameters(), theirs.parameters(), strict=True):
        if y.grad is not None and y.grad.norm() > 1e-5:
            assert_close(x.grad, y.grad)


@pytest.mark.parametrize("lengths", [{}, VARLEN], ids=["positions", "lengths"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [*((kind, "longctx") for kind in KINDS), ("qwen3", "longctx_naive"), ("qwen3", "longctx_sdpa")],
)
def test_packed_equals_alone(kind, name, lengths):
    theirs = reference(kind)
    model, expected = ours(theirs, name), alone(theirs)
    logits = model(TOKENS, position_ids=POSITIONS, **lengths, use_cache=False).logits
    assert_close(logits, expected)
    logits.square().mean().backward()
    expected.square().mean().backward()
    assert_same_gradients(model, theirs)


@pytest.mark.parametrize("rows", [1, 2])
def test_positions_of_a_batch_may_be_shared(rows):
    theirs = reference("qwen3")
    logits = ours(theirs)(TOKENS.expand(2, -1), position_ids=POSITIONS.expand(rows, -1)).logits
    assert_close(logits[1:], alone(theirs))


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_positions_may_be_written_in_place(without_gradients):
    theirs = reference("qwen3")
    model = ours(theirs)
    with without_gradients():
        positions = POSITIONS.clone()
        model(TOKENS, position_ids=positions)
        positions.copy_(torch.arange(52)[None])
        assert_close(model(TOKENS, position_ids=positions).logits, theirs(TOKENS).logits)
        # torch does not count what NumPy or a broadcast writes
        positions.data[:] = POSITIONS
        assert_close(model(TOKENS, position_ids=positions).logits, alone(theirs))


# The first chunk of 8 is all padding
@pytest.mark.parametrize(
    ("kind", "how"), [*((kind, {}) for kind in KINDS), ("qwen3", {"prefill_chunk_size": 8})]
)
def test_generates_the_tokens_of_eager(kind, how):
    theirs, how = reference(kind), {"attention_mask": PADDING, "max_new_tokens": 9} | how
    how |= {"inputs": TOKENS.expand(2, -1), "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours(theirs).generate(**how), theirs.generate(**how))


@pytest.mark.parametrize("padding", [PADDING, PADDING.flip(1)], ids=["left", "right"])
def test_padding_is_left_out(padding):
    theirs = reference("gemma3_text")
    x, y = (m(TOKENS.expand(2, -1), attention_mask=padding) for m in (ours(theirs), theirs))
    assert_close(x.logits[padding.bool()], y.logits[padding.bool()])


def test_recomputation_and_compile():
    theirs = reference("gemma3_text").train()
    model = ours(theirs)
    model.gradient_checkpointing_enable()
    model(TOKENS, position_ids=POSITIONS, use_cache=False).logits.square().mean().backward()
    alone(theirs).square().mean().backward()
    assert_same_gradients(model, theirs)
    theirs.model.layers = theirs.model.layers[:1]  # dynamo takes seconds for each
    compiled = torch.compile(ours(theirs), backend="eager")
    assert_close(compiled(TOKENS, position_ids=POSITIONS).logits, alone(theirs))


def test_autocast():
    theirs = reference("qwen3")  # its norms of queries and keys return fp32
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(ours(theirs)(TOKENS, position_ids=POSITIONS).logits, alone(theirs), 0.02)


def test_saved_folders_need_no_longctx(tmp_path):
    ours(reference("gemma3_text")).save_pretrained(tmp_path)
    assert not any("longctx" in file.read_text() for file in tmp_path.glob("*.json"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="longctx")
    assert model.config._attn_implementation == "longctx"


INSIDE = PADDING[:1].clone()
INSIDE[0, 20:22] = 0
PICTURE = {"or_mask_function": lambda batch, head, query, key: query < 5}


@pytest.mark.parametrize(
    ("kind", "settings", "inputs", "named"),
    [
        ("qwen3", {"attention_dropout": 0.1}, {}, "attention_dropout=0.1"),
        ("llama4_text", {"attention_chunk_size": 16}, {}, "attention_chunk_size=16"),
        ("llama4_text", {}, {}, "cu_seq_lens_q"),
        ("qwen3", {}, {"attention_mask": torch.zeros(1, 1, 52, 52)}, r"\(1, 1, 52, 52\)"),
        ("qwen3", {}, {"attention_mask": torch.ones(1, 52, 52)}, r"\(1, 52, 52\)"),
        ("qwen3", {}, {"attention_mask": INSIDE}, "padding inside"),
        ("qwen3", {}, {"output_attentions": True}, "output_attentions"),
    ],
)
def test_refusals(kind, settings, inputs, named):
    config = reference(kind).config
    for key, value in settings.items():
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="longctx").train()
    with pytest.raises(ValueError, match=named):
        model(TOKENS, **inputs, use_cache=False)


def test_static_caches_and_changed_masks_are_refused():
    model = ours(reference("qwen3"))
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(TOKENS, max_new_tokens=2, cache_implementation="static")
    given = {"inputs_embeds": torch.zeros(1, 52, 64), "past_key_values": None}
    given |= {"attention_mask": None, "position_ids": POSITIONS, "config": model.config}
    groups = torch.full((1, 52), -1)
    assert create_causal_mask(**given, block_sequence_ids=groups) is None
    groups[0, 5:9] = 0
    for change in ({"block_sequence_ids": groups}, PICTURE):
        with pytest.raises(ValueError, match="changes its causal mask"):
            create_causal_mask(**given, **change)


@pytest.mark.parametrize("kind", ["gemma3_text", "mixtral", "gpt2"])
def test_check_passes(kind):
    check(ours(reference(kind)))
    check(ours(reference(kind)).bfloat16())


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        *(("qwen3_next", "one document"), ("jamba", "one document"), ("phimoe", "logits differ")),
        *(("bart", "one document a sequence is right"), ("bert", "not causal")),
    ],
)
def test_check_finds_what_is_wrong(kind, named):
    theirs = reference(kind)
    with pytest.raises(ValueError, match=named):
        check(ours(theirs))
    with pytest.raises(ValueError, match="attn_implementation=eager"):
        check(theirs)


@pytest.mark.parametrize("lengths", [{}, VARLEN], ids=["positions", "lengths"])
def test_packing_an_untried_model_asks_for_its_check(lengths, monkeypatch):
    packed = {"position_ids": POSITIONS, "use_cache": False, **lengths}
    with pytest.raises(ValueError, match=r"model_type=jamba: .*check\(model\)"):
        ours(reference("jamba"))(TOKENS, **packed)
    monkeypatch.setattr("longctx.transformers.TRIED", frozenset())
    checked, other = ours(reference("qwen3")), ours(reference("qwen3"))
    check(checked)
    assert_close(checked(TOKENS, **packed).logits, alone(reference("qwen3")))
    with pytest.raises(ValueError, match="model_type=qwen3: packed"):
        other(TOKENS, **packed)
    other(TOKENS.expand(2, -1), attention_mask=PADDING)  # which packs nothing


@pytest.mark.parametrize(
    ("kind", "package", "installed", "tokens", "is_wrong"),
    [
        *(("qwen3_next", "fla-core", found, 64, found < "0.6") for found in ("0.5.1", "0.6.0")),
        *(("bamba", "mamba-ssm", "2.3.2.post1", n, n > 61_000) for n in (4_096, 65_536)),
        *(("qwen3", package, "0.1.0", 65_536, False) for package in ("fla-core", "mamba-ssm")),
    ],
)
def test_broken_kernels_are_refused(kind, package, installed, tokens, is_wrong, monkeypatch):
    def version(name: str) -> str:
        if name != package:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr("longctx.transformers.version", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(ValueError, match=package) if is_wrong else nullcontext():
        refuse_broken_kernels(reference(kind).config, tokens)


def test_the_extra_is_named_if_transformers_is_missing():
    hidden = "import sys; sys.modules['transformers'] = None; import longctx.transformers"
    assert "longctx-train[transformers]" in finished("-c", [hidden], ROOT).stderr


def test_sft_trainer_packs_without_leaks(tmp_path):
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    theirs = reference("qwen3")

    class Compared(trl.SFTTrainer):
        """Computes every step again, each document alone."""

        def training_step(self, model: Any, inputs: Any, *others: Any) -> Tensor:
            starts = (inputs["position_ids"][0] == 0).nonzero().flatten().tolist()
            each = inputs["input_ids"].tensor_split(starts[1:], dim=1)
            assert len(each) > 2
            theirs.load_state_dict(model.state_dict())
            theirs.zero_grad()
            expected = loss_alone(theirs, each) / sum(x.shape[1] - 1 for x in each)
            expected.backward()
            loss = super().training_step(model, inputs, *others)
            assert_close(loss, expected.detach())
            assert_same_gradients(model, theirs)
            return loss

    write_tokenizer(tmp_path)
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(5, 40, (24,), generator=generator).tolist()
    texts = [torch.randint(3, 301, (n,), generator=generator).tolist() for n in lengths]
    trainer = Compared(
        ours(theirs),
        trl.SFTConfig(
            **{"output_dir": str(tmp_path / "out"), "save_strategy": "no", "report_to": []},
            **{"packing": True, "max_length": 64, "per_device_train_batch_size": 2},
            **{"max_steps": 3, "learning_rate": 1e-3, "bf16": False, "use_cpu": True},
        ),
        train_dataset=datasets.Dataset.from_dict({"input_ids": texts}),
        processing_class=AutoTokenizer.from_pretrained(tmp_path),
    )
    trainer.train()
    assert trainer.state.global_step == 3


SCRIPT = """
import json, sys, torch, transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from longctx.transformers import check
for settings in json.loads(sys.argv[1]):
    config = CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
    check(AutoModelForCausalLM.from_config(config, attn_implementation="longctx"))
print(transformers.__version__)
"""


@pytest.mark.slow  # installs transformers
@pytest.mark.parametrize(("version", "words"), [("5.0.0", []), (None, ["--no-deps"])])
def test_oldest_and_newest_transformers(version, words, tmp_path):
    version = version or newest_version("transformers")
    if version == transformers.__version__:
        return  # as in all other tests
    install(f"transformers=={version}", *words, f"--target={tmp_path}")
    settings = json.dumps([settings_of(kind) for kind in ("llama", "gemma3_text")])
    process = finished("-c", [SCRIPT, settings], ROOT, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (process.returncode, process.stdout.split()[-1:]) == (0, [version]), process.stderr


@pytest.mark.parametrize("backend", ["flash", "naive"])
@pytest.mark.parametrize("memory", ["fast", "balanced"])
def test_two_forwards_keep_their_masks(memory, backend, tmp_path):
    """Backward of recomputed layers, after a forward with other documents."""
    reference("mistral").save_pretrained(tmp_path)
    model = opened(tmp_path, memory, backend)
    batches = [documents(lengths) for lengths in ((17, 5, 30), (40, 12))]
    sum([model(*batch[1:]) for batch in batches]).backward()
    together = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    for batch in batches:
        model(*batch[1:]).backward()
    expected = [weight.grad for weight in model.parameters()]
    torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-6)
