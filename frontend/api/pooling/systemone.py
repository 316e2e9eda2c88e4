"""/v1/systemone: typed questions about a state, answered by probabilities. vLLM and others have the same route.

https://docs.vllm.ai/en/latest/serving/openai_compatible_server/
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.openai import completions
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
from frontend.chat.history import chat_message
from frontend.errors import BadRequest, TooLarge, Unprocessable, api_status
from frontend.model_context import ModelContext, check_model
from frontend.request import GenerationRequest, Usage
from frontend.schema.base import MOST, FieldError, Names, RequestModel, ResponseModel, to_json
from frontend.schema.request_fields import TemplateArguments, Text, doc
from frontend.schema.responses import Size

NAME, PREFIX, TASKS = "systemone", "decision", ("generate", "embed", "score")  # parse refuses all tasks but the first
MOST_QUESTIONS, MOST_DEPTH = 4096, 40
CHOOSE, RATE, JUDGE = "Which option fits best?", "Which level fits best?", "Is this so?"

_State = Annotated[str, Meta(extra_json_schema={"minLength": 1})] | dict[str, Any] | list[Any]
_Described = dict[str, str | None]


class ChoiceQuestion(RequestModel, tag="choice"):
    instructions: Annotated[str | None, doc("What is asked")] = None
    criteria: Annotated[
        Annotated[_Described, Meta(min_length=1, max_length=MOST_OPTIONS)],
        doc("The options, each with what speaks for it, or null"),
    ]

    def question(self, name: str, param: str) -> Question:
        options = tuple((option, text or "") for option, text in self.criteria.items())
        return Question(name, f"{param}.criteria", self.instructions or CHOOSE, options)


class ScoreQuestion(RequestModel, tag="score"):
    instructions: Annotated[str | None, doc("What is asked")] = None
    criteria: Annotated[
        Annotated[list[Text], Meta(min_length=2, max_length=MOST_LEVELS)]
        | Annotated[_Described, Meta(min_length=2, max_length=MOST_LEVELS)],
        doc("The levels from low to high: texts, or names, each with its meaning or null"),
    ]

    def question(self, name: str, param: str) -> Question:
        levels = self.criteria.items() if isinstance(self.criteria, dict) else [(one, None) for one in self.criteria]
        options = tuple((level, text or "") for level, text in levels)
        return Question(name, f"{param}.criteria", self.instructions or RATE, options, ordered=True)


class YesNo(RequestModel):
    true: str | None = None
    false: str | None = None


class NoulQuestion(RequestModel, tag="noul"):
    instructions: Annotated[str | None, doc("The statement that is true or false")] = None
    criteria: Annotated[YesNo | None, doc("What makes it true, and what makes it false")] = None

    def question(self, name: str, param: str) -> Question:
        known = self.criteria or YesNo()
        options = (YES, known.true or ""), (NO, known.false or "")
        return Question(name, f"{param}.criteria", self.instructions or JUDGE, options, is_yes_no=True)


class SystemOneRequest(PoolingFields):
    REFUSED: ClassVar[Names] = ("files",)

    state: Annotated[_State, doc("What the questions are about: a text, or JSON")]
    questions: Annotated[
        Annotated[dict[str, ChoiceQuestion | ScoreQuestion | NoulQuestion], Meta(min_length=1)],
        doc("Questions by name; each is answered alone"),
    ]
    instructions: Annotated[str | None, doc("Instructions for all questions, as a system message")] = None
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=MOST)], doc("Another order in which the options of choices are shown")
    ] = 0
    chat_template_kwargs: TemplateArguments = None

    def __post_init__(self) -> None:
        if self.state == "":
            raise FieldError("state", "is empty", BadRequest, "empty_prompt")


class ChoiceAnswer(ResponseModel, tag="choice"):
    choice: str
    probabilities: dict[str, float]
    confidence: float


class ScoreAnswer(ResponseModel, tag="score"):
    score: Annotated[float, Meta(description="The mean of the levels' numbers, by their probabilities")]
    legend: Annotated[dict[str, str], Meta(description="The levels by number, from 0")]
    probabilities: Annotated[dict[str, float], Meta(description="Of the levels, by number")]
    confidence: float


class NoulAnswer(ResponseModel, tag="noul"):
    noul: Annotated[float, Meta(description="The probability that it is true")]
    probabilities: Annotated[dict[str, float], Meta(description="Of `yes` and `no`")]
    confidence: float


class Diagnostics(ResponseModel):
    label_mass: Annotated[float, Meta(description="The probability that the next token is any of the labels")]
    argmax_is_label: Annotated[bool, Meta(description="Whether the most likely next token is a label")]


class CachedTokens(ResponseModel):
    cached_tokens: Size
    cache_write_tokens: Size | UnsetType = UNSET


class DecisionUsage(ResponseModel):
    input_tokens: Annotated[Size, Meta(description="Of all prompts: each question is asked behind the whole state")]
    output_tokens: Size
    total_tokens: Size
    input_tokens_details: CachedTokens


def counted(usage: Usage, **cached: int) -> dict[str, Any]:
    """Returns the fields of a DecisionUsage. cached: further fields of CachedTokens"""
    return {
        "input_tokens": usage.prompt_tokens, "output_tokens": 0, "total_tokens": usage.prompt_tokens,
        "input_tokens_details": CachedTokens(cached_tokens=usage.cached_tokens, **cached),
    }  # fmt: skip


class StructuredDecision(ResponseModel):
    id: str
    object: Literal["structured_decision"] = "structured_decision"
    created: Size
    model: str
    answers: dict[str, ChoiceAnswer | ScoreAnswer | NoulAnswer]
    diagnostics: dict[str, Diagnostics]
    usage: DecisionUsage


REQUEST = SystemOneRequest
status = api_status
error = completions.error


async def parse(request: SystemOneRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the answers. Raises NotSupported, TooLarge, BadRequest or Unprocessable."""
    check_model(request.model, context)
    if len(request.questions) > MOST_QUESTIONS:
        raise TooLarge(f"`questions` may have at most {MOST_QUESTIONS} entries", param="questions", code="out_of_range")
    state = request.state if isinstance(request.state, str) else _json(request.state)
    questions = [one.question(name, f"questions.{name:.80}") for name, one in request.questions.items()]
    system = [chat_message("system", request.instructions)] if request.instructions else []
    return await questions_request(
        request, [*system, chat_message("user", state)], questions, context, param="state", seed=request.seed,
        kwargs=request.chat_template_kwargs,
    )  # fmt: skip


def _json(value: Any) -> str:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise Unprocessable(f"`state` is nested deeper than {MOST_DEPTH}", param="state", code="out_of_range")
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [each for one in inner for each in one if isinstance(each, dict | list)]
    return msgspec.json.encode(value).decode()


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    found, vectors = await answers(context, arriving)
    return to_json(
        StructuredDecision(
            id=context.id, created=context.created, model=context.request.model,
            answers={one.question.name: _written(one) for one in found},
            diagnostics={
                one.question.name: Diagnostics(label_mass=one.label_mass, argmax_is_label=one.argmax_is_label)
                for one in found
            },
            usage=DecisionUsage(**counted(vectors.usage)),
        )
    )  # fmt: skip


def _written(answer: Answer) -> ChoiceAnswer | ScoreAnswer | NoulAnswer:
    question, shares = answer.question, answer.probabilities
    named = dict(zip([option for option, _ in question.options], shares, strict=True))
    if question.is_yes_no:
        return NoulAnswer(noul=named[YES], probabilities=named, confidence=answer.confidence)
    if question.ordered:
        return ScoreAnswer(
            score=answer.expected, confidence=answer.confidence,
            legend={str(index): level for index, (level, _) in enumerate(question.options)},
            probabilities={str(index): share for index, share in enumerate(shares)},
        )  # fmt: skip
    best, _ = question.options[answer.best]
    return ChoiceAnswer(choice=best, confidence=answer.confidence, probabilities=named)
