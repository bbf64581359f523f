"""Fingerprints: equal if nothing changed, different if one bit did."""

import hashlib
from pathlib import Path

import pytest
import torch

from longctx.attention import Mask, attention
from longctx.kernels.attention import fingerprint, tiled

CPU = torch.device("cpu")
ALL = ("out", "dq", "dk", "dv")


def print_of(head_dim=32, group=2, dtype=torch.float32, names=ALL):
    def run(q, k, v, doc_ids):
        return attention(q, k, v, mask=Mask.documents(doc_ids)), names

    return fingerprint.fingerprint(run, CPU, dtype, head_dim, group)


def test_a_fingerprint_is_of_the_results_alone():
    state = torch.get_rng_state()
    first = print_of()
    torch.manual_seed(9)
    assert print_of() == first
    assert first.keys() == {"inputs", *ALL}
    assert len({first[name] for name in ALL}) == 4
    torch.set_rng_state(state)
    assert print_of(head_dim=16)["out"] != first["out"]
    assert print_of(names=("out",)).keys() == {"inputs", "out"}
    assert "bfloat16, 1000 tokens" in print_of(dtype=torch.bfloat16)["inputs"]


def test_one_bit_changes_a_fingerprint(monkeypatch):
    before, original = print_of(), tiled.backward

    def backward(*args):
        dq, dk, dv = original(*args)
        dk.view(torch.int32)[0, 500, 0, 3] ^= 1
        return dq, dk, dv

    monkeypatch.setattr(tiled, "backward", backward)
    assert {name for name in ALL if print_of()[name] != before[name]} == {"dk"}


def test_sources_are_the_files():
    hashes = fingerprint.sources("triton-hopper")
    hopper = {"hopper_primitives.py", "hopper_forward.py", "hopper_backward.py"}
    assert {"portable.py"} | hopper <= hashes.keys()
    path = Path(fingerprint.__file__).with_name("tiled.py")
    assert fingerprint.sources("torch-tiled") == {
        "tiled.py": hashlib.sha256(path.read_bytes()).hexdigest()
    }
    assert fingerprint.sources("torch matmul and softmax") == {}


def test_ptxas_says_its_version():
    assert [len(fingerprint.ptxas(arch).split(".")) for arch in (90, 100)] == [3, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["portable", pytest.param("hopper", marks=pytest.mark.hopper)])
def test_fingerprints_of_a_gpu(kernel):
    device, names = torch.device("cuda", 0), ALL if kernel == "portable" else ("out", "dk", "dv")

    def run(q, k, v, doc_ids):
        return attention(q, k, v, mask=Mask.documents(doc_ids), kernel=kernel), names

    fingerprints = [
        fingerprint.fingerprint(run, device, torch.bfloat16, 128, 2, bucket)
        for bucket in (0, 0, 8192)
    ]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    machine = fingerprint.machine(device)
    assert machine["ptxas"][0].isdigit()
    assert machine["triton"].startswith("3.")
    assert machine["driver"][0].isdigit()
