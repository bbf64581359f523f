"""Chat templates without end are refused in one line, also those that explode on some rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longctx.data.rendering import Renderer, Request, Written

QUESTION = {"role": "user", "content": "a question"}
TALK = [QUESTION, {"role": "assistant", "content": "an answer"}]
EXPLODING = [*TALK, {"role": "user", "content": "boom"}, TALK[1]]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PLAIN += "{% if add_generation_prompt %}<assistant>{% endif %}"
ENDLESS = {
    "loops": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "power of numbers known": "{{ 10**(10**9) }}",
    "repeated text": "{{ 'x' * 10**10 }}",
    "padded number": "{{ '%10000000000d' % 1 }}",
    "doubled text": "{% set n = namespace(s='x') %}"
    "{% for a in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "long text": "{{ 'x' * 20000000 }}",
    "wide lines": "{{ messages | tojson(indent=100000000) }}",
}


def renderer(source: str) -> Renderer:
    return Renderer(Path("templates"), source, {"eos_token": "</s>"})


def written(template: Renderer, *talks: Any, tools: Any = None) -> Iterator[Written]:
    """The texts of `talks`, whose places are talk:1, talk:2, ..."""
    return template.write(
        Request.of(f"{n}", f"talk:{n}", talk, tools) for n, talk in enumerate(talks, start=1)
    )


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_refused_in_a_line(name: str) -> None:
    with pytest.raises(ValueError, match=r"^(talk:1|templates): .*chat template") as error:
        list(written(renderer(ENDLESS[name]), TALK))
    assert "\n" not in str(error.value)


def test_a_template_that_explodes_on_one_conversation_is_refused_there() -> None:
    template = renderer(
        "{% for m in messages if m.content == 'boom' %}"
        "{{ 10**(10**(messages | length + 8)) }}{% endfor %}" + PLAIN
    )
    for _ in range(2):
        answers = written(template, TALK, TALK, EXPLODING, TALK)
        for _, text, spans in (next(answers), next(answers)):
            assert [text[first:end] for first, end in spans] == ["an answer"]
        with pytest.raises(ValueError, match=r"^talk:3: the chat template of templates takes more"):
            next(answers)


def test_time_that_many_conversations_waste_together_is_bounded() -> None:
    some = "{% for a in range(99999) %}{% endfor %}" * 4
    template = renderer(some + PLAIN)
    with pytest.raises(ValueError, match="takes more than 3 s"):
        list(written(template, *[TALK] * 1000))


def test_an_honest_template_never_runs_out_of_time() -> None:
    long = [{"role": role, "content": "some words " * 20} for role in ("user", "assistant")] * 150
    for _, text, spans in written(renderer(PLAIN), *[long] * 5):
        assert len(spans) == 150 and text.endswith("some words ")


def test_conversations_before_one_that_cannot_be_read_come_first() -> None:
    def requests() -> Iterator[Request]:
        yield Request.of("1", "talk:1", TALK, None)
        raise ValueError("talk:2: no conversation")

    answers = renderer(PLAIN).write(requests())
    assert next(answers).name == "1"
    with pytest.raises(ValueError, match=r"^talk:2"):
        next(answers)


def test_conversations_that_nobody_reads_answer_no_later_one() -> None:
    template = renderer(PLAIN)
    others = [[{"role": "user", "content": name}, TALK[1]] for name in "abcde"]
    assert "<user>a" in next(written(template, *others[:3])).text
    texts = [one.text for one in written(template, *others[3:])]
    assert ["<user>d" in texts[0], "<user>e" in texts[1]] == [True, True]


def test_halves_of_surrogate_pairs_and_nested_tools_pass_through() -> None:
    talk = [QUESTION, {"role": "assistant", "content": "\ud83d é 水"}]
    template = renderer("{{ tools | tojson }}" + PLAIN)
    ((_, text, spans),) = written(template, talk, tools=[{"f": [1.5]}])
    assert text == '[{"f": [1.5]}]<user>a question<assistant>\ud83d é 水'
    assert [text[first:end] for first, end in spans] == ["\ud83d é 水"]
