"""Records which pages the prefix cache stores and evicts. The compute loop writes notes, and the publisher reads them.

The journal follows one group of layers: the first without a sliding window, if there is one. The compute loop only
copies digests and tokens; the thread makes events from them.
"""

import logging
import socket
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
import zmq

from shared.config.declaration import ConfigError
from shared.config.settings import Settings
from shared.prefix_identity import first_line
from worker.kv_cache.pages import PagePool
from worker.kv_cache.prefix_cache import PrefixCache
from worker.scheduler.paging import Paging
from worker.scheduler.sequence import Sequence

# The messages about K/V pages, in vLLM's format: a batch is an array in msgpack, and its events are maps.
#
# The names of classes and fields are those of vLLM (`vllm/distributed/kv_events.py`), because consumers expect them.
# A block is a page. Fields with their default values are left out of a message.

MEDIUM = "GPU"  # vLLM's name for pages that steps read directly; used for the CPU, too


class _Event(msgspec.Struct, tag=True, omit_defaults=True, frozen=True, gc=False):
    """The base class of events. In a message, the field `type` is the name of the class."""


class BlockStored(_Event, frozen=True):
    """Consecutive pages of a prompt that were computed and are in the prefix cache now.

    parent_block_hash: the hash of the page before the first one; None if the first page begins the prompt
    token_ids: the tokens of all pages, len(block_hashes) * block_size
    lora_id: always None, because adapters have names
    extra_keys: for each page, hashes of the other data in its digest (salt, images); None if no page has any
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(_Event, frozen=True):
    """Pages that are no longer in the prefix cache."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(_Event, frozen=True):
    """The prefix cache was emptied: no page that was stored before this event can be found."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Events, in the order in which they happened. ts: seconds since 1970"""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def block_hash(digest: bytes) -> int:
    """Returns the 64 bits of a page's digest that identify the page in events."""
    return int.from_bytes(digest[-8:], "big")


MAX_PENDING = 1 << 16  # the maximum number of pending notes; if there are more, AllBlocksCleared replaces them
KEY_BYTES = 8  # bytes of the hash that replaces a salt or an image in events


@dataclass(frozen=True, slots=True)
class Stored:
    """A note: consecutive pages of a sequence were published.

    tokens: all tokens of these pages
    marks: what the sequence's `Mark` returned for each page; empty if it has no Mark
    """

    digests: list[bytes]
    parent: bytes | None
    tokens: "array[int]"
    salt: str
    adapter: str | None
    marks: list[bytes]


Note = Stored | bytes | None  # bytes: the digest of an evicted page; None: the cache was emptied


class PageJournal:
    """The pages that are in the prefix cache (`found`), and the notes that the publisher has not taken yet."""

    def __init__(self, pool: PagePool, cache: PrefixCache) -> None:
        self.page_size = pool.page_size
        self._cache = cache
        self.found: set[bytes] = set()  # digests that were stored and not evicted; never more than the pool has pages
        self._pending: deque[Note] = deque([None])  # begins with "emptied", because a new process has an empty cache

    @classmethod
    def of(cls, paging: Paging) -> "PageJournal":
        """Returns a journal that the scheduler writes to from now on. Raises ValueError if there is no prefix cache."""
        if paging.prefix is None:
            raise ValueError("there is no prefix cache")
        pool = next((pool for pool in paging.pools if not pool.window), paging.pools[0])
        journal = cls(pool, paging.prefix)
        pool.on_unpublish.append(journal.evicted)
        paging.journals.append(journal)
        return journal

    def stored(self, sequence: Sequence, pages: range) -> None:
        """Notes the pages at these indices of a sequence, which were published. Leaves out pages in `found`."""
        digests, begin = sequence.prefix.digests, pages.start
        for index in pages:
            if digests[index] in self.found:
                self._store(sequence, range(begin, index))
                begin = index + 1
        self._store(sequence, range(begin, pages.stop))

    def evicted(self, digest: bytes) -> None:
        if digest in self.found:
            self.found.remove(digest)
            self._note(digest)

    def cleared(self) -> None:
        """Notes that the cache was emptied, and drops all earlier notes."""
        self.found.clear()
        self._pending.clear()
        self._pending.append(None)

    def take(self) -> list[Event]:
        """Returns the events since the last call, in order. Called by the publisher's thread."""
        notes: list[Note] = []
        while self._pending:
            notes.append(self._pending.popleft())
        return list(_events(notes, self.page_size))

    def _continues(self, sequence: Sequence, page: int) -> bool:
        """Whether a new prompt could find this page of a sequence.

        False for a sequence that was running when the cache was emptied: it continues to publish pages under digests
        that new prompts do not have. The page before such a page is not in `found`. For a first page, the digest that a
        new prompt would have is computed, and differs from the page's digest.
        """
        known = sequence.prefix
        if page:
            return known.digests[page - 1] in self.found
        first: list[bytes] = []
        self._cache.extend(first, sequence.tokens, known.salt, 1, known.mark)
        return first[0] == known.digests[0]

    def _store(self, sequence: Sequence, pages: range) -> None:
        if not pages or not self._continues(sequence, pages.start):
            return
        size, known = self.page_size, sequence.prefix
        digests = known.digests[pages.start : pages.stop]
        mark, adapter = known.mark, sequence.adapter
        self.found.update(digests)
        self._note(
            Stored(
                digests,
                known.digests[pages.start - 1] if pages.start else None,
                array("I", sequence.tokens[pages.start * size : pages.stop * size]),
                known.salt if adapter is None else known.salt.removeprefix(first_line(adapter.adapter)),
                None if adapter is None else adapter.adapter.name,
                [] if mark is None else [mark(page * size, (page + 1) * size) for page in pages],
            )
        )

    def _note(self, note: Note) -> None:
        if len(self._pending) >= MAX_PENDING:
            self.cleared()
            if isinstance(note, bytes):
                return
            self.found.update(note.digests if note is not None else ())
        self._pending.append(note)


def _events(notes: Iterable[Note], page_size: int) -> Iterable[Event]:
    """Makes events from notes. Consecutive evictions become one event."""
    removed: list[int] = []
    for note in notes:
        if isinstance(note, bytes):
            removed.append(block_hash(note))
            continue
        if removed:
            yield BlockRemoved(removed, MEDIUM)
            removed = []
        yield AllBlocksCleared() if note is None else _stored_event(note, page_size)
    if removed:
        yield BlockRemoved(removed, MEDIUM)


def _stored_event(note: Stored, page_size: int) -> BlockStored:
    return BlockStored(
        [block_hash(digest) for digest in note.digests],
        None if note.parent is None else block_hash(note.parent),
        note.tokens.tolist(),
        page_size,
        lora_id=None,
        medium=MEDIUM,
        lora_name=note.adapter,
        extra_keys=_extra_keys(note),
    )


def _extra_keys(note: Stored) -> list[tuple[str, ...] | None] | None:
    """Returns, for each page, hashes of its salt and images: hashes, because a salt may be secret."""
    salt = (_key(note.salt.encode()),) if note.salt else ()
    marks = note.marks or [b""] * len(note.digests)
    keys = [(*salt, *((_key(mark),) if mark else ())) or None for mark in marks]
    return keys if any(keys) else None


def _key(value: bytes) -> str:
    return blake2b(value, digest_size=KEY_BYTES).hexdigest()


# Publishes the events of the journal on a PUB socket, and sends batches again on a ROUTER socket on request.
#
# A thread owns both sockets, so a step never waits for them. A message is topic, sequence number (8 bytes, big-endian)
# and batch. A consumer that sees a gap sends the first number that it lacks to the ROUTER. It gets this batch and all
# later ones that are still kept, each after an empty frame, and then a message with the number -1.

log = logging.getLogger("sluice.kv_events")
POLL_MS = 10
LINGER_MS = 200
MAX_UNSENT = 10_000  # queued batches for one consumer; if it is too slow, it misses the next batches
MAX_KEPT, MAX_KEPT_BYTES = 10_000, 64 << 20  # how many batches are kept to be sent again, and how many bytes
MAX_ASKED_BYTES = 1024  # the largest frame that a consumer may send; a larger one ends its connection
MAX_REPLAYS = 8  # requests that are answered before the next batch is published
END = (-1).to_bytes(8, "big", signed=True)


@dataclass
class KvEventPublisher:
    """Publishes K/V events from a thread. Call open(), then start(), and at the end close()."""

    journal: PageJournal
    topic: bytes
    pub: "zmq.Socket[bytes]"
    replay: "zmq.Socket[bytes] | None"
    sequence: int = 0  # number of the next batch
    kept: deque[tuple[int, bytes]] = field(default_factory=deque)
    _kept_bytes: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _encode: msgspec.msgpack.Encoder = field(default_factory=msgspec.msgpack.Encoder)

    @classmethod
    def open(cls, journal: PageJournal, topic: str, endpoint: str, replay_endpoint: str) -> "KvEventPublisher":
        """Opens the sockets. The PUB socket binds if the endpoint is for all addresses (`*`, `0.0.0.0`, `[::]`), and
        connects otherwise. replay_endpoint: always bound; "": no ROUTER socket. Raises zmq.ZMQError."""
        context = zmq.Context[zmq.Socket[bytes]].instance()
        pub: zmq.Socket[bytes] = context.socket(zmq.PUB)
        pub.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        pub.setsockopt(zmq.LINGER, LINGER_MS)
        replay: zmq.Socket[bytes] | None = None
        try:
            pub.setsockopt(zmq.IPV6, 1)
            pub.setsockopt(zmq.MAXMSGSIZE, MAX_ASKED_BYTES)
            if binds(endpoint):
                pub.bind(endpoint)
            else:
                pub.connect(endpoint)
            if replay_endpoint:
                replay = context.socket(zmq.ROUTER)
                replay.setsockopt(zmq.SNDHWM, MAX_KEPT + 1)
                replay.setsockopt(zmq.LINGER, 0)
                replay.setsockopt(zmq.IPV6, 1)
                replay.setsockopt(zmq.MAXMSGSIZE, MAX_ASKED_BYTES)
                replay.bind(replay_endpoint)
        except zmq.ZMQError:
            pub.close(0)
            if replay is not None:
                replay.close(0)
            raise
        return cls(journal, topic.encode(), pub, replay)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publishes the remaining events, and closes the sockets."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.pub.close()
        if self.replay is not None:
            self.replay.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.publish()
            if self.replay is None:
                self._stop.wait(POLL_MS / 1e3)
            elif self.replay.poll(POLL_MS):
                self._answer(self.replay)
        self.publish()

    def publish(self) -> None:
        """Sends the events since the last call as one batch. Sends nothing if there are no events."""
        events = self.journal.take()
        if not events:
            return
        batch = self._encode.encode(EventBatch(time.time(), events))
        self.pub.send_multipart((self.topic, _number(self.sequence), batch), zmq.NOBLOCK)
        self._keep(batch)
        self.sequence += 1

    def _keep(self, batch: bytes) -> None:
        self.kept.append((self.sequence, batch))
        self._kept_bytes += len(batch)
        while len(self.kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= len(self.kept.popleft()[1])

    def _answer(self, replay: "zmq.Socket[bytes]") -> None:
        """Answers requests for batches. Ignores malformed requests."""
        for _ in range(MAX_REPLAYS):
            try:
                frames = replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                log.warning("a request to --kv-events-replay-endpoint is no sequence number of 8 bytes")
                continue
            first = int.from_bytes(frames[2], "big")
            for number, batch in [*((n, b) for n, b in self.kept if n >= first), (-1, b"")]:
                replay.send_multipart((frames[0], b"", END if number < 0 else _number(number), batch), zmq.NOBLOCK)


def binds(endpoint: str) -> bool:
    """Whether the endpoint is for all addresses of this host."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0] in ("*", "0.0.0.0", "[::]")


def _number(number: int) -> bytes:
    return number.to_bytes(8, "big")


# Starts the publisher of a worker's K/V events, according to the settings.


def start(settings: Settings, paging: Paging) -> KvEventPublisher:
    """Returns a running publisher. Raises ConfigError if an endpoint cannot be used."""
    worker, model = settings.worker, settings.model
    name = (model.served_model_name or model.model).split(",")[0]
    topic = f"kv@{worker.kv_events_pod or socket.gethostname()}@{name}"
    journal = PageJournal.of(paging)
    try:
        publisher = KvEventPublisher.open(journal, topic, worker.kv_events_endpoint, worker.kv_events_replay_endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"--kv-events-endpoint {worker.kv_events_endpoint} or --kv-events-replay-endpoint "
            f"{worker.kv_events_replay_endpoint!r} cannot be used: {error.strerror}"
        ) from error
    publisher.start()
    return publisher
