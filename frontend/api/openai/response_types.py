"""The responses of OpenAI's text and chat completions, complete and in chunks.

These fields are not OpenAI's: `stop_reason` (the stop string or id), `matched_stop` (SGLang's name; it can also be the
end token), `seed` (reproduces the answer), `timings`, and the reasoning under the names of DeepSeek, vLLM and
OpenRouter.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from frontend.api.receipts import Receipt
from frontend.schema.base import ResponseModel
from frontend.schema.responses import Size, Timings

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]
Byte = Annotated[int, Meta(ge=0, le=255)]


class ErrorBody(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: Size | UnsetType = UNSET
    n_ctx: Size | UnsetType = UNSET


class OpenAIError(ResponseModel):
    error: ErrorBody


class PromptTokensDetails(ResponseModel):
    cached_tokens: Size
    continued_tokens: Size | UnsetType = UNSET


class CompletionTokensDetails(ResponseModel):
    reasoning_tokens: Size | UnsetType = UNSET
    accepted_prediction_tokens: Size | UnsetType = UNSET
    rejected_prediction_tokens: Size | UnsetType = UNSET


class Usage(ResponseModel):
    prompt_tokens: Size
    completion_tokens: Size
    total_tokens: Size
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class PromptLogprob(ResponseModel):
    """A token at a position of the prompt. `rank` is its place in the order of likelihood, from 1."""

    logprob: Annotated[float, Meta(le=0)]
    rank: Size
    decoded_token: str


# An entry for each token of the prompt: the token itself and the likeliest tokens, by id; null for the first token.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionHead(ResponseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: Size
    model: str
    system_fingerprint: str | None = None


class CompletionLogprobs(ResponseModel):
    """Four columns with an entry for each token; null for a prompt's first token, which has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[Size]


class CompletionChoice(ResponseModel):
    index: Size
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    matched_stop: str | int | None
    seed: Size | None
    receipt: Receipt | UnsetType = UNSET
    token_ids: list[Size] | UnsetType = UNSET
    prompt_token_ids: list[Size] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(CompletionHead):
    choices: list[CompletionChoice]
    usage: Usage
    timings: Timings | UnsetType = UNSET


class CompletionChunkChoice(ResponseModel):
    index: Size
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    matched_stop: str | int | UnsetType | None = UNSET
    seed: Size | UnsetType | None = UNSET
    receipt: Receipt | UnsetType = UNSET
    token_ids: list[Size] | UnsetType = UNSET
    prompt_token_ids: list[Size] | UnsetType = UNSET


class CompletionChunk(CompletionHead):
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


class ChatHead(ResponseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: Size
    model: str
    system_fingerprint: str | None = None


class ChatChunkHead(ResponseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: Size
    model: str
    system_fingerprint: str | None = None


class TokenScore(ResponseModel):
    token: str
    logprob: Annotated[float, Meta(le=0)]
    bytes: list[Byte] | None


class TokenLogprobs(TokenScore):
    top_logprobs: list[TokenScore]


class ChatLogprobs(ResponseModel):
    content: list[TokenLogprobs]
    refusal: None = None


class FunctionCall(ResponseModel):
    name: str
    arguments: str


class CustomCall(ResponseModel):
    name: str
    input: str


class ToolCall(ResponseModel):
    """A call of a function, or of a custom tool, whose input is a text."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET


class ChatAnswer(ResponseModel):
    """The message of a choice. `content` is null if the message only calls tools."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    refusal: None = None


class ChatChoice(ResponseModel):
    index: Size
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None
    matched_stop: str | int | None
    seed: Size | None
    receipt: Receipt | UnsetType = UNSET
    token_ids: list[Size] | UnsetType = UNSET


class ChatCompletion(ChatHead):
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings | UnsetType = UNSET
    prompt_token_ids: list[Size] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionCallDelta(ResponseModel):
    name: str | UnsetType = UNSET
    arguments: str


class CustomCallDelta(ResponseModel):
    name: str | UnsetType = UNSET
    input: str


class ToolCallDelta(ResponseModel):
    """Part of a tool call. The first part has id, type and name; later parts continue the arguments or the input."""

    index: Size
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionCallDelta | UnsetType = UNSET
    custom: CustomCallDelta | UnsetType = UNSET


class ChatDelta(ResponseModel):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(ResponseModel):
    index: Size
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    matched_stop: str | int | UnsetType | None = UNSET
    seed: Size | UnsetType | None = UNSET
    receipt: Receipt | UnsetType = UNSET
    token_ids: list[Size] | UnsetType = UNSET


class ChatCompletionChunk(ChatChunkHead):
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_token_ids: list[Size] | UnsetType = UNSET


class TokenEvent(ResponseModel):
    """A typed event for one generated token. `token_id` is null for text held back past the last token."""

    token: str
    token_id: Size | None


class EventUsage(ResponseModel):
    prompt_tokens: Size
    completion_tokens: Size
    total_tokens: Size


class DoneEvent(ResponseModel):
    """The typed event that ends a stream."""

    finish_reason: Literal["eos", "stop", "length"]
    usage: EventUsage
    receipt: Receipt | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class ErrorEvent(ResponseModel):
    """The typed event that ends a failed stream."""

    error: str
