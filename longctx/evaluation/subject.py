"""What is evaluated: the trained model of a run's folder or checkpoint, with its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from longctx.config.model_config import AttentionConfig, GPTConfig, LoraConfig
from longctx.data import Tokenizer
from longctx.model import GPT, lora
from longctx.model.restore import mapped_model
from longctx.runs import run_folder
from longctx.runs.checkpoints import read, verify


def load_model(
    path: str | Path,
    device: torch.device | str = "cpu",
    attention: AttentionConfig | str | None = None,
) -> tuple[GPT, Tokenizer, dict[str, Any]]:
    """The trained model, its tokenizer and its configuration, from a run's folder or one checkpoint
    file.

    A folder means its newest checkpoint. `attention` replaces the backend that the run trained
    with. Raises ValueError naming `path` where there is no such thing, or one that is no longer
    what was written.
    """
    given = Path(path)
    if given.is_dir():
        found = run_folder.checkpoints(given)
        if not found:
            what = (
                "the run has no checkpoint yet"
                if (given / "config.yaml").exists()
                else "not the folder of a run"
            )
            if (given / "adapter_config.json").exists():
                what = "an adapter, which lacks the weights it adds to; give the run, or an export without adapter=true"
            raise ValueError(f"checkpoint={given}: {what}")
        given = found[-1]
    elif not given.exists():
        raise ValueError(f"checkpoint={given}: no such file or folder")
    verify(given)
    checkpoint = read(given)
    config = checkpoint["longctx"]["config"]
    folder = given.resolve().parent.parent
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"checkpoint={given}: {folder} has no tokenizer.json; leave checkpoints in the run's folder"
        )
    backend = AttentionConfig(**config["attention"]) if attention is None else attention
    added = LoraConfig(**config.get("lora", {}))
    model = mapped_model(given, checkpoint, GPTConfig.of_saved(config["model"]), backend, added)
    model = model if added.rank is None else lora.merge(model.float())
    return model.to(device).eval(), Tokenizer.load(folder), config
