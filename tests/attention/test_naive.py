"""naive against the correctness rule."""

import pytest
import torch

from longctx.attention import attention
from tests.attention.rule import FREE, GRID, Case, check, inputs


@pytest.mark.parametrize("case", GRID + FREE, ids=str)
def test_rule(case):
    check(case, "naive", torch.float32)


def test_against_the_loop_in_the_textbook():
    """The oracle itself, against softmax written out query by query in fp64."""
    case = Case(2, 7, 9, Hq=4, Hkv=2, D=8, mask="intervals")
    q, k, v, _ = (x.double() for x in inputs(case, torch.float64))
    mask = case.build_mask()
    out, lse = attention(q, k, v, mask=mask, backend="naive", scale=0.3, return_lse=True)
    for b in range(2):
        for h in range(4):
            for i in range(7):
                keys = slice(int(mask.first[b, i]), int(mask.last[b, i]) + 1)
                s = 0.3 * (k[b, keys, h // 2] @ q[b, i, h])
                expected = (
                    torch.softmax(s, 0) @ v[b, keys, h // 2]
                    if len(s)
                    else torch.zeros_like(q[b, i, h])
                )
                torch.testing.assert_close(out[b, i, h], expected)
                assert lse[b, h, i].item() == pytest.approx(
                    torch.logsumexp(s, 0).item() if len(s) else float("-inf"), 1e-5
                )
