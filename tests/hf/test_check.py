"""longctx check: each fault of a mixer is found by the check that is named for it."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from longctx import cli
from longctx.attention.description import SCORES
from longctx.hf import check
from longctx.model.attending import Attending
from longctx.model.mixer import Batch, Mixer
from longctx.model.mixers.description import MIXERS, Cost, register
from tests.model.test_mixers import loaded
from tests.processes import ROOT, finished
from tests.test_docs import blocks


class Sound(Mixer):
    """The token before, in the same document."""

    @classmethod
    def weights(cls, spec):
        return {"out": (spec.size, spec.size)}

    def before(self, x: Tensor, batch: Batch) -> Tensor:
        return pad(x, (0, 0, 1, 0))[:, :-1] * (batch.positions > 0)[..., None]

    def forward(self, x, batch):
        return self.out(self.before(x, batch))

    naive = forward


class Leaking(Sound):
    def before(self, x, batch):
        return pad(x, (0, 0, 1, 0))[:, :-1]


class Peeking(Sound):
    @classmethod
    def weights(cls, spec):
        return super().weights(spec) | {"shares": (spec.size,)}  # zeros in the beginning

    def before(self, x, batch):
        same = (batch.documents == batch.documents.roll(-1, 1))[..., None]
        return pad(x, (0, 0, 0, 1))[:, 1:] * same * self.shares


class Mingling(Sound):  # the sequence before is seen, and no formula shows it
    naive = Mixer.naive

    def forward(self, x, batch):
        return self.out(self.before(x, batch) + x.roll(1, 0) - x)


class Forgetful(Sound):  # decoding reads a token that is not the one before
    def prefill(self, x, batch):
        return self.forward(x, batch), (torch.zeros_like(x[0, : len(batch.offsets) - 1]),)

    def step(self, x, state):
        return self.out(state[:, None])


class Late(Sound):  # the state is lost behind a chunk of 256 tokens
    def forward(self, x, batch):
        return super().forward(x, batch) * (batch.positions < 256)[..., None]


class Gradientless(Sound):
    def forward(self, x, batch):
        return self.out(self.before(x, batch).detach())


class Regrouped(Attending):  # queries get the values of other heads
    def forward(self, q, k, v, batch):
        return q + v.repeat(1, 1, q.shape[2] // v.shape[2], 1)

    def naive(self, q, k, v, batch):
        return q + v.repeat_interleave(q.shape[2] // v.shape[2], 2)


class Dividing(Sound):
    def before(self, x, batch):
        return super().before(x / x.norm(dim=-1, keepdim=True), batch)


class Counting(Sound):
    calls = 0

    def before(self, x, batch):
        self.calls += 1
        return self.calls * super().before(x, batch)


class Drawing(Sound):
    def __init__(self, *given):
        super().__init__(*given)
        self.drawn = float(torch.rand(()))  # in no checkpoint

    def forward(self, x, batch):
        return self.drawn * super().forward(x, batch)


FAULTS = {
    Sound: set(),
    **{x: {"packed = each document alone", "no document leaks"} for x in (Leaking, Mingling)},
    Peeking: {"no document leaks"},
    Forgetful: {"token by token = whole texts"},
    **{x: {"kernel = naive"} for x in (Late, Gradientless, Regrouped)},
    Dividing: {"no NaN from padding"},
    Counting: {"recomputation changes nothing", "resume to the bit"},
    Drawing: {"resume to the bit"},
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_is_found(fault, capsys, monkeypatch):
    monkeypatch.setitem(MIXERS, "fault", fault)
    code = check.check("fault")
    lines = capsys.readouterr().out.splitlines()
    failed = {line[8:40].strip() for line in lines if line.startswith("FAILED")}
    assert failed >= FAULTS[fault] and (code, bool(failed)) in ((0, False), (1, True))
    assert (failed or fault is Sound) and len(lines) == len(check.CHECKS)


@pytest.mark.slow  # a process of its own, which forks two for each
def test_every_check_of_a_cpu_passes(tmp_path):
    names = ["gdn", "kda", "mamba2", "falcon", "mla"]
    names += [f"{ROOT}/examples/{name}.py" for name in ("fox", "xsa", "differential")]
    each = "from longctx.hf.check import check; sys.exit(any([check(x) for x in sys.argv[1:]]))"
    process = finished("-c", [f"import sys; {each}", *names], tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    words = [line.split()[0] for line in process.stdout.splitlines()]
    assert words.count("ok") >= len(names) * (len(check.CHECKS) - 3)


def test_score_functions_of_a_file_are_checked(tmp_path, capsys):
    code = next(code for code in blocks("extend.md", "python") if "def alibi" in code)
    code += 'register_score("x", lambda s, *_: s * torch.ones(1, requires_grad=True))'
    (file := tmp_path / "my_scores.py").write_text(code)
    with loaded(file, SCORES):
        assert check.check(str(file)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:: len(check.CHECKS) + 1] == ["alibi", "first_and_last", "x"]
    assert sum(line.startswith("ok") for line in lines) == 3 * (len(check.CHECKS) - 4)
    assert [line[:24] for line in lines if "no numbers" in line] == ["FAILED  kernel = naive  "]
    with pytest.raises(ValueError, match=r"alibi: no mixer.*; give a file that ends with"):
        check.check("alibi")
    assert check.difference([torch.tensor([1.0, torch.nan])], [torch.ones(2)]) == torch.inf
    assert check.outcome(check.Trial("softmax", "flash", "cpu"), check.decoding)[0] == "ok"


def test_an_error_names_the_line_of_the_file_and_is_printed_once(tmp_path, capsys):
    code = next(code for code in blocks("extend.md", "python") if "class HeadGate" in code)
    # A weight for each head, which two devices have half of
    code = code.replace("(spec.model.heads, spec.size)", "(spec.model.heads,)")
    for old, new in ((", self.gates(x)", ","), ("v, gates", "v"), ("(gates)", "(self.gates)")):
        code = code.replace(old, new)
    (file := tmp_path / "my_heads.py").write_text(code.replace('"head_gate"', '"heads"'))
    with loaded(file):
        assert check.check(str(file)) == 1
    printed = capsys.readouterr()
    (failed,) = [line for line in printed.out.splitlines() if line.startswith("FAILED")]
    line = 1 + code.splitlines().index(next(x for x in code.splitlines() if "self.attended" in x))
    assert f"my_heads.py, line {line}: RuntimeError" in failed and "Traceback" not in printed.err
    assert failed.startswith("FAILED  context=2") and failed.endswith("batch.own_heads")


class Narrow(Sound):
    share, heads = "heads", classmethod(lambda cls, spec: 1)

    @classmethod
    def weights(cls, spec):
        return {"out": (spec.size // 2, spec.size)}

    @classmethod
    def cost(cls, spec, e):
        return Cost(saved=-e * spec.size)


def test_a_wrong_shape_and_a_wrong_cost_are_said(capsys, monkeypatch):
    monkeypatch.setitem(MIXERS, "narrow", Narrow)
    assert check.check("narrow") == 1
    lines = capsys.readouterr().out.splitlines()
    assert "no two to share" in lines[0] and "return (1, 304, 32); give the i" in lines[1]
    assert lines[6].startswith("FAILED  recomputation") and lines[6].endswith("as above")
    assert lines[-1].startswith("FAILED  memory") and "below 0" in lines[-1]


def test_what_is_no_mixer_is_refused(refused, tmp_path):
    refused(cli.main(["check", "gdm"]), "gdm: no mixer")
    (tmp_path / "mine.py").write_text("x = 1\n")
    refused(cli.main(["check", f"{tmp_path}/mine.py"]), "mine.py: no mixer")
    needy = type("Needy", (Sound,), {"needs": "score"})
    for mixer, message in ((torch.nn.Linear, "give a class that d"), (needy, "needs=score: give")):
        with pytest.raises(ValueError, match=rf"model\.mixer=module: {message}"):
            register("module", mixer)
