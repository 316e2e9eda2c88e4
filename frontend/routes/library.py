"""The routes that fetch and name models (--allow-pull), in Ollama's format, and llama.cpp's stream of what models do.

The launcher does the work, so that all frontends have the same models. A download ends when the last client that waits
for it has left; the next one continues it.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, UnsetType, field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from frontend.api.ollama.modelfile import checked_preset, read_modelfile
from frontend.app_state import AppState, json_response
from frontend.errors import BadRequest, Forbidden, NotFound, Overloaded, SluiceError
from frontend.model_table import PULLING, ModelTable, ToLauncher
from frontend.routes.generate import while_connected
from frontend.schema.base import FieldError, Names, RequestModel, ResponseModel, to_json
from frontend.schema.request_fields import Text, doc
from frontend.server.access import check_admin
from frontend.server.sse import JSON_LINES, SERVER_SENT_EVENTS
from shared.launcher_messages import Add, Copy, Create, Delete, Done, Download, ModelState, Pull
from shared.model_library import LibraryError, plain_name, uploaded_file
from shared.model_list import MOST_NAME_CHARS
from shared.preset import Preset, Told

Name = Annotated[str, Meta(max_length=MOST_NAME_CHARS)]
RETRY_S = 10.0
AGAIN_S = 1.0  # a line comes again after so long, because the server notices only by writing that a client has left
MOST_SILENT_S = 15.0  # the stream of changes has a comment at least so often


class PullRequest(RequestModel):
    IGNORED: ClassVar[Names] = ("insecure",)

    model: Annotated[Name, doc("A short name such as `qwen3:4b`, a hub id, or `org/repository:Q4_K_M`")] = ""
    name: Annotated[Name, doc("The older name of `model`")] = ""
    stream: Annotated[bool, doc("false: one object instead of lines")] = True


class OllamaTurn(RequestModel):
    role: Literal["system", "user", "assistant"]
    content: Text


_NoFiles = Annotated[dict[str, str], Meta(extra_json_schema={"maxProperties": 0})]


class CreateRequest(RequestModel):
    model: Annotated[Name, doc("The name to make")] = ""
    name: Annotated[Name, doc("The older name of `model`")] = ""
    from_: Annotated[Name, doc("The model to make it from; one that is not here is pulled")] = field(
        name="from", default=""
    )
    modelfile: Annotated[Text, doc("Ollama's older form: FROM, PARAMETER, SYSTEM, TEMPLATE, MESSAGE, LICENSE")] = ""
    system: Annotated[Text, doc("The system message of conversations that have none")] = ""
    template: Annotated[Text, doc("The chat template, in Jinja; without one, the model's own")] = ""
    parameters: Annotated[dict[str, Any] | None, doc("Defaults of requests, by the names of `options`")] = None
    messages: Annotated[list[OllamaTurn] | None, doc("What conversations begin with")] = None
    license: Annotated[Text | list[Text], doc("Shown by `/api/show`")] = ""
    stream: Annotated[bool, doc("false: one object instead of lines")] = True
    files: Annotated[
        dict[str, str] | None, doc("Instead of `from`: the name and the digest of a GGUF file that was uploaded")
    ] = None
    adapters: Annotated[_NoFiles | None, doc("Refused: adapters are given with `--lora-modules`")] = None
    quantize: Annotated[
        Annotated[str, Meta(extra_json_schema={"maxLength": 0})] | None,
        doc("Refused: `--quantization` quantizes while a model is loaded"),
    ] = None

    def __post_init__(self) -> None:
        for name, reason in REFUSED.items():
            if getattr(self, name):
                raise FieldError(name, reason, BadRequest, "not_allowed")


REFUSED = {
    "adapters": "cannot be uploaded: adapters are given with --lora-modules",
    "quantize": "has no effect here: --quantization quantizes while a model is loaded",
}


class CopyRequest(RequestModel):
    source: Name
    destination: Name


class DeleteRequest(RequestModel):
    model: Annotated[Name, doc("The name to remove")] = ""
    name: Annotated[Name, doc("The older name of `model`")] = ""


class OllamaProgress(ResponseModel):
    """A line about a download or a new name; the last has the status `success`."""

    status: str
    digest: Annotated[str | UnsetType, Meta(description="Of the file that is fetched")] = UNSET
    total: Annotated[int | UnsetType, Meta(description="Its bytes")] = UNSET
    completed: Annotated[int | UnsetType, Meta(description="Its bytes that are here")] = UNSET


SUCCESS = OllamaProgress(status="success")


async def pull(app: AppState, request: Request) -> Response:
    """Fetches a model, and adds it to the table. Raises Forbidden unless the server allows it and an administrator
    asks."""
    library = library_of(app, request)
    asked = await app.decode(request, await app.body(request), PullRequest)
    name = _name(asked.model or asked.name)
    return await _answer(request, _pulled(library, name), stream=asked.stream)


async def create(app: AppState, request: Request) -> Response:
    """Makes a name for a model. Raises Forbidden as `pull` does, and BadRequest or Unprocessable for a field."""
    library = library_of(app, request)  # before any work for somebody who may not
    asked = await app.decode(request, await app.body(request), CreateRequest)
    name, digest = _name(asked.model or asked.name), _digest(asked)
    preset = await while_connected(request, checked_preset(_preset(asked, digest)))
    lines = _from_file(library, name, preset, digest) if digest else _created(app.models, library, name, preset)
    return await _answer(request, lines, stream=asked.stream)


async def copy(app: AppState, request: Request) -> Response:
    """Makes another name for a model. Raises Forbidden as `pull` does, and NotFound."""
    library = library_of(app, request)
    asked = await app.decode(request, await app.body(request), CopyRequest)
    source, destination = _name(asked.source, "source"), _name(asked.destination, "destination")
    with library.asking(lambda ticket: Copy(ticket, source, destination)) as answer:
        _check(await while_connected(request, answer.done()), source)
    return Response()


async def delete(app: AppState, request: Request) -> Response:
    """Removes a name, and a pulled model's files with its last name. Raises Forbidden as `pull` does, and NotFound."""
    library = library_of(app, request)
    asked = await app.decode(request, await app.body(request), DeleteRequest)
    name = _name(asked.model or asked.name)
    with library.asking(lambda ticket: Delete(ticket, name)) as answer:
        _check(await while_connected(request, answer.done()), name)
    return Response()


def library_of(app: AppState, request: Request) -> ToLauncher:
    """Returns the way to the launcher. Raises Forbidden unless the server allows changes and an administrator asks."""
    library = app.models.library
    if library is None:
        raise Forbidden(f"{request.url.path} needs a server with --allow-pull", code="not_allowed")
    check_admin(request)
    return library


def _name(written: str, param: str = "model") -> str:
    if not written:
        raise BadRequest(f"`{param}` is missing", param=param, code="missing_field")
    try:
        return plain_name(written)
    except LibraryError as error:
        raise BadRequest(f"`{param}`: {error}", param=param, code=error.code) from None


def _digest(asked: CreateRequest) -> str:
    """Returns the digest of the uploaded file of which a model is made, or "". Raises BadRequest."""
    if not asked.files:
        return ""
    if asked.from_:
        raise BadRequest("`files` and `from` both name a model: give one", param="files", code="not_allowed")
    if len(asked.files) > 1:
        raise BadRequest(
            "`files` has several files, and a model is made of one GGUF file: parts, towers and safetensors cannot be "
            "uploaded", param="files", code="not_allowed",
        )  # fmt: skip
    (digest,) = asked.files.values()
    try:
        uploaded_file(digest)
    except LibraryError as error:
        raise BadRequest(f"`files`: {error}", param="files", code=error.code) from None
    return digest


def _preset(asked: CreateRequest, digest: str) -> Preset:
    """Returns what the body says; a field wins over the Modelfile's command."""
    read = read_modelfile(asked.modelfile) if asked.modelfile else None
    base, texts = asked.from_ or (read.base if read else ""), read.preset if read else {}
    if digest:
        base = f"upload:{digest[-64:][:12]}"
    license = asked.license if isinstance(asked.license, str) else "\n\n".join(asked.license)
    messages = [Told(one.role, one.content) for one in asked.messages or ()]
    return Preset(
        _name(base, "from"), asked.system or texts.get("system", ""), asked.template or texts.get("template", ""),
        (read.parameters if read else {}) | (asked.parameters or {}),
        tuple(messages or (read.messages if read else ())),
        license or texts.get("license", ""),
    )  # fmt: skip


async def _pulled(library: ToLauncher, name: str) -> AsyncIterator[OllamaProgress]:
    yield OllamaProgress(status=PULLING)
    with library.asking(lambda ticket: Pull(ticket, name), name) as asked:
        async for line in asked.lines(AGAIN_S):
            yield _line(line)
        _check(await asked.done(), name)


async def _created(models: ModelTable, library: ToLauncher, name: str, preset: Preset) -> AsyncIterator[OllamaProgress]:
    if models.get(preset.base) is None:
        async for line in _pulled(library, preset.base):
            yield line
    for part in ("system", "template", "parameters", "messages", "license"):
        if getattr(preset, part):
            yield OllamaProgress(status=f"creating {part} layer")
    yield OllamaProgress(status="writing manifest")
    with library.asking(lambda ticket: Create(ticket, name, preset)) as asked:
        _check(await asked.done(), preset.base)


async def _from_file(library: ToLauncher, name: str, preset: Preset, digest: str) -> AsyncIterator[OllamaProgress]:
    """Adds an uploaded file to the table, under its name if nothing else belongs to the name."""
    yield OllamaProgress(status="parsing GGUF")
    is_all = preset.is_plain and not preset.license
    with library.asking(lambda ticket: Add(ticket, name if is_all else preset.base, digest)) as asked:
        _check(await asked.done(), name)
    yield OllamaProgress(status="writing manifest")
    if not is_all:
        with library.asking(lambda ticket: Create(ticket, name, preset)) as asked:
            _check(await asked.done(), preset.base)


def _line(download: Download) -> OllamaProgress:
    if not download.total:
        return OllamaProgress(status=download.status, digest=download.digest or UNSET)
    return OllamaProgress(
        status=download.status, digest=download.digest, total=download.total, completed=download.completed
    )


def _check(done: Done, name: str) -> None:
    """Raises what an answer of the launcher says."""
    match done.code:
        case "" if not done.problem:
            return
        case "model_not_found":
            raise NotFound(done.problem, param="model", code=done.code)
        case "not_ready" | "busy":
            raise Overloaded(done.problem, code=done.code, retry_after=RETRY_S)
        case "not_allowed":
            raise Forbidden(done.problem, code=done.code)
    raise BadRequest(done.problem, param="model", code=done.code)


async def _answer(request: Request, lines: AsyncIterator[OllamaProgress], *, stream: bool) -> Response:
    """Returns the lines as a stream, whose last line has the error if there is one; else the end alone."""
    if not stream:
        await while_connected(request, _to_its_end(lines))
        return json_response(SUCCESS)

    async def body() -> AsyncIterator[bytes]:
        try:
            async for line in lines:
                yield to_json(line) + b"\n"
            yield to_json(SUCCESS) + b"\n"
        except SluiceError as error:
            yield to_json({"error": error.message}) + b"\n"

    return StreamingResponse(body(), media_type=JSON_LINES.media_type)


async def _to_its_end(lines: AsyncIterator[OllamaProgress]) -> None:
    async for _ in lines:
        pass


# llama.cpp's stream of what models do.


class ModelEvent(ResponseModel):
    """What happened to a model. data: `status` and perhaps `reason`; of a download `status`, and `digest`, `total` and
    `completed` (bytes) of the file that is fetched, or `error`"""

    model: str
    event: Literal["model_status", "download_progress", "download_finished", "download_failed"]
    data: dict[str, Any]


async def changes(app: AppState, request: Request) -> Response:
    """Streams the states of all models, and then every change and the progress of downloads.

    Raises BadRequest where all models always stay loaded.
    """
    launcher = app.models.changes
    if launcher is None:
        raise BadRequest("this server has one model, which is always loaded", code="not_allowed")
    return StreamingResponse(
        _events(launcher, min(app.config.keepalive_s, MOST_SILENT_S)), media_type=SERVER_SENT_EVENTS.media_type,
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )  # fmt: skip


async def _events(launcher: ToLauncher, silent_s: float) -> AsyncIterator[bytes]:
    """A client that reads slowly misses changes between two of its reads, and always gets the newest state."""
    states: dict[str, ModelState] = {}
    downloads: dict[str, Download] = {name: one for name, one in launcher.downloads.items() if one.ended}
    while True:
        seen, now, fetched = launcher.news, dict(launcher.states), dict(launcher.downloads)
        for name, state in now.items():
            if name not in states or (state.state, state.reason) != (states[name].state, states[name].reason):
                yield _event(ModelEvent(model=name, event="model_status", data=_status(state)))
        for name in states.keys() - now.keys():
            yield _event(ModelEvent(model=name, event="model_status", data={"status": "removed"}))
        for name, download in fetched.items():
            if downloads.get(name) != download:
                yield _event(_news(download))
        states, downloads = now, fetched
        try:
            async with asyncio.timeout(silent_s):
                await launcher.next_news(seen)
        except TimeoutError:
            yield SERVER_SENT_EVENTS.keep_alive


def _status(state: ModelState) -> dict[str, Any]:
    return {"status": state.state} | ({"reason": state.reason} if state.reason else {})


def _news(download: Download) -> ModelEvent:
    if download.error:
        return ModelEvent(model=download.name, event="download_failed", data={"error": download.error})
    if download.ended:
        return ModelEvent(model=download.name, event="download_finished", data={})
    numbers = {"digest": download.digest, "total": download.total, "completed": download.completed}
    data = {"status": download.status} | (numbers if download.total else {})
    return ModelEvent(model=download.name, event="download_progress", data=data)


def _event(event: ModelEvent) -> bytes:
    return b"data: " + to_json(event) + b"\n\n"
