"""Masks: one interval of keys per query.

Query i of row b sees the keys first[b, i] .. last[b, i], both ends included and both non-decreasing
in i; an interval with last < first is empty. Causal attention, packed documents, sliding windows,
their intersections and full attention are all of this form. It costs O(T) memory, and its transpose
has the same form: key j is seen by the queries qfirst[b, j] .. qlast[b, j]. The backward of a
tiled kernel walks over those (compare FlashMask, arXiv 2410.01359).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from longctx.attention.exchange import Exchange
from longctx.config.fields import refuse
from longctx.kernels.attention.launch import tile_starts

INT32_MAX = 2**31 - 1  # of an interval; no row is longer


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query sees.

    Build it once per batch with `causal`, `full`, `documents` or `intervals`. After `bind` it holds
    int32 tensors: `first`, `last` (B or 1, Tq) and `qfirst`, `qlast` (B or 1, Tk). A batch of 1
    stands for every row. `doc_ids` (B, T) and `offsets` (documents + 1,) describe packed documents
    over the flattened batch, and `lengths` their tokens; none is longer than `longest`, a power of
    two, so that code compiled for it serves many batches.
    """

    kind: str
    window: int | None = None
    doc_ids: Tensor | None = None
    first: Tensor | None = None
    last: Tensor | None = None
    qfirst: Tensor | None = None
    qlast: Tensor | None = None
    offsets: Tensor | None = None
    lengths: tuple[int, ...] | None = None  # no tensor, so that it stays in the CPU's memory
    longest: int = 0
    starts: Tensor | None = None  # of documents: `tile_starts`
    visible: int = -1
    exchange: Exchange | None = None  # of q, k, v and out, if ranks share the rows
    # values that a backend derives from a bound mask, once per batch
    cache: dict[Any, Any] = field(default_factory=dict)

    @staticmethod
    def causal(window: int | None = None) -> Mask:
        """Let each query see the keys up to its own, the last `window` of them if given; the last
        query sees the last key.
        """
        return Mask("causal", _checked(window))

    @staticmethod
    def full() -> Mask:
        """Let every query see every key."""
        return Mask("full")

    @staticmethod
    def of(mask: Mask | None) -> Mask:
        """Return `mask`, causal if it is None; ValueError for something else."""
        if mask is not None and not isinstance(mask, Mask):
            raise ValueError(f"mask is a {type(mask).__name__}; give a longctx.attention.Mask")
        return Mask("causal") if mask is None else mask

    @staticmethod
    def documents(doc_ids: Tensor, window: int | None = None) -> Mask:
        """Return causal attention inside packed documents: `doc_ids` (B, T) integers that do not
        decrease along a row.

        Give them on the CPU if you can: then counting pairs and offsets waits for no device. Raises
        ValueError if ids decrease.
        """
        remedy = "sort the documents of each row, or renumber them"
        wrong = doc_ids.ndim != 2 or bool((doc_ids[:, 1:] < doc_ids[:, :-1]).any())
        refuse((wrong, f"doc_ids must be (B, T) and must not decrease along a row; {remedy}"))
        B, T = doc_ids.shape
        # a document begins with the row, or with another id
        changes = torch.ones(B, T, dtype=torch.bool, device=doc_ids.device)
        changes[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
        starts = changes.flatten().nonzero().flatten()
        offsets = torch.cat([starts, starts.new_tensor([B * T])]).to(torch.int32)
        lengths, window = offsets.diff().long(), _checked(window)
        visible = int(causal_pairs(lengths, window).sum())
        # a power of two: torch.compile specializes on it
        longest = 1 << (int(lengths.max()) - 1).bit_length() if lengths.numel() else 0
        own: Any = {"offsets": offsets, "lengths": tuple(lengths.tolist()), "longest": longest}
        return Mask("documents", window, doc_ids, visible=visible, **own)

    @staticmethod
    def intervals(first: Tensor, last: Tensor) -> Mask:
        """Return any intervals: `first`, `last` (B or 1, Tq) integers, both non-decreasing along
        Tq; a query with last < first sees nothing.
        """
        shapes, names = f"{tuple(first.shape)} and {tuple(last.shape)}", ("first", "last")
        differ = first.shape != last.shape or first.ndim != 2
        refuse((differ, f"first and last must both be (B, Tq), got {shapes}"))
        for name, x in zip(names, (first, last), strict=True):
            refuse(((x[:, 1:] < x[:, :-1]).any(), f"{name} must not decrease along a row"))
        first, last = (x.long().clamp(-1, INT32_MAX).int().contiguous() for x in (first, last))
        return Mask("intervals", first=first, last=last)

    @staticmethod
    def bound(first: Tensor, last: Tensor, keys: int) -> Mask:
        """Return bound intervals (B or 1, Tq) int32 among so many `keys`: a shard of a mask."""
        first, last = first.contiguous(), last.contiguous()
        qfirst, qlast = _transposed(first, last, keys)
        return Mask("intervals", first=first, last=last, qfirst=qfirst, qlast=qlast)

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Mask:
        """Return the mask with its tensors on `device`."""
        # nothing on a CPU waits for the copy
        non_blocking = non_blocking and torch.device(device).type != "cpu"
        # by name: the compiler of torch 2.11 reads no vars()
        tensors = "doc_ids", "first", "last", "qfirst", "qlast", "offsets", "starts"
        given = {name: getattr(self, name) for name in tensors}
        moved: Any = {
            k: x.to(device, non_blocking=non_blocking) for k, x in given.items() if x is not None
        }
        return replace(self, **moved, cache={})

    def windowed(self, window: int) -> Mask:
        """Return the mask with each query limited to the last `window` of its keys, its own among
        them; wait for nothing.

        Raises ValueError for full attention and for free intervals: their last key need not be the
        query's own.
        """
        window = _checked(window) or window
        if self.kind not in ("causal", "documents"):
            raise ValueError(f"a window of {window} is for causal masks, not for {self.kind}")
        window = window if self.window is None else min(window, self.window)
        if self.qfirst is None:
            return replace(self, window=window, visible=-1, cache={})
        assert self.first is not None and self.last is not None
        # intervals are bound already: only the first keys move
        first = torch.maximum(self.first, self.last - (window - 1))
        _, qlast = _transposed(first, self.last, self.qfirst.shape[1])
        return replace(self, window=window, visible=-1, first=first, qlast=qlast, cache={})

    def padded(self, T: int, N: int) -> Mask:
        """Return the mask with N - T tokens more at the end of each row, which no other token sees.

        Their own outputs have no meaning.
        """
        if N == T:
            return self
        if self.kind == "causal":
            return Mask.causal(self.window)
        if self.doc_ids is not None:
            ids = self.doc_ids.long()
            # padding is a document of its own
            more = (ids[:, -1:] + 1).expand(-1, N - T)
            return Mask.documents(torch.cat([ids, more], dim=1), self.window)
        rows = 1 if self.first is None else self.first.shape[0]
        device = "cpu" if self.first is None else self.first.device
        ends = self._queries(rows, T, T, torch.device(device))
        return Mask.intervals(*(torch.cat([x, x[:, -1:].expand(-1, N - T)], 1) for x in ends))

    def bind(self, B: int, Tq: int, Tk: int, device: torch.device | str) -> Mask:
        """Return the mask with its O(T) interval tensors on `device`; call it once per batch,
        outside a compiled region.

        Raises ValueError if the mask was made for another batch size or length.
        """
        if self.qfirst is not None:
            self._check_shape(B, Tq, Tk)
            return self if self.qfirst.device == torch.device(device) else self.to(device)
        mask = self.to(device)
        first, last = mask._queries(B, Tq, Tk, torch.device(device))
        qfirst, qlast = _transposed(first, last, Tk)
        ends: Any = {"first": first, "last": last, "qfirst": qfirst, "qlast": qlast}
        starts = None if mask.doc_ids is None else tile_starts(document_starts(mask.doc_ids))
        return replace(mask, **ends, starts=starts, cache={})

    def exchanged(self, exchange: Exchange) -> Mask:
        """Return the mask for attention after `exchange`."""
        return replace(self, exchange=exchange, cache={})

    def positions(self, B: int, T: int, device: torch.device | str) -> Tensor:
        """Return (B, T) int64: each token's position in its own document, counted from 0."""
        i = torch.arange(T, device=device)
        if self.doc_ids is None:
            return i.expand(B, T)
        return i - document_starts(self.doc_ids.to(device))

    def pairs(self, B: int, Tq: int, Tk: int) -> int:
        """Count the visible (query, key) pairs of one head, over all B rows."""
        if self.kind == "full":
            return B * Tq * Tk
        if self.kind == "documents":
            self._check_shape(B, Tq, Tk)
            if self.visible < 0:
                assert self.offsets is not None
                return int(causal_pairs(self.offsets.diff().long(), self.window).sum())
            return self.visible
        if self.kind == "causal" and Tq == Tk:
            return B * int(causal_pairs(torch.tensor([Tq]), self.window).sum())
        first, last = self._queries(B, Tq, Tk, torch.device("cpu"))
        first, last = first.cpu().long().clamp(min=0), last.cpu().long().clamp(max=Tk - 1)
        return int((last - first + 1).clamp(min=0).sum()) * (B // first.shape[0])

    def _check_shape(self, B: int, Tq: int, Tk: int) -> None:
        if self.doc_ids is not None and (B, Tq, Tq) != (*self.doc_ids.shape, Tk):
            raise ValueError(
                f"mask is for doc_ids of shape {tuple(self.doc_ids.shape)}, "
                f"not for B={B}, Tq={Tq}, Tk={Tk}"
            )
        if self.first is not None and self.first.shape not in ((1, Tq), (B, Tq)):
            raise ValueError(
                f"mask is for intervals of shape {tuple(self.first.shape)}, not for B={B}, Tq={Tq}"
            )
        if self.qfirst is not None and self.qfirst.shape[1] != Tk:
            raise ValueError(f"mask is bound to {self.qfirst.shape[1]} keys, not to Tk={Tk}")

    def _queries(self, B: int, Tq: int, Tk: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return first, last (B or 1, Tq) int32, clipped to -1 .. Tk."""
        self._check_shape(B, Tq, Tk)
        if self.kind == "intervals":
            assert self.first is not None and self.last is not None
            return self.first.clamp(min=0, max=Tk), self.last.clamp(min=-1, max=Tk - 1)
        i = torch.arange(Tq, device=device, dtype=torch.int32)[None]
        if self.kind == "full":
            return torch.zeros_like(i), torch.full_like(i, Tk - 1)
        if self.doc_ids is not None:
            first = document_starts(self.doc_ids.to(device)).int()
            last = i.expand(B, Tq).contiguous()
        else:
            # the last query sees the last key
            last = (i + (Tk - Tq)).clamp(min=-1)
            first = torch.zeros_like(last)
        if self.window is not None:
            first = torch.maximum(first, last - (self.window - 1))
        return first, last


def _checked(window: int | None) -> int | None:
    """Return the window, no longer than any row; ValueError unless it is a number of keys."""
    if window is None:
        return None
    if not isinstance(window, Integral) or isinstance(window, bool) or window < 1:
        raise ValueError(f"window={window} must be a whole number of keys, 1 or more, or None")
    return min(window, INT32_MAX)


def _transposed(first: Tensor, last: Tensor, Tk: int) -> tuple[Tensor, Tensor]:
    """Return qfirst, qlast (B or 1, Tk): the queries that see each key."""
    keys = torch.arange(Tk, device=first.device, dtype=torch.int32)
    keys = keys.expand(first.shape[0], Tk).contiguous()
    # intervals do not decrease, so a binary search finds both ends
    qfirst = torch.searchsorted(last, keys, right=False, out_int32=True)
    qlast = torch.searchsorted(first, keys, right=True, out_int32=True) - 1
    return qfirst, qlast


def document_starts(doc_ids: Tensor) -> Tensor:
    """Return (B, T) int64: the row index of the first token of each token's document."""
    ids = doc_ids.contiguous()
    return torch.searchsorted(ids, ids)


def causal_pairs(lengths: Tensor, window: int | None) -> Tensor:
    """Count the pairs of causal attention in sequences of these lengths: a triangle, or a band
    of `window` keys.
    """
    w = lengths if window is None else lengths.clamp(max=window)
    return w * (w + 1) // 2 + (lengths - w) * w
