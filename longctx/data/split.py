"""The tokens that validate: a share of the corpus, with near-duplicates on one side.

Documents validate whole, in the order of their hashes, until the share is full. If whole documents
cannot make it up, because they are few or long, the ends of documents do. Shares are counted in
bytes, so a run with another tokenizer validates the same documents. A split is an array `trained`
(documents,) int64 for each store: the first `trained` tokens of a document are trained on, and the
rest validates.

Near-duplicates are found by MinHash (Broder 1997) over shingles of five words. Signatures are
banded: documents with mostly equal shingles share a bucket, and are joined if at least `SIMILAR` of
their positions agree. Words are in lower case and split at white space, so indentation does not
count. In scripts without spaces between words, each character is a word. By hand because datasketch
2.0 takes five times as long (10.3 s, here 2.0 s for the 2,400 embedded documents) and forms other
groups, so old runs could not be resumed.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from longctx.config.fields import refuse

if TYPE_CHECKING:
    from longctx.data.store import Store
    from longctx.data.tokenizer import Tokenizer

SHARE = 0.02  # of the bytes, if data.val_fraction is null
# Bytes, about 32,000 tokens: the standard error of their mean loss is some 0.02 nats. Of a small
# corpus at most SMALL_CORPUS_SHARE.
ENOUGH = 128 << 10
SMALL_CORPUS_SHARE = 0.1
NEARLY = 0.98  # of the wanted bytes, at which no more documents are looked for
SHORTEST = 2  # tokens of a part: one to show and one to predict

POSITIONS = 64  # of a signature, each the smallest of one hash over all shingles
# Positions per bucket key: documents alike by 0.8 share one of 16 keys with probability 0.9998.
_BAND = 4
_SHINGLE = 5  # words
# Thai, Lao, Tibetan, Burmese; Khmer; kana; Han
_UNSPACED = re.compile(
    r"([\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff])"
)
SIMILAR = 0.6  # share of equal positions that makes two documents one group

# h → h · odd + add permutes the 64-bit numbers, so each position orders the shingles anew: one hash
# of a shingle is enough for all positions.
_ODD = np.random.Generator(np.random.PCG64(20)).integers(
    0, 2**64, POSITIONS, dtype=np.uint64
) | np.uint64(1)
_ADD = np.random.Generator(np.random.PCG64(21)).integers(0, 2**64, POSITIONS, dtype=np.uint64)


def splitmix(numbers: np.ndarray | np.uint64) -> np.ndarray:
    """Mix the bits of each number, (n,) uint64, as SplitMix64 does after its addition."""
    mixed = np.asarray(numbers, dtype=np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def by_bytes(
    stores: Sequence[Store], fractions: Mapping[str, float | None], tokenizer: Tokenizer
) -> list[np.ndarray]:
    """Split the documents of all `stores`, (documents,) int64 each, by a val_fraction for each. The
    keys of `fractions` are prefixes of keys, such as data.

    A group of near-duplicates, in one or several stores, validates whole or not at all. Raises
    ValueError if a store has nothing that could validate.
    """
    group = _groups(stores)
    owner = np.repeat(np.arange(len(stores)), [len(store) for store in stores])
    n_bytes = np.concatenate([store.n_bytes for store in stores])
    sizes = np.zeros((int(group.max()) + 1, len(stores)), np.int64)  # bytes of (group, store)
    np.add.at(sizes, (group, owner), n_bytes)
    totals = sizes.sum(axis=0).tolist()
    wanted = [_wanted(*each) for each in zip(totals, fractions.values(), strict=True)]
    validates = _validating_groups(_order(stores, group), sizes, wanted)
    # Few or long documents leave a rest, which the ends of documents make up.
    alone = (sizes > 0).sum(axis=1) == 1  # in one store
    bounds = np.cumsum([len(store) for store in stores])[:-1]
    validating = np.split(validates[group], bounds)
    can_be_cut = np.split((alone & ~validates & _members_are_copies(stores, group))[group], bounds)
    splits = []
    for number, (place, store) in enumerate(zip(fractions, stores, strict=True)):
        whole = validating[number]
        trained = np.where(whole, 0, store.lengths)
        missing = wanted[number] - int(store.n_bytes[whole].sum())
        is_short = missing > wanted[number] / 2 or not whole.any()
        # Of several conversations none is cut: it would never learn how its last answer ends
        is_one_group = (sizes[:, number] > 0).sum() == 1
        has_ends = store.marks(0) is None or (is_one_group and not store.has_sides)
        if wanted[number] and is_short and has_ends:
            _cut_ends(trained, can_be_cut[number], missing, store, tokenizer)
        if wanted[number] and (trained == store.lengths).all():
            # The groups are too large for the share, and no end can validate: the smallest then.
            size = np.where(alone, sizes[:, number], 0)
            smallest = int(np.argmin(np.where(size > 0, size, totals[number])))
            if 0 < size[smallest] < totals[number]:
                trained[np.split(group, bounds)[number] == smallest] = 0
        # With groups in other stores too, nothing may validate here; the run prints that.
        is_unsplit = wanted[number] > 0 and (trained == store.lengths).all() and is_one_group
        key = f"{place}.val_fraction"
        value = "null" if fractions[place] is None else fractions[place]
        problem = f"{key}={value}: cannot split {len(store)} document(s), all alike or too short"
        advice = f"give more documents, or {key}=0 to train without validation"
        is_impossible = is_unsplit or not trained.any()  # nothing to train on: a byte of text
        refuse((is_impossible, f"{problem}, into training and validation; {advice}"))
        splits.append(trained)
    return splits


def _groups(stores: Sequence[Store]) -> np.ndarray:
    """Return the group of near-duplicates of all documents, (documents,) int64, from 0."""
    if len(stores) == 1:
        group = stores[0].groups
    else:
        group = near_duplicates(np.concatenate([store.signatures for store in stores]))
    return np.asarray(np.unique(group, return_inverse=True)[1], np.int64)


def _order(stores: Sequence[Store], group: np.ndarray) -> np.ndarray:
    """Return the groups in the order of a hash that ignores order and number of their members."""
    smallest = np.full(int(group.max()) + 1, 2**64 - 1, np.uint64)
    hashes = np.concatenate([store.keys[:, :8] for store in stores]).view(">u8")
    np.minimum.at(smallest, group, hashes[:, 0].astype(np.uint64))
    # The smallest of many is small: hashed again, large groups come no earlier.
    return np.argsort(splitmix(smallest), kind="stable")


def _wanted(total: int, fraction: float | None) -> int:
    """Return how many of `total` bytes are to validate."""
    if fraction is not None:
        return 0 if fraction == 0 else min(max(1, total - 1), max(1, round(fraction * total)))
    return max(1, round(max(SHARE * total, min(ENOUGH, SMALL_CORPUS_SHARE * total))))


def _validating_groups(order: np.ndarray, sizes: np.ndarray, wanted: Sequence[int]) -> np.ndarray:
    """Choose the groups that validate whole, (groups,) bool.

    Takes each group that fits into the bytes still wanted of each store. Then each store gets one
    more group, if that brings it closer.
    """
    validates = np.zeros(len(sizes), bool)
    room = np.array(wanted, np.int64)
    enough = np.maximum(1, (1 - NEARLY) * room).astype(np.int64)  # room that may stay
    for group in order.tolist():
        if (room < enough).all():
            break
        size = sizes[group]
        if (size <= np.where(room < enough, 0, room)).all():
            validates[group] = True
            room -= size
    # Whole groups leave a rest: one group too large may come closer to the share than none.
    in_one_store = (sizes > 0).sum(axis=1) == 1
    for number, total in enumerate(sizes.sum(axis=0).tolist()):
        others = order[(~validates & in_one_store & (sizes[:, number] > 0))[order]]
        if room[number] < enough[number] or not len(others):
            continue
        size = sizes[others, number]
        closer = np.abs(room[number] - size) < room[number]
        closer &= size <= room[number] + wanted[number] // 2
        closer &= wanted[number] - room[number] + size < total
        if closer.any():
            best = int(np.argmin(np.where(closer, np.abs(room[number] - size), total)))
            validates[others[best]] = True
    return validates


def _members_are_copies(stores: Sequence[Store], group: np.ndarray) -> np.ndarray:
    """Find the groups that hold one text only, (groups,) bool.

    In other groups, the end of one document may be in the trained part of another.
    """
    keys = np.concatenate([store.keys for store in stores])
    first = np.zeros(int(group.max()) + 1, np.int64)
    first[group[::-1]] = np.arange(len(group))[::-1]
    are_copies = np.ones(len(first), bool)
    np.logical_and.at(are_copies, group, (keys == keys[first[group]]).all(axis=1))
    return are_copies


def _cut_ends(
    trained: np.ndarray, can_be_cut: np.ndarray, missing: int, store: Store, tokenizer: Tokenizer
) -> None:
    """Let the ends of documents validate, the same share of each, about `missing` bytes in all."""
    documents = np.flatnonzero(can_be_cut & (store.lengths >= 2 * SHORTEST))
    if not len(documents):
        return
    share = missing / int(store.n_bytes[documents].sum())
    ends = np.floor(share * store.lengths[documents]).astype(np.int64)
    if (ends < SHORTEST).all():  # of the longest one then, and of its copies
        keys = store.keys[documents]
        ends[(keys == keys[np.argmax(store.lengths[documents])]).all(axis=1)] = SHORTEST
    for document, end in zip(documents.tolist(), ends.tolist(), strict=True):
        if end >= SHORTEST:
            length = int(store.lengths[document])
            cut = max(SHORTEST, length - end)
            trained[document] = _between_characters(store, tokenizer, document, cut)


def _between_characters(store: Store, tokenizer: Tokenizer, document: int, cut: int) -> int:
    """Return `cut`, or up to 3 tokens before it, so that no character is cut."""
    for position in range(cut, max(SHORTEST, cut - 3) - 1, -1):
        after = store.tokens(document, position, position + 4).tolist()  # of a byte each at least
        if not tokenizer.decode(after).startswith("\ufffd"):
            return position
    return cut


def signature(text: str) -> np.ndarray:
    """Return the MinHash of a text, (POSITIONS,) uint32.

    Two texts agree in about the same share of positions as of shingles.
    """
    spaced = _UNSPACED.sub(r" \1 ", text.lower())
    words = spaced.encode("utf-8", "replace").split()
    if not words:
        return np.zeros(POSITIONS, np.uint32)
    hashes = np.fromiter(map(zlib.crc32, words), np.uint64, len(words))
    width = min(_SHINGLE, len(words))
    shingles = np.zeros(len(words) - width + 1, np.uint64)
    for word in range(width):
        shingles *= np.uint64(0x100000001B3)
        shingles += hashes[word : word + len(shingles)]
    shingles ^= shingles >> np.uint64(29)
    shingles *= np.uint64(0xBF58476D1CE4E5B9)
    shingles ^= shingles >> np.uint64(32)
    smallest = np.full(POSITIONS, 2**64 - 1, np.uint64)
    for first in range(0, len(shingles), 256):  # (POSITIONS, 256) stays in the cache
        block = shingles[first : first + 256] * _ODD[:, None] + _ADD[:, None]
        np.minimum(smallest, block.min(axis=1), out=smallest)
    return (smallest >> np.uint64(32)).astype(np.uint32)


def near_duplicates(signatures: np.ndarray) -> np.ndarray:
    """Group near-duplicates: (documents, POSITIONS) uint32 -> (documents,) int64, the first of each
    document's group.
    """
    count = len(signatures)
    parent = list(range(count))

    def root(document: int) -> int:
        while parent[document] != document:
            parent[document] = parent[parent[document]]
            document = parent[document]
        return document

    # Comparing all pairs would be quadratic; a bucket has few documents.
    for band in range(0, POSITIONS, _BAND):
        keys = np.zeros(count, np.uint64)
        for position in range(band, band + _BAND):
            keys = keys * np.uint64(0x9E3779B97F4A7C15) + signatures[:, position]
        order = np.argsort(keys, kind="stable")
        # Documents of one bucket are neighbors in the order of its key.
        neighbors = np.flatnonzero(keys[order][1:] == keys[order][:-1])
        left, right = order[neighbors], order[neighbors + 1]
        alike = (signatures[left] == signatures[right]).mean(axis=1) >= SIMILAR
        for pair in zip(left[alike].tolist(), right[alike].tolist(), strict=True):
            first, second = sorted(map(root, pair))
            parent[second] = first
    return np.array([root(document) for document in range(count)], dtype=np.int64)
