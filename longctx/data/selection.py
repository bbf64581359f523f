"""Which documents of a source are used (data.min_tokens, data.max_tokens, data.filter), and how
often the sequences of each are drawn (data.lengths).

Documents are chosen after they are tokenized and before the split, so that other bounds reuse the
tokens in the cache, and validation has the same kind of documents as training.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np

from longctx import untrusted
from longctx.config.data_config import DataConfig
from longctx.config.fields import refuse
from longctx.data.cache import cache_folder, cached, fingerprint
from longctx.data.documents import Corpus, exact_key
from longctx.data.length_ranges import length_ranges
from longctx.data.store import Store, progress

GZIP_KEPT = 0.6  # as in OLMo 3's Longmino mix: without a fifth at either end
SCORED_KEPT = 0.5
_NO_SCORE = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
_GZIP = "gzip 1"  # of the cache; raised when the same text would have another ratio


def selected(store: Store, corpus: Corpus, config: DataConfig) -> Store:
    """Return the documents of `store` that `config` uses, and count the others by reason."""
    minimum, maximum = config.min_tokens or 0, config.max_tokens or np.inf
    if not minimum and config.max_tokens is None and config.filter is None:
        return store
    left_out = {
        f"shorter than data.min_tokens={minimum:,}": store.lengths < minimum,
        f"longer than data.max_tokens={maximum:,}": store.lengths > maximum,
    }
    kept = np.flatnonzero(~np.logical_or.reduce(list(left_out.values())))
    counts = {reason: int(mask.sum()) for reason, mask in left_out.items() if mask.any()}
    if config.filter is not None:
        is_gzip = config.filter == "gzip"
        values = (_ratios if is_gzip else _gains)(store, corpus, config)[kept]
        count = round(len(kept) * (config.keep or (GZIP_KEPT if is_gzip else SCORED_KEPT)))
        counts[f"by data.filter={config.filter}"] = len(kept) - count
        # Of ratios the middle, of gains the largest
        first = (len(kept) - count) // (2 if is_gzip else 1)
        kept = np.sort(kept[np.argsort(values, kind="stable")][first : first + count])
    reasons = ", ".join(f"{count:,} are {reason}" for reason, count in counts.items())
    refuse((not len(kept), f"none of {len(store):,} documents is used: {reasons}"))
    chosen = Store(store.folder, kept)
    chosen.left_out = store.left_out | counts
    return chosen


def _ratios(store: Store, corpus: Corpus, config: DataConfig) -> np.ndarray:
    """Return the compressed bytes of each document's text for each of its bytes, (documents,)."""

    def write(folder: Path) -> None:
        ratios, tokens = np.zeros(len(store)), 0
        number = 0
        with progress("compressing", len(store)) as show:
            for document in corpus.documents():
                # The store has the same order, without documents that have nothing to predict
                if exact_key(document.whole) == store.texts[number : number + 1].tobytes():
                    content = document.whole.encode()
                    ratios[number] = len(zlib.compress(content)) / len(content)
                    tokens += int(store.lengths[number])
                    number += 1
                    show(number, tokens)
        assert number == len(store)
        np.save(folder / "ratios.npy", ratios)

    key = fingerprint([_GZIP, store.content()])
    return np.asarray(np.load(cached(cache_folder(config) / "ratios" / key, write) / "ratios.npy"))


def _gains(store: Store, corpus: Corpus, config: DataConfig) -> np.ndarray:
    """Return how much each document gains from a long context, (documents,), by its text."""
    found, file = dict[bytes, float](), Path(config.filter or "").expanduser()
    with untrusted.named(f"data.filter={file}", errors=(OSError,)):
        opened = untrusted.open_file(file)
    with opened as lines:
        for number, line in enumerate(lines, start=1):
            with untrusted.named(f"{file}:{number}", "not a score ({})", _NO_SCORE):
                row = json.loads(line)
                found[bytes.fromhex(row["key"])] = float(row["gain"])
    gains = np.array([found.get(key.tobytes(), np.nan) for key in store.texts])
    missing = np.flatnonzero(np.isnan(gains))
    problem = f"data.filter={file}: {len(missing):,} of {len(store):,} documents have no score"
    advice = "score the same documents by longctx score"
    for document in missing[:1]:
        raise ValueError(f"{problem}, such as {store.name(document)}; {advice}")
    return gains


def grouped(config: DataConfig, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the group of each document of `lengths` tokens, (documents,) int64, and the weight of
    each group. Those in no range are group 0, with weight 1.
    """
    ranges = length_ranges(config)
    group = np.zeros(len(lengths), np.int64)
    for number, (first, end, _) in enumerate(ranges, start=1):
        group[(lengths >= first) & (lengths < end)] = number
    return group, np.array([1.0, *(weight for *_, weight in ranges)])
