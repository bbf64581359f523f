"""One evaluation, from the request to its files, on one device or several.

`resolve` decides everything before anything is scored, `build_scorer` loads the model, `measure`
scores, and `results` prints and writes. Rank 0 resolves and measures; other ranks serve its scorer.
"""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longctx import files
from longctx.attention import kernels_run
from longctx.attention.description import AUTO, DESCRIPTIONS, AttentionConfig
from longctx.config.eval_config import SHORTEST, TOKENS_PER_BATCH, EvalConfig, default_lengths
from longctx.config.layout_config import POLICIES
from longctx.config.model_config import GPTConfig
from longctx.config.presets import Request
from longctx.evaluation import passkey, results, ruler
from longctx.evaluation.load import (
    TrainedModel,
    build_model,
    documents_of,
    open_model,
    skeleton,
)
from longctx.evaluation.passkey import TOKENS_TOGETHER
from longctx.evaluation.perplexity import perplexity
from longctx.evaluation.score import Scorer
from longctx.evaluation.windows import stride_of
from longctx.model.decoder import KVCache
from longctx.parallel.devices import (
    check_attention,
    choose_attention,
    dtype_of,
    is_out_of_memory,
    this_machine,
    within_memory,
)
from longctx.parallel.launch import Launched
from longctx.parallel.mesh import Layout, Parallel, parallel_of
from longctx.planner.hardware import Machine
from longctx.planner.workload import precision_of
from longctx.runs import evaluations

# Keys that leave the results as they are: they decide the place and the speed of an evaluation.
INDIFFERENT = {"checkpoint", "device", "devices", "strategy"}
INDIFFERENT |= {"context", "batch_size", "compile", "wandb"}
USUAL = 4096  # tokens of RULER's shortest text, unless the model or ruler.lengths has shorter ones


@dataclass(frozen=True)
class Setup:
    """One evaluation, ready to run."""

    request: Request[EvalConfig]
    model: TrainedModel
    device: str  # cuda | cpu
    precision: str  # bf16 | fp32
    context: int  # tokens that the model sees at most
    batch_size: int  # windows per forward of the devices that share sequences
    lengths: list[int]  # tokens of the texts of pass keys or RULER
    strategy: str  # how the devices share the model: none | ddp | fsdp
    packs: bool  # several documents into one sequence

    @property
    def config(self) -> EvalConfig:
        return self.request.config

    @property
    def scores_own_split(self) -> bool:
        """True if the documents are those of the run; else data= names them."""
        return self.model.run is not None and not self.request.names_data

    @property
    def source(self) -> str | dict[str, Any]:
        """The documents as the JSON names them."""
        if self.scores_own_split:
            return f"{self.config.split} split of the run's data"
        return asdict(self.config.data)


def evaluate(request: Request[EvalConfig], processes: Launched) -> int:
    """Run `request` on `processes`, print the tables, write the files and return the exit code.

    Raises ValueError or OSError, one line, for a mistake in the request.
    """
    machine = this_machine()
    parallel = parallel_of(request.config, machine, processes)
    device = parallel.device.type
    setup: Setup | None = None
    try:
        request = request._replace(config=replace(request.config, devices=parallel.ranks))
        setup = resolve(request, device, machine) if parallel.is_first else None
        parallel.launch()
        scorer = build_scorer(request, setup, parallel)
        if setup is None:
            scorer.serve()
        else:
            with within_memory(device):
                stem, content = measure(setup, scorer)
            results.show(content)
            print(results.save(content, stem, setup.model, request.config.wandb))
            # Nothing can fail any more, so the other ranks may leave.
            scorer.end()
        parallel.shut_down()
    except KeyboardInterrupt:
        parallel.fail("stopped by a signal", code=128 + signal.SIGINT)
        raise
    except Exception as error:
        problem = explain(error, request.config, setup, parallel)
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
    has_texts = config.passkey.enabled or config.ruler.enabled or config.tasks
    if model.run is None and not request.names_data and not has_texts:
        raise ValueError(
            f"checkpoint={config.checkpoint}: a Hugging Face folder has no documents of its own; "
            "add data=text data.path=..."
        )
    if model.run is None and "split" in request.overrides:
        raise ValueError(
            f"split={config.split}: a Hugging Face folder has no documents of its own to split; "
            "leave it out"
        )
    if config.compile and model.model.transformers:
        raise ValueError("compile=true: transformers computes this model; leave compile out")
    packs = not model.model.transformers or can_pack(model, config, device)
    if config.attention.backend == AUTO:
        length = config.seq_len or model.seq_len
        backend, line = choose_attention(config, model.model, device, machine, length)
        config = replace(config, attention=backend)
        request = request._replace(config=config)
        print(line)
    check_attention(config, model.model, device)
    # The largest forward decides the strategy, and sizes of context and batch decide that forward.
    precision = precision_of(config.precision, device)
    seq_len = config.seq_len or model.seq_len
    sharing = config.context.degree
    assert isinstance(sharing, int)
    batch_size = config.batch_size or max(1, TOKENS_PER_BATCH[device] * sharing // seq_len)
    lengths = text_lengths(config, seq_len)
    forward = largest_forward(config, lengths, batch_size, device)
    dtype = dtype_of(precision)
    strategy = choose_strategy(config, model.model, dtype, forward, machine, device)
    # An hour of scoring must not end at a folder that cannot be written.
    results_folder = (model.home / evaluations.FOLDER).absolute()
    folders = (results_folder, *results_folder.parents)
    files.check_writable(next(folder for folder in folders if folder.exists()))
    # A longer context is allowed: to see how a model extrapolates is a use of evaluation.
    if (longest := max(seq_len, *lengths)) > model.seq_len:
        origin = "the run trained at" if model.run else "the model is made for"
        print(
            f"warning: {forward.key}={longest:,} is {longest / model.seq_len:,.1f} times the "
            f"{model.seq_len:,} tokens per sequence that {origin}, so it has never seen the "
            "positions beyond them"
        )
    return Setup(request, model, device, precision, seq_len, batch_size, lengths, strategy, packs)


class Forward(NamedTuple):
    """The largest forward of an evaluation, of `rows` sequences that `sharing` devices share."""

    key: str  # the key that decides its length
    rows: int
    length: int  # tokens of a sequence
    sharing: int
    generates: bool  # from a cache of the keys and values; prompts are packed into one sequence

    @property
    def tokens(self) -> int:
        """Tokens of each device."""
        return -(-self.rows * self.length // self.sharing)


def text_lengths(config: EvalConfig, context: int) -> list[int]:
    """Return the tokens of the texts of pass keys or RULER; `context` for other evaluations."""
    usual = default_lengths(context)
    if config.passkey.enabled:
        usual = [length for length in usual if length >= SHORTEST]
        return config.passkey.lengths or usual or [context]
    if config.ruler.enabled:
        usual = [length for length in usual if length >= USUAL]
        return sorted(config.ruler.lengths or usual or [context])
    return [context]


def largest_forward(config: EvalConfig, lengths: list[int], rows: int, device: str) -> Forward:
    """Return the forward of the longest text, or of `rows` sequences of documents."""
    sharing, longest = config.context.degree, max(lengths)
    assert isinstance(sharing, int)
    key = "seq_len"
    for name, texts in (("passkey", config.passkey), ("ruler", config.ruler)):
        if texts.enabled:
            rows = max(1, TOKENS_TOGETHER[device] * sharing // longest)
            key = "seq_len" if texts.lengths is None else f"{name}.lengths"
    generates = config.ruler.enabled or (bool(config.tasks) and sharing == 1)
    return Forward(key, rows, longest, sharing, generates)


def bytes_of_copy(
    config: EvalConfig, model: GPTConfig, dtype: torch.dtype, forward: Forward
) -> float:
    """Return the bytes that a device with a copy of the model needs for `forward`."""
    whole = skeleton(model, config.attention, dtype)
    weights = sum(weight.nbytes for weight in whole.parameters())
    size, tokens = dtype.itemsize, forward.tokens
    in_mlp = min(tokens, POLICIES["long"]["mlp_tile"]) if forward.generates else tokens
    activations: float = size * max(
        block.forward_elements(tokens, in_mlp) for block in model.blocks()
    )
    # Scores twice in fp32, and the probabilities.
    if config.attention.description.score_bytes is not None:
        packed = forward.rows if forward.generates else 1
        pairs = packed * forward.rows * forward.length**2 / forward.sharing
        activations += model.heads * pairs * (2 * 4 + size)
    cache = KVCache.bytes_of(model, forward.rows, forward.length, dtype)
    return weights + activations + (cache if forward.generates else 0)


def choose_strategy(
    config: EvalConfig,
    model: GPTConfig,
    dtype: torch.dtype,
    forward: Forward,
    machine: Machine,
    device: str,
) -> str:
    """Return the strategy of `config`; for auto, a copy per device, or slices if none has room."""
    strategy = config.strategy.name
    if strategy != "auto":
        return strategy
    if config.devices == 1:
        return "none"
    room = machine.host_memory / config.devices
    if device != "cpu" and machine.gpu is not None:
        room = machine.gpu.usable
    # 5% stay free, as `longctx plan` has it
    has_room = bytes_of_copy(config, model, dtype, forward) <= 0.95 * room
    return "ddp" if has_room else "fsdp"


def can_pack(model: TrainedModel, config: EvalConfig, device: str) -> bool:
    """Return True if documents may share a sequence in layers of transformers; a line tells if not.

    Raises ValueError if the layers compute something else than longctx, or devices share sequences.
    """
    from longctx.model import transformers_model

    proof = model.model, device, model.seq_len
    try:
        transformers_model.prove(*proof, trains=False)
    except ValueError:
        # Devices that share a sequence split documents, so layers must not mix tokens either
        if config.context.degree != 1:
            raise
        transformers_model.prove(*proof, packing=False)
        print("each document has a sequence of its own: this model's layers would mix them")
        return False
    return True


def build_scorer(request: Request[EvalConfig], setup: Setup | None, parallel: Parallel) -> Scorer:
    """Load this process's part of the model, as rank 0 has decided in `setup`."""
    decided: list[Any] = []
    if setup is not None:
        decided = [str(setup.model.file), setup.model.model.heads, setup.precision, setup.strategy]
        decided.append(asdict(setup.config.attention))
    decided, *_ = parallel.all_gather_objects(decided)
    file, heads, precision, strategy, backend = decided
    config, attention, dtype = request.config, AttentionConfig(**backend), dtype_of(precision)
    degree = config.context.degree
    assert isinstance(degree, int)
    method = config.context.method_for(heads)
    parallel.init_mesh(Layout(strategy, config.devices // degree, degree, method, attention))
    shard = partial(parallel.shard, cast=False)
    model = build_model(Path(file), attention, parallel.device, dtype, shard)
    model.share_rows(parallel.context)
    if config.compile:
        model.compile_blocks()
    return Scorer(model, dtype, parallel, packs=setup is None or setup.packs)


def measure(setup: Setup, scorer: Scorer) -> tuple[str, dict[str, Any]]:
    """Run the evaluation on rank 0: return its files' name and the content of its JSON."""
    config, measure_kind = setup.config, measure_perplexity
    if config.passkey.enabled:
        measure_kind = measure_passkeys
    elif config.ruler.enabled:
        measure_kind = measure_ruler
    elif config.tasks:
        measure_kind = measure_tasks
    began = time.perf_counter()
    stem, content = measure_kind(setup, scorer)
    backend = config.attention.backend
    about = {
        "asked": decisive(config),
        "checkpoint": str(setup.model.file),
        "trained_seq_len": setup.model.seq_len,
        "attention": backend,
        "kernel": kernels_run()[backend],
        "seconds": round(time.perf_counter() - began, 3),
    }
    return stem, about | content


def decisive(config: EvalConfig) -> dict[str, Any]:
    """Return the keys that decide the results."""
    return {key: value for key, value in asdict(config).items() if key not in INDIFFERENT}


def measure_perplexity(setup: Setup, scorer: Scorer) -> tuple[str, dict[str, Any]]:
    """Score the documents; ValueError if they have no target token."""
    config, is_gpu = setup.config, setup.device == "cuda"
    contexts = default_lengths(setup.context) if config.contexts is None else config.contexts
    documents = documents_of(setup.model, setup.request)
    sizes = setup.context, config.stride, setup.batch_size
    result = perplexity(scorer, documents, *sizes, progress=True, contexts=contexts)
    if contexts and not result.contexts.tokens:
        print(
            f"no document has more than {max(contexts):,} tokens, so no tokens to compare "
            "contexts on; try a smaller seq_len="
        )
    content = {
        "scored": setup.source,
        "precision": setup.precision,
        "device": torch.cuda.get_device_name() if is_gpu else "cpu",
        "devices": config.devices,
        "tokens_per_second": result.tokens_per_second,
        "memory_peak_gib": torch.cuda.max_memory_allocated() / 2**30 if is_gpu else None,
        **result.content(),
    }
    source = config.split if setup.scores_own_split else config.data.source
    settings = setup.context, result.stride, config.attention.backend
    return evaluations.stem(source, setup.model.name, *settings), content


def measure_passkeys(setup: Setup, scorer: Scorer) -> tuple[str, dict[str, Any]]:
    """Hide keys in documents and ask for them; ValueError if the documents are too short."""
    keys, model, longest = setup.config.passkey, setup.model, max(setup.lengths)
    tokenizer, depths = model.tokenizer, keys.depths or passkey.DEPTHS
    filler = passkey.filler_of(documents_of(model, setup.request), tokenizer, 4 * longest)
    texts = tokenizer, filler, setup.lengths, depths, keys.samples, keys.kinds
    cells = passkey.recall(scorer, *texts, progress=True)
    stem = evaluations.stem("passkey", model.name, longest, setup.config.attention.backend)
    return stem, {"filler": setup.source, **passkey.content(cells)}


def measure_ruler(setup: Setup, scorer: Scorer) -> tuple[str, dict[str, Any]]:
    """Answer RULER's tasks; ValueError if the documents are too few or a length too short."""
    config, model, lengths = setup.config, setup.model, setup.lengths
    longest = max(lengths)
    text = None
    if config.ruler.made or any(ruler.TASKS[task].essay for task in config.ruler.chosen):
        documents = documents_of(model, setup.request)
        ids = passkey.filler_of(documents, model.tokenizer, 2 * longest)
        passkey.check_filler("ruler.lengths", ids, lengths)
        text = model.tokenizer.decode(ids)
    elif setup.request.names_data or config.documents is not None:
        raise ValueError("ruler.tasks: none of them is made of text; leave data and documents out")
    texts = ruler.Texts(config.ruler, model.tokenizer, text or "")
    answers = list(ruler.measured(scorer, texts, lengths, model.tokenizer.end_tokens))
    content = {
        "samples": config.ruler.samples,
        "seed": config.ruler.seed,
        "text": None if text is None else setup.source,
        "made": config.ruler.made,
        **ruler.content(answers),
    }
    return evaluations.stem("ruler", model.name, longest, config.attention.backend), content


def measure_tasks(setup: Setup, scorer: Scorer) -> tuple[str, dict[str, Any]]:
    """Run tasks of lm-evaluation-harness; ValueError for one without data, or that is none."""
    from longctx.evaluation.harness import Harness, evaluate_tasks  # lm-eval is an optional extra

    config, model, context = setup.config, setup.model, setup.context
    stride, tokenizer = stride_of(config.stride or context, context), model.tokenizer
    sizes = context, stride, setup.batch_size
    harness = Harness(scorer, tokenizer, *sizes, tokenizer.end_tokens)
    folder = None if config.tasks_path is None else Path(config.tasks_path)
    limits = config.documents, config.fewshot
    content = evaluate_tasks(harness, config.tasks, model.folder, folder, *limits)
    about = {"context": context, "stride": stride, "documents": config.documents}
    return evaluations.stem("tasks", "-".join(config.tasks), model.name, context), about | content


def explain(
    error: Exception, config: EvalConfig, setup: Setup | None, parallel: Parallel
) -> str | None:
    """Return this process's last words about `error`; None if it is to be raised."""
    if is_out_of_memory(error):
        memory = "out of GPU memory" if parallel.device.type == "cuda" else "out of memory"
        backend = DESCRIPTIONS.get(config.attention.backend)
        has_scores = backend is not None and backend.score_bytes is not None
        advice = "give attention=flash, " if has_scores else ""
        advice += (
            "let devices share the model (strategy=fsdp), or give shorter ruler.lengths"
            if config.ruler.enabled
            else "let more devices share a sequence (context=N) or the model (strategy=fsdp), or "
            "give a smaller batch_size or seq_len"
        )
        if setup is not None:
            sizes = f"seq_len={setup.context} batch_size={setup.batch_size}"
            if config.passkey.enabled or config.ruler.enabled:
                sizes = f"lengths={setup.lengths} of the texts"
            advice = f"{sizes} is too much: {advice}"
        return f"{memory} on process {parallel.rank}; {advice}"
    if parallel.is_lost_connection(error):
        return f"a process of the evaluation does not answer ({str(error).splitlines()[0]})"
    return None if parallel.is_first else files.one_line(error)
