"""Tasks of lm-evaluation-harness on a GPT. Imported only for tasks=, because lm-eval is an extra.

A request is scored with the last `context` tokens before it, a long text in lm-eval's rolling
windows. Generation is greedy, from a cache of keys and values; as in lm-eval's own HFLM prompt and
answer share the context. Text never turns into special tokens, which it does there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from torch import Tensor

from longctx.data import Tokenizer
from longctx.evaluation.result_tables import show_tasks
from longctx.evaluation.results import Result
from longctx.evaluation.scorer import Scorer
from longctx.evaluation.scoring import losses
from longctx.evaluation.setup import Setup
from longctx.evaluation.windows import Window, spans, stride_of
from longctx.runs import evaluations

PLACES = 4096  # places of which logits exist at one time on a device
MOST_GENERATED = 256  # tokens, where a task does not say


class Piece(NamedTuple):
    """Tokens (n + 1,) of request number `owner`; the last `scored` of them are to be predicted."""

    owner: int
    ids: np.ndarray
    scored: int


class Question(NamedTuple):
    """A prompt, number `owner`, to continue by at most `most` tokens, up to a word of `until`."""

    owner: int
    prompt: list[int]
    until: Sequence[str]
    most: int


class Harness(TemplateLM):
    """A GPT in eval mode, as lm-eval asks it."""

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: Tokenizer,
        context: int,
        stride: int,
        rows: int,
        ends: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.scorer = scorer
        self.vocabulary = tokenizer
        self.context = context
        self.stride = stride
        self.rows = rows  # of `context` tokens, at a time on each data rank
        self.ends = [tokenizer.eos_id, *sorted({*ends} - {tokenizer.eos_id})]  # of an answer

    @property
    def eot_token_id(self) -> int:
        return self.vocabulary.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.vocabulary.eos_id if self.vocabulary.bos_id is None else self.vocabulary.bos_id

    @property
    def max_length(self) -> int:
        return self.context

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Begin-of-text, where the tokenizer has one, and the text; as lm-eval's own HFLM."""
        begin = self.vocabulary.bos_id
        if begin is None or add_special_tokens is False:
            return self.vocabulary.encode(string)
        return [
            begin,
            *self.vocabulary.encode(string.removeprefix(self.vocabulary.decode([begin]))),
        ]

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(ln p of the continuation, whether each of its tokens is the most likely one) for each
        request.
        """
        sums, greedy = [0.0] * len(requests), [True] * len(requests)
        pieces = [
            piece
            for n, (_, before, after) in enumerate(requests)
            for piece in self._pieces(n, before, after)
        ]
        for batch in self._batches(sorted(pieces, key=lambda piece: -len(piece.ids))):
            most = max(piece.scored for piece in batch)
            ends = [len(piece.ids) - 1 for piece in batch]  # tokens that are shown
            at = torch.tensor([[max(0, end - most + k) for k in range(most)] for end in ends])
            tokens = _padded([piece.ids[:-1] for piece in batch])
            # At places before a continuation nothing is wanted, and what is found there left out.
            wanted = _padded([piece.ids[::-1][: piece.scored] for piece in batch]).flip(1)
            lengths = torch.tensor(ends)
            logp, likeliest = self.scorer.predictions(tokens, at, wanted, lengths)
            right = likeliest == wanted
            for piece, each, hits in zip(batch, logp, right, strict=True):
                sums[piece.owner] += float(each[most - piece.scored :].sum())
                greedy[piece.owner] &= bool(hits[most - piece.scored :].all())
        return list(zip(sums, greedy, strict=True))

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """ln p of texts, every token scored once, in windows as of HFLM."""
        texts = [
            np.array([self.prefix_token_id, *self.vocabulary.encode(r.args[0])], dtype=np.int64)
            for r in requests
        ]
        sums = [0.0] * len(texts)
        windows = (window for n, ids in enumerate(texts) for window in self._rolling(n, ids))
        for window, nats in losses(self.scorer, windows, self.context, self.rows):
            sums[window.owner] -= float(nats.sum())
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, each up to the first of its stop words or the end of the text."""
        questions: list[Question] = []
        for request in requests:
            prompt, settings = request.args
            if settings.get("do_sample") and settings.get("temperature", 1.0) > 0:
                raise ValueError("a task asks for sampling; generation is greedy here")
            until = settings.get("until") or []
            until = [until] if isinstance(until, str) else until
            most = int(settings.get("max_gen_toks", settings.get("max_tokens", MOST_GENERATED)))
            ids = self.tok_encode(prompt) or [self.prefix_token_id]
            room = self.context - most
            if room < 1:
                raise ValueError(
                    f"a task asks for {most:,} new tokens, and a text has {self.context:,} with "
                    f"its prompt; give a greater seq_len, such as seq_len={4 * most}"
                )
            questions.append(Question(len(questions), ids[-room:], until, most))
        answers = [""] * len(questions)
        together = self.rows * self.scorer.data_ranks
        questions.sort(key=lambda question: (question.most, len(question.prompt)))
        for first in range(0, len(questions), together):
            batch = questions[first : first + together]
            for question, text in zip(batch, self._answered(batch), strict=True):
                answers[question.owner] = text
        return answers

    def _answered(self, questions: Sequence[Question]) -> list[str]:
        """The answers to `questions`, generated together."""
        tokens = self.scorer.answers(
            [question.prompt for question in questions],
            max(question.most for question in questions),
            self.ends,
            self.context,
            lambda n, tokens: self._text(questions[n], tokens)[1],
        )
        return [self._text(*pair)[0] for pair in zip(questions, tokens, strict=True)]

    def _text(self, question: Question, tokens: Sequence[int]) -> tuple[str, bool]:
        """The text of an answer, up to its end, and whether `tokens` reach that."""
        text = self.vocabulary.decode(tokens[: question.most], special=False)  # as HFLM
        ends = [place for stop in question.until if stop and (place := text.find(stop)) >= 0]
        return (text[: min(ends)], True) if ends else (text, len(tokens) >= question.most)

    def _rolling(self, owner: int, ids: np.ndarray) -> Iterator[Window]:
        """Windows that advance by `stride` tokens; the last one too shows all of the context."""
        for _, end, first in spans(len(ids), self.context, self.stride):
            begin = max(0, end - self.context)
            yield Window(owner, begin, ids[begin : end + 1], first - begin - 1)

    def _pieces(self, owner: int, before: list[int], after: list[int]) -> Iterator[Piece]:
        """A continuation in one piece, or where it is longer than the context in pieces of `stride`
        tokens.
        """
        ids = np.array([*before, *after], dtype=np.int64)
        first = len(before)
        step = len(after) if len(after) <= self.context else self.stride
        while first < len(ids):
            end = min(first + step, len(ids))
            yield Piece(owner, ids[max(0, end - 1 - self.context) : end], end - first)
            first = end

    def _batches(self, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
        """Pieces of falling length, as many as the rows and the places of logits allow."""
        ranks = self.scorer.data_ranks
        batch: list[Piece] = []
        for piece in pieces:
            most = max(piece.scored, *(other.scored for other in batch)) if batch else piece.scored
            longest = len(batch[0].ids) - 1 if batch else 1
            if batch and (
                (len(batch) + 1) * longest > self.rows * self.context * ranks
                or (len(batch) + 1) * most > PLACES * ranks
            ):
                yield batch
                batch = []
            batch.append(piece)
        if batch:
            yield batch


def _padded(texts: Sequence[np.ndarray]) -> Tensor:
    """(texts, longest) int64, each at the beginning of its row."""
    rows = np.zeros((len(texts), max(map(len, texts))), dtype=np.int64)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    return torch.from_numpy(rows)


def measure_tasks(setup: Setup, scorer: Scorer) -> Result:
    """Run the tasks that are asked for; ValueError for one that does not exist or has no data."""
    config, subject = setup.config, setup.subject
    stride = stride_of(config.stride or setup.context, setup.context)
    lm = Harness(
        scorer, subject.tokenizer, setup.context, stride, setup.batch_size, subject.end_tokens
    )
    folder = None if config.tasks_path is None else Path(config.tasks_path)
    results = evaluate_tasks(
        lm, config.tasks, subject.folder, folder, config.documents, config.fewshot
    )
    content = {
        "context": setup.context,
        "stride": stride,
        "documents": config.documents,
        **results,
    }
    return Result(
        evaluations.tasks_stem(config.tasks, subject.name, setup.context),
        content,
        lambda content: show_tasks(evaluations.task_scores(content["results"])),
    )


def evaluate_tasks(
    lm: Harness,
    tasks: Sequence[str],
    tokenizer_folder: Path,
    task_folder: Path | None = None,
    limit: int | None = None,
    fewshot: int | None = None,
) -> dict[str, Any]:
    """lm-eval's results of `tasks`, which lie in `task_folder` or come with it; `limit` documents
    of each.

    Raises ValueError, one line, for a task that does not exist or whose data cannot be had.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # For tasks of a given length in tokens, such as RULER's.
    metadata = {"tokenizer": str(tokenizer_folder), "max_seq_lengths": [lm.context]}
    manager = _manager(tasks, task_folder, metadata)
    try:
        results = simple_evaluate(
            model=lm,
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            num_fewshot=fewshot,
            log_samples=False,
            bootstrap_iters=1000,
            metadata=metadata,
        )
    except Exception as error:  # whatever the code of a task, its data set or the network raises
        raise ValueError(f"tasks=[{','.join(tasks)}]: {type(error).__name__}: {error}") from error
    assert results is not None
    keys = ("results", "groups", "versions", "n-shot")
    return {key: _plain(results[key]) for key in keys if key in results}


def _plain(value: Any) -> Any:
    """The value as JSON can hold it; what is no number becomes null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | bool | int | None):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None


def _manager(tasks: Sequence[str], folder: Path | None, metadata: dict[str, Any]) -> Any:
    """lm-eval's index of tasks; its own 14,000, which take seconds to read, only where one is not
    in `folder`.
    """
    if folder is not None and not folder.is_dir():
        raise ValueError(
            f"tasks_path={folder}: no such folder; give one with the YAML files of tasks"
        )
    make: Callable[..., Any] = TaskManager
    if folder is not None:
        manager = make(include_path=str(folder), include_defaults=False, metadata=metadata)
        if set(tasks) <= set(manager.all_tasks):
            return manager
    manager = make(include_path=None if folder is None else str(folder), metadata=metadata)
    for task in tasks:
        if task not in manager.all_tasks:
            close = get_close_matches(task, manager.all_tasks, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"tasks={task}: not a task of lm-evaluation-harness{hint}")
    return manager
