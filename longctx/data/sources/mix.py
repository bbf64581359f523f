"""data=mix: several sources in one run, each with keys of its own (data.mix.NAME.KEY=...) and a
weight. The keys of the members are read here; `longctx.data.dataset` makes one data set of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any, NamedTuple

from longctx import untrusted
from longctx.config.data_config import SOURCES, DataConfig
from longctx.config.fields import Key, build, refuse, typed
from longctx.data.documents import Corpus
from longctx.data.length_ranges import check_selection
from longctx.data.sources.registry import Source, check_used, pinned, register

# Keys of the mix, not of a member: one model and one objective learn from all sources.
_ONCE = ("mix", "tokenizer", "vocab_size", "cache", "preferences", "packing")
_OWN = ("path", "files")  # keys of a member, not of the mix
_PINNED = (*_OWN, "revision", "filter")  # keys of a member that `pinned` may change


class Member(NamedTuple):
    """One source of a mix, and its share of the sequences relative to the others."""

    weight: float
    config: DataConfig


@register("mix")
class Mix(Source):
    """The members that data.mix names; a key that a member does not set comes from the mix."""

    keys = frozenset({"mix"})

    def keys_of(self, config: DataConfig) -> Set[str]:
        inner = [SOURCES[member.source].keys_of(member) for _, member in members(config).values()]
        return self.keys | frozenset().union(*inner).difference(_OWN)

    def check(self, config: DataConfig) -> None:
        refuse((not config.mix, "data.mix is not set; give sources: data.mix.long.path=docs/"))
        members(config)

    def check_files(self, config: DataConfig) -> None:
        for name, (_, member) in members(config).items():
            with untrusted.named(f"data.mix.{name}", errors=(ValueError, FileNotFoundError)):
                SOURCES[member.source].check_files(member)

    def left_out(self, config: DataConfig) -> str:
        own = (member for _, member in members(config).values())
        return "; ".join(filter(None, (SOURCES[member.source].left_out(member) for member in own)))

    def pinned(self, config: DataConfig) -> DataConfig:
        mix = dict(config.mix)
        for name, (_, member) in members(config).items():
            own = pinned(member)
            # Only changed keys: config.yaml keeps a mix as short as the user wrote it.
            changed = [key for key in _PINNED if getattr(own, key) != getattr(member, key)]
            mix[name] = {**mix[name], **{key: getattr(own, key) for key in changed}}
        return replace(config, mix=mix)

    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        raise ValueError("data=mix: its documents are read source by source; name one of them")


def members(config: DataConfig) -> dict[str, Member]:
    """Return the members of data.mix by name, checked; raise ValueError for the first wrong key."""
    members = {}
    for name, given in config.mix.items():
        prefix = f"data.mix.{name}"
        problem = f"{prefix}={given}: has no keys; give {prefix}.path=docs/"
        refuse((not isinstance(given, Mapping), problem))
        for key in given.keys() & set(_ONCE):
            raise ValueError(f"{prefix}.{key}: one for all sources; give data.{key}")
        weight = typed(f"{prefix}.weight", given.get("weight", 1.0), Key(type=float))
        refuse((not 0 < weight < float("inf"), f"{prefix}.weight={weight}: not above 0"))
        values = {key: value for key, value in given.items() if key != "weight"}
        # A dictionary checks no types
        built = build(DataConfig, values, f"{prefix}.")
        own = {key: getattr(built, key) for key in values}
        members[name] = Member(weight, _member(prefix, config, own))
    return members


def _member(prefix: str, config: DataConfig, own: Mapping[str, Any]) -> DataConfig:
    """Return the configuration of a member: its `own` keys, else keys of the mix."""
    name = own.get("source") or ("text" if own.get("path") else "embedded")
    with untrusted.named(prefix):
        refuse((name == "mix", "data.source=mix: no member of a mix; name the sources themselves"))
        refuse((name not in SOURCES, f"source={name}: one of {', '.join(SOURCES)}"))
        source = SOURCES[name]
        others = {key for other in SOURCES.values() for key in other.keys} - source.keys
        others -= {"chat", "preferences"}
        others |= {"turns"} if own.get("chat") is False else set()
        unused = {key: getattr(DataConfig(), key) for key in others}
        member = replace(config, **(unused | dict(own) | {"source": name}))
        member.validate()
        # Of conversations only a part is learned: a member that has none must say chat=false.
        for key in ("chat", "preferences"):
            if getattr(member, key):
                check_used(member, key, getattr(member, key))
        check_selection(member)
        source.check(member)
    for key, value in own.items():
        if value is not False:  # chat=false, as any source may say
            check_used(member, key, value, prefix)
    return member
