"""Peak memory of a training step, predicted: the tensors alive at each moment at which many are.
Free of torch.

The largest moment is the peak, as `torch.cuda.max_memory_allocated` counts it. What a block keeps
is what torch.compile's partitioner saves of it (recompute=none) or what longctx.model.recompute
does; tests compare both with the real thing.

Letters: N tokens of a micro-batch in B rows of T; C channels, F ffn, H and Hkv heads of D, L
layers, V words; e bytes of an activation. "Kept" is what forward leaves for backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

from longctx.config.parallel_config import kv_copies
from longctx.planner import links, optimizer_cost
from longctx.planner.workload import FP32, Workload

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
KEPT, ATTENTION, MLP, LOSS, BATCH = (
    "kept activations",
    "attention workspace",
    "MLP workspace",
    "loss",
    "batch",
)
TERMS = (PARAMETERS, GRADIENTS, OPTIMIZER, KEPT, ATTENTION, MLP, LOSS, BATCH)
Terms = dict[str, float]
# Its workspaces on Hopper, of forward's thread and of backward's, allocated through torch
CUBLAS = 65 * 2**20


@dataclass(frozen=True)
class Memory:
    """Bytes by term that one process takes of its GPU, at the moment of a step when that is most,
    and of the host.
    """

    moment: str
    gpu: Terms
    host: Terms = field(default_factory=dict)
    saved: float = 0.0  # of a checkpoint: what this process writes of it

    @property
    def peak(self) -> float:
        """Bytes of the GPU at that moment."""
        return sum(self.gpu.values())

    @property
    def largest(self) -> str:
        """The term that takes most."""
        return max(self.gpu, key=lambda term: self.gpu[term])


def predict(workload: Workload) -> Memory:
    """Peak memory of a step on one of its devices; ValueError where memory=auto is undecided."""
    step = _Step(workload)
    moment, gpu = max(step.moments(), key=lambda moment: sum(moment[1].values()))
    terms = {term: gpu.get(term, 0.0) for term in TERMS}
    return Memory(moment, terms, step.host(), step.saved())


class _Step:
    """The inventory of one training step."""

    def __init__(self, workload: Workload) -> None:
        device, m = workload.device, workload.model
        workload = replace(workload, memory=workload.memory.filled(workload.memory.policy))
        self.workload, self.model, self.memory = workload, m, workload.memory
        self.device, self.libraries = device, CUBLAS if device == "cuda" else 0
        self.B, self.T = workload.batch_size, workload.seq_len
        self.N = self.B * -(-self.T // workload.context)
        # fsdp: a slice of weights, gradients and optimizer state, and gathered weights in 16 bits
        self.sharded, self.slices = workload.sharing.shards_weights, workload.slices
        self.C, self.F, self.L, self.V = m.channels, m.ffn, m.layers, int(m.vocab_size or 0)
        # Q, kv: channels
        self.H, self.q, self.kv = (
            m.heads,
            m.heads * m.head_size,
            m.kv_heads * m.head_size,
        )
        self.e = workload.activation_bytes
        self.compiled = workload.compile
        self.backend, self.layer = workload.attention.description, workload.layer(self.B, self.T)
        # Of a block's products, before and after attention
        self.before_weights = self.C * (self.q + 2 * self.kv)
        self.after_weights = self.q * self.C + 3 * self.C * self.F
        # LoRA: these are trained, in fp32, and the model's own weights are frozen
        self.added = workload.lora.parameters(m)
        self.trained = self.added or m.parameters()
        # Bytes of the gradient of one of the model's own weights
        self.gradient = 0 if self.added else self.e if self.sharded else FP32
        in_16_bits = self.e < FP32 and not self.added and not self.sharded
        self.copy = self.e if in_16_bits else 0  # and of its copy in 16 bits
        # In FP8 a weight has no copy that waits for backward, but in a step that holds all
        # of them from its beginning, as they lie and transposed.
        in_bf16 = {n % self.L for n in workload.bf16_layers}
        is_fp8 = workload.precision == "fp8"
        self.in_8_bits = [is_fp8 and n not in in_bf16 for n in range(self.L)]
        once = workload.quantizes_once
        self.held = 2.0 * sum(self.in_8_bits) * (self.before_weights + self.after_weights) * once
        # One kernel makes the product of gate and up again in backward, see swiglu.py.
        targets = workload.lora.targets if self.added else []
        self.kernels = device == "cuda" and self.e < FP32
        self.fused = self.kernels and "down" not in targets
        # Of N × F elements, where a product has a thin one beside it and both are there before they
        # are added up:
        self.lora_product = 1 if "down" in targets else 0  # the gradient of gate and up's product
        self.lora_gate_up = 6 if "gate_up" in targets else 0  # gate and up, uncompiled
        self.tile = self.tile_of(self.memory.mlp_tile or self.N)
        # Bytes that the first 0, 1, ... blocks keep on the GPU
        self.exchanged = self.exchange()
        self.kept_by_block = [self.kept_by(layer) for layer in range(self.L)]
        here = [0.0] * self.away() + self.kept_by_block[self.away() :]
        self.kept_by_first = [0.0, *accumulate(here)]

    def of_passes(self) -> Iterator[tuple[str, Terms]]:
        """Yield the moments of forward and backward."""
        always = _sum(self.always(), {PARAMETERS: self.held})
        gradients = FP32 * self.trained / self.slices
        embedding = self.gradient * self.V * self.C
        kept = FP32 / self.slices if self.sharded and self.gradient else self.gradient
        block = kept * (self.before_weights + self.after_weights)
        block += FP32 * self.added / self.L / self.slices
        tied = self.model.tied
        # From the second micro-batch on every gradient is there all the time, and always where DDP
        # keeps them in its buckets.
        full = self.workload.accumulate > 1 or self.workload.sharing.buckets_gradients
        before = gradients if full else 0.0
        yield "loss", _sum(always, {GRADIENTS: before}, self.kept(self.L), self.loss())
        # The head's gradient is there at once; a tied one waits beside the sum for that of the
        # embedding.
        head = embedding if tied or not full else 0.0
        # The norm's input and both its gradients; where no kernel of ours takes them as they are,
        # in fp32, and the loss's too.
        norm = (3 * self.e if self.kernels else 3 * FP32 + self.e) * self.C * self.N
        yield (
            "backward of the last norm",
            _sum(always, {GRADIENTS: before + head, LOSS: norm}, self.kept(self.L)),
        )
        for layer in range(self.L, 0, -1):
            held = _sum(
                always,
                {GRADIENTS: before + head + (0.0 if full else block * (self.L - layer))},
                self.kept(layer),
            )
            for name, work in (
                ("MLP", self.mlp_backward(layer)),
                ("attention", self.attention_backward(layer)),
            ):
                yield f"backward of block {layer}, {name}", _sum(held, work)
        last = (gradients if full else gradients - embedding) + (embedding if tied else 0.0)
        # Added to the head's in place
        sparse = tied and self.device == "cuda" and not self.workload.deterministic
        last += 0.0 if sparse else embedding
        tokens = {GRADIENTS: last, KEPT: (FP32 + self.e) * self.C * self.N}
        yield "backward of the embedding", _sum(always, tokens)

    def moments(self) -> Iterator[tuple[str, Terms]]:
        """Yield every moment that can be the peak, with its bytes by term."""
        passes = list(self.of_passes())
        yield from passes
        resting = self.always()
        gradients = {GRADIENTS: FP32 * self.trained / self.slices}
        if self.workload.captured:
            # The graphs' memory pool, gradients among it, stays as large as the passes need: what
            # is no graph of theirs comes on top.
            resting = max((terms for _, terms in passes), key=lambda terms: sum(terms.values()))
            gradients = {}
        workspace = {OPTIMIZER: optimizer_cost.workspace(self.workload)}
        yield "optimizer", _sum(resting, gradients, workspace)
        if not self.workload.validates:
            return
        yield "validation", _sum(resting, self.validation(self.B, self.T))
        length = self.workload.passkey_length
        if length > self.T:  # shorter texts together are no more than a batch
            texts = max(1, self.B * self.T // length)
            yield "pass keys", _sum(resting, self.validation(texts, length))

    def tile_of(self, most: int) -> int:
        """Tokens of a tile of at most so many: all tiles are about equal, see
        `longctx.model.recompute`.
        """
        pieces = -(-self.N // most)
        return self.N if pieces == 1 else min(most, -(-self.N // pieces // 128) * 128)

    def always(self) -> Terms:
        """Parameters, optimizer state, and what every layer of a micro-batch reads."""
        row_tokens = self.B * self.T  # every device of a row has all of it
        # Tokens, targets, doc_ids, int64; CUDA graphs read those of a micro-batch from one place.
        batch = 24 * row_tokens * (self.workload.accumulate + self.workload.captured)
        mask = (16 + 8) * row_tokens  # first, last of queries and of keys; positions
        rope = FP32 * self.N * self.model.head_size  # cos and sin
        return {
            PARAMETERS: self.weights() / self.slices + self.gathered(),
            OPTIMIZER: optimizer_cost.state_on_gpu(self.workload) / self.slices,
            BATCH: batch + mask + rope + self.libraries,
        }

    def weights(self) -> float:
        """Bytes of all weights: fp32 master copies, and frozen ones as they are used."""
        return (self.e if self.added else FP32) * self.model.parameters() + FP32 * self.added

    def saved(self) -> float:
        """Bytes of a checkpoint that this process writes."""
        state = optimizer_cost.state_on_gpu(self.workload)
        state += optimizer_cost.state_on_host(self.workload)
        return (self.weights() + state) / self.slices

    def gathered(self) -> float:
        """fsdp: embedding and lm_head, the block at work and the next one, and the gradient of a
        block in fp32 while the ranks add it up.
        """
        if not self.sharded:
            return 0.0
        outside = (1 if self.model.tied else 2) * self.V * self.C
        block = self.before_weights + self.after_weights
        added = 0 if self.added else FP32 * block
        return float(self.e * (outside + 2 * block) + added)

    def exchange(self) -> float:
        """Context parallelism: what is sent and received at one time in attention's backward, in
        the layers where that is most.
        """
        if self.workload.context == 1:
            return 0.0
        return max(map(self.exchange_of, self.model.windows()))

    def exchange_of(self, window: int | None) -> float:
        """`exchange` of a layer with this `window`."""
        ranks, heads = self.workload.context, self.model.kv_heads
        if links.exchanges_halo(self.workload, window):
            keys = self.N + self.B * ((window or 1) - 1)
            return 4.0 * self.e * self.kv * keys  # k and v with the neighbour's, dk and dv
        parts = self.workload.head_parts
        if self.workload.context_method == "allgather":
            # Of a group of heads, k and v of all tokens: in order, their gradients, those in one
            # tensor, by rank and as received; and their sum in fp32
            group = self.kv / parts * ranks * self.N
            return 2.0 * (5 * self.e * group + FP32 * group / ranks)
        # Ulysses: q, the output and its gradient, and k and v twice, as sent and as received
        copies = kv_copies(self.model.heads, heads, ranks)
        return 2.0 * self.e * (3 * self.q + 2 * copies * self.kv) * self.N / parts

    def host(self) -> Terms:
        """Bytes of host memory that grow with the run: the optimizer's, and kept activations in
        pinned memory.
        """
        away = self.kept_by_block[: self.away()]
        optimizer = optimizer_cost.state_on_host(self.workload) / self.slices
        return {OPTIMIZER: optimizer, KEPT: float(sum(away))}

    def away(self) -> int:
        """Layers whose kept activations lie on the host: the first so many."""
        return round((self.memory.offload or 0.0) * self.L)

    def kept_by(self, layer: int) -> float:
        """Bytes that block `layer`, from 0, keeps."""
        N, C, F, e = self.N, self.C, self.F, self.e
        if self.memory.recompute == "block":
            x = float(e * C * N) if layer % (self.memory.keep_every or 1) == 0 else 0.0
            # The others run forward again
            lse = FP32 * self.H * N if self.backend.has_backward else 0
            return x + e * self.q * N + lse  # with attention's output
        attention = self.backend.saved(self.layer)
        copy, x8 = self.copies(layer)
        norm = (x8 or e) * C * N + FP32 * N  # its output, and 1 / rms
        weights = copy * self.before_weights  # in 16 bits, for backward
        kept = e * C * N + norm + attention + weights  # with the block's input
        if self.memory.recompute == "mlp":
            return kept
        weights = copy * self.after_weights + x8 * self.q * N  # and attention's output in 8 bits
        inner = 2 * F if self.fused else 3 * F  # gate and up, and their product
        return kept + e * C * N + norm + e * inner * N + weights  # with attention's projection

    def copies(self, layer: int) -> tuple[int, int]:
        """Bytes of a weight's copy that block `layer`, from 0, keeps for backward; and of an input
        of a product in FP8, 0 where it is kept as it is: in bf16, or for LoRA's factors.
        """
        in_8_bits = self.in_8_bits[layer]
        return 0 if in_8_bits else self.copy, 1 if in_8_bits and not self.added else 0

    def kept(self, layers: int) -> Terms:
        """What the first `layers` blocks keep on the GPU."""
        return {KEPT: self.kept_by_first[layers]}

    def logits(self, bytes_each: int) -> float:
        """The logits of a chunk: all chunks of the loss are about equal, none larger than
        memory.loss_chunk.
        """
        chunk = self.memory.chunk(self.V, self.device)
        return float(bytes_each * self.V * self.tile_of(chunk))

    def loss(self) -> Terms:
        """The last norm's input, in fp32 where no kernel of ours takes it as it is, and its output,
        logits of a chunk, and the gradients computed with them.
        """
        weight = (self.copy + self.gradient) * self.V * self.C
        hidden = ((self.e if self.kernels else FP32) + 2 * self.e) * self.C * self.N
        return {LOSS: weight + hidden + self.logits(self.e) + FP32 * self.N}

    def mlp_backward(self, layer: int) -> Terms:
        """Backward of the part after attention, when the gradients of gate and up have just been
        computed.

        The gradient of their product is still there then, with LoRA on the down projection in two
        parts. Fused, the product itself is too, and the down projection has no gradient yet but has
        given up its copy in 16 bits; else the other way round.
        """
        N, C, F, e = self.N, self.C, self.F, self.e
        copy, x8 = self.copies(layer - 1)
        incoming = e * C * N
        down = float(-copy if self.fused else self.gradient) * C * F
        if self.memory.recompute == "none":
            incoming += x8 * C * N  # transposed in FP8
            return {MLP: incoming + e * (4 if self.fused else 2 + self.lora_product) * F * N + down}
        n = self.tile
        work = e * (3 * C + 2 * F) * n  # projection, norm, output; gate and up
        work += x8 * (C + self.q) * n - (e - x8 if x8 else 0) * C * n
        work += e * (4 if self.fused else 3 + self.lora_product) * F * n
        weights = copy * self.after_weights + (down if self.fused else down - copy * C * F)
        # Attention's output has its gradient for all tokens, the last tile's is there too;
        # gradients of weights are sums.
        if n < N:
            work += e * self.q * N + e * (C + self.q) * n
            weights += self.gradient * self.after_weights
        return {MLP: incoming + work + weights, KEPT: self.again(layer)}

    def again(self, layer: int) -> float:
        """What is brought or computed back before a block's backward: an input not kept, what lay
        on the host.
        """
        if self.memory.recompute != "block":
            return 0.0
        # Blocks to go back to the last input that was kept
        missing = (layer - 1) % (self.memory.keep_every or 1)
        needed = range(layer - 1 - max(1, missing), layer)
        brought = sum(self.kept_by_block[i] for i in needed if 0 <= i < self.away())
        return brought + min(missing, 2) * self.e * self.C * self.N

    def attention_backward(self, layer: int) -> Terms:
        """Backward of attention, with what comes before it computed again where it was not kept."""
        N, C, e, q, kv = self.N, self.C, self.e, self.q, self.kv
        # Residual; do, dq, dk, dv
        work = (
            e * C * N
            + e * (2 * q + 2 * kv) * N
            + self.backend.workspace(self.layer)
            + self.exchanged
        )
        if self.memory.recompute == "none":
            copy, x8 = self.copies(layer - 1)
            gone = (e * (2 if self.fused else 3) * self.F + (x8 or e) * C + x8 * q) * N + copy * (
                self.after_weights - q * C
            )
            return {ATTENTION: work + self.gradient * self.after_weights, KEPT: -gone}
        sums = self.gradient * self.after_weights
        if self.memory.recompute == "mlp":
            return {ATTENTION: work + sums}
        untiled = self.tile == N
        # With one tile the norm, and q and k before rotation too
        qkv = e * (q + 2 * kv) * N + (e * (C + q + kv) * N if untiled else 0)
        return {ATTENTION: work + qkv + sums, KEPT: self.again(layer)}

    def validation(self, rows: int, length: int) -> Terms:
        """Return the bytes of a forward without gradient, in which blocks run uncompiled."""
        C, F, e = self.C, self.F, self.e
        N = rows * -(-length // self.workload.context)
        scores = self.backend.forward_workspace(self.workload.layer(rows, length))
        inner = max(3 if self.fused else 4, self.lora_gate_up)
        mlp = e * (2 * C + self.q) * N + e * (2 * C + inner * F) * min(self.memory.mlp_tile or N, N)
        logits = self.logits(FP32) + self.copy * self.V * C + e * C * N
        return {MLP: mlp, ATTENTION: scores} if mlp + scores > logits else {LOSS: logits}


def _sum(*parts: Terms) -> Terms:
    total: Terms = {}
    for part in parts:
        for term, size in part.items():
            total[term] = total.get(term, 0.0) + size
    return total
