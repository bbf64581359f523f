"""Forward passes of an evaluation, on one device or several.

Rank 0 leads: it reads the documents, lays out sequences, and adds up the answers. It deals the
sequences of each batch to the data ranks. The other ranks wait for theirs in `serve`, and ranks
that share a sequence get the same ones. So documents are read once, and a mistake is printed once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from longctx.attention import Mask
from longctx.data.sequences import PADDING_PIECE
from longctx.model import GPT
from longctx.model.decoder import Decoder, continuations, decoder_of
from longctx.parallel import sharding
from longctx.parallel.mesh import Parallel

# Rank 0 may load a data set between two batches. A lost process ends the others all the same.
PATIENCE = timedelta(days=7)
HasEnded = Callable[[int, list[int]], bool]  # True if the new tokens of a sequence end it
OnBatch = Callable[[int], None]  # gets the units of each batch that is done


class Generation(NamedTuple):
    """Continue each sequence by at most `max_tokens` tokens, up to one of `ends`."""

    max_tokens: int
    ends: list[int]
    length: int  # tokens of a sequence with its answer, at most


class Asked(NamedTuple):
    """Sequences in the memory of the CPU, and one question about them: the losses of `targets`,
    the predictions of `wanted` after `positions`, or the `generation` after `positions`.
    """

    tokens: Tensor  # (B, T) int64
    targets: Tensor | None = None  # (B, T)
    doc_ids: Tensor | None = None  # (B, T); None: each sequence is one document
    positions: Tensor | None = None  # (B, n)
    wanted: Tensor | None = None  # (B, n) tokens
    generation: Generation | None = None

    def dealt(self, ranks: int) -> list[Asked]:
        """Return equal parts for each of `ranks`, filled up with the last sequence."""
        # Gathering needs equal parts, so some ranks compute the last sequence again
        B = len(self.tokens)
        parts = torch.arange(-(-B // ranks) * ranks).clamp(max=B - 1).view(ranks, -1)
        return [Asked(*(x[part] if isinstance(x, Tensor) else x for x in self)) for part in parts]  # type: ignore[arg-type]


class Scorer:
    """`model`, a GPT in eval mode, on the processes of `parallel`, or on this one alone.

    Products are computed in `dtype`. Documents share sequences if it `packs` them.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype = torch.float32,
        parallel: Parallel | None = None,
        packs: bool = True,
    ) -> None:
        self.model, self.dtype, self.parallel, self.packs = model, dtype, parallel, packs
        self.device = next(model.parameters()).device
        self.data_ranks = 1 if parallel is None else parallel.data_ranks
        self.ranks = 1 if parallel is None else parallel.ranks
        # True if a sequence's length changes its losses: its padding is then another document.
        self.follows_length = isinstance(model, GPT) and model.follows_length
        self.decoder: Decoder | None = None  # of the batch before
        self.graphs = self.device.type == "cuda" and self.ranks == 1
        self.group: dist.ProcessGroup | None = None
        if self.ranks > 1:
            self.group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def sequences_together(self, tokens: int, length: int) -> int:
        """Return how many sequences of `length` tokens a forward takes, `tokens` per device."""
        return max(1, tokens * (self.ranks // self.data_ranks) // length) * self.data_ranks

    def predictions(
        self, tokens: Tensor, positions: Tensor, wanted: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ln p of the tokens `wanted` (B, n) after `positions` (B, n) of sequences (B, T),
        in fp64, and True for the likeliest of all; on the CPU.

        Logits exist for these positions alone: of all they would be 17 GB in fp32 at 32k tokens and
        a vocabulary of 131k. `lengths` (B,): tokens of each sequence before its padding.
        """
        doc_ids = None
        if self.follows_length and lengths is not None:
            beyond = torch.arange(tokens.shape[1]) - lengths[:, None]
            doc_ids = (beyond // PADDING_PIECE + 1).clamp(min=0)
        batch = Asked(tokens, doc_ids=doc_ids, positions=positions, wanted=wanted)
        logp, likeliest = self.ask(batch).cpu().unbind(-1)
        return logp, likeliest == wanted

    def known(self, texts: Sequence[np.ndarray], counts: Sequence[int]) -> list[tuple[float, bool]]:
        """Return ln p of the last `counts` tokens of each text, and True if all are likeliest."""
        longest = max(counts)
        lengths = torch.tensor([len(ids) - 1 for ids in texts])
        positions = (lengths[:, None] - longest + torch.arange(longest)).clamp(min=0)
        # Before fewer tokens any token is asked for, and its answer is dropped.
        ends = [ids[::-1][:count] for ids, count in zip(texts, counts, strict=True)]
        tokens, wanted = _padded([ids[:-1] for ids in texts]), _padded(ends).flip(1)
        answers = zip(*self.predictions(tokens, positions, wanted, lengths), counts, strict=True)
        return [(float(p[-count:].sum()), bool(hits[-count:].all())) for p, hits, count in answers]

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        ends: Sequence[int],
        length: int,
        has_ended: HasEnded = lambda number, tokens: False,
    ) -> list[list[int]]:
        """Return the greedy answer to each prompt: up to `max_tokens` tokens, or to one of `ends`.

        A prompt and its answer have `length` tokens at most. Batches of one length share a cache
        and its CUDA graph; the first of them has the most prompts. On one device a batch stops when
        `has_ended` is true of every answer.
        """
        batch = Asked(
            pad_sequence([torch.tensor(ids) for ids in prompts], batch_first=True),
            positions=torch.tensor([[len(ids) - 1] for ids in prompts]),
            generation=Generation(max_tokens, list(ends), length),
        )
        tokens = self.ask(batch, has_ended).tolist()
        return [list(takewhile(lambda token: token not in ends, row)) for row in tokens]

    def serve(self) -> None:
        """Compute the sequences that rank 0 deals to this rank, until rank 0 ends."""
        while (batch := self._share(None)) is not None:
            self._forward(batch)

    def end(self) -> None:
        """Let the other ranks return from `serve`."""
        if self.group is not None:
            self._share([None] * self.ranks)

    def ask(self, batch: Asked, has_ended: HasEnded | None = None) -> Tensor:
        """Deal the batch to all ranks and return the answer about each of its sequences, on the
        device, without waiting for it: losses of `targets` (B, T), 0 for -100; or ln p and the
        likeliest tokens (B, n, 2); or new tokens (B, max_tokens).
        """
        count = len(batch.tokens)
        if self.group is not None:
            sharing = range(self.ranks // self.data_ranks)
            own = self._share([part for part in batch.dealt(self.data_ranks) for _ in sharing])
            assert own is not None
            batch = own
        return self._forward(batch, has_ended if self.ranks == 1 else None)[:count]

    def _share(self, parts: list[Any] | None) -> Asked | None:
        """Return this rank's part of the `parts` of rank 0."""
        own: list[Asked | None] = [None]
        dist.scatter_object_list(own, parts, src=0, group=self.group)
        return own[0]

    def _forward(self, batch: Asked, has_ended: HasEnded | None = None) -> Tensor:
        """Return the answer about this batch and those of all other data ranks."""
        tokens, targets, doc_ids, positions, wanted, generation = batch
        mask = Mask.causal() if doc_ids is None else Mask.documents(self._pinned(doc_ids))
        is_rounded = self.dtype != torch.float32
        with (
            torch.no_grad(),  # inference_mode would leave tensors that training cannot use
            torch.autocast(self.device.type, self.dtype, enabled=is_rounded),
        ):
            if generation is not None:
                answer = self._generated(batch, generation, has_ended)
            elif targets is not None:
                sent = self._sent(tokens), self._sent(targets)
                answer = self.model(*sent, mask, reduction="none")
            else:
                assert positions is not None and wanted is not None
                at = self._sent(positions)
                logits = self.model(self._sent(tokens), mask=mask, at=at).float()  # (B, n, V)
                of_wanted = logits.gather(-1, self._sent(wanted)[..., None])[..., 0]
                logp = of_wanted.double() - logits.logsumexp(-1).double()
                answer = torch.stack([logp, logits.argmax(-1).double()], dim=-1)
            return answer if self.parallel is None else self.parallel.all_gather_rows(answer)

    def _generated(
        self, batch: Asked, generation: Generation, has_ended: HasEnded | None
    ) -> Tensor:
        """Return (B, max_tokens) int64 new tokens; after the end of a sequence, an end token."""
        # Ranks that share weights all compute the same number
        max_tokens, ends, length = generation
        assert batch.positions is not None and isinstance(self.model, GPT)
        counts = (batch.positions[:, 0] + 1).tolist()
        prompts = [ids[:count] for ids, count in zip(batch.tokens.tolist(), counts, strict=True)]
        answers: list[list[int]] = [[] for _ in prompts]
        unfinished = set(range(len(prompts)))
        with sharding.unsharded(self.model):
            decoder = self._decoder_for(len(prompts), length)
            # The graph of the decoder needs as many sequences as its first batch had.
            prompts += [ends[:1]] * (decoder.sequences - len(prompts))
            for new in continuations(
                decoder, prompts, max_tokens, lambda logits: logits.argmax(-1)
            ):
                for row in tuple(unfinished):
                    answer, token = answers[row], new[row]
                    assert token is not None  # `continuations` ends no sequence by itself
                    answer.append(token)
                    if token in ends or (has_ended is not None and has_ended(row, answer)):
                        unfinished.remove(row)
                if not unfinished and not sharding.is_sharded(self.model):
                    break
        padded = [[*answer, *ends[:1] * (max_tokens - len(answer))] for answer in answers]
        return torch.tensor(padded).to(self.device)

    def _decoder_for(self, sequences: int, length: int) -> Decoder:
        """Return the decoder of the batch before if it has room, because each captures a graph."""
        decoder = self.decoder
        assert isinstance(self.model, GPT)
        if decoder is None or decoder.sequences < sequences or decoder.length != length:
            self.decoder = decoder = None  # frees its cache before there is another one
            self.decoder = decoder = decoder_of(self.model, sequences, length, graphs=self.graphs)
        return decoder

    def _sent(self, x: Tensor) -> Tensor:
        return self._pinned(x).to(self.device, non_blocking=True)

    def _pinned(self, x: Tensor) -> Tensor:
        return x.pin_memory() if self.device.type == "cuda" else x


def _padded(texts: Sequence[np.ndarray]) -> Tensor:
    """Return (texts, longest) int64, with zeros after shorter texts."""
    return pad_sequence([torch.from_numpy(text.copy()) for text in texts], batch_first=True)


class Progress(Bar):
    """A bar on a terminal, else a line each half minute; and the speed. `total`: all units."""

    def __init__(self, unit: str, total: int | None = None) -> None:
        columns = (*Bar.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.add_task(f"scoring {unit}", total=total)
        # Seconds and units done: at the start, after the first batch, after the latest one.
        self.marks = [(time.perf_counter(), 0)]

    def count(self, units: int) -> None:
        """Count the units of a batch; call it once for each."""
        (latest, done), now, began = self.marks[-1], time.perf_counter(), self.marks[0][0]
        # Without a terminal: after the first batch, then each half minute
        if self.disable and (not done or (now - began) // 30 > (latest - began) // 30):
            print(f"{self.tasks[0].description}: {done + units:,}", file=sys.stderr)
        self.marks = [*self.marks[:2], (now, done + units)]
        self.update(self.task_ids[0], completed=done + units)

    @property
    def units_per_second(self) -> float | None:
        """Return the speed after the first batch, which warms up; None if there is only one."""
        if len(self.marks) < 3:
            return None
        (began, before), (ended, done) = self.marks[1:]
        return (done - before) / (ended - began)
