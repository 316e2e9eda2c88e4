"""The K/V store under damage and faults: it costs time, and never a request or a bit."""

import errno
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from shared.config.declaration import ConfigError
from tests.checkpoints import Checkpoints
from tests.patience import PATIENCE_S
from tests.worker.kv_cache.store_harness import BLOCK, PAGE, PROMPT, Answer, Process, files, prompt_of
from tests.worker.kv_cache.test_store_file import ODD
from worker.kv_cache import store_tier
from worker.kv_cache.store_file import TEMPORARY, Disk, Head
from worker.kv_cache.store_tier import PINNED, TOKEN, check_folder
from worker.scheduler import fetching
from worker.scheduler.sequence import Sequence

IN_BLOCKS = (PROMPT - 1) // (PAGE * BLOCK) * PAGE * BLOCK  # tokens of the prompt that the store has

Start = Callable[..., Process]


@pytest.fixture
def start(checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a process with a store in tmp_path/kv."""

    def process(*folders: Path, kind: str = "llama", **settings: object) -> Process:
        return Process(checkpoints(kind), monkeypatch, folders or (tmp_path / "kv",), settings)

    return process


@pytest.fixture
def alone(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """The answer without a store."""
    return Process(checkpoints("llama"), monkeypatch).answer(prompt_of())


def test_damaged_files_cost_time_only_and_are_written_again(start: Start, alone: Answer, tmp_path: Path) -> None:
    start().answer(prompt_of())
    good = {path: path.read_bytes() for path in files(tmp_path / "kv")}
    assert len(good) == IN_BLOCKS // (PAGE * BLOCK)
    process, kinds = start(), {"torn": 0, "foreign": 0, "corrupted": 0, "vanished": 0}
    places = [0, 8, 10, 40, 120, 200, 400, 1000, -1]  # in the header and in the payload
    for number, (path, data) in enumerate(good.items()):
        for place in places:
            damaged = bytearray(data)
            damaged[place] ^= 1 << number % 8
            path.write_bytes(damaged)
            process.forget()
            found = process.answer(prompt_of())
            assert found.equals(alone), (path, place)
            assert found.cached < IN_BLOCKS, (path, place)
            assert path.read_bytes() == data, "a good file takes the place of the damaged one"
    (tier,) = process.store.tiers if process.store else ()
    kinds |= tier.counts.unusable
    assert sum(kinds.values()) == len(good) * len(places) and kinds["corrupted"] > kinds["foreign"] > 0


def test_files_under_each_others_names_and_cut_files_are_not_used(start: Start, alone: Answer, tmp_path: Path) -> None:
    start().answer(prompt_of())
    paths = files(tmp_path / "kv")
    data = [path.read_bytes() for path in paths]
    for path, other in zip(paths, [*data[1:], data[0]], strict=True):
        path.write_bytes(other)
    process = start()
    assert process.answer(prompt_of()).equals(alone)
    assert process.store is not None and process.store.tiers[0].counts.unusable["foreign"] > 0
    for path in files(tmp_path / "kv"):
        path.write_bytes(path.read_bytes()[:-1])
    process = start()
    assert process.answer(prompt_of()).equals(alone)
    assert process.store is not None and process.store.tiers[0].counts.unusable["torn"] > 0


@pytest.mark.parametrize("kind", ODD)
def test_what_lies_in_the_place_of_files_costs_time_only(
    start: Start, alone: Answer, tmp_path: Path, kind: str
) -> None:
    start().answer(prompt_of())
    good = {path: path.read_bytes() for path in files(tmp_path / "kv")}
    (tmp_path / "good").write_bytes(next(iter(good.values())))
    odd = list(good)[::3]
    for path in odd:
        path.unlink()
        ODD[kind](path, tmp_path / "good")
    process = start()
    for _ in range(len(odd) + 1):  # each answer comes to one of them, which is then written again
        found = process.answer(prompt_of())
        assert found.equals(alone)
        process.forget()
    assert process.store is not None
    (tier,) = process.store.tiers
    assert tier.writable and not tier.counts.failures
    if kind != "a folder with a file":  # which nobody removes
        assert found.cached == IN_BLOCKS
        assert {path: path.read_bytes() for path in files(tmp_path / "kv")} == good


@pytest.mark.parametrize("kind", ODD)
def test_what_lies_in_the_place_of_the_token_finds_nothing(
    start: Start, alone: Answer, tmp_path: Path, kind: str
) -> None:
    process = start()
    process.answer(prompt_of())
    process.close()
    token = tmp_path / "kv" / TOKEN
    token.rename(tmp_path / "good")
    ODD[kind](token, tmp_path / "good")
    process = start()
    assert process.answer(prompt_of()).equals(alone)
    process.forget()
    found = process.answer(prompt_of())
    assert found.equals(alone) and found.cached == (0 if "folder" in kind else IN_BLOCKS)


class ReadTogether(Disk):
    """A disk on which two threads read the token before either of them goes on."""

    def __init__(self) -> None:
        self.first = threading.Barrier(2)
        self.draw = count()

    def text(self, path: Path) -> bytes:
        found = super().text(path)
        if next(self.draw) < 2:
            self.first.wait(PATIENCE_S)
        return found


def test_threads_that_find_a_damaged_token_agree_on_the_next(tmp_path: Path) -> None:
    for _ in range(20):
        (tmp_path / TOKEN).write_bytes(b"cut")
        tier = store_tier.Tier(tmp_path, 1 << 20, b"space", ReadTogether())
        with ThreadPoolExecutor(2) as threads:
            found = [future.result(PATIENCE_S) for future in [threads.submit(tier.refresh) for _ in range(2)]]
        assert found == [(tmp_path / TOKEN).read_bytes()] * 2


def test_token_with_a_changed_byte_finds_nothing(start: Start, alone: Answer, tmp_path: Path) -> None:
    start().answer(prompt_of())
    token = (tmp_path / "kv" / TOKEN).read_bytes()
    for at in range(len(token)):
        (tmp_path / "kv" / TOKEN).write_bytes(token[:at] + bytes([token[at] ^ 4]) + token[at + 1 :])
        process = start()
        found = process.sequence(prompt_of())
        process.settle()
        assert process.answers([found])[0].equals(alone) and found.prefix.cached_tokens == 0
        process.close()  # a writer that reads a token of which only a part is written would replace it
        if at >= 1:
            break  # two bytes suffice: all are the key of one hash
    (tmp_path / "kv" / TOKEN).write_bytes(token)
    assert start().answer(prompt_of()).cached == IN_BLOCKS


class Faulty(Disk):
    """A disk whose operations fail with an error. reads, writes: whether these fail"""

    def __init__(self, error: int, *, reads: bool, writes: bool) -> None:
        self.error, self.reads, self.writes, self.calls = error, reads, writes, 0

    def _fail(self, fails: bool) -> None:
        self.calls += 1
        if fails:
            raise OSError(self.error, "a simulated fault")

    def read(self, path: Path, space: bytes, digest: bytes) -> tuple[Head, NDArray[np.uint8]]:
        self._fail(self.reads)
        return super().read(path, space, digest)

    def write(self, path: Path, pieces: tuple[bytes | memoryview, ...]) -> None:
        self._fail(self.writes)
        super().write(path, pieces)

    def used(self, path: Path, until: float = 0.0) -> None:
        self._fail(self.writes and self.error == errno.EROFS)
        super().used(path, until)


def with_disk(process: Process, disk: Disk) -> Process:
    assert process.store is not None
    process.settle()
    for tier in process.store.tiers:
        tier._disk = disk
    return process


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_full_and_read_only_disks_lose_no_request(
    start: Start, alone: Answer, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    process = with_disk(start(), Faulty(error, reads=False, writes=True))
    with caplog.at_level(logging.WARNING, "sluice.kv_store"):
        assert process.answer(prompt_of()).equals(alone)
        process.forget()
        assert process.answer(prompt_of()).equals(alone)
    own = [record.message for record in caplog.records if record.name == "sluice.kv_store"]
    assert len(own) == 1 and own[0].endswith("nothing is written there for now")
    assert process.store is not None
    counts = process.store.tiers[0].counts
    assert counts.failures >= 1 and counts.written == 0 and counts.dropped >= 1


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS])
def test_disk_that_cannot_be_written_to_is_still_read(start: Start, alone: Answer, error: int) -> None:
    start().answer(prompt_of())
    process = with_disk(start(), Faulty(error, reads=False, writes=True))
    for seed in (4, 5):
        found = process.answer(prompt_of())
        assert found.equals(alone) and found.cached == IN_BLOCKS
        process.answer(prompt_of(seed=seed))  # writing it fails
        process.forget()
        assert process.store is not None
        (tier,) = process.store.tiers
        assert tier.usable and not tier.writable and tier.counts.failures == 1, "it is tried again after a while only"


class Small(Disk):
    """A disk that is full from so many bytes of the store on, long before the store is at its own limit."""

    def __init__(self, folder: Path, most: int, error: int) -> None:
        self.folder, self.most, self.error = folder, most, error

    def write(self, path: Path, pieces: tuple[bytes | memoryview, ...]) -> None:
        if sum(nbytes for _, nbytes, _ in self.files(self.folder)) + sum(map(len, pieces)) > self.most:
            raise OSError(self.error, "a simulated fault")
        super().write(path, pieces)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_oldest_files_make_room_on_a_full_disk(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    start().answer(prompt_of())
    folder = tmp_path / "kv"
    oldest = {path: path.stat().st_size for path in files(folder)}
    disk = Small(folder, int(1.5 * sum(oldest.values())), error)
    process = with_disk(start(), disk)
    assert process.store is not None
    (tier,) = process.store.tiers
    with caplog.at_level(logging.WARNING, "sluice.kv_store"):
        process.answer(prompt_of(seed=4))
    assert tier.writable and not tier.counts.dropped, "it goes on"
    assert 0 < tier.counts.evictions < len(oldest) and tier.counts.failures >= 1
    assert "make room" in caplog.text
    disk.most = sum(path.stat().st_size for path in files(folder))
    tier.ask_reset(bytes(16))
    assert tier.refresh() == bytes(16), "so does the file that empties the store for everybody"


def test_failing_reads_are_computed(start: Start, alone: Answer) -> None:
    start().answer(prompt_of())
    process = with_disk(start(), Faulty(errno.EIO, reads=True, writes=False))
    found = process.answer(prompt_of())
    assert found.equals(alone) and found.cached == 0
    assert process.store is not None and not process.store.tiers[0].usable, "it is left alone for a while"


class Hanging(Disk):
    """A disk on which everything hangs until it is released."""

    def __init__(self) -> None:
        self.released, self.hangs = threading.Event(), threading.Event()

    def exists(self, path: Path) -> bool:
        self.hangs.set()
        self.released.wait(PATIENCE_S)
        return super().exists(path)


def test_hanging_disk_is_given_up_and_left_alone(
    start: Start, alone: Answer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    start().answer(prompt_of())
    monkeypatch.setattr(fetching, "STALL_S", {True: 0.05, False: 0.05})
    monkeypatch.setattr(store_tier, "HUNG_S", 0.02)
    disk = Hanging()
    process = with_disk(start(), disk)
    with caplog.at_level(logging.WARNING, "sluice.kv_store"):
        (found,) = process.answers([process.sequence(prompt_of())])
    assert found.equals(alone) and found.cached == 0 and disk.hangs.is_set()
    assert process.store is not None and not process.store.tiers[0].usable
    assert "hangs" in caplog.text
    process.forget()
    steps = process.steps
    (again,) = process.answers([process.sequence(prompt_of())])  # nothing is asked while the disk hangs
    assert again.equals(alone) and process.steps > steps and not process.fetching.waiting
    disk.released.set()
    until = time.monotonic() + PATIENCE_S
    while not process.store.can_fetch:
        assert time.monotonic() < until, "it stays unusable"
        time.sleep(0.001)
    process.forget()
    assert process.answer(prompt_of()).equals(alone)


class StuckWrites:
    """os.write on a disk that hangs in the middle of a file of the store: half of the piece is there, then nothing."""

    def __init__(self) -> None:
        self.released, self.hangs, self._write = threading.Event(), threading.Event(), os.write

    def __call__(self, fd: int, data: bytes | memoryview) -> int:
        if threading.current_thread().name.startswith("kv-write") and len(data) > 64:  # not the token
            if self.hangs.is_set():
                self.released.wait(PATIENCE_S)
            else:
                self.hangs.set()
                return self._write(fd, data[: len(data) // 2])
        return self._write(fd, data)


def test_write_that_hangs_loses_nothing(
    start: Start, alone: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests go on while the disk hangs, no other process reads the torn file, and the file is whole in the end."""
    monkeypatch.setattr(store_tier, "HUNG_S", 0.02)
    process = start()
    process.settle()
    stuck = StuckWrites()
    monkeypatch.setattr(os, "write", stuck)
    with caplog.at_level(logging.WARNING, "sluice.kv_store"):
        (found,) = process.answers([process.sequence(prompt_of())])
        assert found.equals(alone) and stuck.hangs.wait(PATIENCE_S)
        until = time.monotonic() + PATIENCE_S
        assert process.store is not None
        while process.store.tiers[0].usable:
            assert time.monotonic() < until, "it is not noticed that the disk hangs"
            time.sleep(0.001)
    assert "hangs" in caplog.text
    process.forget()
    (again,) = process.answers([process.sequence(prompt_of())])  # the writer is still stuck
    assert again.equals(alone) and again.cached == 0 and not process.store.is_settled
    monkeypatch.setattr(os, "write", stuck._write)  # of the processes that come now
    other = start()
    found = other.answer(prompt_of())
    assert found.equals(alone) and found.cached == 0, "a torn file was read"
    assert other.store is not None
    assert not any(other.store.tiers[0].counts.unusable.values()), "a torn file was visible"
    stuck.released.set()
    process.settle()
    assert not list(tmp_path.glob(f"kv/*/*{TEMPORARY}")), "nothing torn is left"
    found = start().answer(prompt_of())
    assert found.equals(alone) and found.cached == IN_BLOCKS


def test_store_is_closed_while_a_disk_hangs(
    start: Start, alone: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for no disk that hangs already, and what the other folder was given is written."""
    monkeypatch.setattr(store_tier, "HUNG_S", 0.02)
    process, stuck = start(tmp_path / "stuck", tmp_path / "kv"), threading.Event()
    process.settle()
    assert process.store is not None
    first, second = process.store.tiers

    def hang() -> None:
        with first.operation():
            stuck.wait(PATIENCE_S)

    process.store._writers[0].do(hang)
    until = time.monotonic() + PATIENCE_S
    while first.usable:
        assert time.monotonic() < until
        time.sleep(0.001)
    gate = threading.Event()
    process.store._writers[1].do(lambda: gate.wait(PATIENCE_S))
    assert process.answers([process.sequence(prompt_of())])[0].equals(alone)
    threading.Timer(0.2, gate.set).start()
    process.store.close(timeout=PATIENCE_S)
    assert process.store._writers[1].has_ended(0) and second.counts.written == IN_BLOCKS // (PAGE * BLOCK)
    assert not process.store._writers[0].has_ended(0)
    stuck.set()


class Held(Disk):
    """A disk that reads files only one by one, when a test lets it."""

    def __init__(self) -> None:
        self.let = threading.Semaphore(0)

    def read(self, path: Path, space: bytes, digest: bytes) -> tuple[Head, NDArray[np.uint8]]:
        assert self.let.acquire(timeout=PATIENCE_S)
        return super().read(path, space, digest)


def test_others_are_computed_while_a_sequence_fetches(start: Start, alone: Answer) -> None:
    start().answer(prompt_of())
    disk = Held()
    process = with_disk(start(), disk)
    first, second = process.sequence(prompt_of()), process.sequence(prompt_of(30, seed=9), new=8)
    process.scheduler.submit(first, 0.0)
    process.scheduler.submit(second, 0.0)
    while second.key in process.scheduler.state.live:
        process.step()
    assert first.fetch is not None and process.fetching.waiting == 1 and first.computed_tokens == 0
    assert second.output_len == 8
    assert process.scheduler.next_wakeup(time.monotonic()) > time.monotonic(), "the loop sleeps meanwhile"
    disk.let.release(100)
    process.run()
    assert first.tokens[PROMPT:] == alone.ids and first.prefix.cached_tokens == IN_BLOCKS


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("how", ["abort", "preempt", "deadline"])
def test_late_parts_land_in_nobodys_pages(start: Start, kind: str, how: str, checkpoints: Checkpoints) -> None:
    start(kind=kind).answer(prompt_of())
    disk = Held()
    process = with_disk(start(kind=kind), disk)
    plain = start(kind=kind)
    expected = plain.answer(prompt_of(200, seed=4), salt="other")
    first = process.sequence(prompt_of())
    process.scheduler.submit(first, 0.0)
    process.step()
    disk.let.release(2)
    for _ in range(3):
        process.step()
    assert first.fetch is not None
    if how == "abort":
        process.scheduler.abort(first.key)
    elif how == "preempt":
        process.scheduler.state.preempt(first, 0.0)
        process.scheduler.abort(first.key)
    else:
        first.turn.deadline = process.scheduler._earliest_deadline = 1.0
        assert process.scheduler.expire(2.0) == [first]
    assert first.fetch is None and not process.fetching.waiting
    process.scheduler.check()
    second = process.sequence(prompt_of(200, seed=4), salt="other")  # takes the same pages
    process.scheduler.submit(second, 0.0)
    disk.let.release(100)
    process.run()
    assert second.tokens[second.prompt_len :] == expected.ids
    process.settle()
    assert process.answer(prompt_of()).ids == start(kind=kind).answer(prompt_of()).ids


def test_late_store_keeps_what_came_before(start: Start, alone: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    start().answer(prompt_of())
    disk = Held()
    process = with_disk(start(), disk)
    first = process.sequence(prompt_of())
    process.scheduler.submit(first, 0.0)
    disk.let.release(3)
    until = time.monotonic() + PATIENCE_S
    while not (first.fetch and first.fetch.copied == 3 * BLOCK):
        assert time.monotonic() < until
        process.step()
    for fetch in list(process.fetching._active):
        fetch.deadline = 0.0
    process.run()
    assert first.tokens[PROMPT:] == alone.ids and first.prefix.cached_tokens == 3 * BLOCK * PAGE
    disk.let.release(100)


def test_equal_prompts_at_once_fetch_once(start: Start, alone: Answer) -> None:
    start().answer(prompt_of())
    process = start()
    sequences = [process.sequence(prompt_of()) for _ in range(3)]
    answers = process.answers(sequences)
    assert all(one.ids == alone.ids and one.cached >= IN_BLOCKS for one in answers)
    assert process.store is not None and process.store.tiers[0].counts.hits == IN_BLOCKS // (PAGE * BLOCK)


def test_other_salt_model_layout_and_dtype_find_nothing(start: Start, tmp_path: Path) -> None:
    start().answer(prompt_of(), salt="a")
    assert start().answer(prompt_of(), salt="a").cached == IN_BLOCKS
    assert start().answer(prompt_of(), salt="b").cached == 0
    assert start().answer(prompt_of()).cached == 0
    assert start(kind="qwen3").answer(prompt_of(), salt="a").cached == 0
    assert start(kv_cache_dtype="int8").answer(prompt_of(), salt="a").cached == 0
    assert start(kv_cache_dtype="int4").answer(prompt_of(), salt="a").cached == 0
    assert start(dtype="float32").answer(prompt_of(), salt="a").cached == 0


def test_reset_empties_it_for_everybody_and_after_a_restart(start: Start, alone: Answer, tmp_path: Path) -> None:
    process, other = start(), start()
    process.answer(prompt_of())
    process.scheduler.reset_prefix_cache(5)
    process.settle()
    assert process.scheduler.status.prefix_cache_reset == 5
    assert files(tmp_path / "kv") == []
    assert other.answer(prompt_of()).cached == 0
    other.close()
    found = process.answer(prompt_of())
    assert found.equals(alone) and found.cached == IN_BLOCKS, "what the other process stored since is found"
    process.scheduler.reset_prefix_cache(6)
    process.scheduler.reset_prefix_cache(6)  # asked again, because the answer was late
    process.settle()
    assert start().answer(prompt_of()).cached == 0


def test_reset_covers_writes_in_flight_and_sequences_that_run(start: Start, tmp_path: Path) -> None:
    process = start()
    gate = threading.Event()
    assert process.store is not None
    process.settle()
    sequence = process.sequence(prompt_of(), new=200)
    process.scheduler.submit(sequence, 0.0)
    process.store._writers[0].do(lambda: gate.wait(PATIENCE_S))
    while sequence.output_len < 3:
        process.step()
    process.scheduler.reset_prefix_cache(9)
    assert process.scheduler.status.prefix_cache_reset == 0, "it is not confirmed before it is done"
    gate.set()
    process.run()
    process.settle()
    assert process.scheduler.status.prefix_cache_reset == 9
    assert files(tmp_path / "kv") == [] and start().answer(prompt_of()).cached == 0


def test_tier_that_cannot_be_emptied_is_not_confirmed(start: Start) -> None:
    process = start()
    process.answer(prompt_of())
    with_disk(process, Faulty(errno.EROFS, reads=False, writes=True))
    process.scheduler.reset_prefix_cache(3)
    process.forget()
    (found,) = process.answers([process.sequence(prompt_of())])
    assert found.cached == 0, "this process finds nothing there any more"
    assert process.scheduler.status.prefix_cache_reset == 0


def test_two_tiers_write_both_and_the_slow_one_fills_the_fast_one(start: Start, alone: Answer, tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    start(fast, slow).answer(prompt_of())
    assert len(files(fast)) == len(files(slow)) == IN_BLOCKS // (PAGE * BLOCK)
    for path in (*files(fast), fast / TOKEN):
        path.unlink()
    process = start(fast, slow)
    found = process.answer(prompt_of())
    assert found.equals(alone) and found.cached == IN_BLOCKS
    assert process.store is not None and process.store.tiers[1].counts.hits == len(files(fast)) == len(files(slow))
    assert start(fast).answer(prompt_of()).cached == IN_BLOCKS


def test_janitor_keeps_the_size_the_recent_and_the_pinned(start: Start, tmp_path: Path) -> None:
    process = start()
    process.answer(prompt_of())
    found = files(tmp_path / "kv")
    each = found[0].stat().st_size
    for age, path in zip(count(1000, 1000), found, strict=False):
        os.utime(path, (time.time() - age,) * 2)
    oldest = found[-1]
    oldest.with_name(oldest.name + PINNED).touch()
    stale, fresh = (oldest.with_name(f"{'a' * 38}-{name}{TEMPORARY}") for name in ("old", "new"))
    for path in (stale, fresh):
        path.touch()
    os.utime(stale, (1, 1))
    strange = tmp_path / "kv" / "ab" / "report.txt"
    strange.parent.mkdir(exist_ok=True)
    strange.write_text("not the store's")
    os.utime(strange, (1, 1))
    assert process.store is not None
    (tier,) = process.store.tiers
    tier.limit = 5 * each
    tier.sweep()
    left = [path for path in found if path.exists()]
    assert left == [*found[:3], oldest] and tier.counts.evictions == len(found) - 4
    assert tier.counts.nbytes == sum(path.stat().st_size for path in left) <= tier.limit
    assert not stale.exists() and fresh.exists() and strange.exists()


def test_prompt_that_is_to_be_kept_outlives_what_is_used_later(start: Start, tmp_path: Path) -> None:
    process = start()
    assert process.store is not None
    (tier,) = process.store.tiers
    before = time.time()
    process.answer(prompt_of(), keep_s=600)
    kept = files(tmp_path / "kv")
    assert all(600 <= path.stat().st_mtime - before < 600 + PATIENCE_S for path in kept)
    times = [path.stat().st_mtime for path in kept]
    process.answer(prompt_of())  # it finds them in memory
    process.forget()
    process.answer(prompt_of())  # and in the files
    assert [path.stat().st_mtime for path in kept] == times, "another use does not end it"
    process.answer(prompt_of(seed=5))
    assert len(files(tmp_path / "kv")) == 2 * len(kept) == 20
    size = max(path.stat().st_size for path in files(tmp_path / "kv"))
    for limit, of_kept, of_others in ((15, 7, 7), (10, 5, 4)):  # beyond half of the folder, what is kept goes first
        tier.limit = limit * size
        tier.sweep()
        left = files(tmp_path / "kv")
        assert len({*left} & {*kept}) == of_kept and len({*left} - {*kept}) == of_others
    process.forget()
    process.answer(prompt_of(), keep_s=900)
    assert max(path.stat().st_mtime for path in files(tmp_path / "kv")) >= before + 900


def test_prefix_in_memory_is_kept_and_written_again_if_it_is_gone(start: Start, tmp_path: Path) -> None:
    process = start()
    process.answer(prompt_of())
    found = files(tmp_path / "kv")

    for path in found:
        os.utime(path, (1, 1))
    found[0].unlink()
    process.answer(prompt_of())  # its pages come from memory
    assert all(path.stat().st_mtime > 1 for path in found[1:]), "they were used"
    process.answer(prompt_of())
    assert found[0].exists()


def test_memory_of_copies_is_used_again_when_they_are_written(start: Start) -> None:
    process = start()
    assert process.store is not None
    pages = process.store.pages
    own = [list(range(1, BLOCK + 1)) for _ in pages.windows]
    first = pages.gather(own)
    place, data = first.read().data_ptr(), first.read().clone()
    second = pages.gather(own)
    assert second.read().data_ptr() != place, "the first copy is still in use"
    del first
    third = pages.gather(own)
    assert third.read().data_ptr() == place and third.read().equal(data)


def test_slow_store_is_not_waited_for(start: Start, alone: Answer) -> None:
    start().answer(prompt_of())
    process = start()
    assert process.store is not None
    process.store.always = False
    process.fetching._token_s = lambda: 1e-6  # computing takes no time here
    process.store._byte_s, process.store._tried = 1.0, time.monotonic()
    found = process.answer(prompt_of())
    assert found.equals(alone) and found.cached == 0 and process.store.refused == 1
    process.forget()
    process.store._byte_s = 1e-12
    assert process.answer(prompt_of()).cached == IN_BLOCKS


def test_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match=r"--kv-store .*others must not"):
        check_folder(tmp_path / "open")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        check_folder(tmp_path / "file")
    check_folder(tmp_path / "file" / "below")  # cannot be made: the store does without it
    check_folder(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


SEED = os.environ.get("KV_SEED", "")


class Whimsical(Disk):
    """A disk on which operations fail, find nothing or take their time, at random."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def read(self, path: Path, space: bytes, digest: bytes) -> tuple[Head, NDArray[np.uint8]]:
        time.sleep(self.draw.random() * 0.004)
        if self.draw.random() < 0.05:
            raise FileNotFoundError
        return super().read(path, space, digest)

    def exists(self, path: Path) -> bool:
        return self.draw.random() < 0.97 and super().exists(path)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral", "qwen3_5"])
def test_random_company_aborts_preemptions_and_resets_change_no_token(
    checkpoints: Checkpoints, start: Start, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    draw = random.Random(kind + SEED)
    stems = [prompt_of(draw.choice([40, 130, 260]), seed=seed) for seed in range(4)]
    plain = Process(checkpoints(kind), monkeypatch)
    prompts = [draw.choice(stems) + prompt_of(draw.randrange(1, 90), seed=9 + at) for at in range(12)]
    expected = [plain.answer(prompt).ids for prompt in prompts]
    processes = [with_disk(start(kind=kind, kv_cache_gb=0.0015), Whimsical(draw)) for _ in range(2)]
    monkeypatch.setattr(fetching, "STALL_S", {True: 0.03, False: 0.03})
    monkeypatch.setattr(fetching, "COPY_S", 0.0)
    ends: list[tuple[int, Sequence]] = []
    for turn in range(120):
        process = draw.choice(processes)
        state = process.scheduler.state
        match draw.randrange(9):
            case 0 | 1 | 2 if len(state.live) < 6:
                at = draw.randrange(len(prompts))
                sequence = process.sequence(prompts[at])
                process.scheduler.submit(sequence, time.monotonic())
                ends.append((at, sequence))
            case 3 if state.live:
                aborted = process.scheduler.abort(draw.choice(list(state.live)))
                ends = [one for one in ends if one[1] is not aborted]
            case 4 if state.running:
                state.preempt(draw.choice(list(state.running)), time.monotonic())
            case 5:
                process.forget()
            case 6 if draw.random() < 0.2:
                process.scheduler.reset_prefix_cache(turn)
        for _ in range(draw.randrange(5)):
            process.step()
    for process in processes:
        process.run()
    assert len(ends) > 8
    for at, sequence in ends:
        assert sequence.tokens[sequence.prompt_len :] == expected[at]


class Replacing(Disk):
    """A disk on which each file, after its header was read, is replaced by one without most pages of windows."""

    def read(self, path: Path, space: bytes, digest: bytes) -> tuple[Head, NDArray[np.uint8]]:
        head, payload = super().read(path, space, digest)
        kept = payload.nbytes // head.pages
        absent = tuple(head.pages - 1 for _ in head.absent)
        return msgspec.structs.replace(head, absent=absent, nbytes=kept), payload[-kept:]


def test_files_that_lost_pages_of_windows_since_their_header_was_read_are_not_used(
    checkpoints: Checkpoints, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Process(checkpoints("mistral"), monkeypatch).answer(prompt_of())
    start(kind="mistral").answer(prompt_of())
    process = with_disk(start(kind="mistral"), Replacing())
    found = process.answer(prompt_of())
    assert found.equals(expected) and found.cached == 0


def test_state_whose_pages_are_gone_is_not_used(
    checkpoints: Checkpoints, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(PAGE * BLOCK * 4 + 1)  # ends with a block, so that the state at its end has no pages beside it
    expected = Process(checkpoints("qwen3_5"), monkeypatch).answer(prompt)
    start(kind="qwen3_5").answer(prompt)
    found = {path: Disk().read_head(path) for path in files(tmp_path / "kv")}
    assert max(head.tokens for head in found.values() if head.state) == len(prompt) - 1
    for lost in [path for path, head in found.items() if not head.state]:
        data = lost.read_bytes()
        lost.unlink()
        process = start(kind="qwen3_5")
        assert process.answer(prompt).equals(expected), found[lost].tokens
        process.close()
        lost.write_bytes(data)
