"""Objectives of preferences give TRL's loss, gradients and metrics, packed and not."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from longctx.config.data_config import DataConfig
from longctx.config.doors import ObjectiveConfig
from longctx.data import load
from longctx.data.tokenizer import train
from longctx.hf import model_folder
from longctx.model import GPT
from longctx.model.gpt import build
from longctx.training.objectives.answers import AnswerBatch, answers, collate
from longctx.training.throughput import means
from tests.training.objectives.conftest import preferences

ROWS = 9
# None is a default, and none is another's
KEYS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3},
    "kto": {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7},
    "simpo": {"beta": 1.6, "gamma": 0.4},
    "orpo": {"beta": 0.2},
}
CPU = SimpleNamespace(device="cpu")


class Both:
    """The same small model here and in transformers, and another one as the reference."""

    def __init__(self, folder: Path) -> None:
        self.pairs, self.labels = preferences(ROWS).values()
        # TRL compares the first row with the last answer, we with the second one
        self.labels[-1]["completion"] = self.labels[1]["completion"]
        self.folder = folder
        texts = [row["prompt"] + row["chosen"] + row["rejected"] for row in self.pairs]
        tokenizer = train(texts, 290)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(vocab_size=tokenizer.vocab_size, **sizes, **heads)
        for name in ("model", "reference"):
            LlamaForCausalLM(config).save_pretrained(folder / name)
            tokenizer.save(folder / name / "tokenizer.json")
        file, tokens = folder / "model/tokenizer.json", ("eos_token", "pad_token")
        ends = dict.fromkeys(tokens, tokenizer.eos)
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), **ends)

    def ours(self, name: str) -> GPT:
        config = model_folder.read_config(self.folder / name, "never")
        model = build(config, "naive")
        model_folder.load_weights(model, self.folder / name)
        return model

    def theirs(self, name: str) -> Any:
        return LlamaForCausalLM.from_pretrained(self.folder / name, attn_implementation="eager")

    def batch(self, kind: str, packed: bool) -> AnswerBatch:
        """All rows, with what the reference says of them: several to a sequence, or one."""
        rows = self.pairs if kind == "pairs" else self.labels
        file = self.folder / f"{kind}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = DataConfig(source="text", path=str(file), preferences=kind, val_fraction=0)
        paths = {name: str(self.folder / name) for name in ("model", "cache")}
        config = replace(config, tokenizer=paths["model"], cache=paths["cache"], packing=packed)
        data = load(config, 257)
        sequences = [data.train[n] for n in range(len(data.train))]
        assert (len(sequences) < ROWS / 2) == packed
        batch = collate(sequences)
        with torch.no_grad():
            batch.reference = answers(self.ours("reference"), batch).logp.flatten(1)
        return batch


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    torch.manual_seed(0)
    return Both(tmp_path_factory.mktemp("models"))


def ours(both: Both, name: str, packed: bool) -> tuple[float, dict[str, float], Tensor]:
    """Loss, figures, and the gradient of a weight."""
    keys = replace(ObjectiveConfig.of(name), **KEYS[name])
    model, objective = both.ours("model"), keys.traits
    assert objective.data is not None
    batch = both.batch(objective.data, packed)
    loss, figures = objective.loss(model, batch, keys)
    loss.backward()
    row = means(objective.figures, figures.flatten().tolist())
    return loss.item(), row, model.blocks[0].mlp.down.weight.grad


def of_trainer(both: Both, trainer_class: Any, config: Any, rows: Any) -> tuple[Any, ...]:
    model = both.theirs("model")
    keys = {"use_cpu": True, "bf16": False, "report_to": [], "disable_dropout": True}
    keys |= {"per_device_train_batch_size": ROWS, "max_length": None}
    trainer = trainer_class(
        model=model,
        ref_model=both.theirs("reference"),
        args=config(output_dir=str(both.folder / "out"), **keys),
        train_dataset=Dataset.from_list(rows),
        processing_class=both.tokenizer,
    )
    loss = trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
    loss.backward()
    found = trainer._metrics["train"] | trainer._metrics["eval"]  # transformers opens for eval
    row = {key: values[-1] for key, values in found.items()}
    return loss.item(), row, trainer.model.model.layers[0].mlp.down_proj.weight.grad


def of_formula(both: Both, formula: Callable[[Tensor, Tensor], Any]) -> tuple[Any, ...]:
    """The loss that `formula` makes of each pair's mean log-probabilities, by transformers."""
    model, losses, rewards, logps = both.theirs("model"), [], [], []
    for row in both.pairs:
        means = []
        for answer in (row["chosen"], row["rejected"]):
            prompt = both.tokenizer(row["prompt"])["input_ids"]
            ids = torch.tensor(both.tokenizer(row["prompt"] + answer)["input_ids"])
            ids = torch.cat([ids, torch.tensor([both.tokenizer.eos_token_id])])
            log_p = model(ids[None]).logits[0, :-1].log_softmax(-1)
            means.append(log_p.gather(1, ids[1:, None])[len(prompt) - 1 :].mean())
        loss, *found = formula(means[0][None], means[1][None])
        losses.append(loss)
        rewards.append([x.item() for x in found])
        logps.append([x.item() for x in means])  # TRL's logps of these are means over tokens
    total = torch.cat(losses).mean()
    total.backward()
    row = {
        f"{name}/{side}": sum(pair[number] for pair in pairs) / ROWS
        for name, pairs in (("rewards", rewards), ("logps", logps))
        for number, side in enumerate(("chosen", "rejected"))
    }
    return total.item(), row, model.model.layers[0].mlp.down_proj.weight.grad


def simpo(both: Both) -> tuple[Any, ...]:
    keys = {"alpha": 0.0, "beta": 1.6, "simpo_gamma": 0.4, "label_smoothing": 0.0}
    theirs = SimpleNamespace(**keys, loss_type="simpo", accelerator=CPU)
    return of_formula(both, lambda w, l: CPOTrainer.cpo_loss(theirs, w, l))


def orpo(both: Both) -> tuple[Any, ...]:
    theirs = SimpleNamespace(beta=0.2, accelerator=CPU)

    def formula(w: Tensor, l: Tensor) -> tuple[Tensor, ...]:
        ratio, *rewards, _, _ = ORPOTrainer.odds_ratio_loss(theirs, w, l)
        return (-w - ratio, *rewards)

    return of_formula(both, formula)


EXPECTED: dict[str, Callable[[Both], tuple[Any, ...]]] = {
    "dpo": lambda both: of_trainer(both, DPOTrainer, partial(DPOConfig, **KEYS["dpo"]), both.pairs),
    "kto": lambda both: of_trainer(
        both, KTOTrainer, partial(KTOConfig, **KEYS["kto"]), both.labels
    ),
    "simpo": simpo,
    "orpo": orpo,
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", EXPECTED)
def test_loss_gradient_and_metrics_are_those_of_trl(both, name, packed):
    loss, row, gradient = ours(both, name, packed)
    want, theirs, want_gradient = EXPECTED[name](both)
    assert loss == pytest.approx(want, rel=1e-5)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-4, atol=1e-6)
    shared = row.keys() & theirs.keys()
    assert {"rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"} <= shared
    for key in shared:
        assert row[key] == pytest.approx(theirs[key], rel=1e-4, abs=5e-6), key
