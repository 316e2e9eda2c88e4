"""/v1/decisions: predicates, choices and scores about an input, in OpenAI's format.

https://developers.openai.com/api/reference/resources/decisions
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.openai import completions
from frontend.api.openai.chat_request import RefusalPart
from frontend.api.openai.responses_calls import ForeignItem, ImagePart, OutputPart, ResultPart
from frontend.api.openai.responses_request import FunctionCall, FunctionCallOutput, chat_messages
from frontend.api.pooling import systemone
from frontend.api.pooling.fields import PoolingFields
from frontend.api.pooling.questions import (
    MOST_LEVELS,
    MOST_OPTIONS,
    NO,
    YES,
    Answer,
    Question,
    answers,
    questions_request,
)
from frontend.api.pooling.systemone import DecisionUsage, counted
from frontend.chat.history import ChatMessage, chat_message, merge_same_role
from frontend.chat.prompt import MAX_MESSAGES, MAX_PARTS, ROLES, join_text
from frontend.errors import BadRequest, Unprocessable, api_status
from frontend.model_context import ModelContext, check_model
from frontend.request import GenerationRequest
from frontend.schema.base import FieldError, Names, RequestModel, ResponseModel, to_json
from frontend.schema.request_fields import TemplateArguments, Text, doc
from frontend.schema.responses import Size
from frontend.text.chat_template import found_in, within

NAME, PREFIX, TASKS = "decisions", "decision", systemone.TASKS
MOST_QUESTIONS = 400
_MANY = Meta(min_length=1, max_length=MAX_PARTS)


class JsonPart(RequestModel, tag="input_json"):
    data: Annotated[dict[str, Any] | list[dict[str, Any]], doc("JSON, which the model reads as text")]

    @property
    def text(self) -> str:
        return msgspec.json.encode(self.data).decode()


class InputMessage(RequestModel, tag="message"):
    UNKNOWN_TYPE = "unsupported_content"
    DEFAULT_TYPE = True

    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[ResultPart | OutputPart | JsonPart | ImagePart | RefusalPart], _MANY]
    phase: Literal["commentary", "final_answer"] | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


Item = InputMessage | FunctionCall | FunctionCallOutput | ForeignItem
_Instructions = Annotated[
    str | Annotated[list[ResultPart | JsonPart], _MANY], doc("What is asked: a text, or parts of text and JSON")
]


class Predicate(RequestModel, tag="predicate"):
    instructions: _Instructions
    name: Text | None = None

    def question(self, name: str, param: str) -> Question:
        asked = f"Is this true? {join_text(self.instructions)}"
        return Question(name, param, asked, ((YES, ""), (NO, "")), is_yes_no=True, source=self)


class Option(RequestModel):
    value: Annotated[Text | bool, doc("What the answer has; a text and a boolean that spells it are different")]
    description: str | None = None


class Choice(RequestModel, tag="choice"):
    instructions: _Instructions
    choices: Annotated[list[Option], Meta(min_length=2, max_length=MOST_OPTIONS)]
    name: Text | None = None

    def __post_init__(self) -> None:
        if len({(type(one.value), one.value) for one in self.choices}) < len(self.choices):
            raise FieldError("choices", "has the same value twice")

    def question(self, name: str, param: str) -> Question:
        options = tuple((_shown(one.value), one.description or "") for one in self.choices)
        return Question(name, f"{param}.choices", join_text(self.instructions), options, source=self)


class Level(RequestModel):
    label: Text
    description: str | None = None


class Score(RequestModel, tag="score"):
    instructions: _Instructions
    levels: Annotated[list[Level], Meta(min_length=2, max_length=MOST_LEVELS)]
    name: Text | None = None

    def question(self, name: str, param: str) -> Question:
        options = tuple((one.label, one.description or "") for one in self.levels)
        return Question(name, f"{param}.levels", join_text(self.instructions), options, ordered=True, source=self)


class DecisionRequest(PoolingFields):
    IGNORED: ClassVar[Names] = ("user", "prompt_cache_key", "prompt_cache_options", "safety_identifier")

    input: Annotated[
        Annotated[str, Meta(extra_json_schema={"minLength": 1})]
        | Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)],
        doc("What the questions are about: a text, or the items of a conversation"),
    ]
    questions: Annotated[
        Annotated[list[Predicate | Choice | Score], Meta(min_length=1, max_length=MOST_QUESTIONS)],
        doc("Each is answered alone, in this order"),
    ]
    chat_template_kwargs: TemplateArguments = None

    def __post_init__(self) -> None:
        if self.input == "":
            raise FieldError("input", "is empty", BadRequest, "empty_prompt")


class DecidedPredicate(ResponseModel, tag="predicate"):
    name: str | None = None
    probability: float


class ChoiceProbability(ResponseModel):
    value: str | bool
    probability: float


class DecidedChoice(ResponseModel, tag="choice"):
    name: str | None = None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class ScoreProbability(ResponseModel):
    value: Size
    label: str
    probability: float


class DecidedScore(ResponseModel, tag="score"):
    name: str | None = None
    score: float
    confidence: float
    probabilities: list[ScoreProbability]


class NoReasoning(ResponseModel):
    reasoning_tokens: Size = 0


class DecidedUsage(DecisionUsage):
    output_tokens_details: NoReasoning


class Decision(ResponseModel):
    model: str
    answers: list[DecidedPredicate | DecidedChoice | DecidedScore]
    usage: DecidedUsage


REQUEST = DecisionRequest
status = api_status
error = completions.error


async def parse(request: DecisionRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the answers. Raises NotSupported, TooLarge, BadRequest or Unprocessable."""
    check_model(request.model, context)
    questions = [one.question(one.name or "", f"questions[{place}]") for place, one in enumerate(request.questions)]
    for place, one in enumerate(request.questions):
        if not join_text(one.instructions).strip():
            param = f"questions[{place}].instructions"
            raise Unprocessable(f"`{param}` is empty", param=param, code="out_of_range")
    return await questions_request(
        request, _messages(request.input), questions, context, param="input", kwargs=request.chat_template_kwargs
    )


def _messages(items: str | Sequence[Item]) -> list[ChatMessage]:
    if isinstance(items, str):
        return [chat_message("user", items)]
    messages = [
        within(shown, f"input[{place}]")
        for place, one in enumerate(items)
        for shown in ([_message(one)] if isinstance(one, InputMessage) else chat_messages(one))
    ]
    return merge_same_role(messages)


def _message(one: InputMessage) -> ChatMessage:
    return chat_message(ROLES.get(one.role, one.role), join_text(one.content)) | found_in(one.content, "content")


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    found, vectors = await answers(context, arriving)
    return to_json(
        Decision(
            model=context.request.model,
            answers=[_written(one) for one in found],
            usage=DecidedUsage(**counted(vectors.usage, cache_write_tokens=0), output_tokens_details=NoReasoning()),
        )
    )  # fmt: skip


def _written(answer: Answer) -> DecidedPredicate | DecidedChoice | DecidedScore:
    asked: Predicate | Choice | Score = answer.question.source
    shares, name = answer.probabilities, asked.name
    match asked:
        case Predicate():
            return DecidedPredicate(name=name, probability=shares[0])
        case Choice(choices=choices):
            return DecidedChoice(
                name=name, choice=choices[answer.best].value, confidence=answer.confidence,
                probabilities=[
                    ChoiceProbability(value=one.value, probability=share)
                    for one, share in zip(choices, shares, strict=True)
                ],
            )  # fmt: skip
        case Score(levels=levels):
            return DecidedScore(
                name=name, score=answer.expected, confidence=answer.confidence,
                probabilities=[
                    ScoreProbability(value=value, label=one.label, probability=share)
                    for value, (one, share) in enumerate(zip(levels, shares, strict=True))
                ],
            )  # fmt: skip
