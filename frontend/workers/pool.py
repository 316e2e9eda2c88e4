"""All workers as one: chooses a worker for each request, and moves streams when their worker is lost.

Knows streams and connections; nothing of sockets, of addresses, or of how a worker is chosen (routing.py).

    a worker is lost (silent, disconnected, stalled)   its streams move to another ready worker, or else wait
    it returns under the same epoch                    it aborts the streams that moved; the others are repaired
    it returns under a new epoch                       waiting streams are submitted again with the received output
    it drains or leaves                                it gets nothing new; its streams finish
    it returns with another fingerprint                waiting streams fail: no answer mixes two fingerprints
    it is full                                         the next worker is tried; a stream that was admitted waits
    it has computed the prompt for another worker      the stream moves to a worker that generates (remote_prefill.py)
"""

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from frontend.errors import Overloaded, SluiceError, Unprocessable
from frontend.workers.connection import NO_EPOCH, ConnectionCounters, WorkerConnection
from frontend.workers.membership import RESOLVE_S, Discovery, Membership
from frontend.workers.remote_prefill import TIMEOUT_S, TOKENS, RemotePrefill
from frontend.workers.routing import Router, load
from frontend.workers.stream import Stream
from shared import messages as m
from shared.address import Address
from shared.config.settings import WireConfig
from shared.images import with_digests
from shared.messages import PromptImage
from shared.wire import pack_u32

TICK_S = 0.1
REPLACED = (
    "the worker that computed the beginning of this answer was replaced by one that computes other bits (see "
    "system_fingerprint), so the answer cannot continue"
)
FIELD = re.compile(r"`([^`]+)`")  # the name of a field, with which a worker's refusal begins
RETRY_S = 0.5  # pause between two attempts to place the streams that wait for a worker


class WorkerPool:
    """Takes requests and returns streams. Implements ConnectionListener."""

    def __init__(
        self,
        wire: WireConfig,
        discovery: Discovery | None = None,
        *,
        stall_timeout: float = 30.0,
        recovery_timeout: float = 120.0,
        model: str = "",
        tokenizer_hash: Callable[[], str] = str,
        resolve_s: float = RESOLVE_S,
        remote_prefill_tokens: int = TOKENS,
        remote_prefill_timeout: float = TIMEOUT_S,
    ) -> None:
        """
        discovery: finds the workers, every `resolve_s` seconds; None means one worker, at the addresses of `wire`
        stall_timeout: seconds without progress after which a worker's streams move
        recovery_timeout: seconds that a stream waits for a worker before it fails
        model, tokenizer_hash: a worker with another value is not used; empty accepts any
        remote_prefill_tokens, remote_prefill_timeout: see RemotePrefill
        """
        self.id = secrets.token_bytes(m.TOPIC_BYTES)
        self.counters = ConnectionCounters()
        self.membership = Membership(
            wire, discovery, self._connect, model=model, tokenizer_hash=tokenizer_hash, resolve_s=resolve_s
        )
        self._stall_timeout = stall_timeout
        self.recovery_timeout = recovery_timeout
        self._placement = Placement()
        self._waiting: dict[Stream, float] = {}  # stream without a worker → when its wait began
        self._tried: dict[Stream, list[WorkerConnection]] = {}  # new stream → workers that did not admit it
        self._router = Router()
        self._prefill = RemotePrefill(self.counters, tokens=remote_prefill_tokens, timeout=remote_prefill_timeout)
        self._next_id = 0
        self._retried_at = 0.0
        self._ticker: asyncio.Task[None] | None = None

    def _connect(self, address: Address) -> WorkerConnection:
        return WorkerConnection(address, self.id, self, self.counters, stall_timeout=self._stall_timeout)

    async def start(self) -> None:
        await self.membership.start()
        self._ticker = asyncio.create_task(self._tick())

    async def close(self, reason: str = "the server is shutting down") -> None:
        """Fails live streams with `shutdown` and closes all connections."""
        for stream in list(self._placement):
            self._fail(stream, m.Outcome.SHUTDOWN, reason)
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
            self.membership.close()

    @property
    def live(self) -> int:
        return len(self._placement)

    # requests

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the least loaded ready worker, for sequences that must all have the same fingerprint."""
        ready = self.membership.generating()
        loads = zip(self._placement.loads(ready), [one.fingerprint for one in ready], strict=True)
        return min(loads, default=(0, ""))[1]

    def places(self, fingerprint: str = "") -> int:
        """Returns how many sequences the ready workers with this fingerprint ("": all) can hold; 0 if unknown."""
        return self._sum_of("max_sequences", fingerprint)

    def concurrency(self) -> int:
        """Returns how many sequences the ready workers can run at once; 0 if unknown."""
        return self._sum_of("max_batch")

    def _sum_of(self, limit: str, fingerprint: str = "") -> int:
        ready = [one.welcome for one in self.membership.generating(fingerprint=fingerprint)]
        known = [getattr(welcome.limits, limit) if welcome else 0 for welcome in ready]
        return sum(known) if all(known) else 0

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
        pooling: m.Pooling | None = None,
        adapter: m.Adapter | None = None,
        fingerprint: str = "",
        generated: Sequence[int] = (),
        scored_from: int = 0,
        answer: list[int] | None = None,
        images: Sequence[m.PromptImage] = (),
        predicted: Sequence[int] | None = None,
        second_from: int = 0,
        keep_s: int = 0,
    ) -> Stream:
        """Submits a sequence; returns its stream when a worker with this fingerprint ("": any worker) has admitted it.

        generated: output tokens that the sequence already has and continues
        scored_from, second_from, keep_s: see shared.messages.requests.Submit

        Raises:
            Overloaded: queue full, draining, or no worker, with `retry_after` in seconds.
            Unprocessable: no worker can ever serve this request.
        """
        if images:
            check_memory(images, (stream.submit.images for stream in self._placement))
        takers = self.membership.generating(fingerprint=fingerprint)
        if not takers:
            reason = self.membership.readiness
            text = f"no worker has the fingerprint {fingerprint} any more" if reason.ready else reason.text
            raise Overloaded(f"not ready: {text}", code="not_ready", retry_after=1.0)
        message = m.Submit(
            self._new_id(), pack_u32(prompt), sampling,
            cache_salt=cache_salt, group=group, deadline_ms=deadline_ms, priority=priority, tenant=tenant,
            pooling=pooling, generated=pack_u32(generated), scored_from=scored_from,
            answer=None if answer is None else pack_u32(answer), adapter=adapter, images=list(images) or None,
            prediction=None if predicted is None else pack_u32(predicted), second_from=second_from,
            keep_s=keep_s,
        )  # fmt: skip
        stream = Stream(message, asyncio.get_running_loop().create_future(), fingerprint=fingerprint)
        self._begin(stream, takers)
        try:
            await stream.admission
        except asyncio.CancelledError:
            self.abort([stream])
            raise
        finally:
            self._tried.pop(stream, None)
        return stream

    def end_waiting(self) -> None:
        """Ends, with `shutdown`, the streams without a connected worker, as this process will not wait for a worker."""
        for stream in list(self._placement):
            if (home := self._placement.home(stream)) is None or home.welcome is None:
                self._fail(stream, m.Outcome.SHUTDOWN, "the server is shutting down, and its worker is lost")

    def abort(self, streams: Iterable[Stream]) -> None:
        """Aborts streams. Never blocks; ended streams are ignored."""
        live = [stream for stream in streams if stream in self._placement]
        for connection in {home for stream in live if (home := self._placement.home(stream)) is not None}:
            connection.release([stream for stream in live if self._placement.home(stream) is connection])
        for stream in live:
            self._remove(stream)
            stream.finish(m.End(stream.id, m.Outcome.ABORTED, len(stream.output)))

    def _new_id(self) -> int:
        self._next_id = self._next_id % 0xFFFFFFFF + 1
        return self._next_id

    def _begin(self, stream: Stream, takers: Sequence[WorkerConnection]) -> None:
        """Gives a new stream to one of the `takers`, or first to a prefill worker if its prompt is long and new."""
        if not self.membership.has_roles or len(stream.submit.prompt) < 4 * self._prefill.tokens:
            self._put(stream, *self._choose(stream, takers))
            return
        submit, ready = stream.submit, self.membership.ready(fingerprint=stream.fingerprint)
        prompt, names = _keyed(submit), [one.address.name for one in takers]
        helpers = self._prefill.helpers(
            submit, prompt, takers, ready, lambda: self._router.cached(prompt, submit.cache_salt, names)
        )
        if not helpers:
            self._generate(stream, takers)
            return
        stream.submit = msgspec.structs.replace(submit, prefill=m.Prefill.ONLY)
        self._prefill.begin(stream)
        self._put(stream, *self._choose(stream, helpers, self._prefill.router))

    def _generate(self, stream: Stream, takers: Sequence[WorkerConnection]) -> None:
        """Gives a stream to one of the `takers`, which generates."""
        self._put(stream, *self._choose(stream, takers))
        if self.membership.has_roles:
            self._prefill.generates(_keyed(stream.submit), stream.submit.cache_salt)

    def _choose(
        self, stream: Stream, connections: Sequence[WorkerConnection], router: Router | None = None
    ) -> tuple[WorkerConnection, int]:
        """Returns a worker, and how many prompt tokens it may have cached. Sequences of a prompt stay on one worker."""
        if len(connections) == 1:
            return connections[0], 0
        submit, router = stream.submit, router or self._router
        if (home := self._placement.group_home(submit.group)) is not None and home in connections:
            return home, len(submit.prompt) // 4
        names = [one.address.name for one in connections]
        loads = self._placement.loads(connections)
        chosen, saved = router.choose(_keyed(submit), submit.cache_salt, names, loads)
        return connections[chosen], saved

    def _put(self, stream: Stream, connection: WorkerConnection, saved: int) -> None:
        self._placement.put(stream, connection, saved)
        connection.submit(stream)

    def _remove(self, stream: Stream) -> None:
        home = self._placement.pop(stream)
        if home is not None:
            home.release([stream])
        self._waiting.pop(stream, None)
        self._prefill.end(stream, "ended")

    def _fail(self, stream: Stream, outcome: m.Outcome, error: str, code: str = "") -> None:
        self._remove(stream)
        if not stream.admission.done():
            stream.admission.set_exception(Overloaded(error, code=code or outcome.value, retry_after=1.0))
        stream.finish(m.End(stream.id, outcome, len(stream.output), error))

    # ConnectionListener

    def reported(self, connection: WorkerConnection, status: m.Status) -> None:
        if len(self.membership.connections) > 1:
            self._router_of(connection).learn(connection.address.name, status.prefixes)
        if status.role is m.Role.PREFILL:
            self.membership.has_roles = True
        if self.membership.has_roles:
            self._prefill.reported(connection.address.name, status)

    def _router_of(self, connection: WorkerConnection) -> Router:
        return self._prefill.router if connection.role is m.Role.PREFILL else self._router

    def connected(self, connection: WorkerConnection) -> None:
        self.membership.check_compatible()
        self._router_of(connection).forget(connection.address.name)
        for stream in list(connection.streams.values()):
            self._record_death(stream, connection)
            del connection.streams[stream.id]
            self._resume(stream)

    def connection_lost(self, connection: WorkerConnection) -> None:
        """Moves the connection's streams to other workers. If there are none, admitted streams wait, new ones fail."""
        self._evacuate(connection)
        for stream in list(connection.streams.values()):
            if not stream.admission.done():
                self._fail_unadmitted(stream)

    def stream_rejected(self, connection: WorkerConnection, stream: Stream, rejected: m.Rejected) -> None:
        if stream.submit.prefill is m.Prefill.ONLY:  # the worker that generates decides whether it is refused
            self._leave_prefill(stream, "refused")
            return
        final = rejected.reason in (m.Refusal.TOO_LONG, m.Refusal.INVALID)
        if stream.admission.done():
            if final:
                self.counters.lost += 1
                self._fail(stream, m.Outcome.ERROR, rejected.message)
            else:
                self._wait(stream)
            return
        tried = self._tried.setdefault(stream, [])
        tried.append(connection)
        others = [] if final else self.membership.generating(tried, stream.fingerprint)
        if others:
            stream.resubmit(self._new_id())
            self._put(stream, *self._choose(stream, others))
        else:
            self._remove(stream)
            stream.admission.set_exception(rejection_error(rejected))

    def stream_unknown(self, stream: Stream) -> None:
        self._resume(stream)

    def stream_ended(self, stream: Stream, end: m.End) -> None:
        if end.outcome is m.Outcome.PREFILLED:
            stream.prefill_done(end.timings)
            self._leave_prefill(stream, "done")
            return
        if stream.submit.prefill is m.Prefill.ONLY and end.outcome not in (m.Outcome.ABORTED, m.Outcome.DEADLINE):
            self._leave_prefill(stream, "failed")
            return
        others = len(self.membership.connections) > 1
        if end.outcome is m.Outcome.SHUTDOWN and others:  # the worker stopped before it finished the stream
            self._resume(stream)
            return
        self._remove(stream)
        if not stream.admission.done():
            stream.admission.set_result(0)
        stream.finish(end)

    # moving streams

    def _leave_prefill(self, stream: Stream, how: str) -> None:
        """Moves a stream from its prefill worker to a worker that generates, or lets it wait.

        how: how the attempt ended, see remote_prefill.py
        """
        self._prefill.end(stream, how)
        takers = self.membership.generating(fingerprint=stream.fingerprint)
        stream.resubmit(self._new_id())
        if takers:
            self._generate(stream, takers)
        elif not stream.admission.done():
            self._fail_unadmitted(stream)
        else:
            self._wait(stream)

    def _evacuate(self, connection: WorkerConnection) -> None:
        """Moves the streams of an unresponsive worker to ready workers that compute the same bits."""
        others = {other.fingerprint for other in self.membership.ready([connection])} if connection.streams else set()
        streams = [s for s in connection.streams.values() if others and (not s.fingerprint or s.fingerprint in others)]
        connection.release(streams)
        for stream in streams:
            self._record_death(stream, connection)
            self._resume(stream)

    def _record_death(self, stream: Stream, connection: WorkerConnection) -> None:
        """Records that the stream may have killed its worker. The connection undoes this if the worker is alive."""
        if not stream.admission.done():
            self._tried.setdefault(stream, []).append(connection)
        if connection.epoch != NO_EPOCH:
            stream.lost_worker((connection.address.name, connection.epoch))

    def _resume(self, stream: Stream) -> None:
        """Submits a stream to a ready worker, or lets it wait. A stream not yet admitted tries two workers at most."""
        self._prefill.end(stream, "lost")
        ready = self.membership.generating(fingerprint=stream.fingerprint)
        if not stream.admission.done() and (len(self._tried.get(stream, ())) > 1 or not ready):
            self._fail_unadmitted(stream)
        elif not self.membership.may_return(stream.fingerprint):
            self.counters.lost += 1
            self._fail(stream, m.Outcome.ERROR, REPLACED)
        elif not ready:
            self._wait(stream)
        else:
            previous, (connection, saved) = self._placement.home(stream), self._choose(stream, ready)
            self.counters.resumed += 1
            self.counters.moved += connection is not previous
            self._waiting.pop(stream, None)
            stream.resubmit(self._new_id())
            self._put(stream, connection, saved)

    def _fail_unadmitted(self, stream: Stream) -> None:
        self._fail(stream, m.Outcome.ERROR, "the worker was lost", code="worker_lost")

    def _wait(self, stream: Stream) -> None:
        self._placement.put(stream, None)
        self._waiting.setdefault(stream, time.monotonic())

    # periodic work

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            for connection in list(self.membership.connections):
                connection.tick(now)
            self.membership.check_compatible()
            for connection in list(self.membership.connections):
                self._check(connection, now)
            self._end_late_prefills()
            if self._waiting and now - self._retried_at > RETRY_S:
                self._retry(now)
            await asyncio.sleep(TICK_S)

    def _end_late_prefills(self) -> None:
        """Moves streams whose prefill workers take too long to workers that generate, if there are any."""
        for stream in self._prefill.late() if self._prefill else ():
            home = self._placement.home(stream)
            if home is not None and any(
                one.role is not m.Role.PREFILL for one in self.membership.generating(fingerprint=stream.fingerprint)
            ):
                home.release([stream])
                self._leave_prefill(stream, "late")

    def _check(self, connection: WorkerConnection, now: float) -> None:
        if connection.welcome is None or connection.stalled:
            self._evacuate(connection)
        if connection.welcome is None and now - connection.lost_since > self.recovery_timeout:
            self._fail_all(list(connection.streams.values()))
        if connection.leaving and not connection.streams:
            self._router_of(connection).forget(connection.address.name)
            self.membership.remove(connection)

    def _retry(self, now: float) -> None:
        self._retried_at = now
        self._fail_all([s for s, since in self._waiting.items() if now - since > self.recovery_timeout])
        for stream in list(self._waiting) if self.membership.ready() else []:
            self._resume(stream)

    def _fail_all(self, streams: list[Stream]) -> None:
        for stream in streams:
            self.counters.lost += 1
            self._fail(stream, m.Outcome.ERROR, f"the worker did not come back within {self.recovery_timeout:g} s")


def _keyed(submit: m.Submit) -> bytes:
    """Returns the packed ids of a prompt, with the digests of its images in the place of their tokens."""
    if submit.images is None:
        return submit.prompt
    return with_digests(submit.prompt, submit.images)


def rejection_error(rejected: m.Rejected) -> SluiceError:
    """Returns the error for a request that no worker admits. It names the field that the message begins with."""
    if rejected.reason in (m.Refusal.TOO_LONG, m.Refusal.INVALID):
        named = FIELD.match(rejected.message)
        return Unprocessable(rejected.message, code=rejected.reason.value, param=named[1] if named else None)
    return Overloaded(rejected.message, code=rejected.reason.value, retry_after=rejected.retry_after_s)


# Which worker has which stream, and how many tokens each worker still has to compute.
#
# The load of a worker is kept as a number, which is changed when a stream comes or goes, and counted anew at most
# every REFRESH_S. So a choice among many workers with many streams reads one number for each worker.

REFRESH_S = 0.25


class Placement:
    """The live streams of a frontend. A stream without a worker waits for one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._homes: dict[Stream, WorkerConnection | None] = {}
        # group (the sequences of one prompt) → the worker of the latest sequence, and how many sequences are live
        self._groups: dict[int, tuple[WorkerConnection, int]] = {}
        self._loads: dict[WorkerConnection, int] = {}
        self._saved: dict[Stream, int] = {}  # stream → tokens of its prompt that the worker may have cached
        self._clock = clock
        self._counted_at = 0.0

    def __len__(self) -> int:
        return len(self._homes)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._homes)

    def __contains__(self, stream: Stream) -> bool:
        return stream in self._homes

    def home(self, stream: Stream) -> WorkerConnection | None:
        """Returns the worker of a stream; None if it waits, or has ended."""
        return self._homes.get(stream)

    def put(self, stream: Stream, connection: WorkerConnection | None, saved: int = 0) -> None:
        """Gives a stream to a worker, or lets it wait. saved: tokens of its prompt that the worker may have cached"""
        self._leave(stream)
        self._homes[stream] = connection
        if saved:
            self._saved[stream] = saved
        if connection is None:
            return
        if connection in self._loads:
            self._loads[connection] += load([stream], None, self._saved)
        if group := stream.submit.group:
            _, members = self._groups.get(group, (connection, 0))
            self._groups[group] = connection, members + 1

    def pop(self, stream: Stream) -> WorkerConnection | None:
        """Forgets a stream. Returns its worker; None if the stream waited for a worker."""
        self._leave(stream)
        return self._homes.pop(stream, None)

    def clear(self) -> None:
        for stream in list(self._homes):
            self.pop(stream)

    def group_home(self, group: int) -> WorkerConnection | None:
        """Returns the worker that the latest sequence of a prompt went to; None if no sequence of it is live."""
        found = self._groups.get(group)
        return found[0] if found else None

    def loads(self, connections: Sequence[WorkerConnection]) -> list[int]:
        """Returns the load of each of these workers, in tokens; see routing.load."""
        now = self._clock()
        if now - self._counted_at > REFRESH_S or not self._loads.keys() >= set(connections):
            self._counted_at = now
            self._loads = {one: load(one.streams.values(), one.status, self._saved) for one in connections}
        return [self._loads[one] for one in connections]

    def _leave(self, stream: Stream) -> None:
        """Removes a stream from the load of its worker and from its group."""
        home, group = self._homes.get(stream), stream.submit.group
        if home is None:
            return
        if home in self._loads:
            self._loads[home] = max(0, self._loads[home] - load([stream], None, self._saved))
        self._saved.pop(stream, None)
        if group and group in self._groups:
            last, members = self._groups.pop(group)
            if members > 1:
                self._groups[group] = last, members - 1


# Bounds the pixels that a frontend keeps. A stream keeps its images until its end, as its worker may be lost.

MAX_BYTES = 1 << 30  # limit for the pixels of all running requests together


def check_memory(images: Sequence[PromptImage], running: Iterable[Sequence[PromptImage] | None]) -> None:
    """Raises Overloaded if the images of a request and of the running streams exceed MAX_BYTES together."""
    if _nbytes(images) + sum(_nbytes(each) for each in running if each is not None) > MAX_BYTES:
        raise Overloaded(
            f"the images of all requests have more than {MAX_BYTES >> 20} MiB of pixels",
            code="queue_full", retry_after=1.0,
        )  # fmt: skip


def _nbytes(images: Sequence[PromptImage]) -> int:
    return sum(len(image.pixels) for image in images)
