"""One evaluation, from the request to its files, on one device or several.

`resolve` decides everything before anything is scored, `build_scorer` loads the model, `measure`
scores, and `results` prints and writes. Rank 0 resolves and measures; other ranks serve its scorer.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from longctx import files, plugins
from longctx.attention import kernels_run
from longctx.attention.description import AUTO, AttentionConfig
from longctx.config import eval_config, presets
from longctx.config.asked import divisions, workload_of
from longctx.config.eval_config import SHORTEST, TOKENS_PER_BATCH, EvalConfig, default_lengths
from longctx.config.fields import keys, refuse
from longctx.config.presets import Request
from longctx.config.train_config import TrainConfig
from longctx.data.chat import Template, has_template
from longctx.data.dataset import EncodedDocument
from longctx.evaluation import passkey, results, ruler
from longctx.evaluation.gain import longer_documents, write_gains
from longctx.evaluation.load import TrainedModel, build_model, of_run, of_source, open_model
from longctx.evaluation.passkey import TOKENS_TOGETHER
from longctx.evaluation.perplexity import perplexity
from longctx.evaluation.score import OnBatch, Progress, Scorer
from longctx.model.mixers.description import mistake
from longctx.parallel.devices import (
    able_backends,
    check_attention,
    dtype_of,
    is_out_of_memory,
    this_machine,
    within_memory,
)
from longctx.parallel.launch import Launched
from longctx.parallel.mesh import Parallel, parallel_of
from longctx.planner.plans import plan
from longctx.runs import checkpoints, evaluations
from longctx.spec.hardware import Machine
from longctx.spec.model_config import GPTConfig
from longctx.spec.step import Division, precision_of

USUAL = 4096  # tokens of RULER's shortest text, unless the model or ruler.lengths has shorter ones


class Setup(NamedTuple):
    """One evaluation, ready to run."""

    config: EvalConfig
    own_split: bool  # the documents are those of the run; else data= names them
    model: TrainedModel
    device: str  # cuda | cpu
    precision: str  # bf16 | fp32
    context: int  # tokens that the model sees at most
    batch_size: int  # windows per forward of the devices that share sequences
    lengths: list[int]  # tokens of the texts of pass keys or RULER
    strategy: str  # how the devices share the model: none | ddp | fsdp
    packs: bool  # several documents into one sequence

    @property
    def source(self) -> str | dict[str, Any]:
        """Return the documents as the JSON names them."""
        if self.own_split:
            return f"{self.config.split} split of the run's data"
        return asdict(self.config.data)

    def documents(self) -> Iterator[EncodedDocument]:
        """Return the documents to score or to make texts of."""
        config, model = self.config, self.model
        if not self.own_split:
            return of_source(config.data, model.tokenizer, config.documents)
        assert model.run is not None
        fingerprint = checkpoints.read(model.file)["longctx"]["data"]
        return of_run(model.folder, model.run, config.split, fingerprint, config.documents)


def evaluate(request: Request[EvalConfig], processes: Launched) -> int:
    """Run `request` on `processes`, print the tables, write the files and return the exit code.

    Raises ValueError or OSError, one line, for a mistake in the request.
    """
    machine = this_machine()
    parallel = parallel_of(request.config, machine, processes)
    device = parallel.device.type
    try:
        request = request._replace(config=replace(request.config, devices=parallel.ranks))
        decided = resolve(request, device, machine) if parallel.is_first else None
        parallel.launch()
        setup: Setup = next(filter(None, parallel.all_gather_objects(decided)))
        scorer = build_scorer(setup, parallel)
        if not parallel.is_first:
            scorer.serve()
        else:
            with within_memory(device):
                stem, content = measure(setup, scorer)
            results.show(content)
            if isinstance(setup.config, eval_config.ScoreConfig):
                print(setup.config.out, setup.config.out.with_suffix(".png"), sep="\n")
            print(results.save(content, stem, setup.model, request.config.wandb))
            # Nothing can fail any more, so the other ranks may leave.
            scorer.end()
        parallel.shut_down()
    except KeyboardInterrupt:
        parallel.fail("stopped by a signal", code=128 + signal.SIGINT)
        raise
    except Exception as error:
        problem = explain(error, parallel)
        if problem is not None and parallel.is_first:
            print(f"error: {problem}", file=sys.stderr, flush=True)
        parallel.fail(problem or str(error), files.exit_code(error))
        if problem is None:
            raise
        return 1
    return 0


def resolve(request: Request[EvalConfig], device: str, machine: Machine) -> Setup:
    """Open the model of `request` and decide how it runs on `device`, "cuda" or "cpu".

    Warns if the context is longer than the model was trained at. Raises ValueError or OSError, one
    line naming the key, for a request that cannot run here.
    """
    config = request.config
    assert config.checkpoint is not None
    model = open_model(config.checkpoint)
    home, folder = model.home, model.home / evaluations.FOLDER
    own_split = model.run is not None and not request.names_data
    # The run's own backend, unless the command line names one
    names_attention = any(name.partition(".")[0] == "attention" for name in request.overrides)
    asked = config.attention if names_attention else None
    config = replace(config, attention=plugins.attention_of(model.run, model.file, asked))
    has_texts = config.passkey.enabled or config.ruler.enabled or config.tasks
    has_none = model.run is None and not request.names_data and not has_texts
    problem = f"checkpoint={config.checkpoint}: a Hugging Face folder has no documents of its own"
    refuse((has_none, f"{problem}; add data=text data.path=..."))
    precision, seq_len = precision_of(config.precision, device), config.seq_len or model.seq_len
    packs = model.model.packs(device, precision, seq_len, config.context.degree != 1)
    if config.attention.backend == AUTO:
        chosen = fastest_attention(config, model.model, device, machine, seq_len)
        config = replace(config, attention=chosen)
    check_attention(config, model.model, device)
    tokens = TOKENS_PER_BATCH[device] * int(config.context.degree)
    batch_size = config.batch_size or max(1, tokens // seq_len)
    lengths = text_lengths(config, seq_len)
    longest = max(seq_len, *lengths)
    model.model.check_length(longest, "seq_len")
    strategy = choose_strategy(config, model.model, machine, dtype_of(precision))
    # An hour of scoring must not end at a folder that cannot be written.
    if isinstance(config, eval_config.ScoreConfig):
        files.check_writable(config.out.absolute().parent)
    files.check_writable(next(path for path in (folder, *folder.parents) if path.exists()))
    if model.run is not None and home != model.folder:
        print(f"{model.folder}: no file can be made there, so the results go to {home}")
    # A longer context is allowed: to see how a model extrapolates is a use of evaluation.
    if longest > model.seq_len:
        print(
            f"warning: {longest:,} tokens are {longest / model.seq_len:,.1f} times the "
            f"{model.seq_len:,} that the model was trained at or is made for, so it has never seen "
            "the positions beyond them"
        )
    settings = device, precision, seq_len, batch_size, lengths, strategy, packs
    return Setup(config, own_split, model, *settings)


def fastest_attention(
    config: EvalConfig, model: GPTConfig, device: str, machine: Machine, seq_len: int
) -> AttentionConfig:
    """Return the backend of attention=auto: that of training at the same length."""
    training = TrainConfig(precision=config.precision, attention=config.attention)
    able = able_backends(config, model, device)
    step = replace(
        workload_of(training, device, seq_len, model),
        divisions=tuple(divisions(training, model)),
        backends=tuple(AttentionConfig(**presets.read("attention", name)) for name in able),
        merges=True,
        trains=False,
    )
    return plan(step, machine).step.attention


def text_lengths(config: EvalConfig, context: int) -> list[int]:
    """Return the tokens of the texts of pass keys or RULER; `context` for other evaluations."""
    for texts, shortest in ((config.passkey, SHORTEST), (config.ruler, USUAL)):
        if texts.enabled:
            usual = [length for length in default_lengths(context) if length >= shortest]
            return sorted(texts.lengths or usual or [context])
    return [context]


def choose_strategy(
    config: EvalConfig, model: GPTConfig, machine: Machine, dtype: torch.dtype
) -> str:
    """Return the strategy of `config`; for auto, a copy per device, or slices if the weights of a
    copy take more than half of its memory.
    """
    if config.strategy.name != "auto":
        return config.strategy.name
    if config.devices == 1:
        return "none"
    room = machine.host_memory / config.devices if machine.gpu is None else machine.gpu.usable
    return "ddp" if model.parameters() * dtype.itemsize <= room / 2 else "fsdp"


def build_scorer(setup: Setup, parallel: Parallel) -> Scorer:
    """Load this process's part of the model, as rank 0 has decided in `setup`."""
    config, dtype = setup.config, dtype_of(setup.precision)
    degree, method = int(config.context.degree), config.context.method_for(setup.model.model.heads)
    division = Division(setup.strategy, degree, method)
    parallel = parallel.with_mesh(division, config.attention)
    shard = partial(parallel.shard, cast=False)
    built = build_model(setup.model.file, config.attention, parallel.device, dtype, shard)
    built.context = parallel.context
    return Scorer(built, dtype, parallel, setup.packs)


def measure(setup: Setup, scorer: Scorer) -> tuple[str, dict[str, Any]]:
    """Run the evaluation on rank 0: return its files' name and the content of its JSON."""
    config, measure_kind = setup.config, measure_perplexity
    if config.tasks:
        measure_kind = measure_tasks
    elif config.passkey.enabled or config.ruler.enabled:
        measure_kind = measure_ruler if config.ruler.enabled else measure_passkeys
    began, backend = time.perf_counter(), config.attention.label
    stem, content = measure_kind(setup, scorer)
    known = keys(type(config))
    about = {
        "asked": {key: x for key, x in asdict(config).items() if known[key].compared},
        "checkpoint": str(setup.model.file),
        "trained_seq_len": setup.model.seq_len,
        "attention": backend,
        "kernel": ", ".join(kernels_run().get(name, "") for name in backend.split("+")),
        "seconds": round(time.perf_counter() - began, 3),
    }
    return stem, about | content


def measure_perplexity(setup: Setup, scorer: Scorer) -> tuple[str, dict[str, Any]]:
    """Score the documents; ValueError if they have no target token."""
    config, is_gpu = setup.config, setup.device == "cuda"
    usual, sizes = default_lengths(setup.context), (setup.context, config.stride, setup.batch_size)
    tokens = setup.context * setup.batch_size  # of a forward
    contexts = usual if config.contexts is None else config.contexts
    gains: dict[str, Any] = {}
    with Progress("tokens") as progress:
        if isinstance(config, eval_config.ScoreConfig):
            # The short context first: it refuses what cannot gain before an hour of scoring
            short = config.short or min([*usual, setup.context])
            longer = longer_documents(setup.documents(), setup.context, short)
            size = max(1, tokens // short)
            near = perplexity(scorer, longer, short, batch_size=size, on_batch=progress.count)
        result = perplexity(scorer, setup.documents(), *sizes, contexts, progress.count)
        if isinstance(config, eval_config.ScoreConfig):
            gains = write_gains(config.out, result, near)
    content = {
        "scored": setup.source,
        "precision": setup.precision,
        "device": torch.cuda.get_device_name() if is_gpu else "cpu",
        "devices": config.devices,
        "tokens_per_second": progress.units_per_second,
        "memory_peak_gib": torch.cuda.max_memory_allocated() / 2**30 if is_gpu else None,
        **result.content(),
        **gains,
    }
    source = config.split if setup.own_split else config.data.source
    settings = setup.context, result.stride, config.attention.label
    return evaluations.stem(source, setup.model.name, *settings), content


def measure_passkeys(setup: Setup, scorer: Scorer) -> tuple[str, dict[str, Any]]:
    """Hide keys in documents and ask for them; ValueError if the documents are too short."""
    asked, model, longest = setup.config.passkey, setup.model, max(setup.lengths)
    depths = sorted(asked.depths or passkey.DEPTHS)
    filler = passkey.filler_of(setup.documents(), model.tokenizer, 4 * longest)
    texts = model.tokenizer, filler, setup.lengths, depths, asked.samples
    with Progress("texts", len(setup.lengths) * len(depths) * asked.samples) as progress:
        right, logp = passkey.recall(scorer, *texts, on_batch=progress.count)
    grid = {
        "lengths": setup.lengths,
        "depths": depths,
        "accuracy": right.mean(-1).round(6).tolist(),
        "logprob": logp.mean(-1).round(6).tolist(),
    }
    stem = evaluations.stem("passkey", model.name, longest, setup.config.attention.label)
    return stem, {"filler": setup.source, "samples": asked.samples, "kinds": {"passkey": grid}}


def measure_ruler(setup: Setup, scorer: Scorer) -> tuple[str, dict[str, Any]]:
    """Answer RULER's tasks; ValueError if the documents are too few or a length too short."""
    config, model, lengths, text = setup.config, setup.model, setup.lengths, None
    asked, longest = config.ruler, max(lengths)
    if any(ruler.TASKS[task].essay for task in asked.chosen):
        ids = passkey.filler_of(setup.documents(), model.tokenizer, 2 * longest)
        passkey.check_filler("ruler.lengths", ids, lengths)
        text = model.tokenizer.decode(ids)
    template = Template(model.folder) if config.chat_template else None
    texts = ruler.Texts(asked, model.tokenizer, text or "", template)
    with Progress("texts", len(lengths) * len(asked.chosen) * asked.samples) as progress:
        answers = list(answered(scorer, texts, lengths, progress.count))
    scores: dict[str, list[float]] = {}
    for (task, _), rows in groupby(answers, lambda row: (row["task"], row["length"])):
        scores.setdefault(task, []).append(round(fmean(row["score"] for row in rows), 6))
    content = {
        "samples": asked.samples,
        "seed": asked.seed,
        "text": None if text is None else setup.source,
        "ruler": {"lengths": lengths, "scores": scores},
        "answers": answers,
    }
    return evaluations.stem("ruler", model.name, longest, config.attention.label), content


def answered(
    scorer: Scorer, texts: ruler.Texts, lengths: Sequence[int], on_batch: OnBatch
) -> Iterator[dict[str, Any]]:
    """Yield every sample of every length and task with the model's answer and its score."""
    # Made before the first is asked for: a length may be too short for a task
    pairs = {(n, task): texts.samples(task, n) for n in lengths for task in texts.config.chosen}
    together, ends = TOKENS_TOGETHER[scorer.device.type], sorted(texts.tokenizer.end_tokens)
    for (length, task), samples in pairs.items():
        while batch := list(islice(samples, scorer.sequences_together(together, length))):
            prompts = [ids for _, ids in batch]
            answers = scorer.answers(prompts, ruler.TASKS[task].answer, ends, length)
            for (sample, ids), tokens in zip(batch, answers, strict=True):
                answer = texts.tokenizer.decode(tokens)
                yield {
                    "task": task,
                    "length": length,
                    "tokens": len(ids),  # of the prompt
                    "outputs": sample.outputs,
                    "answer": answer,
                    "score": ruler.TASKS[task].score(answer, sample.outputs),
                }
            on_batch(len(batch))


def measure_tasks(setup: Setup, scorer: Scorer) -> tuple[str, dict[str, Any]]:
    """Run tasks of lm-evaluation-harness; ValueError for one without data, or that is none."""
    from longctx.evaluation.harness import Harness, evaluate_tasks  # lm-eval is an optional extra

    config, model, context = setup.config, setup.model, setup.context
    templated = has_template(model.folder) if config.chat_template is None else config.chat_template
    print(f"tasks: chat_template={str(templated).lower()}")
    template = Template(model.folder) if templated else None
    harness = Harness(scorer, model.tokenizer, context, setup.batch_size, template)
    folder = None if config.tasks_path is None else Path(config.tasks_path).expanduser()
    limits = config.documents, config.fewshot
    content = evaluate_tasks(harness, config.tasks, model.folder, folder, *limits)
    about = {"context": context, "documents": config.documents, "chat_template": templated}
    return evaluations.stem("tasks", "-".join(config.tasks), model.name, context), about | content


def explain(error: Exception, parallel: Parallel) -> str | None:
    """Return this process's last words about `error`; None if it is to be raised."""
    if is_out_of_memory(error):
        return (
            f"out of memory on process {parallel.rank}; give a smaller batch_size, seq_len or "
            "lengths, attention=flash, or devices that share the model (strategy=fsdp) or a "
            "sequence (context=N)"
        )
    if parallel.is_lost_connection(error):
        return f"a process of the evaluation does not answer ({str(error).splitlines()[0]})"
    return None if parallel.is_first else files.one_line(mistake(error) or error)
