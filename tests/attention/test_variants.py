"""Backends that are not the formula: generation computes what their whole forward does."""

import sys

import pytest
import torch

import longctx
from longctx import cli, plugins
from longctx.attention import Backend, attention, register
from longctx.attention.description import DESCRIPTIONS, AttentionConfig
from longctx.attention.naive import Naive, visible
from longctx.attention.registry import _backends, check
from longctx.config.asked import workload_of
from longctx.config.layout_config import ContextConfig
from longctx.config.train_config import TrainConfig
from longctx.evaluation.evaluate import resolve
from longctx.model import GPT
from longctx.model.decoder import Decoder
from longctx.parallel.devices import check_attention, this_machine
from longctx.spec.model_config import GPTConfig
from longctx.training import kernel_lock
from tests.test_docs import blocks

ALIBI = next(code for code in blocks("extend.md", "python") if "class Alibi" in code)


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


class Liar(Dilated):
    """It says that it is exact."""

    exact = True


@pytest.fixture(autouse=True)
def variants(tmp_path, monkeypatch):
    """Register the variants; forget them, and the plugin of the docs, after the test."""
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_alibi.py").write_text(ALIBI)
    named = {"dilated": Dilated(), "whole": Undecoded(), "liar": Liar(), "true": Naive()}
    for name, backend in named.items():
        register(name, backend)
    plugins.load([str(tmp_path / "my_alibi.py")])
    yield
    forget(*named, "alibi")
    for name in [name for name in sys.modules if name.startswith("my_alibi")]:
        del sys.modules[name]


def forget(*names: str) -> None:
    for name in names:
        _backends.pop(name, None)
        DESCRIPTIONS.pop(name, None)


def small(backend: str) -> GPT:
    torch.manual_seed(0)
    sizes = {"layers": 2, "channels": 48, "heads": 6, "kv_heads": 2, "ffn": 80, "vocab_size": 71}
    config = GPTConfig(**sizes, init_std=0.3, window=5, window_layers=[1], nope_layers=[0, 1])
    return GPT(config, backend).eval().requires_grad_(False)


@pytest.mark.parametrize("backend", ["alibi", "dilated", "whole", "naive", "sdpa"])
def test_steps_are_the_whole_forward(backend, capsys):
    model = small(backend)
    texts = torch.randint(71, (2, 13), generator=torch.Generator().manual_seed(1))
    starts = (7, 4)
    decoder = Decoder(model, 2, 13)
    steps = [decoder.prefill([x[:n].tolist() for x, n in zip(texts, starts, strict=True)])]
    for more in range(5):
        new = torch.stack([x[n + more] for x, n in zip(texts, starts, strict=True)])
        steps.append(decoder.step(new).clone())
    for row, n in enumerate(starts):
        expected = model(texts[row : row + 1])[0, n - 1 : n + 5]
        torch.testing.assert_close(torch.stack(steps)[:, row], expected, rtol=1e-4, atol=1e-4)
    assert ("reads its text anew" in capsys.readouterr().err) == (backend == "whole")
    differs = (small("naive")(texts) - model(texts)).abs().max() > 0.1
    assert differs == (backend in ("alibi", "dilated", "whole"))


def test_a_backend_that_only_says_it_is_exact_is_refused():
    sizes = {"device": "cpu", "dtype": torch.float32, "head_dim": 16, "group": 3}
    for honest in ("true", "dilated", "flash"):
        check(honest, **sizes)
    with pytest.raises(ValueError, match="attention=liar says that it is exact"):
        check("liar", **sizes)
    q = torch.randn(1, 9, 2, 16)
    assert torch.equal(attention(q, q, q, backend="true"), attention(q, q, q, backend="naive"))


WORDS = [
    *("model=tiny", "model.layers=1", "seq_len=64", "data.vocab_size=300", "data.documents=20"),
    *("batch_size=1", "accumulate=1", "max_steps=1", "val_rows=2", "workers=0", "device=cpu"),
    *("tracker=none", "name=a", "plugins=[my_alibi.py]"),
]


def test_every_way_in_takes_the_backend_of_the_run(tmp_path, refused, capsys):
    assert cli.main(["train", "attention=alibi", *WORDS]) == 0
    a_run, plugin = tmp_path / "runs" / "a", "plugins=[my_alibi.py]"
    model, _ = longctx.load(a_run, device="cpu")
    assert model.blocks[0].attention.attend.name == "alibi"
    words = [f"checkpoint={a_run}", plugin, "device=cpu"]
    evaluation = resolve(cli.compose("eval", words), "cpu", this_machine())
    assert evaluation.config.attention == AttentionConfig("alibi")
    generate = ["generate", str(a_run), "prompt=a", "device=cpu"]
    capsys.readouterr()
    refused(cli.main([*generate, plugin, "attention=flash"]), "trained with attention=alibi")
    refused(cli.main(["eval", *words, "attention=flash"]), "trained with attention=alibi")
    refused(cli.main(["export", str(a_run), "out", plugin]), "trained with attention=alibi")
    assert cli.main([*generate, plugin, "max_new_tokens=2"]) == 0
    forget("alibi")
    capsys.readouterr()
    for command in (generate, ["export", str(a_run), "out"], ["eval", *words[::2]]):
        refused(cli.main([*command, "plugins=[]"]), "/my_alibi.py]")


def test_devices_do_not_share_sequences_of_a_variant():
    chosen = {"attention": AttentionConfig("alibi"), "devices": 2}
    check_attention(TrainConfig(**chosen, context=ContextConfig(1)), GPTConfig(), "cpu")
    with pytest.raises(ValueError, match="context=1"):
        check_attention(TrainConfig(**chosen, context=ContextConfig(2)), GPTConfig(), "cpu")


def test_the_lock_has_the_hash_of_a_plugin():
    locks = {}
    for name in ("alibi", "naive"):
        config = TrainConfig(model=small("naive").config, attention=AttentionConfig(name))
        locks[name] = kernel_lock.of_workload(workload_of(config, "cpu", 64))["fingerprint"]
    assert list(locks["alibi"]) == ["my_alibi.py"] and len(locks["alibi"]["my_alibi.py"]) == 64
    assert "out" in locks["naive"]
