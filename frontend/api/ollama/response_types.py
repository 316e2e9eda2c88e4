"""The JSON types of Ollama's API. Durations are in nanoseconds, and only the last object of a stream has them."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from frontend.api.receipts.receipt import Receipt
from frontend.api.requests.response_types import Capability, Count, ResponseModel

DoneReason = Literal["stop", "length", "load", "unload"]


class OllamaError(ResponseModel):
    error: str


class OllamaFunction(ResponseModel):
    index: Count
    name: str
    arguments: dict[str, Any]


class OllamaCall(ResponseModel):
    id: str
    function: OllamaFunction


class OllamaMessage(ResponseModel):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaAnswer(ResponseModel):
    """The fields that the responses of /api/chat and /api/generate share."""

    model: str
    created_at: str
    done: bool = False
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: Count | UnsetType = UNSET
    load_duration: Count | UnsetType = UNSET
    prompt_eval_count: Count | UnsetType = UNSET
    prompt_eval_duration: Count | UnsetType = UNSET
    eval_count: Count | UnsetType = UNSET
    eval_duration: Count | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class OllamaChat(OllamaAnswer):
    message: OllamaMessage


class OllamaText(OllamaAnswer):
    response: str
    thinking: str | UnsetType = UNSET
    context: Annotated[list[Count], Meta(description="The conversation so far, as token ids")] | UnsetType = UNSET


class OllamaEmbeddings(ResponseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: Count
    load_duration: Count = 0
    prompt_eval_count: Count


class OllamaEmbedding(ResponseModel):
    embedding: list[float]


class OllamaDetails(ResponseModel):
    """Facts about a file of weights. This server does not report them."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] | None = None
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(ResponseModel):
    name: str
    model: str
    modified_at: str
    size: Count = 0
    digest: Annotated[str, Meta(description="Of the tokenizer")]
    details: OllamaDetails


class OllamaModels(ResponseModel):
    models: list[OllamaModel]


class OllamaRunning(ResponseModel):
    name: str
    model: str
    size: Count = 0
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: Count = 0
    context_length: Count


class OllamaProcesses(ResponseModel):
    models: list[OllamaRunning]


class OllamaShown(ResponseModel):
    license: str = ""
    modelfile: str
    parameters: Annotated[str, Meta(description="What the checkpoint recommends")]
    template: Annotated[str, Meta(description="The chat template, in Jinja")]
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Capability]
    modified_at: str


class OllamaVersion(ResponseModel):
    version: str
