"""The table of launch configs: an entry for everything that can be asked, and tiles that tile."""

import pytest

from longctx.kernels.flash_op import HEAD_SIZES
from longctx.kernels.launch import table, table_entry
from longctx.kernels.portable import ROW


@pytest.mark.parametrize("arch", list(table()))
@pytest.mark.parametrize("kernel", ["forward", "dkv", "dq"])
def test_every_request_has_an_entry(arch, kernel):
    for head_dim in HEAD_SIZES:
        for length in (1, 100, 4096, 8191, 8192, 1 << 20):
            launch = table_entry(arch, kernel, head_dim, length)
            assert launch.BM >= 16
            assert launch.BN >= 16
            assert launch.BM & (launch.BM - 1) == launch.BN & (launch.BN - 1) == 0, "powers of two"
            assert launch.BM <= ROW.value, (
                "lse and delta are padded to ROW, and read without a mask"
            )
            assert launch.warps in (4, 8)
            assert 1 <= launch.stages <= 5


def test_bucket_is_the_longest_reached():
    start = max(int(s) for s in table()["sm90"]["forward"]["128"])
    assert start > 0
    below, at = (table_entry("sm90", "forward", 128, n) for n in (start - 1, start))
    assert below != at
    assert at == table_entry("sm90", "forward", 128, 2 * start)
