"""Tasks of lm-evaluation-harness on a GPT. Imported only for tasks=, because lm-eval is an extra.

A request is scored with the last `context` tokens before it, a long text in lm-eval's rolling
windows. Generation is greedy, from a cache of keys and values. As in lm-eval's own HFLM, prompt and
answer share the context. Unlike there, text turns into special tokens only in prompts that the
model's chat template writes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, islice, starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from longctx.config.fields import refuse
from longctx.data import Tokenizer
from longctx.data.chat import Template
from longctx.evaluation.score import Scorer
from longctx.evaluation.windows import Window, losses, spans

LOGITS = 4096  # positions with logits at one time on a device
ANSWER = 256  # tokens, unless a task gives another limit


class TaskPrompt(NamedTuple):
    """Prompt number `owner`, to continue by `max_tokens` tokens or up to a word of `until`."""

    owner: int
    prompt: list[int]
    until: Sequence[str]
    max_tokens: int


class Harness(TemplateLM):
    """A GPT in eval mode with lm-eval's interface.

    `batch_size` sequences of `context` tokens go through the model at a time, on each data rank.
    """

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: Tokenizer,
        context: int,
        batch_size: int,
        template: Template | None = None,
    ) -> None:
        super().__init__()
        self.scorer, self.vocabulary, self.template = scorer, tokenizer, template
        self.context, self.batch_size = context, batch_size

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
        """Return begin-of-text, if the tokenizer has one, and the text; as lm-eval's own HFLM. A
        chat template has written its special tokens.
        """
        if self.template is not None:
            return list(self.vocabulary.encode_conversation(string, [])[0].tolist())
        begin = self.vocabulary.bos_id
        if begin is None or add_special_tokens is False:
            return self.vocabulary.encode(string)
        text = string.removeprefix(self.vocabulary.decode([begin]))
        return [begin, *self.vocabulary.encode(text)]

    @property
    def tokenizer_name(self) -> str:
        return "" if self.template is None else self.template.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self.tokenizer_name

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the conversation up to the next answer, or to the end of one that is begun."""
        assert self.template is not None
        text, begun = self.template.question(chat_history)
        # lm-eval gives a space at the end to the answer that it scores
        return text + chat_history[-1]["content"][len(begun) :] if begun else text

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return, per request, ln p of the continuation, and True if greedy decoding gives it;
        ValueError for a continuation that is longer than the context.
        """
        found = [(0.0, True)] * len(requests)
        pieces = []
        for owner, (_, before, after) in enumerate(requests):
            problem = f"a task scores {len(after):,} tokens at once"
            refuse((len(after) > self.context, f"{problem}; give seq_len={len(after)} or more"))
            ids = np.array([*before, *after], dtype=np.int64)[-1 - self.context :]
            pieces.append(Window(owner, 0, ids, len(ids) - 1 - len(after)))
        pieces = [piece for piece in pieces if piece.is_target.any()]  # an answer may be empty
        for batch in self._batches(sorted(pieces, key=lambda piece: -piece.length)):
            counts = [piece.length - piece.seen for piece in batch]
            answers = self.scorer.known([piece.ids for piece in batch], counts)
            for piece, answer in zip(batch, answers, strict=True):
                found[piece.owner] = answer
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return ln p of whole texts; every token is scored once, in the windows of HFLM."""
        sums = [0.0] * len(requests)
        windows = chain.from_iterable(starmap(self._rolling, enumerate(requests)))
        for window, nats in losses(self.scorer, windows, self.context, self.batch_size):
            sums[window.owner] -= float(nats.sum())
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return greedy answers, each up to the first of its stop words or the end of the text."""
        questions = [self._question(owner, *each.args) for owner, each in enumerate(requests)]
        answers = [""] * len(questions)
        together = self.batch_size * self.scorer.data_ranks
        questions.sort(key=lambda question: (question.max_tokens, len(question.prompt)))
        # Each prompt leaves room in the context for its own limit, so a batch has one limit alone
        for max_tokens, group in groupby(questions, lambda question: question.max_tokens):
            while batch := list(islice(group, together)):
                generated = self.scorer.answers(
                    [question.prompt for question in batch],
                    max_tokens,
                    sorted(self.vocabulary.end_tokens),
                    self.context,
                    lambda row, tokens, batch=batch: self._text(batch[row], tokens)[1],  # type: ignore[misc]
                )
                for question, tokens in zip(batch, generated, strict=True):
                    answers[question.owner] = self._text(question, tokens)[0]
        return answers

    def _question(self, owner: int, prompt: str, settings: dict[str, Any]) -> TaskPrompt:
        """Return a request for an answer; ValueError for sampling, or if the context is short."""
        is_sampled = settings.get("do_sample") and settings.get("temperature", 1.0) > 0
        refuse((is_sampled, "a task asks for sampling; generation is greedy here"))
        until = settings.get("until") or []
        max_tokens = int(settings.get("max_gen_toks", settings.get("max_tokens", ANSWER)))
        room = self.context - max_tokens
        advice = f"give a greater seq_len, such as seq_len={4 * max_tokens}"
        refuse((room < 1, f"a task asks for {max_tokens:,} new tokens; {advice}"))
        # As HFLM: few-shot examples come first, so a prompt that is too long loses its beginning
        ids = self.tok_encode(prompt) or [self.prefix_token_id]
        words = [until] if isinstance(until, str) else until
        return TaskPrompt(owner, ids[-room:], words, max_tokens)

    def _text(self, question: TaskPrompt, tokens: Sequence[int]) -> tuple[str, bool]:
        """Return the text of an answer up to its end, and True if a word of `until` ends it."""
        text = self.vocabulary.decode(tokens, special=False)  # as HFLM
        ends = [index for stop in question.until if stop and (index := text.find(stop)) >= 0]
        return (text[: min(ends)], True) if ends else (text, False)

    def _rolling(self, owner: int, request: Any) -> Iterator[Window]:
        """Yield windows that do not overlap; the last one has the full context, too."""
        ids = np.array([self.prefix_token_id, *self.vocabulary.encode(request.args[0])], np.int64)
        for _, end, first in spans(len(ids), self.context, self.context):
            begin = max(0, end - self.context)
            yield Window(owner, begin, ids[begin : end + 1], first - begin - 1)

    def _batches(self, pieces: Sequence[Window]) -> Iterator[Sequence[Window]]:
        """Yield pieces of falling length, as many as tokens and logits of a forward allow."""
        ranks = self.scorer.data_ranks
        while pieces:
            count = max(1, self.batch_size * self.context * ranks // (pieces[0].length or 1))
            scored = max(piece.length - piece.seen for piece in pieces[:count])
            count = max(1, min(count, LOGITS * ranks // scored))
            yield pieces[:count]
            pieces = pieces[count:]


def evaluate_tasks(
    lm: Harness,
    tasks: Sequence[str],
    tokenizer_folder: Path,
    task_folder: Path | None = None,
    limit: int | None = None,
    fewshot: int | None = None,
) -> dict[str, Any]:
    """Return lm-eval's results of `tasks`, its own or those in `task_folder`, with `limit`
    documents of each.

    Raises ValueError, one line, for a task that does not exist or has no data.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # For tasks of a given length in tokens, such as RULER's.
    metadata = {"tokenizer": str(tokenizer_folder), "max_seq_lengths": [lm.context]}
    settings = {"limit": limit, "num_fewshot": fewshot, "metadata": metadata}
    settings |= {"log_samples": False, "bootstrap_iters": 1000}
    if lm.template is not None:
        settings |= {"apply_chat_template": True, "fewshot_as_multiturn": True}
    is_missing = task_folder is not None and not task_folder.is_dir()
    refuse((is_missing, f"tasks_path={task_folder}: no such folder; give one with YAML files"))
    try:
        own = task_folder and str(task_folder)
        manager = TaskManager(include_path=own, include_defaults=own is None, metadata=metadata)
        results = simple_evaluate(lm, tasks=list(tasks), task_manager=manager, **settings)
    except Exception as error:  # anything from a task's code, its data set or the network
        raise ValueError(f"tasks=[{','.join(tasks)}]: {type(error).__name__}: {error}") from error
    assert results is not None
    keys = ("results", "groups", "versions", "n-shot")
    chosen = {key: results[key] for key in keys if key in results}
    # JSON holds numbers of NumPy as Python's, and other objects as text
    text = json.dumps(chosen, default=lambda x: x.item() if hasattr(x, "item") else str(x))
    return dict(json.loads(text))
