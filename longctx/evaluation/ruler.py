"""RULER: finding, following and counting in texts of every length (arXiv 2404.06654).

Prompts, numbers of needles, chains and words, and the tokens of an answer are those of
https://github.com/NVIDIA/RULER (synthetic.yaml). Nothing is downloaded, so the essays are the
user's own documents, and questions about Wikipedia (qa) are left to lm-eval; docs/evaluation.md
lists every difference. A task makes a text of any size in a unit of its own: words of the essay,
lines, words of a list. Equal seeds make equal texts, and every size of a text asks the same.
Three tasks like GraphWalks, MRCR and OOLONG run if they are named.
"""

from __future__ import annotations

import math
import random
import re
import string
import tomllib
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from functools import partial
from itertools import count, cycle, islice, pairwise, takewhile
from pathlib import Path
from typing import NamedTuple

from longctx.config.eval_config import RulerConfig
from longctx.config.fields import refuse
from longctx.data import Tokenizer
from longctx.data.chat import Template

PROMPTS: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
# A list a line. RULER draws from a package; these words are equal on every machine.
WORD_LISTS = Path(__file__).with_suffix(".txt").read_text().splitlines()
ADJECTIVES, NOUNS, WRITTEN, EQUAL = map(str.split, WORD_LISTS)
WORDS = sorted({*ADJECTIVES, *NOUNS})
PAIRS = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]  # amber-harbor
# Of needles in an essay: RULER's niah.py has round(linspace(0, 100, 40))
DEPTHS = [round(100 * step / 39) / 100 for step in range(40)]
HOPS = 4  # of a chain of variables
EXAMPLE_TOKENS = 500  # of the solved example before a chain of variables
SHORT = 4096  # tokens; lists of words are shorter below
REACHED = 8  # nodes in an answer of graphwalks at most
PIECE = 32  # characters of a text without spaces that count as a word
SENTENCE = 40  # words without an end that count as a sentence
PROBES = 6  # texts that are made to find the size of a length


class Sample(NamedTuple):
    """A prompt to continue, and the words that the answer is to contain."""

    prompt: str
    outputs: list[str]


Encoded = tuple[Sample, list[int]]  # with the tokens of its prompt


def contained(answer: str, outputs: Sequence[str]) -> float:
    """Return the share of `outputs` in the answer."""
    # Capitals do not matter, and control characters are ends of lines, as in RULER
    answer = re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()
    return sum(output.lower() in answer for output in outputs) / len(outputs)


class RulerTask(NamedTuple):
    """How a task makes a text of a size, the tokens of its answers, its sizes, and its scores."""

    make: Callable[[Texts, int, int, random.Random], Sample]  # of a length and a size
    answer: int
    smallest: int
    largest: int = 10**9
    essay: bool = False  # needles are hidden in the user's own text
    score: Callable[[str, Sequence[str]], float] = contained  # 0 to 1


class Texts:
    """The samples of the tasks of `config`, made of `text`; user turns if there is a `template`."""

    def __init__(
        self, config: RulerConfig, tokenizer: Tokenizer, text: str, template: Template | None = None
    ) -> None:
        self.config, self.tokenizer, self.template = config, tokenizer, template
        # In a user's turn these tokens would end it
        for token in [] if template is None else template.special:
            text = text.replace(token, " ")
        self.essay = essay_words(text)
        # Lines of noise in the solved example of vt: 5, or as many as EXAMPLE_TOKENS hold.
        longer = (chain(size + 1, 3, random.Random(0)).prompt for size in count(HOPS + 1))
        fits = takewhile(lambda text: len(tokenizer.encode_prompt(text)) <= EXAMPLE_TOKENS, longer)
        self.example_size = HOPS + 1 + sum(1 for _ in fits)

    def sample(self, task: str, length: int, number: int, size: int) -> Encoded:
        """Make sample `number`, which asks the same at every size."""
        rng = random.Random(f"ruler {self.config.seed} {task} {length} {number}")
        sample = TASKS[task].make(self, length, size, rng)
        if self.template is None:
            return sample, self.tokenizer.encode_prompt(sample.prompt)
        row = {"messages": [{"role": "user", "content": sample.prompt}]}
        return sample, self.tokenizer.encode_question(self.template.prompt(task, row)[0])

    def samples(self, task: str, length: int) -> Iterator[Encoded]:
        """Return samples as long as `length` allows; ValueError if the smallest are longer."""
        _, answer, smallest, largest, *_ = TASKS[task]
        makers = [partial(self.sample, task, length, n) for n in range(self.config.samples)]
        needed = answer + max(len(make(smallest)[1]) for make in makers)
        problem = f"{task} needs {needed:,} tokens at least, {answer} of them for the answer"
        advice = "give greater lengths, or other ruler.tasks"
        refuse((needed > length, f"ruler.lengths=[{length}]: {problem}; {advice}"))
        return fitting(makers, length - answer, smallest, largest)


def fitting(
    makers: Sequence[Callable[[int], Encoded]], limit: int, smallest: int, largest: int
) -> Iterator[Encoded]:
    """Yield a sample of each maker, of nearly the largest size with at most `limit` tokens."""
    # The `smallest` fits, and tokens grow about evenly with the size
    base, size, per_unit = len(makers[0](smallest)[1]), 2 * smallest + 8, 1.0
    for _ in range(PROBES):
        size = max(smallest + 1, min(size, largest))
        per_unit = max(1e-3, (len(makers[0](size)[1]) - base) / (size - smallest))
        size = smallest + int((limit - base) / per_unit)
    for make in makers:
        # The last guess, and other samples of its size, may be a little longer.
        own = min(size, largest)
        while len((made := make(own))[1]) > limit:
            own = max(smallest, own - max(1, round((len(made[1]) - limit) / per_unit)))
        yield made


def essay_words(text: str) -> list[str]:
    """Return the words of a text, each with the space after it and of PIECE characters at most."""
    return re.findall(rf"\S{{1,{PIECE}}} ?", " ".join(text.split()) + " ")


def sentences(words: Sequence[str]) -> list[str]:
    """Return the sentences of an essay's words, of SENTENCE words if none of them ends one."""
    result, first = list[str](), 0
    for end, word in enumerate(words, start=1):
        is_end = word.rstrip().endswith((".", "!", "?", "。", "！", "？"))
        if is_end or end - first == SENTENCE or end == len(words):
            result.append("".join(words[first:end]).strip())
            first = end
    return result


def different(draw: Callable[[], str], number: int) -> list[str]:
    """Return the first `number` different values of `draw`."""
    values: dict[str, None] = {}
    while len(values) < number:
        values[draw()] = None
    return list(values)


def inserted(lines: Sequence[str], positions: Sequence[int], hidden: Sequence[str]) -> list[str]:
    """Return `lines` with each of `hidden` before the line at its position; positions rise."""
    result = list(lines)
    for position, line in reversed(list(zip(positions, hidden, strict=True))):
        result.insert(position, line)
    return result


FORMS: dict[str, Callable[[random.Random], str]] = {  # of keys and values
    "words": lambda rng: PAIRS[rng.randrange(len(PAIRS))],
    "numbers": lambda rng: str(rng.randint(10**6, 10**7 - 1)),
    "uuids": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


def needles(
    haystack: str, key_form: str, form: str, keys: int = 1, values: int = 1, queries: int = 1
) -> RulerTask:
    """Return the task of finding `values` of each of the keys, of which `queries` are asked for.

    haystack: noise | essay | needle; the size is in lines, or in words of the essay.
    """

    def make(texts: Texts, length: int, size: int, rng: random.Random) -> Sample:
        # The draws keep their order whatever the haystack is: another would change a seed's texts.
        draw_key, draw = partial(FORMS[key_form], rng), partial(FORMS[form], rng)
        names = different(draw_key, keys)
        found = {name: [draw() for _ in range(values)] for name in names}
        needle = partial(PROMPTS["needle"].format, form=form)
        hidden = [needle(key=name, value=value) for name in names for value in found[name]]
        rng.shuffle(hidden)
        asked_for = rng.sample(names, queries)
        # An essay begins anywhere, and begins again after its end.
        first = rng.randrange(len(texts.essay)) if haystack == "essay" else 0
        depths = sorted(rng.sample(DEPTHS, len(hidden)))
        if haystack == "essay":
            lines = sentences(list(islice(cycle(texts.essay), first, first + size)))
            positions = [int(len(lines) * depth) for depth in depths]
            context = " ".join(inserted(lines, positions, hidden))
        else:
            lines = [PROMPTS["noise"]] * size
            # Needles in needles: of other keys, so that each question has one answer.
            if haystack == "needle":
                drawn = (draw_key() for _ in count())
                others = (name for name in drawn if name not in names)
                lines = [needle(key=next(others), value=draw()) for _ in lines]
            positions = sorted(rng.sample(range(size), len(hidden)))
            context = "\n".join(inserted(lines, positions, hidden[::-1]))
        is_one = queries * values == 1
        prompt, noun = PROMPTS["niah_one" if is_one else "niah"], form.removesuffix("s" * is_one)
        query = f"{', '.join(asked_for[:-1])}, and {asked_for[-1]}" if queries > 1 else asked_for[0]
        outputs = [value for name in asked_for for value in found[name]]
        return Sample(prompt.format(form=noun, context=context, query=query), outputs)

    return RulerTask(make, answer=128, smallest=keys * values, essay=haystack == "essay")


def variables(texts: Texts, length: int, size: int, rng: random.Random) -> Sample:
    """Ask for a chain of variables in `size` lines of noise, after a solved example."""
    solved, task = chain(texts.example_size, 3, rng), chain(size, 5, rng)
    return Sample(f"{solved.prompt} {' '.join(solved.outputs)}\n\n{task.prompt}", task.outputs)


def chain(size: int, letters: int, rng: random.Random) -> Sample:
    """Hide HOPS assignments from variable to variable in `size` lines of noise."""
    names = different(lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)), HOPS + 1)
    value = str(rng.randrange(10000, 99999))
    assigned = [f"VAR {name} = VAR {before}" for before, name in pairwise(names)]
    positions = sorted(rng.sample(range(size), HOPS + 1))
    hidden = [f"VAR {names[0]} = {value}", *assigned]
    context = "\n".join(inserted([PROMPTS["noise"]] * size, positions, hidden))
    return Sample(PROMPTS["vt"].format(context=context, query=value, count=HOPS + 1), names)


def common_words(texts: Texts, length: int, size: int, rng: random.Random) -> Sample:
    """Ask for the 10 most common of `size` different words, after a solved example."""
    example, often, seldom = ((20, 3, 1), 6, 1) if length < SHORT else ((40, 10, 3), 30, 3)
    solved, task = word_list(*example, rng), word_list(size, often, seldom, rng)
    return Sample(f"{solved.prompt} {numbered(solved.outputs)}\n{task.prompt}", task.outputs)


def word_list(size: int, often: int, seldom: int, rng: random.Random) -> Sample:
    """Mix 10 words, each `often` times, with the others, each `seldom` times."""
    # Pairs, if there are too few words.
    words = rng.sample(WORDS if size <= len(WORDS) else PAIRS, size)
    mixed = words[:10] * often + words[10:] * seldom
    rng.shuffle(mixed)
    return Sample(PROMPTS["cwe"].format(context=numbered(mixed)), words[:10])


def numbered(words: Sequence[str]) -> str:
    """Return the words in one line, each after its number."""
    return " ".join(f"{n}. {word}" for n, word in enumerate(words, start=1))


def frequent_words(texts: Texts, length: int, size: int, rng: random.Random) -> Sample:
    """Ask for the most frequent of `size` words; the n-th has a share of n^-2 / ζ(2)."""
    # The most frequent of all is "...", to be ignored
    number = max(4, (length - 50) // 50) - 1
    coded = different(lambda: "".join(rng.choices(string.ascii_lowercase, k=6)), number)
    mixed: list[str] = []
    for rank, word in enumerate(["...", *coded], start=1):
        mixed += [word] * int(size / rank**2 / (math.pi**2 / 6))
    rng.shuffle(mixed)
    return Sample(PROMPTS["fwe"].format(context=" ".join(mixed)), coded[:3])


def graph_walk(texts: Texts, length: int, size: int, rng: random.Random) -> Sample:
    """Ask which nodes of a graph of `size` edges a search meets at a depth, or for the parents of a
    node (GraphWalks, https://huggingface.co/datasets/openai/graphwalks).
    """
    depth = rng.randint(0, 3)  # 0: parents, a step against the edges
    nodes = different(lambda: f"{rng.getrandbits(40):010x}", size // 2)
    edges = [rng.sample(nodes, 2) for _ in range(size)]
    nexts = defaultdict[str, set[str]](set)
    for here, there in edges if depth else map(reversed, edges):
        nexts[here].add(there)
    for node in nodes:  # of 16 or more, one has few enough
        met, found = {node}, {node}
        for _ in range(max(1, depth)):
            found = {there for here in found for there in nexts[here]} - met
            met |= found
        if 0 < len(found) <= REACHED:
            break
    context = "\n".join(f"{here} -> {there}" for here, there in edges)
    asked = PROMPTS["search" if depth else "parents"].format(node=node, depth=depth)
    return Sample(PROMPTS["graphwalks"].format(context=context, question=asked), sorted(found))


def f1(answer: str, outputs: Sequence[str]) -> float:
    """Return the F1 of the words in the answer's first brackets."""
    found = set(re.findall(r"\w+", answer.partition("]")[0].rpartition("[")[2].lower()))
    return 2 * len(found & set(outputs)) / (len(found) + len(outputs))


def requests(texts: Texts, length: int, size: int, rng: random.Random) -> Sample:
    """Ask for one of the answers to equal requests, among `size` other ones (MRCR, arXiv
    2409.12640, https://huggingface.co/datasets/openai/mrcr).
    """
    number, prefix = rng.choice(EQUAL), "".join(rng.choices(string.ascii_letters, k=10))
    kinds = [f"{form} about the {topic}" for topic in rng.sample(NOUNS, 6) for form in WRITTEN]
    rng.shuffle(kinds)
    asked, *others = kinds
    positions = sorted(rng.choices(range(size + 1), k=len(EQUAL)))
    lines = inserted(rng.choices(others, k=size), positions, [asked] * len(EQUAL))
    turns = [(kind, " ".join(rng.choices(WORDS, k=20))) for kind in lines]
    context = "\n".join(PROMPTS["mrcr_turn"].format(kind=kind, text=text) for kind, text in turns)
    found = [text for kind, text in turns if kind == asked]
    prompt = PROMPTS["mrcr"].format(context=context, prefix=prefix, number=number, kind=asked)
    return Sample(prompt, [prefix, found[EQUAL.index(number)]])


def match_ratio(answer: str, outputs: Sequence[str]) -> float:
    """Return how alike the line after the prefix and the text are; 0 without the prefix."""
    prefix, text = outputs
    before, _, rest = answer.strip().partition(prefix)
    return 0.0 if before else SequenceMatcher(None, rest.strip().partition("\n")[0], text).ratio()


def labels(texts: Texts, length: int, size: int, rng: random.Random) -> Sample:
    """Ask how many of `size` lines have a label, or if it is more common than another one (OOLONG,
    arXiv 2511.02817).
    """
    counts, names = rng.random() < 0.5, rng.sample(NOUNS, 4)
    label, other = rng.sample(names, 2)
    lines = rng.choices(names, (1, 2, 3, 4), k=size)
    count, more = lines.count(label), lines.count(label) - lines.count(other)
    compared = "more common than" if more > 0 else "less common than" if more else "as common as"
    context = "\n".join(PROMPTS["line"].format(text=rng.choice(PAIRS), label=x) for x in lines)
    asked = PROMPTS["oolong_count" if counts else "oolong_compare"].format(label=label, other=other)
    prompt = PROMPTS["oolong"].format(context=context, question=asked)
    return Sample(prompt, [str(count) if counts else compared])


def nearness(answer: str, outputs: Sequence[str]) -> float:
    """Return 0.75 to the power of a number's error, and 1 or 0 for a comparison."""
    (expected,), words = outputs, answer.lower()
    if not expected.isdecimal():  # a chat model answers in a sentence
        compared = re.findall("(?:not )?(?:more|less|as) common", words)
        return float(compared[:1] == [expected.rpartition(" ")[0]])
    found = re.search(r"\d[\d,]{0,15}", words)
    return 0.75 ** abs(int(found[0].replace(",", "")) - int(expected)) if found else 0.0


TASKS = {
    "niah_single_1": needles("noise", "words", "numbers"),
    "niah_single_2": needles("essay", "words", "numbers"),
    "niah_single_3": needles("essay", "words", "uuids"),
    "niah_multikey_1": needles("essay", "words", "numbers", keys=4),
    "niah_multikey_2": needles("needle", "words", "numbers"),
    "niah_multikey_3": needles("needle", "uuids", "uuids"),
    "niah_multivalue": needles("essay", "words", "numbers", values=4),
    "niah_multiquery": needles("essay", "words", "numbers", keys=4, queries=4),
    "vt": RulerTask(variables, 30, HOPS + 1),
    "cwe": RulerTask(common_words, 120, 20, len(PAIRS)),
    "fwe": RulerTask(frequent_words, 50, 60),  # of 60 the first four words are 36, 9, 4 and 2
    "graphwalks": RulerTask(graph_walk, 128, 32, score=f1),
    "mrcr": RulerTask(requests, 128, len(EQUAL), score=match_ratio),
    "oolong": RulerTask(labels, 16, 16, score=nearness),
}
