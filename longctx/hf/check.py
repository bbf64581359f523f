"""longctx check: what must hold for a mixer or an attention backend, measured on small models.

A check returns the largest relative difference that it found and the one allowed, or why it cannot
run here. On a GPU the kernel computes in bf16 and the formula in fp32, so rounding explains some.
For a model of transformers, proof.py next to this file is the check.
"""

from __future__ import annotations

import copy
import inspect
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longctx import attention, plugins
from longctx.attention import Attention, Mask, registered
from longctx.attention.context_parallel import Context
from longctx.attention.description import DESCRIPTIONS, SCORES, AttentionConfig
from longctx.config.fields import refuse
from longctx.config.layout_config import MemoryConfig
from longctx.hf.model_folder import read_config
from longctx.model.decoder import decoder_of
from longctx.model.gpt import GPT
from longctx.model.loss import IGNORED
from longctx.model.mixer import Batch, Mixer
from longctx.model.mixers.description import MIXERS, SOFTMAX, class_of, shared_heads
from longctx.spec.model_config import GPTConfig

LENGTHS = (1, 2, 33, 70, 5, 64, 17)  # of documents; the last one is padding in a step
CHANGED = 60  # the leak check changes the fourth document from this token on
LARGE = 2**31  # elements, from which on offsets of 32 bits are wrong
EXACT = 5e-5
SIZES: Any = {"channels": 64, "heads": 4, "kv_heads": 4, "ffn": 96, "vocab_size": 97, "layers": 2}
POLICIES = (
    MemoryConfig("balanced", mlp_tile=50),
    MemoryConfig("balanced", keep_every=2, attention_again=1.0),
)
# Folders of code that is not the user's
INSTALLED = tuple(str(Path(x).parent) for x in (plugins.__file__, os.__file__, torch.__path__[0]))
Found = tuple[float, float] | str  # difference and limit, or why a check is skipped


@dataclass(frozen=True)
class Trial:
    """A mixer, or softmax attention by a backend, in small models on `device`."""

    mixer: str
    backend: str
    device: str
    score: str = "none"

    @property
    def attention(self) -> AttentionConfig:
        """Return the backend, and its score function if there is one."""
        return AttentionConfig(self.backend, {} if self.score == "none" else {"score": self.score})

    @property
    def rounding(self) -> float:
        """Return a difference that rounding explains."""
        return 5e-2 if self.device == "cuda" else EXACT

    def autocast(self, enabled: bool = True) -> Any:
        return torch.autocast(self.device, torch.bfloat16, enabled and self.device == "cuda")

    def model(self, memory: MemoryConfig | str = "fast", seed: int = 0, **sizes: int) -> GPT:
        """Return a model with random weights, the same each time."""
        torch.manual_seed(seed)
        config = GPTConfig(mixer=[self.mixer], init_std=0.1, **SIZES | sizes)
        model = GPT(config, self.attention, memory)
        for weight in model.parameters():  # zeros would hide what they multiply
            weight.data += torch.randn_like(weight) / 10 * (weight.min() == weight.max())
        return model.to(self.device)

    def inputs(self, rows: int, tokens: int = sum(LENGTHS), size: int = 64) -> Tensor:
        """Return random inputs of a layer, the same each time."""
        generator = torch.Generator(self.device).manual_seed(1)
        return torch.randn(rows, tokens, size, generator=generator, device=self.device)

    def branch(
        self, model: GPT, inputs: Tensor, lengths: Sequence[int] = LENGTHS, naive: bool = False
    ) -> list[Tensor]:
        """Return what the first layer makes of x (B, T, C), packed documents of these lengths, and
        its gradients by inputs and by each weight. `naive` is the formula in fp32.
        """
        layer, (rows, tokens) = copy.copy(model.blocks[0].attention), inputs.shape[:2]
        mask = documents(lengths, rows).bind(rows, tokens, tokens, inputs.device)
        shards = Context().shards(mask, tokens)
        angles = model.angles(mask, shards, (rows, tokens), inputs.device)[0]
        is_mixer = isinstance(layer, Mixer)
        compute = layer.naive if naive and is_mixer else layer
        if naive and not is_mixer:
            layer.attend = Attention("naive", self.attention.options)
        inputs = inputs.detach().requires_grad_()
        with self.autocast(not naive):
            out = compute(*layer.project(inputs, *angles), model.masks(mask, shards, rows)[0])
            added = layer.branch(out, inputs).float()
        if is_mixer:
            layer.part.check_shape("forward and branch return", added, inputs.shape)
        return [added.detach(), *torch.autograd.grad(added, [inputs, *layer.parameters()], added)]

    def step(self, model: GPT, reduces: bool = False) -> list[Tensor]:
        """Return the loss of packed documents, and every gradient; of all ranks if it `reduces`."""
        tokens = torch.arange(2 * sum(LENGTHS)).view(2, -1).square().remainder(89) + 1
        targets, padding = tokens.roll(-1, 1), slice(-LENGTHS[-1], None)
        tokens[:, padding], targets[:, padding] = 0, IGNORED
        with torch.no_grad():
            model.embed.weight[0] = 0
        with self.autocast():
            mask = documents(LENGTHS, 2)
            loss = model(tokens.to(self.device), targets.to(self.device), mask)
        results = [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
        for result in results if reduces else []:
            dist.all_reduce(result)
        return results


def documents(lengths: Sequence[int], rows: int) -> Mask:
    """Return the mask of packed documents, the same ones in each row."""
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return Mask.documents(numbers.expand(rows, -1))


@torch.no_grad()
def difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the largest difference of a tensor, relative to its norm; infinite for NaN."""
    norms = torch.stack([x.float().norm() for x in wanted])
    # A gradient of terms that cancel is rounding alone: a hundredth of all norms is the least
    least = norms.norm().clamp(min=1e-20) / 100
    errors = [(x.float() - y.float()).norm() for x, y in zip(found, wanted, strict=True)]
    return float((torch.stack(errors) / norms.clamp(min=least)).nan_to_num(nan=torch.inf).max())


def devices(trial: Trial) -> Found:
    """Compare a step of two processes, which share sequences, with one, on the CPU."""
    if trial.mixer != SOFTMAX and shared_heads(trial.model().config) % 2:
        return 'it has no share = "heads", or no two to share, so context=2 is refused'
    if variant := trial.attention.variant:
        return f"{variant} is not the formula of attention, so context=N is refused"
    children = []
    on_cpu = replace(trial, device="cpu", backend=trial.backend.replace("flex", "naive"))
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(2):
            children.append(os.fork())
            if children[-1] == 0:
                _compare_ranks(on_cpu, rank, Path(folder))
        for child in children:
            os.waitpid(child, 0)
        # The first error: a rank that waits for the failed one reports a lost connection
        failed = sorted(Path(folder).glob("failed*"), key=lambda file: file.stat().st_mtime_ns)
        if failed:
            hint = "each device has half of the heads, see batch.own_heads"
            raise ChildProcessError(f"{failed[0].read_text()}; {hint}")
        answers = [float(file.read_text()) for file in Path(folder).glob("rank*")]
    refuse((len(answers) < 2, "a process ended early"))
    return max(answers), EXACT


def _compare_ranks(trial: Trial, rank: int, folder: Path) -> None:
    """Write the difference that rank `rank` of two finds, and end this process."""
    try:
        torch.set_num_threads(1)
        meeting: Any = {"init_method": f"file://{folder}/meeting", "rank": rank, "world_size": 2}
        dist.init_process_group("gloo", **meeting, timeout=timedelta(seconds=60))
        model = trial.model()
        wanted = trial.step(model)
        model.context = Context(dist.group.WORLD)
        found = difference(trial.step(model, reduces=True), wanted)
        (folder / f"rank{rank}").write_text(str(found))
    except BaseException as error:
        (folder / f"failed{rank}").write_text(described(error))
    finally:
        os._exit(0)


def formula(trial: Trial) -> Found:
    """Compare output and every gradient with those of the formula."""
    if trial.mixer != SOFTMAX and class_of(trial.mixer).naive is Mixer.naive:
        return "it has no naive to compare forward with; write the formula"
    if not DESCRIPTIONS[trial.backend].exact:
        return "attention is not exact"
    if trial.score != "none":  # what a run refuses
        options = {"score": trial.score}
        attention.check("naive", device="cpu", dtype=torch.float32, head_dim=16, options=options)
    if trial.mixer == SOFTMAX and trial.backend == "naive":
        return "naive itself computes it; on a GPU flex does"
    model, inputs, lengths = trial.model(), trial.inputs(1, 304), (1, 33, 270)  # a chunk has 256
    with suppress(ValueError):  # of a mixer that refuses it; two queries share a key
        model = trial.model(kv_heads=2)
    both = (trial.branch(model, inputs, lengths, naive) for naive in (False, True))
    return difference(*both), trial.rounding


def alone(trial: Trial) -> Found:
    """Compare output and gradients of packed documents with those of each document alone."""
    model, inputs = trial.model(), trial.inputs(2)
    parts = [part for row in inputs.split(1) for part in row.split(LENGTHS, dim=1)]
    results = [trial.branch(model, part, part.shape[1:2])[:2] for part in parts]
    joined = [torch.cat(each, dim=1).view_as(inputs) for each in zip(*results, strict=True)]
    return difference(trial.branch(model, inputs)[:2], joined), trial.rounding


def leak(trial: Trial) -> Found:
    """Change the end of a document; look at tokens before it, and at all other documents."""
    model, inputs, end = trial.model(), trial.inputs(2), sum(LENGTHS[:4])
    changed = inputs.clone()
    changed[0, CHANGED:end] += 1000
    outs = [trial.branch(model, each)[0].flatten(0, 1) for each in (changed, inputs)]
    unseen = [torch.cat([out[:CHANGED], out[end:]]) for out in outs]
    return difference(unseen[:1], unseen[1:]), EXACT


@torch.no_grad()
def decoding(trial: Trial) -> Found:
    """Compare the logits of texts, decoded token by token, with those of each whole text."""
    model = trial.model().eval()
    texts = torch.arange(3 * 80).view(3, -1).square().remainder(89).to(trial.device)
    ends = torch.tensor([1, 5, 70], device=trial.device)  # of the prompts
    rows, steps = torch.arange(3, device=trial.device), range(6)
    with trial.autocast():
        decoder, logits = decoder_of(model, 3, 80), model(texts)
        if not decoder.decodes:
            return "it has no step, so each new token reads its text anew"
        prompts = [text[:end].tolist() for text, end in zip(texts, ends, strict=True)]
        found = [decoder.prefill(prompts).clone()]
        found += [decoder.step(texts[rows, ends + step]).clone() for step in steps]
    wanted = [logits[rows, ends + step - 1] for step in (*steps, len(steps))]
    return difference(found, wanted), trial.rounding


def padding(trial: Trial) -> Found:
    """Look for NaN in a step with padding."""
    return 0.0 if all(x.isfinite().all() for x in trial.step(trial.model())) else torch.inf, 0.0


def recomputation(trial: Trial) -> Found:
    """Compare steps of other memory policies."""
    wanted = trial.step(trial.model())
    return max(difference(trial.step(trial.model(x)), wanted) for x in POLICIES), trial.rounding


def resume(trial: Trial) -> Found:
    """Compare the weights after two steps with and without a resume after the first."""
    models = [trial.model(), trial.model(seed=1)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]

    def train(number: int) -> None:
        weights = list(models[number].parameters())
        for weight, gradient in zip(weights, trial.step(models[number])[1:], strict=True):
            weight.grad = gradient
        optimizers[number].step()

    train(0)
    # A checkpoint holds parameters alone
    models[1].load_state_dict({x: y.detach() for x, y in models[0].named_parameters()}, False)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    train(0)
    train(1)
    return difference(list(models[1].parameters()), list(models[0].parameters())), 0.0


def strides(trial: Trial) -> Found:
    """Compare the last of many documents with itself alone, in tensors beyond 2^31 elements."""
    if trial.device == "cpu":
        return "for a GPU"
    size, tokens = 4096, 1000
    model = trial.model(channels=size, heads=32, kv_heads=32, layers=1)
    widest = max(linear.outputs for linear in model.config.blocks[0].attention.linears)
    lengths = [tokens] * (LARGE // widest // tokens + 2)
    inputs = trial.inputs(1, sum(lengths), size).bfloat16()
    found = [result[:, -tokens:].clone() for result in trial.branch(model, inputs, lengths)[:2]]
    return difference(found, trial.branch(model, inputs[:, -tokens:], [tokens])[:2]), trial.rounding


def memory(trial: Trial) -> Found:
    """Compare the bytes saved by forward with the prediction of `cost`."""
    if trial.mixer == SOFTMAX:
        return "for a mixer"
    model, tokens = trial.model(), 65536
    layer, part = model.blocks[0].attention, model.blocks[0].attention.part
    cost = part.cost(2)
    is_wrong = min(cost) < 0 and not part.softmax_calls
    refuse((is_wrong, f"{cost} is below 0; give what it takes for each token"))
    if trial.device == "cpu" or part.softmax_calls:
        return "for a GPU, and a mixer that calls no softmax attention"
    inputs = trial.inputs(1, tokens).bfloat16().requires_grad_()
    mask = Mask.causal().bind(1, tokens, tokens, inputs.device)
    shards = Context().shards(mask, tokens)
    angles, batch = model.angles(mask, shards, (1, tokens), inputs.device)[0], Batch(mask, 1)
    with trial.autocast():
        before = torch.cuda.memory_allocated()
        added = layer.branch(layer(*layer.project(inputs, *angles), batch), inputs)
        saved = torch.cuda.memory_allocated() - before - added.nbytes
    # A gate's factors and what they multiply are planned apart
    wanted = tokens * (cost.saved + 4 * part.gate_size)
    return abs(saved / wanted - 1), 0.1


CHECKS: dict[str, Callable[[Trial], Found]] = {
    "context=2 = one device": devices,
    "kernel = naive": formula,
    "packed = each document alone": alone,
    "no document leaks": leak,
    "token by token = whole texts": decoding,
    "no NaN from padding": padding,
    "recomputation changes nothing": recomputation,
    "resume to the bit": resume,
    "strides beyond 2^31 elements": strides,
    "memory measured = predicted": memory,
}


def check(name: str) -> int:
    """Print a line for each check of `name`: a plugin, a mixer, a score function, an attention
    backend, or the folder of a model that transformers computes. Return 1 if one fails.
    """
    if Path(name).is_dir():
        config = read_config(name)
        refuse((config.has_kernels, f"{name}: a family of ours, which has tests; give another"))
        config.prove("cpu", "fp32", 1024, packing=True)
        print("ok      logits, and documents of a sequence, are those of transformers")
        return 0
    names = {name}
    if name.endswith(".py"):
        plugins.load([name])
        path = Path(name).expanduser().absolute()
        names = {mixer for mixer, x in MIXERS.items() if x and inspect.getfile(x) == str(path)}
        names |= {name for name, backend in registered().items() if backend.source() == path}
        names |= {score for score, (*_, file) in SCORES.items() if file == str(path)}
    device, compiled = ("cuda", "flex") if torch.cuda.is_available() else ("cpu", "naive")
    mixers = [(name, class_of(name).needs) for name in MIXERS if name in names - {SOFTMAX}]
    trials = [Trial(x, compiled if "score" in parts else "flash", device) for x, parts in mixers]
    trials += [Trial(SOFTMAX, backend, device) for backend in DESCRIPTIONS if backend in names]
    trials += [Trial(SOFTMAX, compiled, device, score) for score in SCORES if score in names]
    remedy = "give a file that ends with register(NAME, ...) or register_score(NAME, ...)"
    refuse((not trials, f"{name}: no mixer, score function or attention backend; {remedy}"))
    # A process that has used a GPU cannot fork
    forked, failed = [outcome(trial, devices) for trial in trials], 0
    for trial, shared in zip(trials, forked, strict=True):
        own, last = (trial.score, trial.mixer, trial.backend), ""
        if len(trials) > 1:
            print(next(name for name in own if name not in ("none", SOFTMAX)))
        for title, each in CHECKS.items():
            status, found = shared if each is devices else outcome(trial, each)
            print(f"{status:<7} {title:<32} {'as above' if found == last else found}", flush=True)
            if status == "FAILED":
                failed, last = 1, found
    return failed


def outcome(trial: Trial, check: Callable[[Trial], Found]) -> tuple[str, str]:
    """Return ok, skipped or FAILED, and what the check found."""
    try:
        found = check(trial)
    except torch.OutOfMemoryError:
        return "skipped", "the GPU has too little memory"
    except Exception as error:  # the code is somebody's first try
        return "FAILED", described(error)
    if isinstance(found, str):
        return "skipped", found
    measured = "NaN" if found[0] == torch.inf else f"{found[0]:.1e}"
    return "ok" if found[0] <= found[1] else "FAILED", f"{measured}, at most {found[1]:.0e}"


def described(error: BaseException) -> str:
    """Return the error in one line, with the line of the user's file in which it was raised."""
    if isinstance(error, ChildProcessError):
        return str(error)
    frames = [x for x in extract_tb(error.__traceback__) if not x.filename.startswith(INSTALLED)]
    place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: " if frames else ""
    return f"{place}{type(error).__name__}: {' '.join(str(error).split())}"
