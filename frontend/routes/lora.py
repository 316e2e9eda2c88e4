"""The routes that change LoRA adapters while the server runs, with the requests and responses of vLLM and llama.cpp.

vLLM's routes load and unload adapters. llama.cpp's route sets the adapter of requests that name none.

A worker tries an adapter before it is listed. So a broken adapter causes an error for the client that loads it, and not
for the clients that would use it. A running request keeps its adapter to its end, even if the adapter is unloaded or
replaced in the meantime.
"""

import logging
from dataclasses import replace
from typing import Annotated, ClassVar

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from frontend.api.llama_cpp import server as llama_cpp
from frontend.api.llama_cpp.options import AdapterScale
from frontend.app_state import AppState, json_response
from frontend.errors import BadRequest, Forbidden, Internal, NotFound, Unprocessable
from frontend.lora import AdapterRegistry, Default, NameTaken, NoSuchAdapter, TooMany, describe_in_child
from frontend.model_table import ServedModel, scaled_adapter
from frontend.request import Admission, Features, GenerationRequest
from frontend.routes.generate import while_connected
from frontend.schema.base import Names, RequestModel
from frontend.schema.decoding import decode_json
from frontend.schema.request_fields import doc
from frontend.schema.responses import Accepted
from frontend.server.access import check_admin
from frontend.server.middleware import RECORD
from shared.lora import MAX_NAME_CHARS, AdapterError, name_problem
from shared.messages import Adapter, Sampling

log = logging.getLogger("sluice.frontend")


async def load_adapter(app: AppState, request: Request) -> Response:
    """Loads an adapter by name. Raises Forbidden if clients may not change adapters; BadRequest, which names the
    field."""
    asked = await app.decode(request, await app.body(request), LoadAdapterRequest)
    registry, name = _allowed(app, request), asked.lora_name
    if problem := name_problem(name):
        raise BadRequest(f"`lora_name` {problem}", param="lora_name", code="out_of_range")
    taken = BadRequest(
        f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
        "'load_inplace' to True.", param="lora_name", code="name_taken",
    )  # fmt: skip
    if (known := app.models.get(name)) is not None and (known.adapter is None or not asked.load_inplace):
        raise taken
    try:
        registry.check_path(asked.lora_path)
        adapter, base = await while_connected(request, describe_in_child(name, asked.lora_path))
    except AdapterError as error:
        raise BadRequest(f"`lora_path`: {error}", param="lora_path", code="adapter_unusable") from None
    await while_connected(request, _try(app.models.first, adapter, request.scope[RECORD].tenant))
    try:
        registry.put(adapter, replace=asked.load_inplace)
    except NameTaken:
        raise taken from None
    except TooMany:
        raise BadRequest("too many adapters are loaded: unload one first", code="too_many_adapters") from None
    success = f"Success: LoRA adapter '{name}' added successfully."
    if doubt := registry.doubt(base):
        log.warning("the adapter %r %s", name, doubt)
        success += f" Warning: it {doubt}."
    return PlainTextResponse(success)


async def unload_adapter(app: AppState, request: Request) -> Response:
    """Unloads an adapter by name. Raises Forbidden if clients may not change adapters; NotFound for an unknown name."""
    asked = await app.decode(request, await app.body(request), UnloadAdapterRequest)
    try:
        _allowed(app, request).remove(asked.lora_name)
    except NoSuchAdapter:
        raise NotFound(
            f"The lora adapter '{asked.lora_name}' cannot be found.", param="lora_name", code="model_not_found"
        ) from None
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


async def default_scales(app: AppState, request: Request) -> Response:
    registry = app.models.registry
    known, default = (registry.adapters.values(), registry.default) if registry is not None else ((), None)
    return json_response(llama_cpp.adapters(known, default))


async def set_default_scales(app: AppState, request: Request) -> Response:
    """Sets the scales of adapters for requests that name none.

    An adapter that is not in the list gets 0, as in llama.cpp.

    Raises Forbidden if clients may not change adapters, and BadRequest or Unprocessable for a wrong list.
    """
    body = await app.body(request)
    if not isinstance(decode_json(body), list):
        raise BadRequest("the body must be an array of objects with `id` and `scale`")
    asked = await app.decode(request, b'{"adapters":%b}' % body, DefaultScalesRequest)
    registry = _allowed(app, request)
    used = scaled_adapter([*registry.adapters.values()], {one.id: one.scale for one in asked.adapters}, "adapters")
    try:
        registry.set_default(None if used is None else Default(used.name, used.scale))
    except NoSuchAdapter:
        raise NotFound("the adapter was unloaded meanwhile", param="adapters", code="model_not_found") from None
    return json_response(Accepted())


def _allowed(app: AppState, request: Request) -> AdapterRegistry:
    registry = app.models.registry
    if registry is None or not registry.runtime:
        raise Forbidden("requests may change adapters only in a server with --allow-runtime-lora", code="not_allowed")
    check_admin(request)
    return registry


async def _try(base: ServedModel, adapter: Adapter, tenant: str) -> None:
    """Makes a worker compute a token with an adapter. Raises BadRequest if this fails, Overloaded if no worker is
    ready.

    The prompt has two tokens, because attention to a single one has the weight 1, whatever its score is; and not token
    0, which is padding in many models, with an embedding of zeros that hides what a product does.
    """
    await base.service.wait_for_handshake()
    if base.context.task.name != "generate":
        return
    request = GenerationRequest(
        ([1, 2],), Sampling(1, temperature=0.0), model=adapter.name, admission=Admission(tenant=tenant),
        features=replace(Features(), adapter=adapter),
    )  # fmt: skip
    try:
        generation = await base.service.start(request)
    except Unprocessable as refused:
        problem = refused.message.removeprefix("`model`: ")
        raise BadRequest(f"`lora_path`: {problem}", param="lora_path", code="adapter_unusable") from None
    try:
        async for _ in generation.deltas():
            pass
    except Internal as failed:
        if failed.code != "worker_error":  # no fault of the adapter: the worker was lost
            raise
        problem = f"the adapter {adapter.name!r} cannot be used: {failed.message}"
        raise BadRequest(f"`lora_path`: {problem}", param="lora_path", code="adapter_unusable") from None
    finally:
        generation.close()


# The request types of the routes for adapters.
#
# Requests that load or unload have vLLM's names; the request that sets scales has llama.cpp's names.

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]


class LoadAdapterRequest(RequestModel):
    IGNORED: ClassVar[Names] = ("base_model_name",)

    lora_name: Annotated[Name, doc("The name that requests give as their model")]
    lora_path: Annotated[
        str, Meta(min_length=1, max_length=4096), doc("Folder or GGUF file below the folder of --allow-runtime-lora")
    ]
    load_inplace: Annotated[bool, doc("Replace the adapter of this name")] = False


class UnloadAdapterRequest(RequestModel):
    IGNORED: ClassVar[Names] = ("lora_int_id",)

    lora_name: Annotated[Name, doc("The name of the adapter")]


class DefaultScalesRequest(RequestModel):
    """The body of POST /lora-adapters. The client sends only the list itself."""

    adapters: Annotated[list[AdapterScale], Meta(max_length=1000)]
