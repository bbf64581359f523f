"""Models that transformers computes for us: packed documents with our attention give the loss and
the gradients of each document alone with transformers' own; what cannot be right is refused.
"""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import longctx
from benchmarks import models
from benchmarks.models import LENGTHS, documents, loss_alone, opened
from benchmarks.shapes import reference, settings_of
from longctx.data.dataset import EncodedDocument
from longctx.evaluation.perplexity import perplexity
from longctx.evaluation.score import Scorer
from longctx.hf import model_folder
from longctx.hf.export import export, export_adapter
from longctx.hf.families import FAMILIES
from longctx.hf.families.hybrid import HybridFamily
from longctx.hf.proof import prove
from longctx.hf.transformers_model import TransformersModel, described
from longctx.model import lora
from longctx.model.decoder import decoder_of
from longctx.model.gpt import build
from longctx.parallel import sharding
from longctx.spec.model_config import LoraConfig
from tests.hf.families.parity import write_tokenizer
from tests.hf.test_model_folder import REFUSALS
from tests.processes import ROOT, finished

FAST = ("cohere2", "deepseek_v3", "gemma2", "gemma4_text", "gpt2", "gpt_oss", "llama", "qwen3_moe")
# In a layer or two of each something is in fp32 that a GPU's 16 bits meet
LOADED = ("deepseek_v3", "gpt2", "granitemoe", "lfm2", "zamba2")
SLOWER = ("cohere2", "dots1", "ernie4_5_moe", "glm", "minimax_m2", "olmoe", "opt")
LOADED = [*LOADED, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOWER)]
# Computed by longctx too
RECURRENT = {kind for kind, family in FAMILIES.items() if isinstance(family, HybridFamily)}
OURS = set(FAMILIES) & set(CONFIG_MAPPING) - set(FAST) - RECURRENT
KINDS = [*FAST, *(pytest.param(kind, marks=pytest.mark.slow) for kind in sorted(OURS))]


@pytest.mark.parametrize("memory", ["fast", "balanced"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_each_document_alone(kind, memory, tmp_path):
    prove(described(settings_of(kind)), "cpu", "fp32", 256, packing=True)
    loss, gradient = models.differences(kind, tmp_path, models.LENGTHS, memory)
    assert loss < 1e-5
    assert gradient < 2e-5


def test_autocast_keeps_norms_in_16_bits(tmp_path):
    reference("qwen3").save_pretrained(tmp_path)
    model, found = opened(tmp_path), {}
    for name, module in model.backbone.named_modules():
        if name.endswith(("norm", "q_proj", "down_proj")):
            module.register_forward_hook(lambda _, x, y, name=name: found.update({name: y.dtype}))
    _, tokens, targets, mask = documents(LENGTHS)
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens, targets, mask).backward()
    assert set(found.values()) == {torch.bfloat16}
    assert {"norm", "layers.0.self_attn.q_norm", "layers.2.input_layernorm"} <= found.keys()


@pytest.mark.parametrize("kind", ["lfm3", "minimax", "qwen3_5_text"])
def test_layers_that_leak_are_refused(kind):
    config = described(settings_of(kind))
    with pytest.raises(ValueError, match=rf"model_type={kind}: .*data\.packing=false"):
        prove(config, "cpu", "fp32", 256, packing=True)
    prove(config, "cpu", "fp32", 256, packing=False)


def test_layers_that_leak_are_scored_alone(tmp_path):
    theirs = reference("lfm3")
    theirs.save_pretrained(tmp_path)
    each = documents(LENGTHS)[0]
    scored = [EncodedDocument(str(n), x[0].numpy(), 1) for n, x in enumerate(each)]
    score = perplexity(Scorer(opened(tmp_path), packs=False), scored, context=64)
    with torch.no_grad():
        expected = float(loss_alone(theirs, each))
    assert score.total.nats == pytest.approx(expected, rel=1e-5)


def test_a_hidden_window_is_found_at_any_length():
    config = described(settings_of("phimoe") | {"sliding_window": 5000})
    prove(config, "cpu", "fp32", 4096)
    with pytest.raises(ValueError, match="logits differ"):
        prove(config, "cpu", "fp32", 8192)


@pytest.mark.parametrize(("changes", "named"), REFUSALS["transformers"])
def test_what_does_not_train_is_refused(changes, named, tmp_path):
    settings = settings_of(changes.get("model_type", "cohere")) | changes
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=named) as caught:
        model_folder.read_config(tmp_path, "always")
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("kind", ["cohere2", "qwen3_moe", "gpt_oss"])
def test_an_export_is_the_model_again(kind, tmp_path):
    theirs = reference(kind)
    theirs.save_pretrained(tmp_path / "in")
    write_tokenizer(tmp_path / "in")
    export(opened(tmp_path / "in"), tmp_path / "in", tmp_path / "out", 512)
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert again.config.max_position_embeddings == 512
    ids = torch.arange(3, 60)[None]
    assert torch.equal(again.eval()(ids).logits, theirs(ids).logits)


def test_a_missing_tensor_is_named(tmp_path):
    theirs = reference("cohere")
    state = {name: x for name, x in theirs.state_dict().items() if "layers.1.mlp.up" not in name}
    theirs.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"missing tensor model\.layers\.1\.mlp\.up_proj"):
        opened(tmp_path)


def test_noise_of_routers_is_never_drawn():
    settings = settings_of("mixtral") | {"router_jitter_noise": 0.9}
    model = build(described(settings), "naive", "balanced").to_empty(device="cpu")
    model.init_weights()
    ids = torch.arange(40)[None]
    assert torch.equal(model.train()(ids), model.eval()(ids))
    # Its routers compare with this number, also if nothing is drawn
    changed = {"sliding_window": 5000, "router_jitter_noise": 0.3}
    prove(described(settings_of("phimoe") | changed), "cpu", "fp32", 256)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", LOADED)
def test_it_decodes_in_the_precision_that_runs(kind, precision, tmp_path):
    theirs = reference(kind)
    theirs.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    model, _ = longctx.load(tmp_path, "cpu", precision, "naive")
    ids = torch.arange(3, 40)[None]
    decoder = decoder_of(model, 1, 64)
    decoder.prefill([ids[0, :35].tolist()])
    decoder.step(ids[0, 35:36])
    logits, expected = decoder.step(ids[0, 36:]).float(), theirs(ids).logits[:, -1]
    assert (logits - expected).norm() < (1e-5 if precision == "fp32" else 0.03) * expected.norm()


@pytest.mark.parametrize("kind", ["bloom", "gpt_neox_japanese", "xglm"])
def test_no_way_in_leads_past_the_proof(kind, tmp_path):
    reference(kind).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    refused = f"model_type={kind}: its attention cannot be replaced"
    with pytest.raises(ValueError, match=refused):
        longctx.load(tmp_path, "cpu", "fp32")
    with pytest.raises(ValueError, match=refused):
        build(described(settings_of(kind)))
    config = described(settings_of(kind))
    with pytest.raises(ValueError, match=refused):
        config.packs("cpu", "fp32", 256, is_shared=False)


IN_A_TERMINAL = """
import sys
from dataclasses import replace
from benchmarks.shapes import settings_of
from longctx.hf.transformers_model import described
from longctx.model.gpt import build
config = described(settings_of("cohere2"))
maps = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
for keys in {"auto_map": maps}, {"auto_map": maps, "trust_remote_code": True}, {}:
    keys |= {"_name_or_path": sys.argv[1], "name_or_path": sys.argv[1]}
    theirs = config.transformers | {"config": config.settings | keys}
    assert build(replace(config, transformers=theirs)).whole.config.model_type == "cohere2"
"""


@pytest.mark.slow
def test_code_of_a_folder_never_runs(tmp_path):
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    done = finished("-c", [IN_A_TERMINAL, str(tmp_path)], ROOT, input="y\n" * 9)
    assert done.returncode == 0, done.stderr
    assert "custom code" not in done.stdout and not (tmp_path / "ran").exists()


def test_layers_that_share_weights_are_loaded_once(tmp_path):
    settings = settings_of("zamba2") | {"layers_block_type": ["hybrid", "mamba", "hybrid"]}
    torch.manual_seed(0)
    config = CONFIG_MAPPING["zamba2"].from_dict(settings)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path)
    model, ids = opened(tmp_path).eval(), torch.arange(3, 60)[None]
    torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="strategy=fsdp"):
        sharding.shard(model, None, None)


@pytest.mark.parametrize(("kind", "limit"), [("gpt2", 256), ("opt", 256), ("cohere2", None)])
def test_learned_positions_end(kind, limit):
    config = described(settings_of(kind))
    assert config.transformers["positions"] == limit
    config.check_length(256, "seq_len")
    if limit is not None:
        with pytest.raises(ValueError, match="seq_len=257"):
            config.check_length(257, "seq_len")


def test_lora_without_a_layer_is_refused():
    """GPT-2 has layers of a class of its own."""
    with pytest.raises(ValueError, match=r"lora\.targets=.*: the model has none"):
        LoraConfig(rank=2).check_model(described(settings_of("gpt2")))
    LoraConfig(rank=2).check_model(described(settings_of("gpt_neox")))


EXACT = [(opened, "deepseek_v3", "e_score_correction_bias")]
EXACT += [(opened, "ernie4_5_moe", "e_score_correction_bias")]
EXACT += [(model_folder.pretrained, "qwen3_next", "A_log")]


@pytest.mark.parametrize(("way", "kind", "exact"), EXACT)
def test_an_export_in_16_bits_rounds_no_exact_weight(way, kind, exact, tmp_path):
    reference(kind).save_pretrained(tmp_path / "in")
    write_tokenizer(tmp_path / "in")
    model = way(tmp_path / "in")
    for weight in model.parameters():
        weight.data += 0.001 * torch.rand_like(weight)
    export(model, tmp_path / "in", tmp_path / "out", 256, torch.bfloat16)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    dtypes = {name.rpartition(".")[2]: x.dtype for name, x in saved.items()}
    assert dtypes[exact] == torch.float32
    assert dtypes["q_proj" if "q_proj" in dtypes else "weight"] == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((kind, {}) for kind in ("deepseek_v3", "dots1", "ernie4_5_moe", "gemma2")),
        *(("cohere2", {"rslora": rslora}) for rslora in (False, True)),
        *((kind, {"targets": ["qkv", "gate_up"]}) for kind in ("glm4", "phi3", "qwen3_5_text")),
        *((kind, {"targets": ["qkv", "out"]}) for kind in ("glm4_moe", "qwen3_next")),
    ],
)
def test_lora_begins_trains_merges_and_opens_in_peft(kind, changes, tmp_path):
    theirs, config = reference(kind), LoraConfig(rank=3, **changes)
    theirs.save_pretrained(tmp_path)
    is_ours = kind in ("glm4", "glm4_moe", "phi3", "qwen3_5_text", "qwen3_next")
    model = model_folder.pretrained(tmp_path) if is_ours else opened(tmp_path)
    _, tokens, targets, mask = documents(LENGTHS)
    before = model(tokens, targets, mask)
    loss = lora.add(model, config)(tokens, targets, mask)
    assert torch.equal(loss, before)
    loss.backward()
    trained = [name for name, x in model.named_parameters() if x.grad is not None]
    assert trained and all(name.endswith(("lora_a", "lora_b")) for name in trained)
    added = sum(x.numel() for x in model.parameters() if x.requires_grad)
    assert added == config.parameters(model.config)
    with torch.no_grad():
        for layer in lora.layers(model):
            layer.lora_b.normal_(std=0.1)
        packed, alone = model(tokens, mask=mask), model(tokens)
        export_adapter(model, config, str(tmp_path), tmp_path / "adapter")
        adapted = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
        torch.testing.assert_close(adapted(tokens).logits, alone, rtol=1e-4, atol=1e-5)
        merged = lora.merge(model)(tokens, mask=mask)
        torch.testing.assert_close(merged, packed, rtol=1e-4, atol=1e-5)


def test_a_tensor_that_lora_changes_in_parts_is_refused(tmp_path):
    reference("qwen3_5_text").save_pretrained(tmp_path)
    config = LoraConfig(rank=3, targets=["qkv", "gate"])
    model = lora.add(model_folder.pretrained(tmp_path), config)
    message = r"adapter=true: .*\.q_proj\.weight apart; leave adapter out"
    with pytest.raises(ValueError, match=message):
        export_adapter(model, config, str(tmp_path), tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["apertus", "gemma4_text", "deepseek_v3"])
def test_new_weights_are_all_set(kind):
    with torch.device("meta"):
        model = build(described(settings_of(kind)))
    model.to_empty(device="cpu")
    for weight in model.parameters():
        weight.data.fill_(torch.nan)  # as memory may be that nothing has set
    model.init_weights()
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_counts_are_those_of_transformers():
    theirs = reference("mixtral")
    config = described(settings_of("mixtral"))
    assert config.parameters() == theirs.num_parameters()
    idle = sum(x.numel() for x in theirs.parameters() if x.ndim == 3) // 2  # 2 experts of 4
    outside = theirs.get_input_embeddings().weight.numel()
    matrices = sum(x.numel() for x in theirs.parameters() if x.ndim > 1)
    assert config.matmul_parameters() == matrices - idle - outside
    assert isinstance(build(config), TransformersModel)
