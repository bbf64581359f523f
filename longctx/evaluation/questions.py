"""Questions about documents, for RULER's qa_1 and qa_2: from files of SQuAD and HotpotQA, or made.

Made questions are about facts that are placed into passages of one's own text. One hop, as SQuAD:
where was a person born. Two hops, as HotpotQA: who leads the town where a person was born. Other
people and towns stand in other passages.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from longctx import untrusted
from longctx.data.sources.needles import CITIES

LARGEST = 1 << 30  # bytes of a file of questions
PASSAGE = 600  # characters of a passage, about those of a paragraph of SQuAD
PEOPLE = 10  # that passages tell of, at most
_FIRST = (
    "Ada Anton Bela Carla Clara Dario Edith Elias Emil Fatima Flora Greta Hugo Ida Ivan Jonas "
    "Jorge Karin Lena Linus Marta Milan Nadia Nora Olga Oscar Petra Rafael Rosa Samir Selma "
    "Simon Tara Tomas Vera Viktor Wanda Xavier Yusuf Zora"
)
_LAST = (
    "Abbott Bauer Becker Castel Dahl Dumont Eriksen Farkas Ferrer Galvin Hansen Holt Ibarra "
    "Jansen Keller Kovac Lang Lindgren Marsh Moreau Nakamura Novak Okafor Olsen Petrov Quinn "
    "Ramos Reyes Sato Schuster Silva Tanaka Thorne Ullman Varga Weber Winter Yilmaz Zamora "
    "Ziegler"
)
FIRST_NAMES, LAST_NAMES = _FIRST.split(), _LAST.split()


class DocumentQuestion(NamedTuple):
    """A question about `documents`, and its answers, each of which is right."""

    documents: list[str]
    question: str
    answers: list[str]


class Questions(Protocol):
    """Where questions come from; `fewest` documents hold one."""

    fewest: int

    def draw(self, size: int, rng: random.Random) -> DocumentQuestion:
        """A question about `size` documents."""


class MadeQuestions:
    """Questions about facts in passages of one's own `sentences`, in `hops` steps, 1 or 2."""

    def __init__(self, sentences: Sequence[str], hops: int):
        self.hops = self.fewest = hops
        self.passages: list[list[str]] = [[]]
        characters = 0
        for sentence in sentences:
            if characters >= PASSAGE:
                self.passages.append([])
                characters = 0
            self.passages[-1].append(sentence)
            characters += len(sentence)

    def draw(self, size: int, rng: random.Random) -> DocumentQuestion:
        """A question about `size` passages, which repeat where there are fewer."""
        people = names(rng, PEOPLE)
        leaders = names(rng, PEOPLE)
        towns = rng.sample(CITIES, PEOPLE)
        repeats, remainder = divmod(size, len(self.passages))
        numbers = [*range(len(self.passages))] * repeats + rng.sample(
            range(len(self.passages)), remainder
        )
        rng.shuffle(numbers)
        passages = [list(self.passages[n]) for n in numbers]
        count = min(PEOPLE, size // self.hops)
        facts = [f"{people[n]} was born in {towns[n]}." for n in range(count)]
        if self.hops == 2:
            facts += [f"The mayor of {towns[n]} is {leaders[n]}." for n in range(count)]
        for fact, place in zip(facts, rng.sample(range(size), len(facts)), strict=True):
            passages[place].insert(rng.randint(0, len(passages[place])), fact)
        documents = [" ".join(passage) for passage in passages]
        if self.hops == 1:
            return DocumentQuestion(documents, f"Where was {people[0]} born?", [towns[0]])
        question = f"Who is the mayor of the city where {people[0]} was born?"
        return DocumentQuestion(documents, question, [leaders[0]])


def names(rng: random.Random, count: int) -> list[str]:
    """Different names of people."""
    pairs = rng.sample(range(len(FIRST_NAMES) * len(LAST_NAMES)), count)
    return [f"{FIRST_NAMES[n // len(LAST_NAMES)]} {LAST_NAMES[n % len(LAST_NAMES)]}" for n in pairs]


class Row(NamedTuple):
    """A question of a file; documents by their numbers."""

    question: str
    answers: list[str]
    needed: list[int]  # documents that answer it
    near: list[int]  # others of the same article


class FileQuestions:
    """The questions of a file, about all of its documents."""

    def __init__(self, rows: Sequence[Row], documents: Sequence[str]):
        self.rows, self.documents = rows, documents
        self.fewest = max(len(row.needed) for row in rows)

    def draw(self, size: int, rng: random.Random) -> DocumentQuestion:
        """A question with the documents that answer it, others of its article, then any others."""
        row = rng.choice(self.rows)
        order = [n for n in row.near if n not in row.needed]
        rng.shuffle(order)
        known = {*row.needed, *order}
        lacking = size - len(row.needed) - len(order)
        if lacking > 0:
            others = [n for n in range(len(self.documents)) if n not in known] or [*known]
            repeats, remainder = divmod(lacking, len(others))
            order += others * repeats + rng.sample(others, remainder)
        numbers = [*row.needed, *order][:size]
        rng.shuffle(numbers)
        return DocumentQuestion([self.documents[n] for n in numbers], row.question, row.answers)


def read_squad(path: Path) -> FileQuestions:
    """Questions of a file in the form of SQuAD; ValueError naming it for any other."""

    def rows(content: Any) -> tuple[list[Row], list[str]]:
        documents = sorted({p["context"] for one in content["data"] for p in one["paragraphs"]})
        numbers = {document: n for n, document in enumerate(documents)}
        result = []
        for article in content["data"]:
            near = [numbers[p["context"]] for p in article["paragraphs"]]
            for p in article["paragraphs"]:
                needed = [numbers[p["context"]]]
                for one in p["qas"]:
                    answers = [str(x["text"]) for x in one["answers"]]
                    if answers and not one.get("is_impossible", False):
                        result.append(Row(str(one["question"]), answers, needed, near))
        return result, documents

    return _read(path, "squad", "SQuAD", rows)


def read_hotpotqa(path: Path) -> FileQuestions:
    """Questions of a file in the form of HotpotQA; ValueError naming it for any other."""

    def rows(content: Any) -> tuple[list[Row], list[str]]:
        texts = [[f"{title}\n{''.join(parts)}" for title, parts in x["context"]] for x in content]
        documents = sorted({text for of_row in texts for text in of_row})
        numbers = {document: n for n, document in enumerate(documents)}
        return [
            Row(str(x["question"]), [str(x["answer"])], [numbers[text] for text in of_row], [])
            for x, of_row in zip(content, texts, strict=True)
        ], documents

    return _read(path, "hotpotqa", "HotpotQA", rows)


def _read(path: Path, key: str, form: str, rows: Any) -> FileQuestions:
    try:
        questions, documents = rows(untrusted.read_json(path, LARGEST))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"ruler.{key}={path}: not in the form of {form} ({reason})") from error
    if not questions:
        raise ValueError(f"ruler.{key}={path}: no question with an answer in it")
    return FileQuestions(questions, documents)
