"""Peak memory of a training step, predicted: the tensors alive in each phase in which many are.
Free of torch.

The largest phase is the peak, as `torch.cuda.max_memory_allocated` counts it. torch.compile's
partitioner decides what a block keeps (recompute=none), or longctx.model.recompute does; tests
compare both with the real thing.

Letters: N tokens of a micro-batch in B sequences of T; C channels, F ffn, H and Hkv heads of D, L
layers, V words; e bytes of an activation. "Saved" is what forward leaves for backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from math import inf
from typing import NamedTuple

from longctx.attention.description import Description
from longctx.config.layout_config import kv_copies, tile_size
from longctx.planner import block_memory
from longctx.spec.parts import FP32, BlockSpec, Pass
from longctx.spec.step import SLICE, STACK, MeasuredLayer, Workload

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
KEPT, ATTENTION, MLP = "saved activations", "attention workspace", "MLP workspace"
LOSS, BATCH = "loss", "batch"
TERMS = (PARAMETERS, GRADIENTS, OPTIMIZER, KEPT, ATTENTION, MLP, LOSS, BATCH)
Terms = dict[str, float]
# Its workspaces on Hopper, of forward's thread and of backward's, allocated through torch
CUBLAS = 65 * 2**20


@dataclass(frozen=True)
class Memory:
    """Bytes by term: of a GPU, in the phase of a step when it holds most, and of the host."""

    phase: str
    gpu: Terms
    host: Terms = field(default_factory=dict)
    saved: float = 0.0  # of a checkpoint: what this process writes of it

    @property
    def peak(self) -> float:
        """Bytes of the GPU in that phase."""
        return sum(self.gpu.values())

    @property
    def largest(self) -> str:
        """The term that takes most."""
        return max(self.gpu, key=lambda term: self.gpu[term])


def predict(workload: Workload, enough: float = inf) -> Memory:
    """Return the peak memory of a step on one device, or the first phase that takes more than
    `enough` bytes; ValueError if memory=auto is undecided.
    """
    step, peak = _Step(workload), -1.0
    for name, terms in step.phases():
        if (size := sum(terms.values())) > peak:
            peak, phase, gpu = size, name, terms
        if peak > enough:
            break
    return Memory(phase, {term: gpu.get(term, 0.0) for term in TERMS}, step.host(), step.saved())


class _Costs(NamedTuple):
    """Bytes of one block: saved for backward, alive in its two halves, freed between them."""

    saved: float
    mlp: float
    attention: float
    freed: float = 0.0
    output: float = 0.0  # of attention, in what is saved


class _Step:
    """The inventory of one training step."""

    def __init__(self, workload: Workload) -> None:
        self.memory = workload.memory.filled(workload.memory.policy)
        if self.memory is not workload.memory:
            workload = replace(workload, memory=self.memory)
        self.workload, self.model, self.captured = workload, workload.model, workload.captured
        self.blocks = workload.model.blocks
        self.measured = workload.measured.get(self.memory.recompute or "none")
        weights = {id(block): block.weights for block in self.measured or self.blocks}
        self.weights_by_block = [weights[id(block)] for block in self.measured or self.blocks]
        self.B, self.T = workload.batch_size, workload.seq_len
        self.through = workload.pass_of(self.B, self.T)
        self.N, self.e = self.through.tokens, self.through.activation
        self.C, self.L, self.V = self.model.channels, self.model.layers, self.model.vocab_size or 0
        # fsdp: a slice of weights, gradients and optimizer state, and gathered weights in 16 bits
        self.sharded, self.slices = workload.sharing.shards_weights, workload.slices
        # LoRA: these are trained, in fp32, and the model's own weights are frozen
        self.added = workload.added
        self.trained = self.added or workload.model.parameters()
        # Bytes of the gradient of one of the model's own weights, and of its copy in 16 bits
        self.gradient, self.copy = self.through.gradient, self.through.weight_copy
        self.norms_fused = workload.uses_kernels and self.model.norm_form == "rms"
        in_bf16 = {n % self.L for n in workload.bf16_layers}
        self.in_8_bits = [workload.precision == "fp8" and n not in in_bf16 for n in range(self.L)]
        # Of the layer with the largest exchange
        windows = self.model.windows() if workload.context > 1 else [None]
        self.exchanged = max(map(self.exchange_of, windows))
        # Blocks that are alike have one object. With recompute=block the last ones may save all
        runs_again = [layer < round(self.memory.again * self.L) for layer in range(self.L)]
        kinds = list(zip(map(id, self.blocks), self.in_8_bits, runs_again, strict=True))
        alike = dict(zip(kinds, self.blocks, strict=True))
        by_kind = {kind: self.costs_of(block, *kind[1:]) for kind, block in alike.items()}
        self.costs = [by_kind[kind] for kind in kinds]
        if self.measured:
            self.costs = [self.measured_costs(layer) for layer in self.measured]
        # Without its input a block before it runs forward again; without its output attention does
        self.every = self.memory.keep_every or 1
        self.attends_again = set(attends_again(workload))
        self.saved_by_block = [
            costs.saved
            - (self.e * self.C * self.N if layer % self.every else 0.0)
            - (costs.output if layer in self.attends_again else 0.0)
            for layer, costs in enumerate(self.costs)
        ]
        # Bytes on the GPU of the first 0, 1, ... blocks; the first of all keep theirs on the host
        self.away = round((self.memory.offload or 0.0) * self.L)
        self.reads_host = bool(self.through.heads_at_once and self.memory.offload)
        here = [0.0] * self.away + self.saved_by_block[self.away :]
        self.saved_by_first = [0.0, *accumulate(here)]
        for n, (x, out) in enumerate(read_from_host(workload)):  # tiles, one ahead of its use
            width = self.C * x + self.blocks[n].attention.query_size * out
            brought = self.e * width * min(2 * self.through.tile, self.N)
            self.costs[n] = self.costs[n]._replace(mlp=self.costs[n].mlp + brought)

    def costs_of(self, block: BlockSpec, in_8_bits: bool, runs_again: bool) -> _Costs:
        """Return the bytes of one block, which `runs_again` in backward or saves all."""
        through = self.workload.pass_of(self.B, self.T, in_8_bits, block.attention.window)
        through = through._replace(recompute="block" if runs_again else "none")
        kept = list(block_memory.kept(block, through))
        attention = block_memory.attention_backward(block, through) + self.exchanged
        # Gradients of LoRA's additions to the block, and their sum over tiles
        added = FP32 * self.added / self.L
        several = through.recompute != "none" and through.tile < through.tokens
        mlp = block_memory.mlp_backward(block, through) + (1 + several) * added
        workspace = block_memory.attention_workspace(block.attention, through)
        return _Costs(
            saved=sum(row.bytes for row in kept),
            mlp=mlp,
            attention=attention + added + workspace,
            freed=sum(row.bytes for row in kept if row.until == block_memory.MLP),
            output=block_memory.output(block.attention, through),
        )

    def measured_costs(self, layer: MeasuredLayer) -> _Costs:
        """Return the bytes of a layer that transformers computes, as if attention's workspace were
        there at the peak.
        """
        attention = self.blocks[0].attention, self.through
        saved, peak = layer.saved.slope * self.N, layer.peak.slope * self.N + layer.peak.intercept
        if self.memory.recompute == "none":
            # Copies of weights, and scores if the backend has them in memory
            saved += layer.saved.intercept
            fused = attention[0], self.through._replace(backend=Description())
            more = block_memory.attention_saved(*attention) - block_memory.attention_saved(*fused)
            saved += max(0.0, more)
        workspace = block_memory.attention_workspace(*attention)
        return _Costs(saved, peak, peak + self.exchanged + workspace)

    def of_passes(self) -> Iterator[tuple[str, Terms]]:
        """Yield the phases of forward and backward."""
        always = self.always
        gradients = FP32 * self.trained / self.slices
        embedding = self.gradient * self.V * self.C
        kept = FP32 / self.slices if self.sharded and self.gradient else self.gradient
        added = FP32 * self.added / self.L / self.slices
        # Bytes of the gradients of the first 0, 1, ... blocks
        of_first = [0.0, *accumulate(kept * weights + added for weights in self.weights_by_block)]
        tied = self.model.tied
        # From the second micro-batch on every gradient is there all the time, and always where DDP
        # keeps them in its buckets.
        full = self.workload.accumulate > 1 or self.workload.sharing.buckets_gradients
        before = gradients if full else 0.0
        saved = {KEPT: self.saved_by_first[self.L]}
        # Of weights, which autocast has made in forward
        of_layers = [] if self.memory.recompute == "none" else self.measured or []
        copies = sum((layer.saved.intercept for layer in of_layers), 0.0)
        at_loss = {GRADIENTS: before, PARAMETERS: copies}
        yield "loss", _sum(always, at_loss, saved, self.loss())
        if self.through.heads_at_once:
            # With little else, the stream, attention's output, their sum
            forward = self.forward(self.through) + FP32 * self.model.heads * self.N  # and the lse
            # No block after the last one has weights on their way from the host
            for name, at in ("last", self.L - 1), ("last but one", max(0, self.L - 2)):
                others = {KEPT: self.saved_by_first[at], MLP: forward}
                coming = self.brought(min(2, self.L - at))
                yield f"forward of the {name} block", _sum(always, at_loss, others, coming)
        # The head's gradient is there at once; a tied one waits beside the sum for that of the
        # embedding.
        head = embedding if tied or not full else 0.0
        # The norm's input and both its gradients; where no kernel of ours takes them as they are,
        # in fp32, and the loss's too.
        norm = float(self.C * (3 * self.e if self.norms_fused else 3 * FP32 + self.e))
        if self.measured:
            norm = self.measured[-1].norm.slope
        last_norm = {GRADIENTS: before + head, LOSS: norm * self.N}
        yield "backward of the last norm", _sum(always, last_norm, saved)
        yield self.of_blocks(before + head, [0.0] * (self.L + 1) if full else of_first)
        last = (gradients if full else gradients - embedding) + (embedding if tied else 0.0)
        # The tokens' gradient in fp32, next to its source, then to the weight's gradient
        of = self.e if self.model.multipliers.embedding == 1 else FP32
        last += max(of * self.C * self.N, embedding)
        tokens = {GRADIENTS: last, KEPT: float(FP32 * self.C * self.N)}
        yield "backward of the embedding", _sum(always, tokens)

    def of_blocks(self, before: float, of_first: list[float]) -> tuple[str, Terms]:
        """Return the largest phase of the blocks' backward. `before`: bytes of gradients before it;
        `of_first`: bytes of the gradients of the first 0, 1, ... blocks.
        """
        # A search asks this most often: sums of numbers take a fifth of the time of those of terms
        largest = -1.0
        for layer in range(self.L, 0, -1):
            costs, again = self.costs[layer - 1], self.again(layer)
            held = before + of_first[-1] - of_first[layer] + self.saved_by_first[layer] + again
            if (size := held + max(costs.mlp, costs.attention - costs.freed)) > largest:
                largest, at = size, layer
        costs, saved = self.costs[at - 1], self.saved_by_first[at] + self.again(at)
        gradients = {GRADIENTS: before + of_first[-1] - of_first[at]}
        if costs.mlp >= costs.attention - costs.freed:
            half, own = "MLP", {MLP: costs.mlp, KEPT: saved}
        else:
            half, own = "attention", {ATTENTION: costs.attention, KEPT: saved - costs.freed}
        return f"backward of block {at}, {half}", _sum(self.always, gradients, own, self.brought())

    def phases(self) -> Iterator[tuple[str, Terms]]:
        """Yield every phase that can be the peak, with its bytes by term."""
        yield from self.of_passes()
        resting = self.always
        gradients = {GRADIENTS: FP32 * self.trained / self.slices}
        if self.captured:
            # The graphs' memory pool, gradients among it, stays as large as the passes need: what
            # is no graph of theirs comes on top.
            resting = max(self.of_passes(), key=lambda phase: sum(phase[1].values()))[1]
            gradients = {}
        workspace = {OPTIMIZER: update_workspace(self.workload)}
        yield "optimizer", _sum(resting, gradients, workspace)
        if not self.workload.validates:
            return
        yield "validation", _sum(resting, self.validation(self.B, self.T))
        length = self.workload.passkey_length
        if length > self.T:  # shorter texts together are no more than a batch
            texts = max(1, self.B * self.T // length)
            yield "pass keys", _sum(resting, self.validation(texts, length))

    @cached_property
    def always(self) -> Terms:
        """Parameters, optimizer state, and the tensors that all layers read."""
        sequence_tokens = self.B * self.T  # devices that share a sequence have all of it
        # Tokens, targets, doc_ids, int64; CUDA graphs read those of a micro-batch from one place.
        batch = 24 * sequence_tokens * (self.workload.accumulate + self.captured)
        mask = (16 + 8) * sequence_tokens  # first, last of queries and of keys; positions
        # cos and sin of each pair, and the factor of queries
        rope = FP32 * self.N * sum(x.size + bool(x.growth) for x in self.model.ropes())
        away, _ = frozen_on_host(self.workload)
        return {
            PARAMETERS: self.weights / self.slices + self.gathered() - away,
            OPTIMIZER: optimizer_state(self.workload)[0] / self.slices,
            BATCH: batch + mask + rope + (CUBLAS if self.through.on_gpu else 0),
        }

    def brought(self, blocks: int = 2) -> Terms:
        """Return frozen weights from the host: of the block that computes, and of the next one."""
        away, largest = frozen_on_host(self.workload)
        return {PARAMETERS: min(blocks * largest, away)}

    @cached_property
    def weights(self) -> float:
        """Bytes of all weights: fp32 master copies; frozen ones as used, or packed."""
        if self.added:
            return self.workload.lora.frozen_bytes(self.model, self.e) + FP32 * self.added
        return FP32 * self.workload.model.parameters()

    def saved(self) -> float:
        """Return the bytes of a checkpoint that this process writes."""
        return (self.weights + sum(optimizer_state(self.workload))) / self.slices

    def gathered(self) -> float:
        """Return the bytes that fsdp gathers."""
        # Embedding and lm_head, some blocks, and the gradient of a block in fp32 while ranks sum it
        if not self.sharded:
            return 0.0
        outside = (1 if self.model.tied else 2) * self.V * self.C
        block = max(self.weights_by_block)
        added = 0 if self.added else FP32 * block
        gathered = max(frozen_bytes(self.workload, x) for x, _ in self.model.kinds)
        gathered = self.e * block if self.measured else gathered
        together = max(2, self.memory.keep_every or 1)  # an input is made of the last one saved
        return float(self.e * outside + together * gathered + added)

    def exchange_of(self, window: int | None) -> float:
        """Return the bytes that attention's backward sends and receives at one time between the
        ranks of a sequence, in a layer with this `window`.
        """
        ranks, attention = self.workload.context, self.model.largest_attention
        if ranks == 1:
            return 0.0
        heads, q, kv = attention.model.kv_heads, attention.query_size, attention.key_size
        if exchanges_halo(self.workload, window):
            keys = self.N + self.B * ((window or 1) - 1)
            return 4.0 * self.e * kv * keys  # k and v with the neighbour's, dk and dv
        parts = self.workload.head_parts
        if self.workload.context_method == "allgather":
            # Of a group of heads, k and v of all tokens: in order, their gradients, those in one
            # tensor, by rank and as received; and their sum in fp32
            group = kv / parts * ranks * self.N
            return 2.0 * (5 * self.e * group + FP32 * group / ranks)
        # Ulysses: q, the output and its gradient, and k and v twice, as sent and as received
        copies = kv_copies(attention.model.heads, heads, ranks)
        return 2.0 * self.e * (3 * q + 2 * copies * kv) * self.N / parts

    def host(self) -> Terms:
        """Return the pinned host memory: weights, the optimizer's state, and activations."""
        away = sum(self.saved_by_block[: self.away])
        if self.reads_host:
            # A place for an input, and one for each output, that is made again
            away += self.e * self.C * self.N * (self.every > 1)
            away += self.costs[0].output * len({layer % self.every for layer in self.attends_again})
        weights, _ = frozen_on_host(self.workload)
        _, optimizer = optimizer_state(self.workload)
        return {PARAMETERS: weights, OPTIMIZER: optimizer / self.slices, KEPT: away}

    def logits(self, bytes_each: int) -> float:
        """Return the bytes of a chunk's logits."""
        chunk = self.memory.chunk(self.V, self.workload.device)
        return float(bytes_each * self.V * tile_size(self.N, chunk))

    def loss(self) -> Terms:
        """Return the last norm's input and output, logits of a chunk, and their gradients."""
        # The input is in fp32 unless a kernel of ours takes it as it is
        weight = (self.copy + self.gradient) * self.V * self.C
        hidden = ((self.e if self.norms_fused else FP32) + 2 * self.e) * self.C * self.N
        slopes = 0 if self.model.multipliers.logit_softcap is None else FP32
        return {LOSS: weight + hidden + self.logits(self.e + slopes) + FP32 * self.N}

    def again(self, layer: int) -> float:
        """Return the bytes brought or computed back before a block's backward."""
        # Discarded inputs and offloaded activations
        if self.memory.recompute != "block" or self.reads_host:
            return 0.0
        # Blocks to go back to the last input that was kept; it is made of theirs
        missing = (layer - 1) % self.every
        since = range(layer - 1 - missing, layer)
        made = [self.costs[i].output for i in since if i in self.attends_again]
        x = self.e * self.C * self.N * (missing > 0)
        needed = range(layer - 1 - max(1, missing), layer)
        return sum(self.saved_by_block[i] for i in needed if 0 <= i < self.away) + sum(made) + x

    def forward(self, through: Pass) -> float:
        """Return the bytes of a block's forward without gradients."""
        return max(block_memory.forward(block, through) for block, _ in self.model.kinds)

    def validation(self, sequences: int, length: int) -> Terms:
        """Return the bytes of a forward without gradient, in which blocks run uncompiled."""
        tokens = sequences * -(-length // self.workload.context)
        tile = min(self.memory.mlp_tile or tokens, tokens)
        through = self.workload.pass_of(sequences, length, self.in_8_bits[0])
        # In memory: masked scores, their distance to the lse, and its exp
        attention = self.workload.attention
        has_scores = any(x.description.score_bytes for x in attention.each)
        scores = 3.0 * FP32 * self.model.heads * tokens * length if has_scores else 0.0
        mlp = self.forward(through._replace(tile=tile, is_compiled=False))
        # A layer that is computed again saves nothing in forward, as in validation
        if layers := self.workload.measured.get("block"):
            copies = sum(layer.forward.intercept for layer in layers)
            of_token = self.e * self.C + max(layer.forward.slope for layer in layers)
            mlp = copies + of_token * tokens
        logits = self.logits(FP32) + self.copy * self.V * self.C + self.e * self.C * tokens
        of_block = _sum({MLP: mlp, ATTENTION: scores}, self.brought())
        return of_block if sum(of_block.values()) > logits else {LOSS: logits}


def _sum(*parts: Terms) -> Terms:
    terms = dict.fromkeys(chain(*parts))
    return {term: sum(part.get(term, 0.0) for part in parts) for term in terms}


def exchanges_halo(workload: Workload, window: int | None) -> bool:
    """Return True if a layer of this `window` needs only the end of the rank before."""
    # The backend must take the free intervals that result
    fits = window is not None and window - 1 <= -(-workload.seq_len // workload.context)
    backend = workload.attention.of_window(window).description
    return workload.context > 1 and fits and backend.takes_intervals


def frozen_bytes(workload: Workload, block: BlockSpec) -> int:
    """Return the bytes of the matrices of a block that trains no more than LoRA's additions."""
    base, e = workload.lora.base, workload.activation_bytes
    return sum(linear.frozen_bytes(base, e) for linear in block.linears.values())


def frozen_on_host(workload: Workload) -> tuple[float, float]:
    """Return the bytes of the frozen matrices in host memory, and those of the largest block."""
    share = workload.memory.offload_weights
    if not share or not workload.added:
        return 0.0, 0.0
    each = [(frozen_bytes(workload, block), count) for block, count in workload.model.kinds]
    layers = workload.model.layers
    mean = sum(size * count for size, count in each) / layers
    return round(share * layers) * mean, float(max(size for size, _ in each))


def attends_again(workload: Workload) -> list[int]:
    """Return the blocks to run attention again in: the shortest windows first, the cheapest."""
    model, share = workload.model, workload.memory.attention_again or 0.0
    blocks = sorted(range(model.layers), key=lambda block: model.window_of(block) or inf)
    return blocks[: round(share * model.layers)]


def read_from_host(workload: Workload) -> Iterator[tuple[bool, bool]]:
    """Yield for each block if backward reads its input, and attention's output, from the host, tile
    by tile: they are saved there, or made again.
    """
    memory, again = workload.memory, set(attends_again(workload))
    if memory.heads_at_once and memory.offload:
        away = round(memory.offload * workload.model.layers)
        for n in range(workload.model.layers):
            yield n < away or n % (memory.keep_every or 1) > 0, n < away or n in again


def trained_weights(workload: Workload) -> tuple[int, int]:
    """Count the trained weights: in matrices of the blocks, and all others, LoRA's among them."""
    if workload.added:
        return 0, workload.added
    matrices = sum(block.weights * count for block, count in workload.model.kinds)
    return matrices, workload.model.parameters() - matrices


def optimizer_state(workload: Workload) -> tuple[float, float]:
    """Return the bytes of optimizer state: on the GPU between updates, and in pinned memory."""
    traits, stored = workload.optimizer.traits, workload.memory.optimizer_state
    matrices, others = trained_weights(workload)
    in_fp32 = float(traits.matrix_bytes * matrices + traits.other_bytes * others)
    if stored == "host":
        return 0.0, in_fp32
    return in_fp32 / 2 if stored == "bf16" else in_fp32, 0.0


def update_workspace(workload: Workload) -> float:
    """Return the bytes of an update on the GPU, its resting state apart."""
    model, orthogonalizes = workload.model, workload.optimizer.traits.orthogonalizes
    linears = [linear for block in workload.model.blocks for linear in block.linears.values()]
    largest = float(int(model.vocab_size or 0) * model.channels)
    if workload.added:
        largest = workload.added / model.layers
    elif not orthogonalizes:
        largest = max(largest, *(linear.weights for linear in linears))
    # Slices of state that comes from the host
    slices = 2.0 * FP32 * min(SLICE, largest) if workload.memory.optimizer_state == "host" else 0.0
    if not orthogonalizes:
        return slices
    # A batch in bf16 before and after an iteration, with two square matrices no larger than it.
    # While it is filled: itself, the same in fp32, and its momentum unless that changes in place.
    each = 8 if workload.memory.optimizer_state in (None, "fp32") else 10
    largest_matrix = max(max(linear.rows) * linear.columns for linear in linears)
    if workload.sharing.shards_weights:  # one matrix at a time, next to its whole weight in bf16
        return max(slices, *(2.0 * x.weights + 8.0 * max(x.rows) * x.columns for x in linears))
    return max(slices, float(each * min(max(STACK, largest_matrix), trained_weights(workload)[0])))
