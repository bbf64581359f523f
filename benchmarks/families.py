"""Training steps of models that people bring, next to transformers': computed by transformers with
our attention ("adapter"), and by GPT ("native").

Every peer has random weights and tokens, layers that are recomputed in backward, our loss in
chunks, and torch's fused AdamW. transformers and Liger have bf16 weights and SDPA, longctx fp32
weights under autocast, as train.py has. documents=3000 packs documents of so many tokens; 0: each
sequence is one. lora=RANK freezes the weights, in bf16, and is for longctx alone.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.process_group import in_child
from benchmarks.report import machine, write_json
from longctx.config.fields import key
from longctx.tables import grid

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PEERS = ("transformers", "liger", "adapter", "native")
GEMMA_LAYERS = [*["sliding_attention"] * 5, "full_attention"]
SHAPES: dict[str, dict[str, Any]] = {
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "layer_types": (GEMMA_LAYERS * 5)[:26],
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b-4": {  # 4 of 48 layers
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}
SHOWN = ("shape", "tokens", "documents", "peer", "tokens_per_second", "over_transformers", "gib")
Step = Callable[[], "Tensor"]


@dataclass(frozen=True)
class Options:
    """What to measure."""

    shapes: tuple[str, ...] = key(("gemma-3-1b", "llama-3.2-1b"), "shapes", choices=SHAPES)
    peers: tuple[str, ...] = key(PEERS, "peers", choices=PEERS)
    lengths: tuple[int, ...] = key((16384, 32768), "tokens of a sequence; a step has one")
    documents: tuple[int, ...] = key((0, 3000), "tokens of a document; 0: one document", above=-1)
    lora: int = key(0, "rank of LoRA; 0: all weights are trained", between=(0, 1024))
    offload: float = key(0.0, "memory.offload of longctx", between=(0, 1))
    warm: int = key(3, "steps before the timed ones", between=(0, 100))
    steps: int = key(5, "that are timed; the median counts", between=(1, 10**6))
    out: str = key("results/families", "writes .json")


def run(options: Options, command: str) -> None:
    """Measure every peer, print, write `out`.json."""
    rows: list[dict[str, Any]] = []
    result = {"command": command, **machine(), "options": asdict(options), "results": rows}
    for shape in options.shapes:
        for tokens in options.lengths:
            for document in options.documents:
                theirs = None
                for peer in options.peers:
                    row = {"shape": shape, "tokens": tokens, "documents": document, "peer": peer}
                    try:
                        row |= in_child(measured, peer, SHAPES[shape], tokens, document, options)
                    except Exception as error:  # of transformers and Liger: any
                        row["failed"] = str(error).split("\n")[0][:200]
                    if peer == "transformers":
                        theirs = row.get("tokens_per_second")
                    if theirs and "failed" not in row:
                        row["over_transformers"] = row["tokens_per_second"] / theirs
                    rows.append(row)
                    print(row, flush=True)
                    write_json(Path(f"{options.out}.json"), result)
    grid("Steps of models that people bring", SHOWN, rows)


def measured(
    peer: str, settings: dict[str, Any], tokens: int, document: int, options: Options
) -> dict[str, Any]:
    """Return tokens per second and peak memory of one peer."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    ids = torch.randint(settings["vocab_size"], (1, tokens + 1), device=device)
    size = document or tokens
    numbers = (torch.arange(tokens, device=device) // size)[None]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = BUILD[peer](settings, ids, numbers, options)
    laps = []
    for _ in range(options.warm + options.steps):
        began = time.perf_counter()
        loss = float(step())  # waits for the device
        laps.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {"tokens_per_second": tokens / median(laps[options.warm :]), "gib": peak, "loss": loss}


def optimized(model: torch.nn.Module, loss_of: Step) -> Step:
    """Return a whole step: forward, backward, AdamW."""
    import torch

    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step() -> Tensor:
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def of_transformers(
    settings: dict[str, Any], ids: Tensor, numbers: Tensor, options: Options, liger: bool = False
) -> Step:
    """transformers' class in bf16 with SDPA, as its users train it; `liger` with its kernels."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from longctx.attention import Mask
    from longctx.config.layout_config import MemoryConfig
    from longctx.model.loss import linear_cross_entropy

    if options.lora:
        raise ValueError(f"lora={options.lora}: for adapter and native alone")
    config = CONFIG_MAPPING[settings["model_type"]].from_dict(dict(settings))
    with torch.device(ids.device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).train()
    if liger:
        from liger_kernel.transformers import monkey_patch

        monkey_patch._apply_liger_kernel_to_instance(model=model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens, targets, T = ids[:, :-1], ids[:, 1:], ids.shape[1] - 1
    positions = Mask.documents(numbers).positions(1, T, ids.device)
    chunk = MemoryConfig("balanced").chunk(config.vocab_size, ids.device.type)

    def loss_of() -> Tensor:
        x = model.model(input_ids=tokens, position_ids=positions, use_cache=False)[0]
        return linear_cross_entropy(x, model.lm_head.weight, targets, chunk)

    return optimized(model, loss_of)


def ours(
    settings: dict[str, Any], ids: Tensor, numbers: Tensor, options: Options, by_transformers: str
) -> Step:
    """longctx's model, as train.py builds it with memory=balanced."""
    import torch

    from longctx.attention import Mask
    from longctx.config.layout_config import MemoryConfig
    from longctx.model import lora
    from longctx.model.gpt import build
    from longctx.model.huggingface import read_config
    from longctx.spec.model_config import LoraConfig

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        config = read_config(folder, by_transformers)
    device = ids.device
    with torch.device("meta"):
        model = build(config, "flash", MemoryConfig("balanced", offload=options.offload))
    if options.lora:
        model.cast(torch.bfloat16)
        lora.add(model, LoraConfig(options.lora))
    model.to_empty(device=device)
    model.init_weights()
    for layer in lora.layers(model):
        layer.init_added()
    if by_transformers == "never" and device.type == "cuda":
        model.compile_blocks()
    tokens, targets, mask = ids[:, :-1], ids[:, 1:], Mask.documents(numbers)

    def loss_of() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return model(tokens, targets, mask)

    return optimized(model.train(), loss_of)


BUILD: dict[str, Callable[..., Step]] = {
    "transformers": of_transformers,
    "liger": lambda *given: of_transformers(*given, liger=True),
    "adapter": lambda *given: ours(*given, by_transformers="always"),
    "native": lambda *given: ours(*given, by_transformers="never"),
}
