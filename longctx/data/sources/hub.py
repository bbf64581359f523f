"""data=hub: any data set of the Hugging Face Hub that `datasets` can stream.

Streaming reads no more than is asked for, so `data.documents` bounds a data set of any size. Code
from a data set's repository is never run. A run records the commit in its configuration, so that a
push changes nothing for it, and it needs no network once its tokens are in the cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import huggingface_hub

from longctx import hub_snapshot
from longctx.config.data_config import DataConfig
from longctx.config.fields import refuse
from longctx.data.documents import Corpus, Document, Shard
from longctx.data.sources.registry import Source, register
from longctx.data.sources.rows import chat_template, documents_in, of_table
from longctx.files import one_line

if TYPE_CHECKING:
    from longctx.data.chat import Template


@register("hub")
class Hub(Source):
    """The data set that data.path names, or its files that data.files names."""

    keys = frozenset(
        {"path", "name", "split", "files", "revision", "text_column", "chat", "preferences"}
    )

    def check(self, config: DataConfig) -> None:
        paths, _ = config.paths(), config.data_files()
        problem = f"data.path={config.path}: data=hub reads one data set by name, OWNER/NAME"
        is_here = len(paths) == 1 and os.path.exists(os.path.expanduser(paths[0]))
        refuse((len(paths) != 1 or is_here, f"{problem}; data=text reads what is here"))

    def pinned(self, config: DataConfig) -> DataConfig:
        return replace(config, revision=_revision(config))

    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        config = self.pinned(config)
        names = [config.paths()[0], config.name, config.split, config.text_column]
        identity = [*names, config.revision, config.data_files()]
        template = chat_template(config)
        identity += [] if template is None else [template.fingerprint]
        return Corpus(identity, [Shard(config.paths()[0], partial(_read, config, template))])


def _read(config: DataConfig, template: Template | None) -> Iterator[Document]:
    # Whoever streams a data set cannot mend the text in it.
    config = replace(config, errors="replace")
    path = config.paths()[0]
    rows = enumerate(_stream(path, config), start=1)
    locations = ((f"{path}:{n}", f"data.path={path}: row {n}", of_table(row)) for n, row in rows)
    yield from documents_in(locations, config, template)


def _stream(path: str, config: DataConfig) -> Iterator[dict[str, object]]:
    import datasets  # 1.5 s

    datasets.disable_progress_bars()
    try:
        yield from datasets.load_dataset(
            path,
            config.name,
            split=config.split,
            data_files=config.data_files() or None,
            revision=config.revision,
            streaming=True,
        )
    except Exception as error:  # each transport raises its own
        # datasets lists the splits that exist
        if "Bad split" in str(error):
            raise ValueError(f"data.split={config.split}: {one_line(error)}") from error
        raise hub_snapshot.failure(f"data.path={path}", error) from error


def _revision(config: DataConfig) -> str | None:
    """Return the commit that `config` means at the Hub; one that is given stands for itself."""
    path = config.paths()[0]
    if config.revision is not None and hub_snapshot.COMMIT.fullmatch(config.revision):
        return config.revision
    try:
        api = huggingface_hub.HfApi()
        sha: str | None = api.dataset_info(path, revision=config.revision, timeout=10).sha
    except Exception as error:  # transports differ between versions of the library
        raise hub_snapshot.failure(f"data.path={path}", error) from error
    return sha
