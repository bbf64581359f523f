"""The benchmark of preferences with tiny shapes, on a CPU."""

import pytest

LENGTHS = ["lengths=32", "shortest=16", "longest=64", "step=16", "side=32", "layers=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "cases"),
    [
        (["ours"], ["longctx"]),
        (["lora", "whole"], ["dpo cached", "cross_entropy", "dpo step", "dpo cached"]),
        (["packed"], ["nf4", "fp8"]),
        (["speed", "trl"], ["longctx", *["trl sdpa"] * 4, "trl sdpa, longest"]),
    ],
)
def test_preferences_are_measured(result_of, parts, cases):
    own = [f"parts={','.join(parts)}", "tiny=true", "attentions=sdpa", *LENGTHS]
    rows = result_of("preferences", *own)["results"]
    measured = [row for row in rows if row["case"] != "all of it"]
    assert [row["case"] for row in measured] == cases
    assert not any(row.get("failed") for row in measured)
