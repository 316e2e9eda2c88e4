"""The life of a request for vectors or scores: read, parse, compute, write the response."""

import time
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.formats import MODULES, Modules
from frontend.api.pooling.fields import Binary
from frontend.app_state import AppState
from frontend.errors import SluiceError
from frontend.generation.service import Windows
from frontend.model_context import ModelContext, check_task
from frontend.request import GenerationRequest
from frontend.routes.generate import while_connected
from frontend.schema.base import RequestModel
from frontend.server.middleware import API_FORMAT, RECORD, RequestRecord


class PoolingFormat(Protocol):
    """The interface of a module that implements one format, and of the Format objects in a module with several."""

    NAME: str  # the format's name in logs and traces
    PREFIX: str  # the prefix of a response's id

    @property
    def TASKS(self) -> tuple[str, ...]: ...  # the server's --task must be one of these
    @property
    def REQUEST(self) -> type[RequestModel]: ...  # the type that a body is decoded into

    async def parse(self, request: Any, context: ModelContext, /) -> GenerationRequest: ...
    async def complete(self, context: ResponseContext, arriving: AsyncDeltas) -> bytes | Binary: ...
    def status(self, exc: SluiceError, /) -> int: ...
    def error(self, exc: SluiceError, request_id: str) -> bytes: ...


POOLING_FORMATS: Modules[PoolingFormat] = Modules({
    "/v1/embeddings": "frontend.api.pooling.embeddings",
    "/pooling": "frontend.api.pooling.pooling",
    "/classify": "frontend.api.pooling.classify",
    "/v1/classify": "frontend.api.pooling.classify",
    "/predict": "frontend.api.pooling.tei:PREDICT",
    "/embed": "frontend.api.pooling.tei:EMBED",
    "/similarity": "frontend.api.pooling.tei:SIMILARITY",
    "/v1/embed": "frontend.api.pooling.cohere:EMBED_V1",
    "/v2/embed": "frontend.api.pooling.cohere:EMBED_V2",
    "/v1/logprobs": "frontend.api.pooling.logprobs",
    "/v1/systemone": "frontend.api.pooling.systemone",
    "/v1/decisions": "frontend.api.pooling.decisions",
    "/generative_scoring": "frontend.api.pooling.generative_scoring",
    "/v1/score": "frontend.api.pooling.rerank:SCORE",
    "/score": "frontend.api.pooling.rerank:SCORE",
    "/v1/rerank": "frontend.api.pooling.rerank:RERANK",
    "/v2/rerank": "frontend.api.pooling.rerank:COHERE_V2",
    "/rerank": "frontend.api.pooling.rerank:RERANK",
    "/v1/reranking": "frontend.api.pooling.rerank:RERANK",
    "/reranking": "frontend.api.pooling.rerank:RERANK",
    "/api/embed": "frontend.api.ollama.embed:EMBED",
    "/api/embeddings": "frontend.api.ollama.embed:EMBEDDINGS",
    "/embedding": "frontend.api.llama_cpp.server",
    "/embeddings": "frontend.api.llama_cpp.server",
})  # fmt: skip


async def pool(app: AppState, request: Request) -> Response:
    body, begun = await app.body(request), time.perf_counter()
    record: RequestRecord = request.scope[RECORD]
    chosen = request.scope[API_FORMAT] = await MODULES.soon(POOLING_FORMATS.names[request.scope["path"]])
    record.api_format = chosen.NAME
    decoded = await app.decode(request, body, chosen.REQUEST)
    model = await app.usable_model(request, decoded)
    context = model.context
    check_task(request.scope["path"], chosen.TASKS, context)
    asked = (await while_connected(request, chosen.parse(decoded, context))).admitted(**record.admission)
    record.generation_request = asked
    windows = record.generation = Windows(model.service, asked, begun)
    response_context = ResponseContext(asked, context.tokenizer, chosen.PREFIX)
    async with aclosing(windows.deltas()) as arriving:
        answer = await while_connected(request, chosen.complete(response_context, arriving))
    app.sign(request, model, windows.fingerprint)
    if isinstance(answer, Binary):
        return Response(answer.data, headers=answer.headers, media_type="application/octet-stream")
    return Response(answer, media_type="application/json")
