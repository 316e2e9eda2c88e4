"""The workers behind this frontend as one: which gets a request, and where a stream goes on when its worker is lost.

Knows streams and links; nothing of sockets (link.py), of which workers there are (roster.py, from the addresses of
places.py) or of how one is chosen among those that are ready (routing.py).

    a worker is lost (silent, cut off, stalled)   its streams go on at another that is ready; else they wait for it
    it comes back as it was                       what was moved is ended there, the rest is repaired
    it comes back under a new epoch               what waited is submitted again, with what was received
    it drains, or leaves                          it gets nothing new; its streams finish there
    it has no room                                the next one is asked; a stream that was admitted before waits
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence

from frontend.errors import Overloaded, SluiceError, Unprocessable
from frontend.workers.connection import NO_EPOCH, WireCounters, WorkerConnection
from frontend.workers.discovery import Discovery
from frontend.workers.membership import LOOK_S, Membership
from frontend.workers.routing import PrefixAffinity, choose, load, prefix_hashes
from frontend.workers.stream import Stream
from shared import messages as m
from shared.address import Address
from shared.codec import pack_u32
from shared.config import WireConfig

TICK_S = 0.1
RETRY_S = 0.5  # how often a stream that no worker had room for asks again


class WorkerPool:
    """One worker or many: takes requests and hands back streams."""

    def __init__(
        self,
        wire: WireConfig,
        places: Discovery | None = None,
        *,
        stall_timeout: float = 30.0,
        recovery_timeout: float = 120.0,
        model: str = "",
        tokenizer_hash: Callable[[], str] = str,
        look_s: float = LOOK_S,
    ) -> None:
        """`places` says where the workers are, which is looked up each `look_s` seconds; without it there is one, where
        `wire` says. A worker with another `model` or tokenizer is not used; an empty text fits any.
        """
        self.id = secrets.token_bytes(m.TOPIC_BYTES)
        self.counters = WireCounters()
        self.membership = Membership(
            wire, places, self._link, model=model, tokenizer_hash=tokenizer_hash, look_s=look_s
        )
        self._stall_timeout = stall_timeout
        self._recovery_timeout = recovery_timeout
        self._homes: dict[
            Stream, WorkerConnection | None
        ] = {}  # where each live stream is; None: it waits for a worker
        self._waiting: dict[Stream, float] = {}  # those, and since when
        self._tried: dict[Stream, list[WorkerConnection]] = {}  # who had no room for a request not yet admitted
        self._beginnings = PrefixAffinity()
        self._next_id = 0
        self._turn = 0
        self._retried = 0.0
        self._ticker: asyncio.Task[None] | None = None

    def _link(self, address: Address) -> WorkerConnection:
        return WorkerConnection(address, self.id, self, self.counters, stall_timeout=self._stall_timeout)

    # life

    async def start(self) -> None:
        await self.membership.start()
        self._ticker = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """Ends what still lives with `shutdown`."""
        for stream in list(self._homes):
            self._fail(stream, m.Outcome.SHUTDOWN, "the server is shutting down")
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
            self.membership.close()

    @property
    def live(self) -> int:
        return len(self._homes)

    # requests

    async def submit(
        self,
        prompt: list[int],
        sampling: m.Sampling,
        *,
        cache_salt: str = "",
        group: int = 0,
        deadline_ms: int = 0,
        priority: int = 0,
        tenant: str = "",
    ) -> Stream:
        """Returns when a worker has admitted it.

        Raises:
            Overloaded: queue full, draining, or no worker, with `retry_after` in seconds.
            Unprocessable: the workers refuse this request for good.
        """
        ready = self.membership.ready()
        if not ready:
            raise Overloaded(f"not ready: {self.membership.readiness.text}", code="not_ready", retry_after=1.0)
        message = m.Submit(
            self._new_id(), pack_u32(prompt), sampling,
            cache_salt=cache_salt, group=group, deadline_ms=deadline_ms, priority=priority, tenant=tenant,
        )  # fmt: skip
        stream = Stream(message, asyncio.get_running_loop().create_future())
        self._put(stream, self._choose(stream, ready))
        try:
            await stream.admission
        except asyncio.CancelledError:
            self.abort([stream])
            raise
        finally:
            self._tried.pop(stream, None)
        return stream

    def abort(self, streams: Iterable[Stream]) -> None:
        """Never blocks; ended streams are ignored."""
        live = [stream for stream in streams if stream in self._homes]
        for link in {home for stream in live if (home := self._homes[stream]) is not None}:
            link.release([stream for stream in live if self._homes[stream] is link])
        for stream in live:
            self._remove(stream)
            stream.finish(m.End(stream.id, m.Outcome.ABORTED, len(stream.output)))

    def _new_id(self) -> int:
        self._next_id = self._next_id % 0xFFFFFFFF + 1
        return self._next_id

    def _choose(self, stream: Stream, links: Sequence[WorkerConnection]) -> WorkerConnection:
        """Choices of one prompt go together, so that it is computed once."""
        if len(links) == 1:
            return links[0]
        submit = stream.submit
        if submit.group:
            for other, home in self._homes.items():
                if other.submit.group == submit.group and home is not None and home in links:
                    return home
        keys = prefix_hashes(submit.prompt, submit.cache_salt)
        index = {link.address.name: i for i, link in enumerate(links)}
        knowing = [[index[name] for name in names if name in index] for names in self._beginnings.knowing(keys)]
        loads = [load(link.streams.values(), link.status) for link in links]
        self._turn = choose(loads, knowing, self._turn) + 1
        chosen = links[self._turn - 1]
        self._beginnings.remember(keys, chosen.address.name)
        return chosen

    def _put(self, stream: Stream, link: WorkerConnection) -> None:
        self._homes[stream] = link
        link.submit(stream)

    def _remove(self, stream: Stream) -> None:
        home = self._homes.pop(stream, None)
        if home is not None:
            home.release([stream])
        self._waiting.pop(stream, None)

    def _fail(self, stream: Stream, outcome: m.Outcome, error: str, code: str = "") -> None:
        self._remove(stream)
        if not stream.admission.done():
            stream.admission.set_exception(Overloaded(error, code=code or outcome.value, retry_after=1.0))
        stream.finish(m.End(stream.id, outcome, len(stream.output), error))

    # what links notice

    def connected(self, link: WorkerConnection) -> None:
        self.membership.check_fit()
        self._beginnings.forget(link.address.name)
        for stream in list(link.streams.values()):
            self._count_death(stream, link)
            del link.streams[stream.id]
            self._resume(stream)

    def connection_lost(self, link: WorkerConnection) -> None:
        """Its streams go to another worker; where there is none, those that were admitted wait for it."""
        self._evacuate(link)
        for stream in list(link.streams.values()):
            if not stream.admission.done():
                self._fail_unadmitted(stream)

    def stream_rejected(self, link: WorkerConnection, stream: Stream, rejected: m.Rejected) -> None:
        final = rejected.reason in (m.Refusal.TOO_LONG, m.Refusal.INVALID)
        if stream.admission.done():
            if final:
                self.counters.lost += 1
                self._fail(stream, m.Outcome.ERROR, rejected.message)
            else:
                self._wait(stream)
            return
        tried = self._tried.setdefault(stream, [])
        tried.append(link)
        others = [] if final else self.membership.ready(but=tried)
        if others:
            stream.resubmit(self._new_id())
            self._put(stream, self._choose(stream, others))
        else:
            self._remove(stream)
            stream.admission.set_exception(rejection_error(rejected))

    def stream_unknown(self, stream: Stream) -> None:
        self._resume(stream)

    def stream_ended(self, stream: Stream, end: m.End) -> None:
        if end.outcome is m.Outcome.SHUTDOWN and len(self.membership.connections) > 1:  # its worker had no more time
            self._resume(stream)
            return
        self._remove(stream)
        if not stream.admission.done():
            stream.admission.set_result(0)
        stream.finish(end)

    # going on elsewhere

    def _evacuate(self, link: WorkerConnection) -> None:
        """Move all that is at a worker which does not answer, if there is another."""
        if not link.streams or not self.membership.ready(but=[link]):
            return
        streams = list(link.streams.values())
        link.release(streams)
        for stream in streams:
            self._count_death(stream, link)
            self._resume(stream)

    def _count_death(self, stream: Stream, link: WorkerConnection) -> None:
        """For a request that may have killed its worker; the link takes it back if the worker had not died."""
        if not stream.admission.done():
            self._tried.setdefault(stream, []).append(link)
        if link.epoch != NO_EPOCH:
            stream.lost_worker((link.address.name, link.epoch))

    def _resume(self, stream: Stream) -> None:
        """Submits a stream that no worker has, or lets it wait. One not yet admitted gets two workers at most."""
        ready = self.membership.ready()
        if not stream.admission.done() and (len(self._tried.get(stream, ())) > 1 or not ready):
            self._fail_unadmitted(stream)
        elif not ready:
            self._wait(stream)
        else:
            before, link = self._homes.get(stream), self._choose(stream, ready)
            self.counters.resumed += 1
            self.counters.moved += link is not before
            self._waiting.pop(stream, None)
            stream.resubmit(self._new_id())
            self._put(stream, link)

    def _fail_unadmitted(self, stream: Stream) -> None:
        self._fail(stream, m.Outcome.ERROR, "the worker was lost", code="worker_lost")

    def _wait(self, stream: Stream) -> None:
        self._homes[stream] = None
        self._waiting.setdefault(stream, time.monotonic())

    # time

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            for link in list(self.membership.connections):
                link.tick(now)
            self.membership.check_fit()
            for link in list(self.membership.connections):
                self._look_after(link, now)
            if self._waiting and now - self._retried > RETRY_S:
                self._retry(now)
            await asyncio.sleep(TICK_S)

    def _look_after(self, link: WorkerConnection, now: float) -> None:
        if link.welcome is None or link.stalled:
            self._evacuate(link)
        if link.welcome is None and now - link.lost_since > self._recovery_timeout:
            self._give_up(list(link.streams.values()))
        if link.leaving and not link.streams:
            self._beginnings.forget(link.address.name)
            self.membership.remove(link)

    def _retry(self, now: float) -> None:
        self._retried = now
        self._give_up([s for s, since in self._waiting.items() if now - since > self._recovery_timeout])
        for stream in list(self._waiting) if self.membership.ready() else []:
            self._resume(stream)

    def _give_up(self, streams: list[Stream]) -> None:
        for stream in streams:
            self.counters.lost += 1
            said = f"the worker did not come back within {self._recovery_timeout:g} s"
            self._fail(stream, m.Outcome.ERROR, said)


def rejection_error(rejected: m.Rejected) -> SluiceError:
    """What a client is told of a request that no worker takes."""
    if rejected.reason in (m.Refusal.TOO_LONG, m.Refusal.INVALID):
        return Unprocessable(rejected.message, code=rejected.reason.value)
    return Overloaded(rejected.message, code=rejected.reason.value, retry_after=rejected.retry_after_s)
