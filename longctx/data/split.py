"""The tokens that validate: a share of the corpus, chosen by the hashes of its texts.

Documents validate whole, in the order of their hashes, until the share is full, so a text mostly
keeps its side when others come. For a share of up to a half, no more than half of the texts do.
Copies of a text have one side, in all sources of a mix; texts that are only alike do not: a tool
such as datatrove takes those out beforehand. Shares are counted in bytes, so a run with another
tokenizer validates the same documents. If the documents are too long for their share, the end of
the longest validates, or of conversations the shortest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from longctx.config.fields import refuse

if TYPE_CHECKING:
    from longctx.data.store import Store

SHARE = 0.02  # of the bytes, if data.val_fraction is null
# Bytes, about 32,000 tokens: the standard error of their mean loss is some 0.02 nats. Of a small
# corpus at most SMALL_CORPUS_SHARE.
ENOUGH = 128 << 10
SMALL_CORPUS_SHARE = 0.1
NEARLY = 0.98  # of the wanted bytes, at which no more documents are looked for
SHORTEST = 2  # tokens of a part: one to show and one to predict


def splitmix(numbers: np.ndarray | np.uint64) -> np.ndarray:
    """Mix the bits of each number, (n,) uint64, as SplitMix64 does after its addition."""
    mixed = np.asarray(numbers, dtype=np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def by_hash(stores: Sequence[Store], fractions: Mapping[str, float | None]) -> list[np.ndarray]:
    """Return for each store the first tokens of each document that are trained on, (documents,)
    int64; the rest validates. The keys of `fractions` are prefixes of keys, such as data.

    Raises ValueError if a store has nothing to train on, or nothing that could validate.
    """
    lengths = np.concatenate([store.lengths for store in stores])
    owner = np.repeat(np.arange(len(stores)), [len(store) for store in stores])
    hashes = np.concatenate([store.keys[:, :8] for store in stores]).view(">u8")[:, 0]
    texts, text = np.unique(hashes.astype(np.uint64), return_inverse=True)
    sizes = np.zeros((len(texts), len(stores)), np.int64)  # bytes of (text, store)
    np.add.at(sizes, (text, owner), np.concatenate([store.n_bytes for store in stores]))
    wanted = np.array([*map(_wanted, sizes.sum(axis=0).tolist(), fractions.values())])
    validates = whole_texts(texts, sizes, wanted)
    missing = wanted - sizes[validates].sum(axis=0)
    trained = np.where(validates[text], 0, lengths)
    # Few long texts leave too little: the end of the longest validates, or one conversation
    is_in_one_store = (sizes > 0).sum(axis=1) == 1
    for number, (prefix, store) in enumerate(zip(fractions, stores, strict=True)):
        own = np.flatnonzero(owner == number)
        others = own[(trained[own] > 0) & is_in_one_store[text[own]]]
        if missing[number] > wanted[number] / 2 and len(others):
            longest, shortest = (others[f(lengths[others])] for f in (np.argmax, np.argmin))
            length, size = int(lengths[longest]), int(sizes[text[longest], number])
            # Of answers none is cut: it would never learn how its last one ends. Nor are several
            # documents of one text, of which others have its end
            is_whole = store.has_answers or not np.array_equal(store.keys, store.texts)
            if is_whole and len(others) == len(own):
                trained[text == text[shortest]] = 0
            elif not is_whole and length >= 2 * SHORTEST:
                end = max(SHORTEST, length * int(missing[number]) // size)
                trained[text == text[longest]] = max(SHORTEST, length - end)
        is_unsplit = wanted[number] and (trained[own] == lengths[own]).all()
        key = f"{prefix}.val_fraction"
        value = "null" if fractions[prefix] is None else fractions[prefix]
        shared = "" if is_in_one_store[text[own]].all() else ", or in other sources of the mix too"
        problem = f"{key}={value}: cannot split {len(own)} document(s), all alike or too short"
        advice = f"give more documents, or {key}=0 to train without validation"
        message = f"{problem}{shared}, into training and validation; {advice}"
        refuse((is_unsplit or not trained[own].any(), message))
    return np.split(trained, np.cumsum([len(store) for store in stores])[:-1])


def whole_texts(texts: np.ndarray, sizes: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return which texts, (n,) bool, validate whole: no store gets more than its `wanted` bytes."""
    in_store, missing = sizes > 0, wanted.copy()
    # Next to one long text all others may be few bytes: half of the texts are trained on
    room = np.where(2 * wanted <= sizes.sum(axis=0), in_store.sum(axis=0) // 2, len(texts))
    enough = np.maximum(1, (1 - NEARLY) * wanted).astype(np.int64)  # bytes that may be missing
    validates = np.zeros(len(texts), bool)
    # In the order of their hashes: the same text is on the same side next to any others
    for number in np.argsort(splitmix(texts), kind="stable").tolist():
        if (missing < enough).all():
            break
        fits = (sizes[number] <= np.where(missing < enough, 0, missing)).all()
        if fits and (room >= in_store[number]).all():
            validates[number] = True
            missing -= sizes[number]
            room -= in_store[number]
    return validates


def _wanted(total: int, fraction: float | None) -> int:
    """Return how many of `total` bytes are to validate."""
    if fraction is not None:
        return 0 if fraction == 0 else min(max(1, total - 1), max(1, round(fraction * total)))
    return max(1, round(max(SHARE * total, min(ENOUGH, SMALL_CORPUS_SHARE * total))))
