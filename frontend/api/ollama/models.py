"""Lists and describes the served models in Ollama's format. Values that this server does not report are empty or 0."""

import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET

from frontend.api.ollama import types
from frontend.api.ollama.chat import check_model, rfc3339, tagged
from frontend.api.ollama.types import OllamaModelName
from frontend.errors import BadRequest
from frontend.model_context import ModelContext
from frontend.schema.base import FieldError, Names, RequestModel
from frontend.schema.request_fields import Text, doc
from frontend.schema.responses import Capability
from frontend.text.fill_in_middle import layout_of
from shared.gguf.index import StoredWeights, stored_bytes, stored_weights
from shared.launcher_messages import ModelState
from shared.preset import Preset

VERSION = "0.12.6"  # the version of Ollama's API that these routes follow; clients check that it is recent enough
ARCHITECTURE = "sluice"  # clients look up `<architecture>.context_length`
NEVER = "9999-12-31T23:59:59Z"  # expiry time of a model that stays loaded
PARAMETERS = {"repetition_penalty": "repeat_penalty"}  # names that differ in Ollama


class ShowRequest(RequestModel):
    IGNORED: ClassVar[Names] = ("verbose",)

    model: OllamaModelName | None = None
    name: Annotated[Text | None, doc("The older name of `model`")] = None

    def __post_init__(self) -> None:
        if not (self.model or self.name):
            raise FieldError("model", "is missing", BadRequest, "missing_field")


def tags(contexts: Sequence[ModelContext], created: int, unloaded: Sequence[str] = ()) -> types.OllamaModels:
    """Lists the models.

    created: the start of this process, in seconds since 1970
    unloaded: names of models that are not loaded; they have no digest, because the digest is the tokenizer's, and no
        size
    """
    known = {one.model: (one.tokenizer.hash, _stored_bytes(one), _details(one)) for one in contexts}
    models = [
        types.OllamaModel(
            name=name, model=name, modified_at=rfc3339(created), size=size, digest=digest, details=details
        )
        for model, (digest, size, details) in {
            **known, **dict.fromkeys(unloaded, ("", 0, types.OllamaDetails()))
        }.items()
        for name in [tagged(model)]
    ]  # fmt: skip
    return types.OllamaModels(models=models)


def _stored_bytes(context: ModelContext) -> int:
    """Returns the bytes of the model's files of weights, as far as they are on this machine."""
    try:
        return stored_bytes(context.tokenizer.folder)
    except (OSError, msgspec.DecodeError):
        return 0


def _weights(context: ModelContext) -> StoredWeights:
    try:
        return _read_weights(context.tokenizer.folder, _stored_bytes(context))
    except (OSError, ValueError, LookupError, TypeError):  # files that are not here, or that only the worker can judge
        return StoredWeights()


@cache
def _read_weights(folder: Path, nbytes: int) -> StoredWeights:
    """Reads the facts about files of weights. nbytes: of the files; when it changes, they are read again"""
    return stored_weights(folder)


def _details(context: ModelContext) -> types.OllamaDetails:
    found = _weights(context)
    return types.OllamaDetails(
        format=found.format, family=found.family, families=[found.family] if found.family else None,
        parameter_size=parameter_size(found.parameters), quantization_level=found.kind,
    )  # fmt: skip


def parameter_size(count: int) -> str:
    """Writes a number of parameters as Ollama does (134.52M, 7.6B, 8B); empty for 0."""
    for unit, size, decimals in (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 0)):
        if count >= size:
            return f"{count / size:.{decimals if count % size else 0}f}{unit}"
    return str(count or "")


def running(contexts: Sequence[ModelContext], states: Sequence[ModelState] = ()) -> types.OllamaProcesses:
    """Lists the loaded models. states: the launcher's reports about models that it loads on demand"""
    known = {state.name: state for state in states}
    models = [
        types.OllamaRunning(
            name=name, model=name, digest=context.tokenizer.hash, details=_details(context),
            expires_at=_expires_at(state), context_length=context.max_seq_len,
            size=state.nbytes if state else _stored_bytes(context),
        )
        for context in contexts
        if context.max_seq_len
        for name, state in [(tagged(context.model), known.get(context.model))]
    ]  # fmt: skip
    return types.OllamaProcesses(models=models)


def _expires_at(state: ModelState | None) -> str:
    """Returns when the model will be unloaded if running requests end now and no more requests come."""
    if state is None or state.keep_alive is None:
        return NEVER
    return rfc3339(state.expires_at or time.time() + state.keep_alive)


def show(request: ShowRequest, context: ModelContext, created: int) -> types.OllamaShown:
    """Describes the model. Raises NotFound for the name of another model."""
    check_model(request.model or request.name or "", context)
    info: dict[str, Any] = {"general.architecture": ARCHITECTURE, "general.basename": context.model}
    if context.max_seq_len:
        info[f"{ARCHITECTURE}.context_length"] = context.max_seq_len
    if context.hidden_size:
        info[f"{ARCHITECTURE}.embedding_length"] = context.hidden_size
    if parameters := _weights(context).parameters:
        info["general.parameter_count"] = parameters
    preset = context.preset or Preset(context.model)
    template = preset.template or context.tokenizer.templates.get("default", "")
    defaults = _parameters(context)
    return types.OllamaShown(
        license=preset.license,
        modelfile=modelfile(preset),
        parameters="\n".join(defaults),
        template=template,
        system=preset.system or UNSET,
        messages=[{"role": one.role, "content": one.content} for one in preset.messages] or UNSET,
        details=_details(context),
        model_info=info,
        capabilities=capabilities(context),
        modified_at=rfc3339(created),
    )


def _parameters(context: ModelContext) -> list[str]:
    """Returns the defaults of requests as lines of a Modelfile, without their first word."""
    own = context.preset.parameters if context.preset else {}
    given = {PARAMETERS.get(name, name): value for name, value in context.recommended.items()} | own
    return [line for name, value in given.items() for line in _lines(name, value)]


def _lines(name: str, value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [f"{name} {msgspec.json.encode(one).decode()}" for one in values]


def modelfile(preset: Preset) -> str:
    """Returns the Modelfile of a name."""
    texts = {"TEMPLATE": preset.template, "SYSTEM": preset.system, "LICENSE": preset.license}
    lines = [f"FROM {preset.base}", *(f'{word} """{text}"""' for word, text in texts.items() if text)]
    lines += [f"PARAMETER {line}" for name, value in preset.parameters.items() for line in _lines(name, value)]
    lines += [f'MESSAGE {one.role} """{one.content}"""' for one in preset.messages]
    return "\n".join(lines)


def version() -> types.OllamaVersion:
    return types.OllamaVersion(version=VERSION)


def capabilities(context: ModelContext) -> list[Capability]:
    """Returns the model's abilities in Ollama's words."""
    style, generates = context.style, context.task.name == "generate"
    has: dict[Capability, bool] = {
        "completion": generates,
        "insert": generates and layout_of(context.tokenizer) is not None,
        "embedding": context.task.name == "embed",
        "tools": generates and (style.shows_tools or style.tools_as_text),
        "vision": generates and context.tokenizer.image_format is not None,
        "thinking": generates and (style.has_reasoning or bool(style.thinking_switch)),
    }
    return [name for name, is_there in has.items() if is_there]
