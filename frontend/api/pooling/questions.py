"""Questions about one text whose answers are probabilities, not words. /v1/systemone and /v1/decisions share this.

Each question stands alone behind the text (in one prompt, they would change each other's answers) and ends where the
model's answer would begin. The text is computed once for all questions. Every possible answer has a label of one
token, and the answer is the probabilities of the labels as the next token.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from string import ascii_lowercase, ascii_uppercase
from typing import Any

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.pooling.fields import PoolingFields, Vectors, check_prompts, collect, pooling_request
from frontend.chat.history import ChatMessage, chat_message
from frontend.chat.large_chats import prepared
from frontend.chat.prompt import checked_ids, render
from frontend.chat.reasoning import thinking
from frontend.errors import NotSupported, TooLarge, Unprocessable
from frontend.generation.service import MAX_TOKENS
from frontend.model_context import ModelContext, check_characters
from frontend.output_parser.model_format import Reasoning, ToolFormat
from frontend.request import GenerationRequest
from frontend.text.tokenizer import HUGE_CHARS
from shared.messages import Pooling, PoolingKind

MOST_OPTIONS, MOST_LEVELS = 128, 10
MOST_CHARACTERS = 4 * MAX_TOKENS  # limit on the characters of all prompts of a request together
YES, NO = "yes", "no"
DIGITS = "0123456789"
_BORDER = "\ue002"  # a private-use character; with a number, it separates the questions while they are rendered


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    name: how its answer is called
    param: the path of its field, for errors
    asked: what the model is asked, before the possible answers
    options: the possible answers, in the order of the response, each with a description or ""
    ordered: whether the options are levels from low to high, which keep their order and have numbers as labels
    is_yes_no: whether the options are YES and NO, which are their own labels if they are tokens
    source: the question as the request has it, if the response needs it
    """

    name: str
    param: str
    asked: str
    options: tuple[tuple[str, str], ...]
    ordered: bool = False
    is_yes_no: bool = False
    source: Any = None


@dataclass(frozen=True, slots=True)
class Asked:
    """The questions of a request as they were asked: the ids of the labels of each, in the order of its options."""

    questions: tuple[Question, ...]
    labels: tuple[tuple[int, ...], ...]
    token_ids: tuple[int, ...]  # all labels, once


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question.

    probabilities: of its options, in their order; their sum is 1
    label_mass: the probability that the next token is any of the labels
    argmax_is_label: whether the most likely token is a label
    """

    question: Question
    probabilities: tuple[float, ...]
    label_mass: float
    argmax_is_label: bool

    @property
    def best(self) -> int:
        """The index of the most probable option; of equals, the first."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def expected(self) -> float:
        """The mean of the options' indexes, by their probabilities."""
        return math.fsum(index * each for index, each in enumerate(self.probabilities))

    @property
    def confidence(self) -> float:
        """From 0 (all options are equally probable) to 1 (one of them is certain)."""
        count, best = len(self.probabilities), self.best
        if not self.question.ordered:
            return max(0.0, (count * self.probabilities[best] - 1) / (count - 1)) if count > 1 else 1.0
        distance = math.fsum(abs(index - best) * each for index, each in enumerate(self.probabilities))
        uniform = sum(abs(index - best) for index in range(count)) / count
        return max(0.0, 1 - distance / uniform)


async def questions_request(
    fields: PoolingFields, messages: Sequence[ChatMessage], questions: Sequence[Question], context: ModelContext, *,
    param: str, seed: int = 0, kwargs: Mapping[str, Any] | None = None,
) -> GenerationRequest:  # fmt: skip
    """Makes the request whose vectors `answers` turns into answers.

    messages: what the questions are about; they follow the last one's text, if it is the user's
    param: the field of the messages; kwargs: variables of the chat template
    seed: decides the order in which the options of a choice are shown, which differs between questions

    Raises NotSupported for a model that cannot answer so, TooLarge, Unprocessable or BadRequest.
    """
    if context.task.name != "generate":
        raise NotSupported(
            f"this server's model makes no text (--task {context.task.name}), so it cannot be asked", param="model",
            code="task_not_served",
        )  # fmt: skip
    shown = [_order(one, seed) for one in questions]
    names = await _labels(questions, context)
    texts = [_text(one, order, labels) for one, order, (labels, _) in zip(questions, shown, names, strict=True)]
    prompts = await _prompts(messages, texts, context, param, kwargs or {})
    check_prompts(param, prompts, context)
    # The option that is shown at place p has the label of this place.
    ids = [
        tuple(labels[order.index(option)] for option in range(len(order)))
        for order, (_, labels) in zip(shown, names, strict=True)
    ]
    every = tuple(dict.fromkeys(id for labels in ids for id in labels))
    made = pooling_request(
        fields, prompts, Pooling(PoolingKind.LOGPROBS, token_ids=every), context,
        Asked(tuple(questions), tuple(ids), every),
    )  # fmt: skip
    return replace(made, param=param, features=replace(made.features, one_group=len(prompts) > 1))


def _order(question: Question, seed: int) -> list[int]:
    """Returns the options' indexes in the order in which they are shown: models prefer some places."""
    order = list(range(len(question.options)))
    if question.ordered or question.is_yes_no:
        return order

    def key(index: int) -> bytes:
        text = "\0".join((str(seed), question.name, question.asked, str(index), *question.options[index]))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

    return sorted(order, key=key)


async def _labels(questions: Sequence[Question], context: ModelContext) -> list[tuple[list[str], list[int]]]:
    """Returns the texts and ids of each question's labels. Raises NotSupported if the tokenizer has too few."""
    letters = max((len(one.options) for one in questions if not one.ordered), default=0)
    singles = [*ascii_uppercase, *ascii_lowercase]
    pairs = map("".join, product(ascii_uppercase, ascii_uppercase)) if letters > len(ascii_uppercase) else ()
    tried = [YES, NO, *DIGITS, *singles, *pairs]
    ids = dict(zip(tried, await context.tokenizer.encode_following(tried), strict=True))
    known = {text: one[0] for text, one in ids.items() if len(one) == 1}
    found = []
    for one in questions:
        if one.is_yes_no and {YES, NO} <= known.keys():
            texts = [YES, NO]
        elif one.ordered:
            texts = list(DIGITS[: len(one.options)])
        else:
            texts = list(islice((text for text in tried[2 + len(DIGITS) :] if text in known), len(one.options)))
        labels = [known[text] for text in texts if text in known]
        if len({*labels}) < len(one.options):
            raise NotSupported(
                f"`{one.param}`: this model's tokenizer has only {len({*labels})} labels of one token for the "
                f"{len(one.options)} possible answers",
                param=one.param, code="unsupported_field",
            )  # fmt: skip
        found.append((texts, labels))
    return found


def _text(question: Question, order: Sequence[int], labels: Sequence[str]) -> str:
    lines = []
    for label, index in zip(labels, order, strict=True):
        option, description = question.options[index]
        shown = [] if option == label else [option]
        lines.append(f"{label}: {' - '.join([*shown, description] if description else shown)}".rstrip(": "))
    by_letter = "the letters before one of the options"
    told = "the number of one level" if question.ordered else f"{YES} or {NO}" if labels[0] == YES else by_letter
    return "\n".join([question.asked, "", *lines, "", f"Answer only with {told}."])


async def _prompts(
    messages: Sequence[ChatMessage], texts: Sequence[str], context: ModelContext, param: str, kwargs: Mapping[str, Any]
) -> list[list[int]]:
    """Renders the conversation once with all questions, and returns the ids of it with each of them alone."""
    number = 0
    while any(f"{_BORDER}{number}{_BORDER}" in text for text in (*texts, *(one["content"] for one in messages))):
        number += 1
    border = f"{_BORDER}{number}{_BORDER}"
    *rest, last = messages
    if last["role"] != "user":
        rest, last = list(messages), chat_message("user", "")
    content = last["content"] + "\n\n" if last["content"] else ""
    asking = [*rest, last | {"content": content + border + border.join(texts) + border}]
    variables = thinking(False, context) | ({"reasoning_effort": "low"} if context.style.has_reasoning_effort else {})
    make = partial(_rendered, asking, {**variables, **kwargs}, param)
    rendered = await prepared(make, context, asking, {"chat_template_kwargs": kwargs, param: messages})
    head, *asked, tail = rendered.marked.split(border)
    if len(asked) != len(texts):
        raise NotSupported(
            "this model's chat template does not show a message as it is, so it cannot be asked", param="model",
            code="no_chat_template",
        )  # fmt: skip
    if rendered.image_sources:
        raise Unprocessable(
            f"`{param}`: questions are about texts, not about images", param=param, code="unsupported_content"
        )
    tail += _opening(rendered.begins, context)
    check_characters(param, head, context)
    if sum(map(len, asked)) + len(asked) * (len(head) + len(tail)) > MOST_CHARACTERS:
        raise TooLarge(
            f"`questions` make {len(asked)} prompts of more than {MOST_CHARACTERS} characters in all",
            param="questions", code="out_of_range",
        )  # fmt: skip
    prompts: list[list[int]] = []
    for batch in _batches([head + one + tail for one in asked]):
        prompts += await checked_ids(batch, rendered.mark, context, param)
    return prompts


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yields the texts in order, as many together as other tenants' texts may wait for (at least one)."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > HUGE_CHARS:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    yield batch


def _rendered(messages: Sequence[ChatMessage], kwargs: Mapping[str, Any], param: str, context: ModelContext) -> Any:
    return render(messages, context, kwargs, param=param)


def _opening(begins: Reasoning, context: ModelContext) -> str:
    """Returns what must still stand before an answer: the end of reasoning that the template has opened."""
    if context.style.tool_format is ToolFormat.HARMONY:
        return "<|channel|>final<|message|>"
    _, closing = context.style.tags
    return f"\n{closing}\n\n" if begins is Reasoning.OPEN else ""


async def answers(context: ResponseContext, arriving: AsyncDeltas) -> tuple[list[Answer], Vectors]:
    """Waits for the probabilities of all labels. Raises SluiceError if a question failed."""
    vectors = await collect(context, arriving)
    asked: Asked = context.request.format_data
    place = {id: index for index, id in enumerate(asked.token_ids)}
    found = []
    for index, (question, labels) in enumerate(zip(asked.questions, asked.labels, strict=True)):
        *logprobs, best = vectors.floats(index)
        shares = [math.exp(logprobs[place[id]]) for id in labels]
        mass = math.fsum(shares)
        peak = max(logprobs[place[id]] for id in labels)  # the labels may be so unlikely that all shares are zero
        weights = [math.exp(logprobs[place[id]] - peak) for id in labels]
        total = math.fsum(weights)
        found.append(Answer(question, tuple(one / total for one in weights), min(1.0, mass), int(best) in labels))
    return found, vectors
