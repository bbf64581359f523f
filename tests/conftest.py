"""Without a GPU, Triton interprets its kernels: chosen before triton is first imported."""

import gc
import importlib
import os
import signal
from collections.abc import Callable, Iterator

import pytest

gc.disable()  # imports leave nothing to collect: looking for it takes a fifth of their time
# Two workers share two cores: more threads than that only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

# nohup has it ignored, which what a test starts would inherit: then no closed pipe ends a run
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    for name in ("decoding", "portable"):
        importlib.import_module(f"longctx.kernels.attention.{name}")
    names = ("adamw_update", "cross_entropy", "quantize", "rms_norm", "rotary", "swiglu")
    for name in names:
        importlib.import_module(f"longctx.kernels.elementwise.{name}")
    del os.environ["TRITON_INTERPRET"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips, by its marker, what cannot run on this machine."""
    reasons = {"gpu": "runs on a CUDA GPU; this machine has none"}
    if torch.cuda.is_available():
        reasons = {"no_gpu": "needs a machine without a CUDA GPU; this one has one"}
        if torch.cuda.get_device_capability()[0] != 9:
            reasons["hopper"] = "runs on a Hopper GPU; this machine's is another"
    for name, reason in reasons.items():
        for item in items:
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    gc.freeze()  # what is there before the first test stays
    gc.enable()


@pytest.fixture(autouse=True)
def algorithms_as_before() -> Iterator[None]:
    """Ends what a test asks of torch for the whole process: deterministic algorithms."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def pytest_runtest_teardown() -> None:
    """What a test took of a GPU goes back: other workers' tests run out of memory beside it."""
    torch.cuda.empty_cache()


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interprets the kernels where there is no GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[[int, str], str]:
    """Check that a command printed one line with `message` and ended with 2; return the line."""

    def check(code: int, message: str) -> str:
        lines = capsys.readouterr().err.splitlines(keepends=True)
        # Whoever comes first to the documents of a cache tokenizes them, and says so
        error = "".join(line for line in lines if not line.startswith(("data: ", "scoring ")))
        assert code == 2, error
        assert error.startswith("error: "), error
        assert error.count("\n") == 1, error
        assert message in error, error
        return error

    return check
