"""What identifies kernels: versions and sources."""

import pytest
import torch

from longctx.kernels.attention import fingerprint


def test_sources_are_the_files():
    hashes = fingerprint.sources("triton-hopper")
    hopper = {"hopper_primitives.py", "hopper_forward.py", "hopper_backward.py"}
    assert {"portable.py"} | hopper <= hashes.keys()
    assert fingerprint.sources("torch-tiled").keys() == {"tiled.py"}
    assert fingerprint.sources("torch matmul and softmax") == {}


@pytest.mark.gpu
def test_a_gpu_names_its_compilers():
    machine = fingerprint.machine(torch.device("cuda", 0))
    assert machine["triton"].startswith("3.")
    assert machine["driver"][0].isdigit()
