"""`python -m longctx.model export runs/NAME out/`: a trained model as a Hugging Face folder. See
`--help`.
"""

import sys
from pathlib import Path
from typing import Any

from longctx.files import by_step
from longctx.options import answer

HELP = """Write a trained model as a Hugging Face folder, which transformers, vLLM and lm-eval open.

  python -m longctx.model export runs/NAME out/

runs/NAME    a run, of which the newest checkpoint is taken, or a file in runs/NAME/checkpoints
out/         a new folder, or an empty one

  dtype=fp32        of the weights: fp32, as they are trained, or bf16, fp16: half the size
  shard_gb=5        the largest size of one file of weights, in 10^9 bytes
  adapter=false     true: of a run with LoRA only what was trained, as an adapter that peft reads; else it is merged"""


def main(argv: list[str]) -> int:
    """Exit code: 0 done, 2 a mistake (one line on stderr)."""
    return answer(argv or ["help"], lambda: HELP, lambda words: run(*read_words(words)))


def read_words(argv: list[str]) -> tuple[Path, Path, dict[str, str]]:
    """Source, target and options of the command; ValueError for a word that does not belong."""
    if argv[0] != "export":
        raise ValueError(f"{argv[0]}: not a command; there is export, see --help")
    paths = [word for word in argv[1:] if "=" not in word]
    options = dict(word.split("=", 1) for word in argv[1:] if "=" in word)
    for word in paths:
        if word.startswith("-"):
            raise ValueError(
                f"{word}: not an option; there are --help, dtype=, shard_gb= and adapter="
            )
    for key, value in options.items():
        if key not in ("dtype", "shard_gb", "adapter"):
            raise ValueError(f"{key}={value}: not a key; there are dtype=, shard_gb= and adapter=")
    if options.get("adapter", "false") not in ("true", "false"):
        raise ValueError(f"adapter={options['adapter']}: true or false")
    if len(paths) != 2:
        raise ValueError(
            f"export {' '.join(paths)}: give the run and the new folder, as in export runs/NAME out/"
        )
    return Path(paths[0]), Path(paths[1]), options


def run(source: Path, out: Path, options: dict[str, str]) -> None:
    """Read the checkpoint, write the folder, say where."""
    from longctx.model.export import SHORT_NAMES, check_out, export
    from longctx.runs.checkpoints import opened, verify

    dtype = options.get("dtype", "fp32")
    if dtype not in SHORT_NAMES:
        raise ValueError(f"dtype={dtype}: one of {', '.join(SHORT_NAMES)}")
    try:
        shard_bytes = int(float(options.get("shard_gb", "5")) * 1e9)
    except (ValueError, OverflowError):
        shard_bytes = 0
    if shard_bytes < 1:
        raise ValueError(f"shard_gb={options['shard_gb']}: a number above 0")
    check_out(out)
    file = newest(source)
    verify(file)
    checkpoint = opened(file)
    model, seq_len, added = build(file, checkpoint)
    if options.get("adapter") == "true":
        run_adapter(model, file, checkpoint, added, seq_len, out)
        return
    if added.rank is not None:
        from longctx.model import lora

        model = lora.merge(model.float())
    context = max(seq_len, model.config.context or 0)
    export(model, file.resolve().parent.parent, out, context, SHORT_NAMES[dtype], shard_bytes)
    print(
        f"{out}: {model.config.parameters():,} parameters of {file}, {dtype}, for {context:,} tokens"
    )


def run_adapter(
    model: Any, file: Path, checkpoint: dict[str, Any], added: Any, seq_len: int, out: Path
) -> None:
    """Write what LoRA trained, and say where; of a model with stretched positions also its
    config.json, and what it is for.
    """
    from longctx.model import lora
    from longctx.model.export import architecture
    from longctx.model.huggingface import read_config

    if added.rank is None:
        raise ValueError(f"adapter=true: {file} was trained without lora.rank; leave adapter out")
    config = checkpoint["longctx"]["config"]
    base = str(config.get("init"))
    stretched = config.get("rope", {}).get("type", "keep") != "keep"
    if Path(base).is_dir():
        base = str(Path(base).resolve())
        positions = ("rope_theta", "rope_scaling", "context")
        stretched = any(
            getattr(model.config, key) != getattr(read_config(base), key) for key in positions
        )
    context = max(seq_len, model.config.context or 0)
    lora.export_adapter(
        model, added, base, out, architecture(model.config, context) if stretched else None
    )
    print(f"{out}: {added.parameters(model.config):,} parameters of {file}, an adapter of {base}")
    if stretched:
        print(
            f"its positions are stretched, which peft does not do: open {base} with config=AutoConfig.from_pretrained('{out}')"
        )


def newest(source: Path) -> Path:
    """The checkpoint file that `source` means; ValueError if there is none."""
    if source.is_file():
        return source
    found = sorted((source / "checkpoints").glob("step-*.ckpt"), key=by_step)
    if not found:
        raise ValueError(
            f"{source}: {'no run with a checkpoint' if source.exists() else 'no such run or checkpoint'}"
        )
    return found[-1]


def build(file: Path, checkpoint: dict[str, Any]) -> tuple[Any, int, Any]:
    """The model of a checkpoint, the length of the rows that it was trained on, and its LoRA;
    ValueError if they do not fit.
    """
    from longctx.config.model_config import GPTConfig, LoraConfig
    from longctx.model.restore import mapped_model

    try:
        config = checkpoint["longctx"]["config"]
        added = LoraConfig(**config.get("lora", {}))
        model = mapped_model(file, checkpoint, GPTConfig.of_saved(config["model"]), "naive", added)
        return model, int(config["seq_len"]), added
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: its weights are not those of its model: {error}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
