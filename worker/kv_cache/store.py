"""The K/V store: keeps pages outside the process, in one or more tiers, and brings them back.

Its threads wait for disks; the compute loop does not. The loop hands over copies of pages (`write`) and asks for a
prefix (`fetch`). A thread for each tier writes. A few threads read, each one prefix from its beginning to its end; what
they read comes back as results, which the loop takes between steps. A thread that hangs with its disk costs nothing but
itself.
"""

import logging
import os
import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from math import inf

import torch
from torch import Tensor

from worker.kv_cache.pages import first_kept
from worker.kv_cache.store_file import Head, packed_head
from worker.kv_cache.store_pages import HostBytes, StoredPages
from worker.kv_cache.store_tier import PAGES, ROOM, STATE, TOKEN_BYTES, Tier

log = logging.getLogger("sluice.kv_store")

READERS = 3
NICE = 10  # of the threads that write: computing goes first
MOST_QUEUED_BYTES = 256 << 20  # copies of pages that wait to be written, in each tier; more are dropped
MOST_STAGED_BYTES = 256 << 20  # bytes that were read and not taken yet, of all prefixes
LEAST_STAGED = 2  # files that are read ahead in any case
RATE_KEPT = 0.7  # how much of the former rate a new measurement leaves
TRY_AGAIN_S = 60.0  # a store that was slower than computing is tried again after so long
KNOWN = 1 << 16  # digests of files that are remembered as written


@dataclass(eq=False, slots=True)
class Fetch:
    """A prefix that a sequence wants from the store.

    digests: the digests of its pages, up to the last one that it can use; start: how many of them it has already
    token_s: how long computing a token takes, in seconds; 0: not known
    """

    digests: list[bytes]
    start: int
    token_s: float
    cancelled: bool = False
    # of the reader
    target: int = 0  # how many pages there will be if all parts come; set before the first one
    # of the loop
    copied: int = 0  # pages up to here were copied, in groups without a window
    windows: dict[int, list[tuple[int, Tensor]]] = field(default_factory=dict)  # group → (first page, bytes) of runs
    state: Tensor | None = None
    deadline: float = 0.0  # until when the sequence waits for the next part, in seconds of the loop's clock
    latest: float = inf  # until when it waits for all parts


@dataclass(frozen=True, slots=True)
class Part:
    """A file that was read. first: the index of its first page in the prefix; payload: see StoredPages.split()."""

    fetch: Fetch
    first: int
    pages: int
    absent: tuple[int, ...]
    state: bool
    payload: Tensor


@dataclass(frozen=True, slots=True)
class Done:
    """A fetch has ended. complete: whether all pages up to `Fetch.target` came."""

    fetch: Fetch
    complete: bool


@dataclass(frozen=True, slots=True)
class Run:
    """A run of consecutive pages of a prefix, as one file has it.

    kind: PAGES or STATE; digest, parent: the digests of all tokens up to its end, and before it (b"": there are none);
    end: the number of pages up to its end; pages: of the run; absent: see Head
    """

    kind: bytes
    digest: bytes
    parent: bytes
    end: int
    pages: int
    absent: tuple[int, ...]


class KvStore:
    """tiers: from the fastest to the slowest. always: fetch even if computing would be faster.

    wake: wakes the compute loop; any thread may call it.
    """

    def __init__(
        self,
        pages: StoredPages,
        tiers: Sequence[Tier],
        *,
        always: bool = False,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.pages, self.tiers, self.always, self._wake = pages, tuple(tiers), always, wake
        self.results: deque[Part | Done] = deque()
        self.refused = 0  # fetches that were not worth waiting for
        self._written: OrderedDict[bytes, None] = OrderedDict()
        self._writers = [_Worker(f"kv-write-{index}") for index, _ in enumerate(self.tiers)]
        self._asked: deque[Fetch] = deque()
        self._asked_any = threading.Condition()
        self._idle = 0
        self._staged = threading.Condition()
        self._staged_bytes = self._staged_parts = 0
        self._byte_s = 0.0  # seconds that reading a byte takes, as measured; 0: not known
        self._tried = 0.0
        self._reset_done = [0] * len(self.tiers)  # the nonce of the latest reset that each tier has done
        self._stop = False
        for writer, tier in zip(self._writers, self.tiers, strict=True):
            writer.do(tier.refresh)
            writer.do(partial(_swept, tier))
        for index in range(READERS):
            threading.Thread(target=self._read, name=f"kv-read-{index}", daemon=True).start()

    # called by the compute loop

    def wants(self, digest: bytes, kind: bytes) -> bool:
        """Whether a file should be written, as far as is known. Costs no system call."""
        return kind + digest not in self._written and any(
            tier.writable and writer.takes(0) for tier, writer in zip(self.tiers, self._writers, strict=True)
        )

    def write(self, run: Run, data: HostBytes, keep_s: int = 0) -> None:
        """Writes a file to every tier that keeps up. keep_s: for how many seconds it counts as used"""
        self.remember(run.digest, run.kind)
        until = _until(keep_s)
        for tier, writer in zip(self.tiers, self._writers, strict=True):
            if tier.writable and writer.takes(data.nbytes):
                writer.do(partial(self._write, tier, tier.token, run, data, until), data.nbytes)
            else:
                tier.counts.dropped += 1
                self._forget(run.digest, run.kind)

    @property
    def most_tokens(self) -> int:
        """How many tokens' pages the largest tier has room for, with the states between them."""
        room = max([tier.limit for tier in self.tiers]) * (1 - ROOM)
        shares = 2 if self.pages.state_bytes else 1  # states take no more room than the pages between them
        return int(room * self.pages.page_size / (shares * sum(self.pages.page_bytes)))

    def flush(self) -> Callable[[], bool]:
        """Returns a function that says whether a tier has written all that it was given until now.

        Tiers that cannot be written to now do not count: if there are only these, there is nothing to wait for. The
        loop is woken when the answer changes.
        """
        written = []
        for writer, tier in zip(self._writers, self.tiers, strict=True):
            if tier.writable:
                written.append(event := threading.Event())
                writer.do(partial(self._flushed, event))
        return lambda: not written or any([event.is_set() for event in written])

    def _flushed(self, event: threading.Event) -> None:
        event.set()
        self._wake()

    def remember(self, digest: bytes, kind: bytes) -> None:
        """Notes that a file exists, so that it need not be written."""
        self._written[kind + digest] = None
        if len(self._written) > KNOWN:
            self._written.popitem(last=False)

    def _forget(self, digest: bytes, kind: bytes) -> None:
        self._written.pop(kind + digest, None)

    def used(self, files: Sequence[tuple[bytes, bytes]], keep_s: int = 0) -> None:
        """Notes that prefixes were found in memory, so that their files stay.

        files: (digest, kind) of each; keep_s: for how many seconds they count as used
        """
        until = _until(keep_s)
        for writer, tier in zip(self._writers, self.tiers, strict=True):
            if tier.writable and writer.is_idle:
                writer.do(partial(self._touch, tier, tuple(files), until))

    @property
    def can_fetch(self) -> bool:
        """Whether a fetch would begin at once."""
        return self._idle > len(self._asked) and self.usable

    @property
    def usable(self) -> bool:
        """Whether there is a tier that neither failed a moment ago nor hangs."""
        return any([tier.usable for tier in self.tiers])

    def fetch(self, fetch: Fetch) -> None:
        """Looks for a prefix. Its parts, in order, and a Done come as results."""
        with self._asked_any:
            self._asked.append(fetch)
            self._asked_any.notify()

    def take(self) -> Part | Done | None:
        """Returns the next result; None if there is none yet."""
        if not self.results:
            return None
        result = self.results.popleft()
        if isinstance(result, Part):
            with self._staged:
                self._staged_bytes -= result.payload.numel()
                self._staged_parts -= 1
                self._staged.notify_all()
        return result

    def reset(self, nonce: int) -> None:
        """Empties all tiers for everybody: what was written or is being written is found no more."""
        token = blake2b(nonce.to_bytes(8, "little", signed=True), digest_size=TOKEN_BYTES, person=b"reset").digest()
        self._written.clear()
        for index, tier in enumerate(self.tiers):
            tier.ask_reset(token)
            self._writers[index].do(partial(self._reset, index, nonce), first=True)

    def has_reset(self, nonce: int) -> bool:
        """Whether every tier has done the reset with this nonce."""
        return all([done == nonce for done in self._reset_done])

    @property
    def is_settled(self) -> bool:
        """Whether nothing waits to be written."""
        return all([writer.is_idle for writer in self._writers])

    def close(self, timeout: float = 5.0) -> None:
        """Waits until what is queued is written: no longer than `timeout` seconds, and not for a disk that hangs."""
        self._stop = True
        with self._asked_any:
            self._asked_any.notify_all()
        for writer in self._writers:
            writer.end()
        until = time.monotonic() + timeout
        for writer, tier in zip(self._writers, self.tiers, strict=True):
            while not writer.has_ended(0.1) and time.monotonic() < until and not tier.hangs:
                pass

    # writing

    def _write(self, tier: Tier, token: bytes, run: Run, data: HostBytes, until: float = 0.0) -> None:
        payload = data.read().numpy().data
        head = Head(
            self.pages.space, run.digest, run.parent, run.end * self.pages.page_size, self.pages.fingerprint,
            run.pages, run.absent, run.kind == STATE, payload.nbytes, zlib.crc32(payload),
        )  # fmt: skip
        if not tier.write(run.digest, run.kind, token, (packed_head(head), payload), until):
            self._forget(run.digest, run.kind)

    def _touch(self, tier: Tier, files: tuple[tuple[bytes, bytes], ...], until: float) -> None:
        for digest, kind in files:
            if not tier.writable:
                return
            if not tier.used(digest, kind, until):
                self._forget(digest, kind)  # the next sequence that finds it in memory writes it again

    def _copy_up(self, head: Head, payload: Tensor, kind: bytes, source: Tier) -> None:
        """Writes a file that was read from a slow tier to the faster ones."""
        end = head.tokens // self.pages.page_size
        run, data = Run(kind, head.digest, head.parent, end, head.pages, head.absent), HostBytes(payload)
        for tier, writer in zip(self.tiers, self._writers, strict=True):
            if tier is source:
                return
            if tier.writable and writer.takes(data.nbytes):
                writer.do(partial(self._write, tier, tier.token, run, data), data.nbytes)

    def _reset(self, index: int, nonce: int) -> None:
        tier = self.tiers[index]
        while not self._stop:
            if tier.refresh() and not tier.reset_to:
                self._reset_done[index] = nonce
                self._wake()
                tier.empty()
                return
            time.sleep(0.5)

    # reading

    def _read(self) -> None:
        while True:
            with self._asked_any:
                self._idle += 1
                while not self._asked and not self._stop:
                    self._asked_any.wait()
                self._idle -= 1
                if self._stop:
                    return
                fetch = self._asked.popleft()
            complete = False
            try:
                complete = self._fetch(fetch)
            except Exception:
                log.exception("a prefix could not be fetched")
            self.results.append(Done(fetch, complete))
            self._wake()

    def _fetch(self, fetch: Fetch) -> bool:
        """Finds and reads a prefix. Returns whether all of it came."""
        tiers = [tier for tier in self.tiers if tier.usable and tier.refresh()]
        files = _Plan(self.pages, tiers, fetch).files()
        for digest in fetch.digests[files[-1].end if files else fetch.start :]:
            self._forget(digest, PAGES)
            self._forget(digest, STATE)
        if not files:
            if tiers:
                tiers[-1].counts.misses += 1
            return False
        fetch.target = files[-1].end
        nbytes = sum(self.pages.nbytes(one.end - one.begin, (0,) * len(self.pages.windows), state=one.kind == STATE)
                     for one in files)  # fmt: skip
        if not self._worthwhile(nbytes, (fetch.target - fetch.start) * self.pages.page_size * fetch.token_s):
            self.refused += 1
            fetch.target = 0
            return False
        for one in files:
            began = time.perf_counter()
            part = self._part(fetch, one)
            if part is None or fetch.cancelled:
                self._forget(fetch.digests[one.end - 1], one.kind)  # the sequence that computes it writes it again
                return False
            self._measure(part.payload.numel(), time.perf_counter() - began)
            self._post(part)
        return True

    def _worthwhile(self, nbytes: int, compute_s: float) -> bool:
        """Whether reading is faster than computing, as far as both were measured. A slow store is tried again later."""
        now = time.monotonic()
        if self.always or not compute_s or self._byte_s * nbytes < compute_s or now - self._tried > TRY_AGAIN_S:
            self._tried = now
            return True
        return False

    def _measure(self, nbytes: int, seconds: float) -> None:
        each = seconds / max(1, nbytes)
        self._byte_s = RATE_KEPT * self._byte_s + (1 - RATE_KEPT) * each if self._byte_s else each

    def _part(self, fetch: Fetch, one: "_File") -> Part | None:
        """Reads a file from the first tier that has it whole."""
        digest = fetch.digests[one.end - 1]
        tokens = (one.end - max(one.begin, fetch.start)) * self.pages.page_size
        for tier in one.tiers:
            if fetch.cancelled:
                return None
            if not tier.usable:
                continue
            try:
                found = tier.read(digest, one.kind, tokens)
            except OSError:
                continue
            if found is not None:
                head, payload = found[0], torch.from_numpy(found[1])
                if any(
                    missing and not window for missing, window in zip(head.absent, self.pages.windows, strict=False)
                ):
                    continue
                whole = self.pages.nbytes(head.pages, head.absent, state=head.state)
                if head.pages == one.end - one.begin and head.state == (one.kind == STATE) and whole == head.nbytes:
                    self._copy_up(head, payload, one.kind, tier)
                    return Part(fetch, one.begin, head.pages, head.absent, head.state, payload)
        return None

    def _post(self, part: Part) -> None:
        """Adds a part to the results, when there is room for it."""
        nbytes = part.payload.numel()
        with self._staged:
            while self._staged_parts >= LEAST_STAGED and self._staged_bytes + nbytes > MOST_STAGED_BYTES:
                if part.fetch.cancelled or self._stop:
                    return
                self._staged.wait(0.1)
            self._staged_bytes += nbytes
            self._staged_parts += 1
        self.results.append(part)
        self._wake()


def _until(keep_s: int) -> float:
    """Returns until when a file counts as used, in seconds since 1970; 0: it was used now."""
    return time.time() + keep_s if keep_s else 0.0


@dataclass(frozen=True, slots=True)
class _File:
    """A file to read: pages begin .. end - 1 of a prefix. tiers: those that have it."""

    kind: bytes
    begin: int
    end: int
    tiers: tuple[Tier, ...]


class _Plan:
    """Which files a prefix consists of, and how far they reach."""

    def __init__(self, pages: StoredPages, tiers: Sequence[Tier], fetch: Fetch) -> None:
        self._pages, self._tiers, self._fetch = pages, tiers, fetch

    def files(self) -> list[_File]:
        """Returns the files after which a sequence can continue furthest, in order. Empty: it has nothing to gain."""
        blocks = self._blocks()
        if self._pages.state_bytes:
            blocks = self._with_state(blocks)
        if any(self._pages.windows):
            blocks = self._windowed(blocks)
        return blocks if blocks and blocks[-1].end > self._fetch.start else []

    def _blocks(self) -> list[_File]:
        """Returns the blocks from that of the first missing page on, up to the first that no tier has."""
        size, fetch = self._pages.block, self._fetch
        found = []
        for begin in range(fetch.start // size * size, len(fetch.digests) - size + 1, size):
            tiers = self._having(fetch.digests[begin + size - 1], PAGES)
            if not tiers or fetch.cancelled:
                break
            found.append(_File(PAGES, begin, begin + size, tiers))
        return found

    def _having(self, digest: bytes, kind: bytes) -> tuple[Tier, ...]:
        return tuple(tier for tier in self._tiers if _exists(tier, digest, kind))

    def _with_state(self, blocks: list[_File]) -> list[_File]:
        """Returns the blocks up to the last state, and the file of this state."""
        size, fetch = self._pages.block, self._fetch
        covered = blocks[-1].end if blocks else fetch.start // size * size
        for end in range(min(len(fetch.digests), covered + size), fetch.start, -1):
            if fetch.cancelled:
                break
            if end // size * size > covered:  # the pages before this state are in a block that the store does not have
                continue
            if tiers := self._having(fetch.digests[end - 1], STATE):
                last = _File(STATE, end // size * size, end, tiers)
                return [*(one for one in blocks if one.end <= end), last]
        return []

    def _windowed(self, blocks: list[_File]) -> list[_File]:
        """Returns the blocks up to the last after which all windows have the pages that the next row reads."""
        kept: list[tuple[_File, tuple[int, ...]]] = []
        for one in blocks:
            head = next((head for tier in one.tiers if (head := _head(tier, self._fetch, one)) is not None), None)
            if head is None or len(head.absent) != len(self._pages.windows):
                break
            kept.append((one, head.absent))
        size = self._pages.page_size
        for count in range(len(kept), 0, -1):
            end = kept[count - 1][0].end
            needed = [first_kept(window, end * size) // size for window in self._pages.windows]
            if all(
                absent[group] == 0 or one.begin + absent[group] <= max(first, self._fetch.start) or one.end <= first
                for one, absent in kept[:count]
                for group, first in enumerate(needed)
                if self._pages.windows[group]
            ):
                first = min([self._fetch.start, *needed])
                return [one for one, _ in kept[:count] if one.end > first]
        return []


def _exists(tier: Tier, digest: bytes, kind: bytes) -> bool:
    if not tier.usable:
        return False
    try:
        return tier.exists(digest, kind)
    except OSError:
        return False


def _head(tier: Tier, fetch: Fetch, one: _File) -> Head | None:
    try:
        return tier.head(fetch.digests[one.end - 1], one.kind)
    except OSError:
        return None


def _swept(tier: Tier) -> None:
    """Looks at a folder for the first time: what it holds, and what is too much. Never raises."""
    try:
        with tier.operation(writes=True):
            tier.keep_size()
    except OSError:
        pass


class _Worker:
    """A thread that does jobs in order."""

    def __init__(self, name: str) -> None:
        self._jobs: deque[tuple[Callable[[], object], int]] = deque()
        self._nbytes = 0  # of all jobs
        self._any = threading.Condition()
        self._busy = self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        return not self._busy and not self._jobs

    def takes(self, nbytes: int) -> bool:
        """Whether a job with so many bytes does not exceed the queue."""
        return self._nbytes + nbytes <= MOST_QUEUED_BYTES

    def do(self, job: Callable[[], object], nbytes: int = 0, *, first: bool = False) -> None:
        """Adds a job. nbytes: how many bytes it keeps in memory until it is done"""
        with self._any:
            self._nbytes += nbytes
            if first:
                self._jobs.appendleft((job, nbytes))
            else:
                self._jobs.append((job, nbytes))
            self._any.notify()

    def end(self) -> None:
        """Ends the thread when all jobs are done."""
        with self._any:
            self._closed = True
            self._any.notify()

    def has_ended(self, timeout: float) -> bool:
        """Waits for the end of the thread, at most `timeout` seconds, and returns whether it came."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            with self._any:
                self._busy = False
                while not self._jobs and not self._closed:
                    self._any.wait()
                if not self._jobs:
                    return
                (job, nbytes), self._busy = self._jobs.popleft(), True
            try:
                job()
            except Exception:
                log.exception("the K/V store could not do a job")
            del job
            with self._any:
                self._nbytes -= nbytes
