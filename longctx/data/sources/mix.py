"""Several sources in one run, each with keys of its own: data.mix.NAME.KEY=..., and a weight.

Here the keys of the members are read; `longctx.data.mixture` makes one data set of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any, NamedTuple, get_args, get_type_hints

from longctx.config.data_config import DataConfig
from longctx.data.corpus import SOURCES, Corpus, Source, check_used, register, source_of

_ONCE = ("mix", "tokenizer", "vocab_size", "cache")  # keys of the mix, not of a member
_OWN = ("path", "files")  # keys of a member, not of the mix
_PINNED = (*_OWN, "revision")  # keys of a member that `pinned` may change


class Member(NamedTuple):
    """One source of a mix, and its share of the rows relative to the others."""

    weight: float
    config: DataConfig


@register("mix")
class Mix(Source):
    """The members that data.mix names; a key that a member does not set is that of the mix."""

    keys = frozenset({"mix"})

    def keys_of(self, config: DataConfig) -> Set[str]:
        inner = [source_of(one).keys_of(one) for _, one in members(config).values()]
        return self.keys | frozenset().union(*inner).difference(_OWN)

    def check(self, config: DataConfig) -> None:
        if not config.mix:
            raise ValueError(
                "data.mix is not set; give sources, "
                "such as data.mix.long.source=text data.mix.long.path=docs/"
            )
        members(config)

    def without_effect(self, config: DataConfig) -> Mapping[str, str]:
        used: set[str] = set(self.keys)
        for _, one in members(config).values():
            source = source_of(one)
            used |= source.keys_of(one) - source.without_effect(one).keys()
        return dict.fromkeys(self.keys_of(config) - used, "no source of the mix reads it")

    def check_files(self, config: DataConfig) -> None:
        for _, one in members(config).values():
            source_of(one).check_files(one)

    def pinned(self, config: DataConfig) -> DataConfig:
        mix = dict(config.mix)
        for name, (_, one) in members(config).items():
            own = source_of(one).pinned(one)
            values = {key: getattr(own, key) for key in _PINNED}
            changed = {key: value for key, value in values.items() if value != getattr(one, key)}
            mix[name] = {**mix[name], **changed}
        return replace(config, mix=mix)

    def open(self, config: DataConfig, without: Set[bytes]) -> Corpus:
        raise ValueError(
            "data=mix: its documents are read source by source; "
            "name one of them, such as data=text data.path=docs/"
        )


def members(config: DataConfig) -> dict[str, Member]:
    """Return the members of data.mix by name, checked; ValueError names the first wrong key."""
    members = {}
    for name, keys in config.mix.items():
        place = f"data.mix.{name}"
        if not isinstance(keys, Mapping):
            raise ValueError(f"{place}={keys}: has no keys; give some, such as {place}.path=docs/")
        own = _typed_keys(place, keys)
        weight = own.pop("weight", 1.0)
        if not 0 < weight < float("inf"):
            raise ValueError(f"{place}.weight={weight}: not a share; give a number above 0")
        members[name] = Member(weight, _member(place, config, own))
    return members


def _typed_keys(place: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a member with the types of `DataConfig`; a dictionary checks none."""
    hints = {key: hint for key, hint in get_type_hints(DataConfig).items() if key not in _ONCE}
    hints["weight"] = float
    typed = {}
    for key, value in keys.items():
        if key not in hints:
            raise ValueError(
                f"{place}.{key}: not a key of a source in a mix; use one of "
                f"{', '.join(sorted(hints))}"
            )
        types = get_args(hints[key]) or (hints[key],)
        if float in types and type(value) is int:
            value = float(value)
        if str in types and type(value) in (int, float):  # data.mix.a.name=2024
            value = str(value)
        if Any not in types and type(value) not in types:
            expected = {bool: "true or false", int: "a whole number", float: "a number"}
            raise ValueError(f"{place}.{key}={value}: must be {expected.get(types[0], 'text')}")
        typed[key] = value
    return typed


def _member(place: str, config: DataConfig, own: Mapping[str, Any]) -> DataConfig:
    """Return the configuration of a member: its `own` keys, else those of the mix that it uses."""
    name = own.get("source") or ("text" if own.get("path") else "embedded")
    try:
        if name == "mix":
            raise ValueError("data.source=mix: a mix cannot be a member of a mix; name its sources")
        source = source_of(replace(config, source=name))
        # Conversations are scored differently, so a member that has none must say chat=false.
        others = {key for other in SOURCES.values() for key in other.keys} - source.keys - {"chat"}
        unused = {key: getattr(DataConfig(), key) for key in others}
        member = replace(config, **(unused | dict(own) | {"source": name}))
        member.validate()
        if member.chat:
            check_used(member, "chat", True)
        source.check(member)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    for key, value in own.items():
        check_used(member, key, value, place)
    return member
