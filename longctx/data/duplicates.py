"""Near-duplicate documents, so that a copy of a training document never validates.

MinHash (Broder 1997) over shingles of five words, banded so that documents that share most of them
meet in a bucket, then joined if their signatures agree in at least `SIMILAR` of the places. Words
are compared in lower case and split at white space, so that indentation and line breaks do not
count. By hand because datasketch 2.0 takes five times as long (10.3 s rather than 2.0 s for the
2,400 embedded documents) and its groups are others, so that old runs could not be resumed.
"""

from __future__ import annotations

import zlib

import numpy as np

PLACES = 64  # of a signature
# Places per bucket key: documents alike by 0.8 share one of 16 keys with probability 0.9998.
_BAND = 4
_SHINGLE = 5  # words
SIMILAR = 0.6  # share of equal places from which two documents are one group

_ODD = np.random.Generator(np.random.PCG64(20)).integers(
    0, 2**64, PLACES, dtype=np.uint64
) | np.uint64(1)
_ADD = np.random.Generator(np.random.PCG64(21)).integers(0, 2**64, PLACES, dtype=np.uint64)


def signature(text: str) -> np.ndarray:
    """MinHash of a text, (PLACES,) uint32: two texts agree in about the share of places in which
    their shingles do.
    """
    words = text.lower().encode("utf-8", "replace").split()
    if not words:
        return np.zeros(PLACES, np.uint32)
    hashes = np.fromiter(map(zlib.crc32, words), np.uint64, len(words))
    width = min(_SHINGLE, len(words))
    shingles = np.zeros(len(words) - width + 1, np.uint64)
    for at in range(width):
        shingles *= np.uint64(0x100000001B3)
        shingles += hashes[at : at + len(shingles)]
    shingles ^= shingles >> np.uint64(29)
    shingles *= np.uint64(0xBF58476D1CE4E5B9)
    shingles ^= shingles >> np.uint64(32)
    smallest = np.full(PLACES, 2**64 - 1, np.uint64)
    for first in range(0, len(shingles), 256):  # (PLACES, 256) stays in the cache
        block = shingles[first : first + 256] * _ODD[:, None] + _ADD[:, None]
        np.minimum(smallest, block.min(axis=1), out=smallest)
    return (smallest >> np.uint64(32)).astype(np.uint32)


def groups(signatures: np.ndarray) -> np.ndarray:
    """Group near-duplicates: (documents, PLACES) uint32 -> (documents,) int64, the first of each
    document's group.
    """
    count = len(signatures)
    parent = list(range(count))

    def root(document: int) -> int:
        while parent[document] != document:
            parent[document] = parent[parent[document]]
            document = parent[document]
        return document

    for band in range(0, PLACES, _BAND):
        keys = np.zeros(count, np.uint64)
        for place in range(band, band + _BAND):
            keys = keys * np.uint64(0x9E3779B97F4A7C15) + signatures[:, place]
        order = np.argsort(keys, kind="stable")
        meet = np.flatnonzero(keys[order][1:] == keys[order][:-1])
        one, other = order[meet], order[meet + 1]
        alike = (signatures[one] == signatures[other]).mean(axis=1) >= SIMILAR
        for a, b in zip(one[alike].tolist(), other[alike].tolist(), strict=True):
            a, b = sorted((root(a), root(b)))
            parent[b] = a
    return np.array([root(document) for document in range(count)], dtype=np.int64)
