"""The table of docs/models.md: what computes each causal model_type of transformers, or why nothing
does.

A small model with random weights stands for each. `trial` says what becomes of it: a family of
longctx computes it; transformers does, with longctx's attention, and packed documents have the loss
and the gradients of each alone; or it is refused. kinds= prints these rows and writes nothing.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.shapes import reference, settings_of
from longctx import files
from longctx.config.fields import Group, key

if TYPE_CHECKING:
    from torch import Tensor

    from longctx.attention import Mask
    from longctx.model import GPT

PAGE = Path(__file__).parent.parent / "docs/models.md"
HEAD = "## Every model_type\n"
OURS, THEIRS, REFUSED, NOT_TRIED = "longctx", "transformers", "refused: ", "not tried: "
UNBUILT = "transformers cannot build it: "
ALONE = "transformers, with `data.packing=false`"
LENGTHS = (17, 5, 30)  # tokens of documents in one sequence
LOSS, GRADIENT = 1e-5, 2e-4  # relative differences that rounding makes on one CPU or another
LARGEST = 30_000_000  # weights of a small model


@dataclass(frozen=True)
class Options(Group):
    """What to try."""

    kinds: tuple[str, ...] = key((), "model_types to print; none: all, into docs/models.md")


def run(options: Options, command: str) -> None:
    """Try every model_type, and write or print the table."""
    rows = {}
    for kind in options.kinds or known():
        rows[kind] = trial(kind)
        print(f"{kind}: {rows[kind]}", flush=True)
    if not options.kinds:
        lines = ["", f"transformers {version('transformers')}, by `{command}`.", ""]
        lines += ["| model_type | computed by |", "|---|---|"]
        lines += [f"| `{kind}` | {result} |" for kind, result in rows.items()]
        before, _, _ = PAGE.read_text().partition(HEAD)
        files.write_text(PAGE, before + HEAD + "\n".join([*lines, ""]))


def known() -> list[str]:
    """Return the model_types of transformers' causal models, and those of our families."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *families()})


def families() -> set[str]:
    """Return the model_types that longctx computes, those of wrapped text models too."""
    from longctx.hf.families import FAMILIES, config_json

    wrappers = {kind for kind, text in config_json.WRAPPERS.items() if text in FAMILIES}
    return {*FAMILIES, *wrappers}


def table() -> dict[str, str]:
    """Return the table as docs/models.md has it: model_type → what computes it."""
    _, _, rows = PAGE.read_text().partition(HEAD)
    return dict(re.findall(r"^\| `(.+?)` \| (.+?) \|$", rows, re.MULTILINE))


def trial(kind: str) -> str:
    """Return what computes models with this model_type, or why nothing does."""
    if kind in families():
        return OURS
    reason = refusal(kind, packing=True)
    if reason is None:
        return THEIRS
    if "data.packing=false" in reason:
        reason = refusal(kind, packing=False)
        if reason is None:
            return ALONE
    reason = shortened(reason, kind)
    if reason.startswith(UNBUILT):  # this small one
        return NOT_TRIED + reason.removeprefix(UNBUILT)
    return REFUSED + reason


def refusal(kind: str, packing: bool) -> str | None:
    """Return why the model of transformers is refused, or None if it is right."""
    from longctx.hf.transformers_model import described

    try:
        config = described(settings_of(kind))
        if config.parameters() > LARGEST:
            return UNBUILT + "no small model of it is known"
        config.prove("cpu", "fp32", 256, packing)
    except ValueError as error:
        return str(error)
    with tempfile.TemporaryDirectory() as folder:
        loss, gradient = differences(kind, Path(folder), LENGTHS if packing else LENGTHS[:1])
    if loss > LOSS or gradient > GRADIENT:
        return f"its loss differs by {loss:.0e}, its gradients by {gradient:.0e}"
    return None


def shortened(reason: str, kind: str) -> str:
    """Return the beginning of a refusal, which says why."""
    reason = reason.removeprefix(f"model_type={kind}: ")
    reason = re.split(r"; | \(logits| by \d", reason)[0]
    return reason.replace("|", " ")[:100]


def differences(
    kind: str, folder: Path, lengths: tuple[int, ...], memory: str = "balanced"
) -> tuple[float, float]:
    """Return the relative differences of the loss and of the gradient that differs most: documents
    of `lengths` in one sequence, in training, from each alone in transformers' own model.
    """
    theirs = reference(kind)
    theirs.save_pretrained(folder)
    model = opened(folder, memory)
    each, tokens, targets, mask = documents(lengths)
    loss, expected = model(tokens, targets, mask, reduction="sum"), loss_alone(theirs, each)
    loss.backward()
    expected.backward()
    weights = dict(theirs.named_parameters())
    worst = 0.0
    for name, weight in model.named_parameters():
        want = weights[model.name_of(name)].grad if model.name_of(name) in weights else None
        if weight.requires_grad and want is not None and want.norm() > 1e-4:
            worst = max(worst, float((weight.grad - want).norm() / want.norm()))
    return abs(loss.item() - expected.item()) / expected.item(), worst


def opened(folder: Path, memory: str = "fast", attention: str = "flash") -> Any:
    """Return the model in `folder`, computed by transformers, in training."""
    import torch

    from longctx.hf import model_folder
    from longctx.model.gpt import build

    config = model_folder.read_config(folder, "always")
    with torch.device("meta"):
        model: GPT = build(config, attention, memory)
    # Memory that nothing fills has NaN then
    torch.use_deterministic_algorithms(True)
    model.to_empty(device="cpu")
    torch.use_deterministic_algorithms(False)
    model_folder.load_weights(model, folder)
    return model.train()


def documents(lengths: tuple[int, ...]) -> tuple[list[Tensor], Tensor, Tensor, Mask]:
    """Return random documents, and their tokens, targets and mask in one sequence."""
    import torch

    from longctx.attention import Mask

    generator = torch.Generator().manual_seed(1)
    each = [torch.randint(3, 301, (1, n), generator=generator) for n in lengths]
    ends = torch.full((1, 1), -100)
    targets = torch.cat([torch.cat([x[:, 1:], ends], dim=1) for x in each], dim=1)
    numbers = torch.arange(len(each)).repeat_interleave(torch.tensor(lengths))
    return each, torch.cat(each, dim=1), targets, Mask.documents(numbers[None])


def loss_alone(model: Any, each: list[Tensor]) -> Tensor:
    """Return the loss of every document alone, summed, by transformers itself."""
    import torch
    import torch.nn.functional as F

    total = torch.zeros(())
    for ids in each:
        logits = model(ids, use_cache=False).logits[0, :-1]
        total = total + F.cross_entropy(logits, ids[0, 1:], reduction="sum")
    return total
