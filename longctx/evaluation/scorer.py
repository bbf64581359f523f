"""Forward passes of an evaluation, on one device or several.

The first process leads: it reads the documents, lays out rows, and adds up what comes back. It
deals the rows of each batch to the data ranks; the other processes wait for theirs in `serve`, and
those that share rows get the same ones. So documents are read once, a result exists once, and a
mistake is said once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import takewhile
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from longctx.attention import Mask
from longctx.data.rows import PADDING_PIECE
from longctx.model import GPT
from longctx.model.decoder import Decoder, continuations
from longctx.parallel import sharding
from longctx.parallel.mesh import Parallel

# The first process may load a data set between two batches. Who is lost, the heartbeat notices.
PATIENCE = timedelta(days=7)
HasEnded = Callable[[int, list[int]], bool]  # whether the tokens so far of a row end it


class Rows(NamedTuple):
    """Rows of one data rank, in the memory of the CPU, and what is asked about them: the losses of
    `targets`, what is predicted at the places `at`, or how they go on after the places `at`.
    """

    tokens: Tensor  # (B, T) int64
    targets: Tensor | None = None  # (B, T)
    doc_ids: Tensor | None = None  # (B, T); None: each row is of one document
    at: Tensor | None = None  # (B, n)
    wanted: Tensor | None = None  # (B, n) tokens
    most: Tensor | None = None  # (B,) tokens to go on with, the same in each row
    ends: Tensor | None = None  # (B, n) tokens that end a row
    room: Tensor | None = None  # (B,) tokens that a row has at most, the same in each

    def dealt(self, ranks: int) -> list[Rows]:
        """Equal parts for each of `ranks`; the last row stands in for those that are lacking."""
        B = len(self.tokens)
        parts = torch.arange(-(-B // ranks) * ranks).clamp(max=B - 1).view(ranks, -1)
        return [Rows(*(None if x is None else x[part] for x in self)) for part in parts]  # type: ignore[arg-type]


class Scorer:
    """`model`, a GPT in eval mode, which the processes of `parallel` hold; None: this one alone.

    Products are computed in `dtype`.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype = torch.float32,
        parallel: Parallel | None = None,
    ) -> None:
        self.model, self.dtype, self.parallel = model, dtype, parallel
        self.device = next(model.parameters()).device
        self.data_ranks = 1 if parallel is None else parallel.data_ranks
        self.ranks = 1 if parallel is None else parallel.ranks
        # Whether what a row computes depends on its length: padding then has documents of its own.
        self.follows_length = isinstance(model, GPT) and model.ropes.follows_length
        self.decoder: Decoder | None = None  # of the batch before
        self.graphs = self.device.type == "cuda" and self.ranks == 1
        self.group: dist.ProcessGroup | None = None
        if self.ranks > 1:
            self.group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def rows_together(self, tokens: int, length: int) -> int:
        """How many rows of `length` tokens go through the model at a time, `tokens` per device."""
        return max(1, tokens * (self.ranks // self.data_ranks) // length) * self.data_ranks

    def losses(self, tokens: Tensor, targets: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        """(B, T) losses of `targets`, 0 where one is -100, on the device; waits for nothing there.

        `tokens`, `targets` and `doc_ids` (B, T) lie in the memory of the CPU.
        """
        return self._led(Rows(tokens, targets, doc_ids))

    def predictions(
        self, tokens: Tensor, at: Tensor, wanted: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """ln p of the tokens `wanted` (B, n) after the places `at` (B, n) of rows (B, T), in fp64,
        and the likeliest tokens there; on the CPU.

        After `lengths` (B,) tokens, where they are given, a row is padding.
        """
        doc_ids = None
        if self.follows_length and lengths is not None:
            beyond = torch.arange(tokens.shape[1]) - lengths[:, None]
            doc_ids = (beyond // PADDING_PIECE + 1).clamp(min=0)
        rows = Rows(tokens, doc_ids=doc_ids, at=at, wanted=wanted)
        logp, likeliest = self._led(rows).cpu().unbind(-1)
        return logp, likeliest.long()

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        most: int,
        ends: Sequence[int],
        room: int,
        has_ended: HasEnded = lambda row, tokens: False,
    ) -> list[list[int]]:
        """The likeliest next tokens of each prompt, one after the other: at most `most`, and those
        before one of `ends`.

        A prompt and its answer have `room` tokens at most: batches of one room, the first of which
        has the most rows, share a cache and its CUDA graph. Where this process is alone, all stop
        as soon as `has_ended` says that each has.
        """
        B = len(prompts)
        rows = Rows(
            pad_sequence([torch.tensor(ids) for ids in prompts], batch_first=True),
            at=torch.tensor([[len(ids) - 1] for ids in prompts]),
            most=torch.full((B,), most),
            ends=torch.tensor(ends).expand(B, -1),
            room=torch.full((B,), room),
        )
        tokens = self._led(rows, has_ended).tolist()
        return [list(takewhile(lambda token: token not in ends, row)) for row in tokens]

    def serve(self) -> None:
        """Compute the rows that the first process deals to this one, until it ends."""
        while (rows := self._share(None)) is not None:
            self._forward(rows)

    def end(self) -> None:
        """Let the others return from `serve`."""
        if self.group is not None:
            self._share([None] * self.ranks)

    def _led(self, rows: Rows, has_ended: HasEnded | None = None) -> Tensor:
        count = len(rows.tokens)
        if self.group is not None:
            parts = rows.dealt(self.data_ranks)
            sharing = self.ranks // self.data_ranks
            own = self._share([parts[rank // sharing] for rank in range(self.ranks)])
            assert own is not None
            rows = own
        return self._forward(rows, has_ended if self.ranks == 1 else None)[:count]

    def _share(self, parts: list[Any] | None) -> Rows | None:
        """This rank's part of those that the first one deals out."""
        own: list[Rows | None] = [None]
        dist.scatter_object_list(own, parts, src=0, group=self.group)
        return own[0]

    def _forward(self, rows: Rows, has_ended: HasEnded | None = None) -> Tensor:
        """The answer about `rows`, and about those of all other data ranks."""
        mask = Mask.causal() if rows.doc_ids is None else Mask.documents(self._pinned(rows.doc_ids))
        kind = self.device.type
        with (
            torch.no_grad(),  # inference_mode would leave tensors that training cannot use
            torch.autocast(kind, self.dtype, enabled=self.dtype != torch.float32),
        ):
            if rows.most is not None:
                answer = self._continued(rows, has_ended)
            elif rows.targets is not None:
                tokens, targets = self._sent(rows.tokens), self._sent(rows.targets)
                answer = self.model(tokens, targets, mask, reduction="none")
            else:
                assert rows.at is not None and rows.wanted is not None
                tokens, at = self._sent(rows.tokens), self._sent(rows.at)
                logits = self.model(tokens, mask=mask, at=at).float()  # (B, n, V)
                wanted = logits.gather(-1, self._sent(rows.wanted)[..., None])[..., 0]
                logp = wanted.double() - logits.logsumexp(-1).double()
                answer = torch.stack([logp, logits.argmax(-1).double()], dim=-1)
            return answer if self.parallel is None else self.parallel.all_gather_rows(answer)

    def _continued(self, rows: Rows, has_ended: HasEnded | None) -> Tensor:
        """(B, most) int64 tokens that follow; after the end of a row, one that ends it.

        Ranks that share weights all compute the same number.
        """
        assert rows.most is not None and rows.at is not None and rows.ends is not None
        B, most, ends = len(rows.tokens), int(rows.most[0]), rows.ends[0].tolist()
        lengths = (rows.at[:, 0] + 1).tolist()
        prompts = [ids[:n] for ids, n in zip(rows.tokens.tolist(), lengths, strict=True)]
        answers: list[list[int]] = [[] for _ in prompts]
        going = set(range(B))
        assert rows.room is not None and isinstance(self.model, GPT)
        with sharding.unsharded(self.model):
            decoder = self._decoder_of(B, int(rows.room[0]))
            prompts += [ends[:1]] * (decoder.cache.rows - B)  # to be as many as its graph has
            for new in continuations(decoder, prompts, most, lambda logits: logits.argmax(-1)):
                for n in tuple(going):
                    answer, token = answers[n], new[n]
                    assert token is not None  # without `ends` no row ends
                    answer.append(token)
                    if token in ends or (has_ended is not None and has_ended(n, answer)):
                        going.remove(n)
                if not going and not sharding.is_sharded(self.model):
                    break
        padded = [[*row, *ends[:1] * (most - len(row))] for row in answers]
        return torch.tensor(padded).to(self.device)

    def _decoder_of(self, rows: int, room: int) -> Decoder:
        """A decoder of at least so many rows, of `room` tokens each: the one of the batch before
        where that fits, since each captures a graph of its own.
        """
        decoder = self.decoder
        assert isinstance(self.model, GPT)
        if decoder is None or decoder.cache.rows < rows or decoder.cache.length != room:
            self.decoder = decoder = None  # before there is another cache
            self.decoder = decoder = Decoder(self.model, rows, room, graphs=self.graphs)
        return decoder

    def _sent(self, x: Tensor) -> Tensor:
        return self._pinned(x).to(self.device, non_blocking=True)

    def _pinned(self, x: Tensor) -> Tensor:
        return x.pin_memory() if self.device.type == "cuda" else x


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` in eval mode inside the block."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
