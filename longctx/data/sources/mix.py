"""data=mix: several sources in one run, each with keys of its own (data.mix.NAME.KEY=...) and a
weight. The keys of the members are read here; `longctx.data.dataset` makes one data set of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any, NamedTuple

from longctx import untrusted
from longctx.config.data_config import SOURCES, DataConfig
from longctx.config.fields import Key, keys, refuse, typed
from longctx.data.documents import Corpus
from longctx.data.sources.registry import Source, check_used, register

# Keys of the mix, not of a member: one model and one objective learn from all sources.
_ONCE = ("mix", "tokenizer", "vocab_size", "cache", "preferences", "packing")
_OWN = ("path", "files")  # keys of a member, not of the mix
_PINNED = (*_OWN, "revision")  # keys of a member that `pinned` may change


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

    def ignored(self, config: DataConfig, name: str) -> str:
        every = {own: member for own, (_, member) in members(config).items()}
        # A key of one source, as mix.a.text_column
        group, _, rest = name.partition(".")
        own, _, key = rest.partition(".")
        if group == "mix" and own in every:
            return str(SOURCES[every[own].source].ignored(every[own], key))
        if name in self.keys or name not in self.keys_of(config):
            return ""
        for own, member in every.items():
            source = SOURCES[member.source]
            is_read = name in source.keys_of(member) and name not in config.mix[own]
            if is_read and not source.ignored(member, name):
                return ""
        return "no source of the mix reads it"

    def check(self, config: DataConfig) -> None:
        example = "data.mix.long.source=text data.mix.long.path=docs/"
        refuse((not config.mix, f"data.mix is not set; give sources, such as {example}"))
        members(config)

    def check_files(self, config: DataConfig) -> None:
        for _, member in members(config).values():
            SOURCES[member.source].check_files(member)

    def left_out(self, config: DataConfig) -> str:
        every = members(config).values()
        others = (SOURCES[member.source].left_out(member) for _, member in every)
        return "; ".join(filter(None, others))

    def pinned(self, config: DataConfig) -> DataConfig:
        mix = dict(config.mix)
        for name, (_, member) in members(config).items():
            own = SOURCES[member.source].pinned(member)
            # Only changed keys: config.yaml keeps a mix as short as the user wrote it.
            values = {key: getattr(own, key) for key in _PINNED}
            changed = {key: value for key, value in values.items() if value != getattr(member, key)}
            mix[name] = {**mix[name], **changed}
        return replace(config, mix=mix)

    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        raise ValueError(
            "data=mix: its documents are read source by source; "
            "name one of them, such as data=text data.path=docs/"
        )


def members(config: DataConfig) -> dict[str, Member]:
    """Return the members of data.mix by name, checked; raise ValueError for the first wrong key."""
    members = {}
    for name, given in config.mix.items():
        place = f"data.mix.{name}"
        example = f"give some, such as {place}.path=docs/"
        refuse((not isinstance(given, Mapping), f"{place}={given}: has no keys; {example}"))
        own = _typed_keys(place, given)
        weight = own.pop("weight", 1.0)
        is_share = 0 < weight < float("inf")
        refuse((not is_share, f"{place}.weight={weight}: not a share; give a number above 0"))
        members[name] = Member(weight, _member(place, config, own))
    return members


def _typed_keys(place: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a member with their declared types; a dictionary checks none."""
    known = {name: declared for name, declared in keys(DataConfig).items() if name not in _ONCE}
    known["weight"] = Key(type=float)
    result = {}
    for name, value in given.items():
        names = ", ".join(sorted(known))
        unknown = f"{place}.{name}: no key of a source in a mix; use one of {names}"
        refuse((name not in known, unknown))
        result[name] = typed(f"{place}.{name}", value, known[name])
    return result


def _member(place: str, config: DataConfig, own: Mapping[str, Any]) -> DataConfig:
    """Return the configuration of a member: its `own` keys, else keys of the mix."""
    name = own.get("source") or ("text" if own.get("path") else "embedded")
    with untrusted.named(place):
        refuse((name == "mix", "data.source=mix: no member of a mix; name the sources themselves"))
        replace(config, source=name).validate()  # an unknown name
        source = SOURCES[name]
        others = {key for other in SOURCES.values() for key in other.keys} - source.keys
        others -= {"chat", "preferences"}
        others |= {"turns"} if own.get("chat") is False else set()
        unused = {key: getattr(DataConfig(), key) for key in others}
        member = replace(config, **(unused | dict(own) | {"source": name}))
        member.validate()
        # Of conversations only a part is learned: a member that has none must say so.
        has_none = member.chat and "chat" not in source.keys
        advice = f"give {place}.chat=false"
        refuse((has_none, f"data.chat=true: data={name} has no conversations; {advice}"))
        if member.preferences:
            check_used(member, "preferences", member.preferences)
        source.check(member)
    for key, value in own.items():
        if value is not False:  # chat=false, as any source may say
            check_used(member, key, value, place)
    return member
