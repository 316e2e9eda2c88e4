"""Empties the prefix caches of all workers, and waits until the workers confirm it."""

import asyncio
import secrets
from collections.abc import Collection
from typing import Protocol

from frontend.errors import Overloaded
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
