"""One evaluation, every layout: random compositions of strategy, context, checkpoint, mask and
batch on gloo, each against the same evaluation on one device.

    python -m torch.distributed.run --nproc-per-node 4 tests/evaluation/several_devices.py \
        CASES SEED FOLDER

Rank 0 writes FOLDER/differences.json: a list, each case with its largest differences.
"""

import json
import random
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from longctx import system
from longctx.attention.description import AttentionConfig
from longctx.config.eval_config import EvalConfig
from longctx.config.model_config import GPTConfig, LoraConfig
from longctx.config.parallel_config import ContextConfig, StrategyConfig
from longctx.config.presets import Request
from longctx.config.train_config import TrainConfig
from longctx.data.tokenizer import train
from longctx.evaluation.evaluate import build_scorer, resolve
from longctx.evaluation.load import load_model
from longctx.evaluation.passkey import recall
from longctx.evaluation.perplexity import perplexity
from longctx.evaluation.score import Scorer
from longctx.evaluation.windows import Document
from longctx.model import GPT, lora
from longctx.parallel import sharding
from longctx.parallel.mesh import Parallel
from longctx.planner.hardware import Machine
from longctx.runs import checkpoints, run_folder
from longctx.runs.checkpoint_write import ALONE, Writers
from tests.written import write

MACHINE = Machine(0, None, False, 2.0**40)
TEXT = "a long walk home with the old dog\n"
V = 512


def drawn(draw: random.Random, ranks: int, folder: Path) -> tuple[TrainConfig, EvalConfig]:
    """A run and an evaluation of it on `ranks` devices, at random."""
    context = draw.choice([n for n in (1, 2, 4) if ranks % n == 0])
    heads = draw.choice([4, 8])
    model = GPTConfig(
        vocab_size=V,
        layers=draw.choice([1, 2]),
        channels=32,
        heads=heads,
        kv_heads=draw.choice([1, 2, 4]),
        ffn=40,
        init_std=0.2,
        window=draw.choice([None, 6]),
        tied=draw.random() < 0.5,
        qkv_bias=draw.random() < 0.3,
    )
    trained = draw.choice([LoraConfig(), LoraConfig(rank=3, targets=["qkv", "down"])])
    backend = draw.choice(["naive", "flash"])
    evaluation = EvalConfig(
        checkpoint=str(folder),
        seq_len=draw.choice([16, 31, 50]),
        batch_size=draw.choice([1, 3]),
        device="cpu",
        devices=ranks,
        attention=AttentionConfig(backend),
        strategy=StrategyConfig(draw.choice(["auto", "ddp", "fsdp"])),
        context=ContextConfig(context),
    )
    return TrainConfig(seq_len=32, model=model, lora=trained), evaluation


def write_run(run: TrainConfig, folder: Path, sharded: bool, parallel: Parallel) -> None:
    """The folder of a run, with a checkpoint of random weights in one file or a shard per rank; all
    ranks call it.
    """
    model = GPT(run.model)
    if run.lora.rank is not None:
        lora.add(model, run.lora)
        for layer in lora.layers(model):
            nn.init.normal_(layer.lora_b, std=0.2)
    if parallel.is_first:
        (folder / "checkpoints").mkdir(parents=True)
        tokenizer = train([TEXT * 40 + "The pass key is 12345. The secret number of 67890"], 400)
        tokenizer.save(folder / "tokenizer.json")
    parallel.barrier()
    module, path = nn.ModuleDict({"model": model}), run_folder.checkpoint_path(folder, 1)
    about = checkpoints.describe(run, "data", parallel.ranks, None)
    writers = ALONE
    if sharded:
        sharding.shard(model, init_device_mesh("cpu", (parallel.ranks,)), None)
        writers = Writers(parallel.rank, parallel.ranks, parallel.barrier)
    if sharded or parallel.is_first:
        state = {"random": checkpoints.random_state()}
        write(checkpoints.saving(path, about, state, sharding.parts(module), writers=writers))
    parallel.barrier()


def documents(draw: random.Random) -> list[Document]:
    """Documents of random tokens and of lengths that nothing divides."""
    rng = np.random.default_rng(draw.randrange(2**31))
    lengths = [40, *(draw.choice([1, 2, 5, 17, 33, 64, 101, 150]) for _ in range(9))]
    return [Document(f"d{n}", rng.integers(V, size=n), 4 * n, n // 3) for n in lengths]


def measured(scorer: Scorer, seq_len: int, rows: int, docs: list[Document]) -> dict[str, Any]:
    """Numbers of each kind of evaluation, as flat lists."""
    scored = perplexity(scorer, docs, seq_len, batch_size=rows, contexts=[4, 9, seq_len])
    tables = scored.contexts.rows() + scored.positions.buckets()
    numbers = {
        "documents": [score.nats for score in scored.documents],
        "tables": [row["nats"] for row in tables],
        "tokens": [row["tokens"] for row in tables],
    }
    tokenizer = train([TEXT * 40 + "The pass key is 12345. The secret number of 67890"], 400)
    filler = np.asarray(tokenizer.encode(TEXT * 40), dtype=np.int64)
    cells = recall(scorer, tokenizer, filler, [150, 131], [0.0, 0.6], samples=2)
    numbers["facts"] = [cell.nats for cell in cells]
    numbers["found"] = [cell.right for cell in cells]
    prompts = [[5, 6, 7], [9], [3, 1, 4, 1, 5]]
    numbers["greedy"] = scorer.answers(prompts, 6, [8], 11) + scorer.answers([[2]], 6, [8], 11)
    if find_spec("lm_eval") is not None:
        from longctx.evaluation.harness import Harness

        lm = Harness(scorer, tokenizer, seq_len, max(1, seq_len // 2), rows)
        rng = np.random.default_rng(0)
        requests = [
            (("", ""), rng.integers(256, size=a).tolist(), rng.integers(256, size=b).tolist())
            for a, b in [(3, 1), (20, 5), (50, 1), (9, 9), (30, 70)]
        ]
        numbers["continuations"] = [nats for nats, _ in lm._loglikelihood_tokens(requests)]
        texts = [SimpleNamespace(args=(TEXT * n,)) for n in (1, 3, 2)]
        numbers["texts"] = lm.loglikelihood_rolling(texts)
        questions = [
            SimpleNamespace(args=(TEXT[:n], {"max_gen_toks": most, "until": ["o"]}))
            for n, most in [(4, 5), (20, 2), (9, 9), (2, 7), (12, 1)]
        ]
        numbers["answers"] = lm.generate_until(questions)
    return numbers


def difference(ours: list[Any], theirs: list[Any]) -> float:
    """The largest relative difference; 1 where things differ that are to be equal."""
    if ours and isinstance(theirs[0], float):
        x, y = np.array(ours), np.array(theirs)
        return float((np.abs(x - y) / np.maximum(np.abs(y), 1e-3)).max())
    return float(ours != theirs)


def compared(draw: random.Random, folder: Path) -> dict[str, float]:
    """One random evaluation on all ranks against the same on one; empty but on the first."""
    run, config = drawn(draw, dist.get_world_size(), folder)
    parallel = Parallel(config, "cpu")
    parallel.launch()
    write_run(run, folder, draw.random() < 0.5, parallel)
    request = Request(config, {}, {"data": "text"})
    setup = resolve(request, "cpu", MACHINE) if parallel.is_first else None
    scorer = build_scorer(request, setup, parallel)
    weights = list(scorer.model.parameters())
    held = sum(sharding.local(x).numel() for x in weights) / sum(x.numel() for x in weights)
    assert not parallel.strategy.shards_weights or held < 1.1 / parallel.ranks
    result: dict[str, float] = {}
    if setup is None:
        scorer.serve()
    else:
        docs = documents(draw)
        ours = measured(scorer, setup.context, setup.batch_size, docs)
        scorer.end()
        alone = Scorer(load_model(folder, attention="naive")[0])
        theirs = measured(alone, setup.context, setup.batch_size, docs)
        result = {name: difference(ours[name], theirs[name]) for name in ours}
    return result


def main(cases: int, seed: int, base: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = []
    for case in range(seed, seed + cases):
        torch.manual_seed(case)
        try:
            differences = compared(random.Random(case), base / str(case))
        except Exception as error:
            raise RuntimeError(f"case {case}") from error
        results.append({"case": case, "differences": differences})
    if dist.get_rank() == 0:
        (base / "differences.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    system.exit_with(0)
