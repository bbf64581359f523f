"""The texts of RULER's 13 tasks (Hsieh et al. 2024, arXiv 2404.06654), made from a seed.

Prompts, numbers of needles, chains and words, and the tokens of an answer are those of
https://github.com/NVIDIA/RULER (synthetic.yaml). What differs, because nothing is downloaded: the
essays are one's own documents, words come from `ruler_words`, and questions come from `questions`.

A task makes a text of any size, counted in its own unit: words of the essay, sentences, words of a
list, documents. The same chance gives the same question at every size.
"""

from __future__ import annotations

import math
import random
import re
import string
import uuid
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from longctx.evaluation.questions import Questions
from longctx.evaluation.ruler_words import PAIRS, WORDS, pair

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NIAH = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text? "
    "The special magic {kind} for {query} mentioned in the provided text are"
)
# RULER's answer begins with "variables are assgined the value": here it is spelled right
CHAINS = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text above. "
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables "
    "are assigned the value {query}, they are:"
)
COMMON_WORDS = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list? "
    "Answer: The top 10 words that appear most often in the list are:"
)
FREQUENT_WORDS = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text? "
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)
QUESTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\nThe following are given documents.\n\n{context}\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\nQuestion: {query} Answer:"
)
DEPTHS = [round(100 * n / 39) / 100 for n in range(40)]  # of needles in an essay
HOPS = 4  # of a chain of variables
EXAMPLE_TOKENS = 500  # of the solved example before a chain of variables
SHORT = 4096  # tokens; lists of words are shorter below
PIECE = 32  # characters of a text without spaces that count as a word
ENDS = (".", "!", "?", "。", "！", "？")  # of a sentence
SENTENCE = 40  # words without an end that count as a sentence


class Sample(NamedTuple):
    """A prompt to continue, and what the answer is to contain."""

    prompt: str
    outputs: list[str]


Make = Callable[[int, random.Random], Sample]  # of a size


class Sized(NamedTuple):
    """A task at one length: `make` for sizes from `least` to `most`, answers of `answer` tokens."""

    make: Make
    answer: int
    least: int
    most: int = 10**9


class Needles(NamedTuple):
    """What a needle-in-a-haystack task hides, and in what."""

    haystack: str  # noise | essay | needle
    key: str  # words | uuids
    value: str  # numbers | uuids
    keys: int = 1
    values: int = 1  # of each key
    queries: int = 1


NEEDLES = {
    "niah_single_1": Needles("noise", "words", "numbers"),
    "niah_single_2": Needles("essay", "words", "numbers"),
    "niah_single_3": Needles("essay", "words", "uuids"),
    "niah_multikey_1": Needles("essay", "words", "numbers", keys=4),
    "niah_multikey_2": Needles("needle", "words", "numbers"),
    "niah_multikey_3": Needles("needle", "uuids", "uuids"),
    "niah_multivalue": Needles("essay", "words", "numbers", values=4),
    "niah_multiquery": Needles("essay", "words", "numbers", keys=4, queries=4),
}


def needs_essay(task: str) -> bool:
    """Whether a task hides its needles in documents."""
    return task in NEEDLES and NEEDLES[task].haystack == "essay"


def sized(
    task: str,
    length: int,
    essay: Sequence[str],
    questions: Questions | None,
    tokens: Callable[[str], int],
) -> Sized:
    """`task` at `length` tokens; `tokens` counts those of a text.

    essay: words, for the tasks that `needs_essay`. questions: for qa_1 and qa_2.
    """
    if task in NEEDLES:
        return needles(NEEDLES[task], essay)
    if task == "vt":
        return chains(example_size(tokens))
    if task == "cwe":
        return common_words(length)
    if task == "fwe":
        return frequent_words(length)
    assert questions is not None
    return Sized(question_text(questions), 32, questions.fewest)


def words_of(text: str) -> list[str]:
    """The words of a text, each with the space after it, for an essay.

    White space becomes one space, as in RULER. A stretch without any counts as several words.
    """
    return re.findall(rf"\S{{1,{PIECE}}} ?", " ".join(text.split()) + " ")


# Needles in a haystack


def needles(task: Needles, essay: Sequence[str]) -> Sized:
    """The size is in words of the essay, or in sentences."""

    def make(size: int, rng: random.Random) -> Sample:
        keys: list[str] = []
        while len(keys) < task.keys:
            if (key := drawn(task.key, rng)) not in keys:
                keys.append(key)
        values = [[drawn(task.value, rng) for _ in range(task.values)] for _ in keys]
        hidden = [
            NEEDLE.format(kind=task.value, key=key, value=value)
            for key, of_key in zip(keys, values, strict=True)
            for value in of_key
        ]
        rng.shuffle(hidden)
        chosen = rng.sample(range(task.keys), task.queries)
        start = rng.randrange(len(essay)) if task.haystack == "essay" else 0
        places = sorted(rng.sample(DEPTHS, len(hidden)))
        if task.haystack == "essay":
            context = " ".join(among(sentences(words_from(essay, start, size)), hidden, places))
        else:
            lines = [NOISE] * size
            if task.haystack == "needle":
                lines = [other_needle(task, keys, rng) for _ in range(size)]
            at = sorted(rng.sample(range(size), len(hidden)), reverse=True)
            for place, line in zip(at, hidden, strict=True):
                lines.insert(place, line)
            context = "\n".join(lines)
        template, kind = NIAH, task.value
        if task.queries * task.values == 1:
            template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
            kind = kind.removesuffix("s")
        query = listed([keys[n] for n in chosen])
        outputs = [value for n in chosen for value in values[n]]
        return Sample(template.format(kind=kind, context=context, query=query), outputs)

    return Sized(make, 128, task.keys * task.values)


def drawn(kind: str, rng: random.Random) -> str:
    """A key or value: a pair of words, a number of 7 digits, or a UUID."""
    if kind == "words":
        return pair(rng.randrange(PAIRS))
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def other_needle(task: Needles, keys: Sequence[str], rng: random.Random) -> str:
    """A needle of the haystack, of none of the `keys`."""
    while (key := drawn(task.key, rng)) in keys:
        pass
    return NEEDLE.format(kind=task.value, key=key, value=drawn(task.value, rng))


def words_from(essay: Sequence[str], start: int, size: int) -> list[str]:
    """`size` words of the essay from `start` on, and from its beginning again after its end."""
    words = list(essay[start : start + size])
    while len(words) < size:
        words += essay[: size - len(words)]
    return words


def sentences(words: Sequence[str]) -> list[str]:
    """Sentences of the words of an essay; where none ends, SENTENCE words."""
    result: list[str] = []
    first = 0
    for n, word in enumerate(words, start=1):
        if word.rstrip().endswith(ENDS) or n - first == SENTENCE or n == len(words):
            result.append("".join(words[first:n]).strip())
            first = n
    return result


def among(texts: Sequence[str], hidden: Sequence[str], places: Sequence[float]) -> list[str]:
    """`texts` with the `hidden` ones at these shares of them, which rise."""
    result: list[str] = []
    at = 0
    for place, line in zip(places, hidden, strict=True):
        end = int(len(texts) * place)
        result += [*texts[at:end], line]
        at = end
    return [*result, *texts[at:]]


def listed(names: Sequence[str]) -> str:
    """a, b, and c"""
    return ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]


# Chains of variables


def chains(example: int) -> Sized:
    """The size is in sentences of noise, beside `example` of them in a solved example."""

    def make(size: int, rng: random.Random) -> Sample:
        solved = chain(example, 3, rng)
        task = chain(size, 5, rng)
        return Sample(f"{solved.prompt} {' '.join(solved.outputs)}\n\n{task.prompt}", task.outputs)

    return Sized(make, 30, HOPS + 1)


def chain(size: int, letters: int, rng: random.Random) -> Sample:
    """HOPS assignments from variable to variable, in `size` sentences of noise."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    value = str(rng.randrange(10000, 99999))
    assigned = [f"VAR {name} = VAR {before}" for before, name in pairwise(names)]
    lines = [NOISE] * size
    places = sorted(rng.sample(range(size), HOPS + 1))
    for n, (place, line) in enumerate(
        zip(places, [f"VAR {names[0]} = {value}", *assigned], strict=True)
    ):
        lines.insert(place + n, line)
    return Sample(CHAINS.format(context="\n".join(lines), query=value, count=HOPS + 1), names)


def example_size(tokens: Callable[[str], int]) -> int:
    """Sentences of noise of the solved example: as many as EXAMPLE_TOKENS hold, 5 at least."""
    size = HOPS + 1
    while tokens(chain(size + 1, 3, random.Random(0)).prompt) <= EXAMPLE_TOKENS:
        size += 1
    return size


# Words of a list


def common_words(length: int) -> Sized:
    """The size is in different words, 10 of which stand more often than the others.

    A list of more words than there are is of pairs.
    """
    example, often, seldom = ((20, 3, 1), 6, 1) if length < SHORT else ((40, 10, 3), 30, 3)

    def make(size: int, rng: random.Random) -> Sample:
        context, answer = word_list(*example, rng)
        numbered = " ".join(f"{n}. {word}" for n, word in enumerate(answer, start=1))
        solved = f"{COMMON_WORDS.format(context=context)} {numbered}"
        context, answer = word_list(size, often, seldom, rng)
        return Sample(f"{solved}\n{COMMON_WORDS.format(context=context)}", answer)

    return Sized(make, 120, 20, PAIRS)


def word_list(size: int, often: int, seldom: int, rng: random.Random) -> tuple[str, list[str]]:
    """A numbered list of `size` different words, and the 10 that stand `often` times in it."""
    words = (
        rng.sample(WORDS, size)
        if size <= len(WORDS)
        else [pair(number) for number in rng.sample(range(PAIRS), size)]
    )
    every = words[:10] * often + words[10:] * seldom
    rng.shuffle(every)
    return " ".join(f"{n}. {word}" for n, word in enumerate(every, start=1)), words[:10]


def frequent_words(length: int) -> Sized:
    """The size is in words of 6 random letters; the n-th most frequent stands n^-2 / ζ(2) of it.

    The most frequent of all is "...", to be ignored.
    """
    count = max(4, (length - 50) // 50)

    def make(size: int, rng: random.Random) -> Sample:
        words: dict[str, None] = {"...": None}
        while len(words) < count:
            words["".join(rng.choices(string.ascii_lowercase, k=6))] = None
        every: list[str] = []
        for n, word in enumerate(words, start=1):
            every += [word] * int(size / n**2 / (math.pi**2 / 6))
        rng.shuffle(every)
        return Sample(FREQUENT_WORDS.format(context=" ".join(every)), list(words)[1:4])

    return Sized(make, 50, 60)  # 60: 36, 9, 4 and 2 of the first four


# Questions about documents


def question_text(questions: Questions) -> Make:
    """The size is in documents."""

    def make(size: int, rng: random.Random) -> Sample:
        one = questions.draw(size, rng)
        context = "\n\n".join(
            f"Document {n}:\n{document}" for n, document in enumerate(one.documents, start=1)
        )
        return Sample(QUESTION.format(context=context, query=one.question), one.answers)

    return make
