"""Attention that is not the formula, by score functions or by a backend: packed documents are as
alone, and generation computes what the whole forward does.
"""

import itertools
from dataclasses import replace

import pytest
import torch

import longctx
from longctx import cli, plugins
from longctx.attention import Backend, Mask, attention, flex, register, register_score
from longctx.attention.description import DESCRIPTIONS, SCORES, AttentionConfig
from longctx.attention.naive import Naive, visible
from longctx.attention.registry import _backends, check
from longctx.config.asked import workload_of
from longctx.config.layout_config import ContextConfig, MemoryConfig
from longctx.config.train_config import TrainConfig
from longctx.evaluation.evaluate import resolve
from longctx.kernels.attention import Scores
from longctx.model import GPT
from longctx.model.decoder import Decoder
from longctx.parallel.devices import check_attention, this_machine
from longctx.planner.fitting import ways
from longctx.spec.model_config import GPTConfig
from longctx.training import kernel_lock
from tests.inputs import check_decoding
from tests.model.test_mixers import loaded
from tests.test_docs import blocks

SCORES_OF_DOCS = next(code for code in blocks("extend.md", "python") if "def alibi" in code)
ALIBI = AttentionConfig("naive", {"score": "alibi"})


def dilated(b, h, q_idx, kv_idx):
    """Head h sees every (h + 1)-th key of the document, its own among them."""
    return (q_idx - kv_idx) % (h + 1) == 0


def ends(b, h, q_idx, kv_idx):
    """Two intervals: the first keys of the document and the last ones."""
    return (kv_idx < 3) | (q_idx - kv_idx < 9)


def of_places(score, b, h, q_idx, kv_idx):
    """Scores depend on both positions, not on their distance alone."""
    return score + torch.cos(q_idx * 0.3 + kv_idx * kv_idx * 0.1) * (h + 1)


def branches(score, b, h, q_idx, kv_idx):
    return score if q_idx > kv_idx else 0 * score


class Dilated(Naive):
    """Every second key, its own among them."""

    exact = False

    def run(self, q, k, v, mask, scores, **options):
        last, keys = mask.last[..., None], torch.arange(k.shape[1], device=q.device)
        sees = visible(mask, k.shape[1]) & ((last - keys) % 2 == 0)[:, None]
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        s = torch.einsum("bihd,bjhd->bhij", q, k) * scores.scale
        s = s.masked_fill(~sees, -torch.inf)
        return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v), s.logsumexp(-1), "dilated"

    decode = run


class Undecoded(Dilated):
    """It computes a whole text alone."""

    decode = Backend.decode


class Liar(Dilated):  # it says that it is exact
    exact = True


class Shortsighted(Naive):
    """It knows no windows."""

    def run(self, q, k, v, mask, scores, **options):
        whole = Mask.documents(mask.doc_ids).bind(*q.shape[:2], k.shape[1], q.device)
        return super().run(q, k, v, whole, scores)


@pytest.fixture(autouse=True)
def variants(tmp_path, monkeypatch):
    """Register the variants, and the plugin of the docs; forget them after the test."""
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_scores.py").write_text(SCORES_OF_DOCS)
    named = {"dilated": Dilated(), "whole": Undecoded(), "liar": Liar(), "true": Naive()}
    named["shortsighted"] = Shortsighted()
    for name, backend in named.items():
        register(name, backend)
    with loaded(tmp_path / "my_scores.py", SCORES):
        register_score("dilated", mask_mod=dilated)
        register_score("ends", mask_mod=ends)
        register_score("both", of_places, dilated)
        yield
    forget(*named)


def forget(*names: str) -> None:
    for name in names:
        _backends.pop(name, None)
        DESCRIPTIONS.pop(name, None)
    for name in [name for name in SCORES if name != "none"]:
        del SCORES[name]


IDS = torch.tensor([[0] * 50 + [1] * 99 + [2] * 151, [0] * 201 + [4] * 99])
NAMES = ["alibi", "ends", "dilated", "both"]


def tensors(device="cpu", dtype=torch.float32, size=16) -> list[torch.Tensor]:
    """q, k, v, do for the documents of IDS."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 300, heads, size) for heads in (6, 2, 2, 6)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize("name", NAMES)
def test_scores_of_packed_documents_are_as_alone(name):
    q, k, v, _ = tensors()
    for window in (None, 30):
        out = attention(q, k, v, Mask.documents(IDS, window), backend="naive", score=name)
        plain = attention(q, k, v, Mask.documents(IDS, window), backend="naive")
        assert (out - plain).abs().max() > 0.1
        for row, first, last in ((0, 50, 149), (0, 149, 300), (1, 201, 300)):
            own = (x[row : row + 1, first:last] for x in (q, k, v))
            alone = attention(*own, Mask.causal(window), backend="naive", score=name)
            torch.testing.assert_close(out[row : row + 1, first:last], alone)


def test_full_masks_and_flex_beyond_its_indices_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="score=both: needs a causal mask"):
        attention(*tensors()[:3], Mask.full(), backend="naive", score="both")
    with pytest.raises(ValueError, match=r"flex is wrong for 2\^31 elements of q"):
        flex.Flex().run(*[torch.empty(1, 2**25, 1, 64, device="meta")] * 3, Mask.causal(), Scores())
    # Views that reach 3 · 2^30 elements far are copied
    aux = flex.torch_flex.AuxOutput()
    monkeypatch.setattr(flex, "compiled", lambda _: lambda q, k, v, **_: (v, aux))
    qkv = torch.empty(1, 2**20, 3, 16, 64, device="meta").unbind(2)
    assert flex.Flex().run(*qkv, Mask.causal().bind(1, 4, 4, "cpu"), Scores())[0].is_contiguous()


def test_a_score_function_is_the_formula_by_hand():
    q, k, v, _ = tensors()
    out = attention(q, k, v, backend="naive", score="both", softcap=3.0)
    i, j = torch.arange(300)[:, None], torch.arange(300)
    for head in (0, 5):
        s = 3 * torch.tanh(q[1, :, head] @ k[1, :, head // 3].T / 4 / 3)
        s = s + torch.cos(i * 0.3 + j * j * 0.1) * (head + 1)
        s = s.masked_fill((j > i) | ((i - j) % (head + 1) != 0), -torch.inf)
        torch.testing.assert_close(out[1, :, head], s.softmax(-1) @ v[1, :, head // 3])


def test_flex_computes_the_functions_of_naive(monkeypatch):
    # FlexAttention's own formula, as a CPU compiles no backward
    monkeypatch.setattr(flex, "compiled", lambda function: function)
    q, k, v = (x[:1, :160] for x in tensors()[:3])
    changed = Scores(scale=0.3, softcap=2.0, key_bias=torch.randn(1, 6, 160))
    for name, window, scores in (("alibi", None, Scores(scale=0.3)), ("both", 40, changed)):
        mask = Mask.documents(IDS[:1, :160], window).bind(1, 160, 160, "cpu")
        expected = Naive().run(q, k, v, mask, scores, score=name)
        actual = flex.Flex().run(q, k, v, mask, scores, score=name)
        torch.testing.assert_close(actual[:2], expected[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_compiled_flex_has_the_gradients_of_naive(name):
    *qkv, do = tensors("cuda", torch.bfloat16, 64)
    for window in (None, 40):
        results = []
        for backend, dtype in (("naive", torch.float64), ("naive", torch.bfloat16), ("flex", None)):
            leaves = [x.to(dtype or x.dtype).requires_grad_() for x in qkv]
            out = attention(*leaves, Mask.documents(IDS, window), backend=backend, score=name)
            grads = torch.autograd.grad(out, leaves, do.to(out.dtype))
            results.append([x.double() for x in (out, *grads)])
        for exact, plain, x in zip(*results, strict=True):
            assert (x - exact).norm() <= 2 * (plain - exact).norm() + 1e-3 * exact.norm()


def test_a_name_belongs_to_one_file(tmp_path):
    register_score("dilated", mask_mod=dilated)
    (tmp_path / "other.py").write_text(SCORES_OF_DOCS)
    with pytest.raises(ValueError, match="score=alibi is already registered"):
        plugins.load([str(tmp_path / "other.py")])
    with pytest.raises(ValueError, match="score=none is already"):
        register_score("none", of_places)
    with pytest.raises(ValueError, match="score=nothing: one of none, alibi"):
        attention(*tensors()[:3], backend="naive", score="nothing")


def small(backend: AttentionConfig | str, mixer: str = "softmax") -> GPT:
    torch.manual_seed(0)
    sizes = {"layers": 2, "channels": 48, "heads": 6, "kv_heads": 2, "ffn": 80, "vocab_size": 71}
    layers = {"window": 5, "window_layers": [1], "nope_layers": [0, 1], "mixer": [mixer]}
    config = GPTConfig(**sizes, **layers, init_std=0.3)
    return GPT(config, backend).eval().requires_grad_(False)


BACKENDS = [ALIBI, AttentionConfig("naive", {"score": "both"}), "dilated", "whole", "naive", "sdpa"]


@pytest.mark.parametrize("mixer", ["softmax", "mla"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_are_the_whole_forward(backend, mixer):
    model, is_formula = small(backend, mixer), backend in ("naive", "sdpa")
    texts = torch.randint(71, (2, 13), generator=torch.Generator().manual_seed(1))
    check_decoding(decoder := Decoder(model, 2, 13), texts, (7, 4), 5)
    # The cached latents of mla have the formula alone
    assert decoder.decodes == (backend != "whole" if mixer == "softmax" else is_formula)
    differs = (small("naive", mixer)(texts) - model(texts)).abs().max() > 0.1
    assert differs != is_formula


def test_a_backend_that_only_says_it_is_exact_is_refused(monkeypatch):
    sizes = {"device": "cpu", "dtype": torch.float32, "head_dim": 16, "group": 3}
    for honest in ("true", "dilated", "flash"):
        check(honest, **sizes)
    for name in ("liar", "shortsighted"):
        with pytest.raises(ValueError, match=f"attention={name} says that it is exact"):
            check(name, **sizes)
    for run, message in (
        (lambda *_: (0, 0), ": ValueError: not enough values to unpack"),
        (lambda *_: None, ": TypeError: cannot unpack"),
        (lambda _, q, *__: (q[:, 1:], q, ""), ": RuntimeError: The size of tensor"),
        (lambda *_: [][0], r", line \d+, in <lambda>: IndexError"),
    ):
        monkeypatch.setattr(Liar, "run", run)
        with pytest.raises(ValueError, match=rf"^attention=liar: .*\.py{message}.*; run returns"):
            check("liar", **sizes)
    for name, function, message in (
        ("learned", lambda x, *_: x * torch.ones(1, requires_grad=True), "has no numbers of it"),
        ("branches", branches, r"test_variants\.py, line \d+, in branches: .* torch\.where"),
        ("narrow", lambda score: score, "takes 1 positional argument but 5 were given"),
        ("nan", lambda score, *_: score.log(), r"test_variants\.py: outputs are NaN"),
        ("blind", lambda score, *_: score - torch.inf, "hides every key from every query"),
        ("random", lambda score, *_: score * torch.rand(()), "two calls differ"),
    ):
        register_score(name, function)
        with pytest.raises(ValueError, match=rf"^attention\.options\.score={name}: .*{message}"):
            check("naive", **sizes, options={"score": name})


WORDS = [
    *("model=tiny", "model.layers=1", "seq_len=64", "data.vocab_size=300", "data.documents=20"),
    *("batch_size=1", "accumulate=1", "max_steps=1", "val_rows=2", "workers=0", "device=cpu"),
    *("tracker=none", "name=a", "plugins=[my_scores.py]"),
]


def test_every_way_in_takes_the_scores_of_the_run(tmp_path, refused, capsys):
    chosen = ["attention=naive", "attention.options.score=alibi"]
    assert cli.main(["train", *chosen, *WORDS]) == 0
    a_run, plugin = tmp_path / "runs" / "a", "plugins=[my_scores.py]"
    model, _ = longctx.load(a_run, device="cpu")
    assert model.blocks[0].attention.attend.options == {"score": "alibi"}
    words = [f"checkpoint={a_run}", plugin, "device=cpu"]
    evaluation = resolve(cli.compose("eval", words), "cpu", this_machine())
    assert evaluation.config.attention == ALIBI
    generate = ["generate", str(a_run), "prompt=a", "device=cpu"]
    capsys.readouterr()
    trained = "trained with attention.options.score=alibi"
    refused(cli.main([*generate, plugin, "attention=flash"]), trained)
    refused(cli.main(["eval", *words, "attention=sdpa"]), trained)
    refused(cli.main(["export", str(a_run), "out", plugin]), trained)
    no_softmax = ["train", *chosen, *WORDS, "model.mixer=[gdn]"]
    refused(cli.main(no_softmax), "score=alibi: no layer has softmax attention; leave it out")
    refused(cli.main([*generate, plugin, "attention=flex"]), "on a CPU; use attention=naive")
    assert cli.main([*generate, plugin, "attention=naive", "max_new_tokens=2"]) == 0
    capsys.readouterr()
    begun = [x for x in WORDS[2:] if not x.startswith(("data.vocab_size", "plugins"))]
    assert cli.main(["train", f"init={a_run}", *begun, "dry_run=true", "plugins=[]"]) == 0
    assert trained in capsys.readouterr().out
    forget()
    capsys.readouterr()
    for command in (generate, ["export", str(a_run), "out"], ["eval", *words[::2]]):
        refused(cli.main([*command, "plugins=[]"]), "/my_scores.py]")


@pytest.mark.parametrize("variant", [ALIBI, AttentionConfig("dilated")])
def test_heads_of_a_variant_stay_together(variant):
    alone = TrainConfig(attention=variant, devices=2, context=ContextConfig(1))
    check_attention(alone, GPTConfig(), "cpu")
    with pytest.raises(ValueError, match="context=1"):
        check_attention(replace(alone, context=ContextConfig(2)), GPTConfig(), "cpu")
    parts = MemoryConfig("balanced", heads_at_once=1)
    with pytest.raises(ValueError, match="heads_at_once=0"):
        check_attention(replace(alone, memory=parts), GPTConfig(), "cpu")
    workload = workload_of(TrainConfig(model=small("naive").config), "cpu", 64)
    for chosen, parts in ((AttentionConfig("naive"), {0, 1, 2}), (variant, {0})):
        open_step = replace(workload, memory=MemoryConfig(), attention=chosen)
        found = [x for way in ways(open_step) for x in itertools.chain(*way)]
        assert {x.heads_at_once for x in found if x.policy == "balanced"} == parts


def test_the_lock_has_the_hash_of_a_plugin():
    locks = []
    for chosen in (ALIBI, AttentionConfig("naive")):
        config = TrainConfig(model=small("naive").config, attention=chosen)
        locks.append(kernel_lock.of_workload(workload_of(config, "cpu", 64))["fingerprint"])
    assert len(locks[0].pop("my_scores.py")) == 64
    assert locks[0]["out"] != locks[1]["out"]
