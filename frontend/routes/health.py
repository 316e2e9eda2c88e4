"""Routes that report health, readiness, load and metrics, and the route that empties the prefix caches.

Empties the prefix caches of all workers, and waits until the workers confirm it.
"""

import asyncio
import secrets
from collections.abc import Collection
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from frontend.app_state import AppState, json_response
from frontend.errors import Overloaded
from frontend.schema.responses import Health, Load, NotReady, PrefixCacheReset, Ready, Version
from frontend.server.access import administers, check_admin
from frontend.server.middleware import RECORD, RequestRecord
from frontend.workers.status import ConnectionState
from shared import build
from shared import messages as m

ANSWER_S = 10.0  # time limit for a worker's confirmation, which it sends after its current step
RESEND_S = 1.0
POLL_S = 0.02


class Worker(Protocol):
    """The part of WorkerConnection that this module needs."""

    @property
    def welcome(self) -> m.Welcome | None: ...
    @property
    def status(self) -> m.Status | None: ...
    def reset_prefix_cache(self, nonce: int) -> None: ...


class Workers(Protocol):
    @property
    def connections(self) -> Collection[Worker]: ...


async def reset_prefix_caches(workers: Workers, answer_s: float = ANSWER_S) -> int:
    """Empties the prefix cache of each worker; returns their number. Raises Overloaded if a worker answers too late.

    A worker's Status names only its latest reset, so another frontend's reset may hide ours. Ours is then sent again.
    """
    asked, nonce = list(workers.connections), secrets.randbits(48)
    loop = asyncio.get_running_loop()
    began = sent = loop.time()
    for worker in asked:
        worker.reset_prefix_cache(nonce)
    while missing := [worker for worker in asked if not _done(worker, nonce)]:
        now = loop.time()
        if now - began > answer_s:
            raise Overloaded(
                f"{len(missing)} of {len(asked)} workers did not confirm that their prefix cache is empty",
                code="worker_lost",
                retry_after=1.0,
            )
        if now - sent > RESEND_S:
            sent = now
            for worker in missing:
                worker.reset_prefix_cache(nonce)
        await asyncio.sleep(POLL_S)
    return len(asked)


def _done(worker: Worker, nonce: int) -> bool:
    return worker.welcome is not None and worker.status is not None and worker.status.prefix_cache_reset == nonce


SERVING = (ConnectionState.READY, ConnectionState.DRAINING)  # states in which the model is loaded


async def health(app: AppState, request: Request) -> Response:
    pools = [model.pool.membership.statuses() for model in app.models]
    each = [any(worker.state in SERVING for worker in workers) for workers in pools]
    # If models are loaded on demand, one loaded model suffices; otherwise, all models must be loaded.
    loaded = any(each) if app.models.state_of(app.models.first.name) is not None else all(each)
    return json_response(Health(model_loaded=loaded))


async def ready(app: AppState, request: Request) -> Response:
    readiness = app.models.readiness
    if readiness.ready and not app.models.first.service.has_tokenizer:  # no model is loaded yet
        return json_response(Ready(task="generate", chat=False))
    if readiness.ready:
        context = app.models.first.context
        return json_response(Ready(task=context.task.name, chat=bool(context.template)))
    pools = [model.pool.membership.statuses() for model in app.models]
    progress = min(
        max((worker.status.progress for worker in workers if worker.status), default=0.0) for workers in pools
    )
    return json_response(NotReady(reason=readiness.text, progress=progress), 503, {"Retry-After": "1"})


async def version(app: AppState, request: Request) -> Response:
    return json_response(Version(version=build.version()))


async def load(app: AppState, request: Request) -> Response:
    """Returns the number of running requests of this frontend, under vLLM's name."""
    return json_response(Load(server_load=sum(len(model.service.generations) for model in app.models)))


async def metrics(app: AppState, request: Request) -> Response:
    """Returns the metrics. Other keys are named only to administrators."""
    app.models.flush_metrics()
    record: RequestRecord = request.scope[RECORD]
    reader = None if administers(request) else record.tenant
    kind, started = "text/plain; version=0.0.4; charset=utf-8", {"Process-Start-Time-Unix": str(app.created)}
    return Response(app.metrics.text(reader), media_type=kind, headers=started)


# The route that empties the prefix caches of all workers.


async def reset_prefix_cache(app: AppState, request: Request) -> Response:
    """Empties the caches. Only administrators may do this, because it slows down all other clients.

    A check of the client's address would not help: behind a proxy on this host, every client has the host's address.

    Raises Forbidden if another key, or none, asks; and Overloaded if a worker does not confirm the reset.
    """
    check_admin(request, keyed=True)
    each = await asyncio.gather(*(reset_prefix_caches(model.pool.membership) for model in app.models))
    return json_response(PrefixCacheReset(workers=sum(each)))
