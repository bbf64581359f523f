"""The traffic benchmark: the literature's figures come out, ncu's list is read case by case, and
its failures are said.
"""

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
    assert at_4k["traffic_ratio"] == 33
    assert at_16k["traffic_ratio"] == 129
    assert at_4k["memory_ratio"] == 9
    assert at_4k["score_matrix_gib"] == 1.0
    assert at_4k["standard_gb"] > 4
    assert at_4k["standard_gb"] / at_4k["fused_gb"] == pytest.approx(33)
    assert shared_memory(128) == 129 * 1024


def fake_ncu(tmp_path, lines, code=0, story=None):
    """A command that prints what ncu would, and leaves what the child would."""
    script = tmp_path / "ncu"
    script.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "words = sys.argv[1:]\n"
        "assert words[words.index('--clock-control') + 1] == 'none'\n"
        "assert 'dram__bytes_read.sum,dram__bytes_write.sum' in words\n"
        f"open(words[words.index('--log-file') + 1], 'w').write({chr(10).join(lines)!r})\n"
        + (f"open(words[-1], 'w').write({json.dumps(story)!r})\n" if story else "")
        + f"sys.exit({code})\n"
    )
    script.chmod(0o755)
    return str(script)


def test_bytes_are_those_of_each_case_less_the_flush(tmp_path):
    cases = [
        {"tokens": 64, "backend": b, "heads": 2, "direction": "forward"} for b in ("naive", "flash")
    ]
    lines = [
        "==PROF== Connected to process 1",
        HEADER,
        '"","","","byte","Kbyte"',
        '"0","1","flush_l2","100","1"',
        '"1","1","bmm","5,000","3"',
        '"2","1","softmax","1000","2"',
        '"3","1","flush_l2","100","1"',
        '"4","1","forward_kernel","600","0.5"',
        '"5","1","flush_l2","100","1"',
    ]
    ncu = fake_ncu(
        tmp_path,
        lines,
        story={"windows": [{"case": "nothing"}, *cases], "shared": [{"kernel": "x"}]},
    )
    counted = traffic.count(Options(lengths=(64,)), ncu)
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
        (
            ["==ERROR== ERR_NVGPUCTRPERM - no permission"],
            1,
            "only administrators read the hardware counters",
        ),
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


def test_heads_are_left_out_until_scores_fit():
    cases = traffic.cases(Options(lengths=(4096, 16384, 131072), backends=("naive", "flash")))
    assert [case["heads"] for case in cases] == [32, 32, 8, 8, 1, 1]


def test_without_ncu_there_are_closed_forms(tmp_path, capsys):
    assert main(["traffic", f"ncu={tmp_path}/none", f"out={tmp_path}/t"]) == 2
    printed = capsys.readouterr()
    assert "129 KiB" in printed.out
    assert "not found" in printed.err
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(
    not shutil.which("ncu"),
    reason="counts bytes by ncu (NVIDIA Nsight Compute), which is not on PATH here",
)
def test_counted_bytes_cover_the_least_traffic(tmp_path):
    assert (
        main(["traffic", "lengths=2048", "heads=8", "backends=naive,flash", f"out={tmp_path}/t"])
        == 0
    )
    report = json.loads((tmp_path / "t.json").read_text())
    moved = {(row["backend"], row["direction"]): row for row in report["rows"]}
    assert moved["flash", "forward"]["read_gb"] > 0.5 * 3 * 2048 * 8 * 128 * 2 / 1e9
    assert moved["naive", "forward"]["moved_gb"] > 3 * moved["flash", "forward"]["moved_gb"]
    assert any("forward" in row["kernel"] for row in report["shared"])
