"""The traffic benchmark: closed forms, the bytes of ncu's list by case, its failures."""

import json
import shutil
import sys

import pytest

from benchmarks import traffic
from benchmarks.traffic import Options, closed_forms, shared_memory
from benchmarks.words import main

HEADER = '"ID","Process ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"'


def test_closed_forms_are_those_of_the_literature():
    at_4k, at_16k = closed_forms(4096, 128, 32), closed_forms(16384, 128, 32)
    assert (at_4k["traffic_ratio"], at_16k["traffic_ratio"]) == (33, 129)
    assert (at_4k["memory_ratio"], at_4k["score_matrix_gib"]) == (9, 1.0)
    assert at_4k["standard_gb"] > 4
    assert at_4k["standard_gb"] / at_4k["fused_gb"] == pytest.approx(33)
    assert shared_memory(128) == 129 * 1024


FAKE_NCU = """#!{}
import sys
words = sys.argv[1:]
assert words[words.index("--clock-control") + 1] == "none"
assert "dram__bytes_read.sum,dram__bytes_write.sum" in words
open(words[words.index("--log-file") + 1], "w").write({!r})
if (story := {!r}) != "null":
    open(words[-1], "w").write(story)
sys.exit({})
"""


def fake_ncu(tmp_path, lines, code=0, story=None):
    """A command that prints what ncu would, and leaves what the child would."""
    script = tmp_path / "ncu"
    script.write_text(FAKE_NCU.format(sys.executable, "\n".join(lines), json.dumps(story), code))
    script.chmod(0o755)
    return str(script)


def test_bytes_are_those_of_each_case_less_the_flush(tmp_path):
    cases = [
        {"tokens": 64, "backend": b, "heads": 2, "direction": "forward"} for b in ("naive", "flash")
    ]
    lines = ["==PROF== Connected to process 1", HEADER, '"","","","byte","Kbyte"']
    flush = '"0","1","flush_l2","100","1"'
    lines += [flush, '"1","1","bmm","5,000","3"', '"2","1","softmax","1000","2"']
    lines += [flush, '"4","1","forward_kernel","600","0.5"', flush]
    story = {"windows": [{"case": "nothing"}, *cases], "shared": [{"kernel": "x"}]}
    counted = traffic.count(Options(lengths=(64,)), fake_ncu(tmp_path, lines, story=story))
    naive, flash = traffic.with_ratios(counted["rows"])
    assert naive["read_gb"] == pytest.approx(6e-6)
    assert naive["write_gb"] == pytest.approx(5e-6)
    assert naive["kernels"] == ["bmm", "softmax"]
    assert flash["moved_gb"] == pytest.approx(1.1e-6)
    assert naive["ratio"] == pytest.approx(10)
    assert flash["ratio"] == 1
    assert counted["shared"] == [{"kernel": "x"}]


@pytest.mark.parametrize(
    ("lines", "code", "message"),
    [
        (["==ERROR== ERR_NVGPUCTRPERM - no permission"], 1, "administrators"),
        (["==ERROR== Failed to initialize the profiler: LibraryNotLoaded"], 1, "LibraryNotLoaded"),
        ([], 0, "ncu printed nothing"),
        ([HEADER, '"","","","byte","byte"', '"0","1","flush_l2","n/a","1"'], 0, "n/a"),
    ],
)
def test_unreadable_counters_are_reported(tmp_path, lines, code, message):
    story = {"windows": [{"case": "nothing"}], "shared": []} if code == 0 and lines else None
    with pytest.raises(ValueError, match=r"counter|counted") as error:
        traffic.count(Options(lengths=(64,)), fake_ncu(tmp_path, lines, code, story))
    assert message in str(error.value)


@pytest.mark.no_gpu
def test_without_ncu_or_gpu_closed_forms_are_printed(tmp_path, capsys):
    for ncu, problem in ((f"{tmp_path}/none", "not found"), (fake_ncu(tmp_path, []), "CUDA GPU")):
        assert main(["traffic", f"ncu={ncu}", f"out={tmp_path}/t"]) == 2
        printed = capsys.readouterr()
        assert "129 KiB" in printed.out or "GPU" in problem
        assert problem in printed.err


@pytest.mark.gpu
@pytest.mark.skipif(
    not shutil.which("ncu"),
    reason="counts bytes by ncu (NVIDIA Nsight Compute), which is not on PATH here",
)
def test_counted_bytes_are_at_least_those_moved(result_of):
    report = result_of("traffic", "lengths=2048", "heads=8", "backends=naive,flash")
    moved = {(row["backend"], row["direction"]): row for row in report["rows"]}
    assert moved["flash", "forward"]["read_gb"] > 0.5 * 3 * 2048 * 8 * 128 * 2 / 1e9
    assert moved["naive", "forward"]["moved_gb"] > 3 * moved["flash", "forward"]["moved_gb"]
    assert any("forward" in row["kernel"] for row in report["shared"])
