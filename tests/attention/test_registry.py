"""The registry: explicit requests, no fallback, what ran on record, and room for backends from
outside.
"""

from pathlib import Path

import pytest
import torch

from longctx.attention import Mask, attention, backends, check, kernels_run, register
from longctx.attention.naive import Naive

CONFIGS = Path(__file__).parent.parent.parent / "configs" / "attention"
q = torch.randn(1, 5, 2, 16)


def test_every_backend_has_its_yaml_and_its_test():
    names = set(backends())
    assert names >= {"naive", "sdpa", "flash", "flex", "flash_attn"}
    assert names == {p.stem for p in CONFIGS.glob("*.yaml")}
    assert names <= {p.stem.removeprefix("test_") for p in Path(__file__).parent.glob("test_*.py")}


def test_backends_says_what_is_missing():
    have = backends()
    assert have["naive"] is None
    assert have["flash"] is None
    if not torch.cuda.is_available():
        assert "needs a CUDA GPU" in have["flash_attn"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: attention(q, q, q, backend="flahs"),
            "attention=flahs is not a backend; choose one of",
        ),
        (
            lambda: attention(q, q, q, backend="sdpa", kernle="flash"),
            "options.kernle=flash is not an option of sdpa",
        ),
        (
            lambda: attention(q, q, q, backend="sdpa", kernel="fastest"),
            "must be one of auto, flash, cudnn",
        ),
        (
            lambda: attention(q.double(), q.double(), q.double(), backend="flash"),
            "use attention=naive",
        ),
        (lambda: attention(q, q[:, :, :0], q[:, :, :0]), "sizes of at least 1"),
        (
            lambda: attention(q.expand(1, 5, 2, 16)[:, :, [0, 1, 0]], q, q),
            "3 query heads are not a multiple of 2",
        ),
        (lambda: attention(q, q.half(), q.half()), "one dtype"),
        (lambda: attention(q.long(), q.long(), q.long()), "fp32, bf16 or fp16"),
        (lambda: attention(q, q, q, scale=-1.0), "scale=-1.0 must be above 0"),
        (lambda: attention(q[0], q, q), "takes q"),
        (
            lambda: check("flash_attn", device="cpu", dtype=torch.bfloat16, head_dim=64),
            "use attention=flash",
        ),
        (
            lambda: check("flex", device="cpu", dtype=torch.bfloat16, head_dim=64),
            "use attention=flash",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_kernel_that_ran_is_recorded():
    attention(q, q, q, backend="naive")
    attention(q, q, q, backend="sdpa")
    assert kernels_run()["naive"] == "torch matmul and softmax"
    assert kernels_run()["sdpa"] == "torch CPU flash"


def test_a_backend_from_outside_is_one_call_away():
    class Twice(Naive):
        def run(self, q, k, v, mask, scale):
            out, lse, _ = super().run(q, k, v, mask, scale)
            return 2 * out, lse, "twice"

    register("twice", Twice())
    assert torch.equal(attention(q, q, q, backend="twice"), 2 * attention(q, q, q, backend="naive"))
    assert kernels_run()["twice"] == "twice"
    with pytest.raises(ValueError, match="already registered"):
        register("twice", Naive())
    from longctx.attention.registry import _backends

    del _backends["twice"]


def test_autocast_chooses_the_dtype():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, q, q).dtype == torch.bfloat16
        assert attention(q, q.bfloat16(), q.bfloat16(), mask=Mask.full()).dtype == torch.bfloat16


def test_lse_is_natural_log():
    out, lse = attention(q[:, :1], q[:, :1], q[:, :1], backend="naive", return_lse=True)
    expected = (q[0, 0] ** 2).sum(-1) * 16**-0.5
    torch.testing.assert_close(lse[0, :, 0], expected)
    torch.testing.assert_close(out, q[:, :1])
