"""The lock: equal where nothing changed, different where anything did, and about machine code
rather than folders.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longctx.attention import Mask, attention
from longctx.kernels import fingerprint, tiled, toolchain

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
    assert (
        "bfloat16, 1000 tokens in documents, 2 heads on 1, size 32"
        in print_of(dtype=torch.bfloat16)["inputs"]
    )


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
    assert {"portable.py", "tile_schedule.py", "gluon.py"} | hopper <= hashes.keys()
    path = Path(fingerprint.__file__).with_name("tiled.py")
    assert fingerprint.sources("torch-tiled") == {
        "tiled.py": hashlib.sha256(path.read_bytes()).hexdigest()
    }
    assert fingerprint.sources("torch matmul and softmax") == {}


def test_differences_name_field_before_and_now():
    old = {
        "kernel": "a",
        "machine": {"torch": "1", "gpu": "x"},
        "compiled": {"f BM=64": ["1"], "g": ["2"]},
        "earlier": [{"kernel": "z"}],
    }
    assert fingerprint.differences(old, json.loads(json.dumps(old)) | {"earlier": []}) == []
    new = {
        "kernel": "b",
        "machine": {"torch": "1"},
        "compiled": {"f BM=64": ["1"], "g": ["3"], "h": ["4"]},
        "more": 1,
    }
    assert fingerprint.differences(old, new) == [
        ("kernel", "a", "b"),
        ("machine.gpu", "x", "none"),
        ("compiled.g", "2", "3"),
        ("more", "none", "1"),
    ]
    assert ("compiled.h", "4", "none") in fingerprint.differences(new, old), (
        "what the run used must still be compiled"
    )


def test_ptxas_says_its_version():
    assert [len(toolchain.ptxas(arch).split(".")) for arch in (90, 100)] == [3, 3]


def test_machine_of_a_cpu():
    assert toolchain.machine(CPU) == {"torch": torch.__version__, "device": "cpu"}


SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import shared_kernel as module
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from longctx.kernels import fingerprint
source = ASTSource(module.double, {"x": "*fp32", "N": "constexpr"}, {(1,): int(sys.argv[2])})
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
module.double.device_caches[0][0]["key"] = kernel
sys.modules["longctx.kernels.shared_kernel"] = module
print(json.dumps([fingerprint.compiled(["shared_kernel.py"]), kernel.asm["cubin"].hex()]))
"""
KERNEL = """
import triton
import triton.language as tl

@triton.jit
def double(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, tl.load(x + at) * 2)
"""


@pytest.mark.slow
def test_machine_code_hash_ignores_the_folder(tmp_path, monkeypatch):
    """The same kernel in two folders: other line tables, the same code; with another constant,
    other code.
    """
    outputs = []
    root = str(Path(__file__).parents[2])
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    for folder, size in (("a", 128), ("some/where/else", 128), ("a", 256)):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "shared_kernel.py").write_text(KERNEL)
        env |= {"TRITON_CACHE_DIR": str(tmp_path / folder / f"cache{size}"), "PYTHONPATH": root}
        # no driver here, so the cache of a kernel is a plain dictionary
        script = SCRIPT.replace(
            "module.double.device_caches[0][0]",
            "module.double.device_caches.setdefault(0, ({},))[0]",
        )
        process = subprocess.run(
            [sys.executable, "-c", script, tmp_path / folder, str(size)],
            env=env,
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr[-1500:]
        outputs.append(json.loads(process.stdout))
    (one, binary), (elsewhere, other_binary), (larger, _) = outputs
    assert list(one) == ["shared_kernel.double N=128 warps=4 stages=3"]
    assert one == elsewhere
    assert binary != other_binary, "the line tables name their folders"
    assert list(larger.values()) != list(one.values())


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["portable", pytest.param("hopper", marks=pytest.mark.hopper)])
def test_lock_of_a_gpu(kernel):
    device, names = torch.device("cuda", 0), ALL if kernel == "portable" else ("out", "dk", "dv")

    def run(q, k, v, doc_ids):
        return attention(q, k, v, mask=Mask.documents(doc_ids), kernel=kernel), names

    fingerprints = [
        fingerprint.fingerprint(run, device, torch.bfloat16, 128, 2, bucket)
        for bucket in (0, 0, 8192)
    ]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    machine = toolchain.machine(device)
    assert machine["ptxas"][0].isdigit()
    assert machine["triton"].startswith("3.")
    assert machine["driver"][0].isdigit()
    compiled = fingerprint.compiled(fingerprint.sources(f"triton-{kernel}"))
    wanted = {"portable": [f"portable.{name}_kernel" for name in ("forward", "delta", "dkv", "dq")]}
    wanted["hopper"] = [
        "hopper_forward.forward_kernel",
        "hopper_backward.backward_kernel",
        "portable.delta_kernel",
    ]
    for name in wanted[kernel]:
        assert any(key.startswith(name) and "D=128" in key for key in compiled), (
            name,
            list(compiled),
        )
    assert all(len(code) == 64 for codes in compiled.values() for code in codes)
