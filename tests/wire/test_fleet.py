"""Several whole workers behind one frontend: routing, and what becomes of streams when one of them is lost."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from frontend.errors import Overloaded
from frontend.workers.connection import WorkerConnection
from frontend.workers.discovery import Discovery
from frontend.workers.pool import WorkerPool
from frontend.workers.status import READY, not_ready
from frontend.workers.stream import Stream
from shared import messages as m
from shared.address import parse_all
from shared.config import WireConfig
from tests.patience import PATIENCE_S
from tests.wire.harness import FakeRunner, Worker, expected, sampling
from tests.wire.test_link import until, whole


def slow() -> FakeRunner:
    return FakeRunner(delay=0.005)


@asynccontextmanager
async def fleet(
    *workers: Worker, file: Path | None = None, ready: int | None = None, **options: Any
) -> AsyncIterator[WorkerPool]:
    """In front of running workers; `ready` of them are waited for (None: all)."""
    fixed = [] if file else parse_all(" ".join(f"ipc://{worker.folder}" for worker in workers))
    made = WorkerPool(WireConfig(), Discovery(fixed, file), **options)
    await made.start()
    try:
        await until(lambda: len(made.membership.ready()) == (len(workers) if ready is None else ready))
        yield made
    finally:
        await made.close()


@pytest.fixture
def two(tmp_path: Path) -> Any:
    with Worker(tmp_path / "a", runner=slow()) as a, Worker(tmp_path / "b", runner=slow()) as b:
        yield a, b
        for worker in (a, b):
            worker.scheduler.check()


async def start(fleet: WorkerPool, count: int, tokens: int = 200) -> list[Stream]:
    """Streams that all have begun, told apart by their prompts."""
    streams = [await fleet.submit([i, i + 1], sampling(tokens, seed=i)) for i in range(count)]
    await until(lambda: all(len(stream.output) > 3 for stream in streams))
    return streams


async def check(streams: list[Stream], tokens: int = 200) -> None:
    """Each has what it would have had alone, once, and ended as it should."""
    for i, (found, end) in enumerate(await asyncio.wait_for(asyncio.gather(*map(whole, streams)), PATIENCE_S)):
        assert found == expected([i, i + 1], tokens)
        assert (end.outcome, end.tokens, streams[i].seed) == (m.Outcome.LENGTH, tokens, i)


def at(fleet: WorkerPool, index: int) -> int:
    return len(fleet.membership.connections[index].streams)


def idle(worker: Worker) -> bool:
    return not worker.scheduler.has_work


async def test_requests_are_spread_and_all_answered(two: tuple[Worker, Worker]) -> None:
    async with fleet(*two) as made:
        streams = await start(made, 20)
        assert (at(made, 0), at(made, 1)) == (10, 10)
        members = made.membership.statuses()
        assert [member.streams for member in members] == [10, 10] and all(member.load for member in members)
        await check(streams)
        assert made.live == made.counters.resumed == 0


async def test_choices_of_a_prompt_and_equal_beginnings_go_together(two: tuple[Worker, Worker]) -> None:
    async with fleet(*two) as made:
        choices = [await made.submit([1, 2], sampling(500), group=7) for _ in range(4)]
        assert sorted((at(made, 0), at(made, 1))) == [0, 4]
        made.abort(choices)
        beginnings = [[i % 4] * 80 for i in range(16)]  # four conversations, taking turns
        homes: dict[int, set[int]] = {}
        for prompt in beginnings:
            stream = await made.submit(prompt, sampling(4))
            homes.setdefault(prompt[0], set()).add(0 if at(made, 0) else 1)
            await whole(stream)
        assert all(len(where) == 1 for where in homes.values())
        assert {one for where in homes.values() for one in where} == {0, 1}


async def test_streams_of_a_worker_that_dies_go_on_at_the_other(two: tuple[Worker, Worker]) -> None:
    a, b = two
    async with fleet(a, b) as made:
        streams = await start(made, 20)
        a.kill()
        await until(lambda: made.membership.connections[0].welcome is None)
        assert made.membership.readiness == READY
        assert (at(made, 0), at(made, 1)) == (0, 20)
        again = await made.submit([5], sampling(3))
        assert (await whole(again))[0] == expected([5], 3)
        await check(streams)
        assert (made.counters.moved, made.counters.lost, made.live) == (10, 0, 0)
        await until(lambda: idle(b))


async def test_a_request_that_was_not_admitted_yet_goes_on_too(two: tuple[Worker, Worker]) -> None:
    a, b = two
    async with fleet(a, b) as made:
        a.stopped = True
        a.thread.join()  # hears, and answers nothing
        waiting = [asyncio.ensure_future(made.submit([i], sampling(5))) for i in range(6)]
        await until(lambda: at(made, 0) == 3)
        a.link.close()
        for i, stream in enumerate(await asyncio.gather(*waiting)):
            assert (await whole(stream))[0] == expected([i], 5)


async def test_when_all_die_streams_wait_and_the_first_that_is_back_takes_them(two: tuple[Worker, Worker]) -> None:
    a, b = two
    async with fleet(a, b) as made:
        streams = await start(made, 8)
        a.kill()
        b.kill()
        await until(lambda: not made.membership.readiness.ready)
        assert made.live == 8
        with Worker(b.folder, epoch=2) as back:
            await check(streams)
            assert made.counters.lost == 0
            await until(lambda: idle(back))


def cut(link: WorkerConnection) -> Any:
    """Nothing comes through in either direction, as when a cable is pulled; returns what mends it."""
    link._on_event = lambda event: None  # type: ignore[method-assign]
    link._send = lambda message: False  # type: ignore[method-assign]

    def mend() -> None:
        del link._on_event, link._send

    return mend


async def test_a_worker_that_was_only_cut_off_does_not_go_on_with_what_was_moved(two: tuple[Worker, Worker]) -> None:
    a, b = two
    async with fleet(a, b) as made:
        streams = await start(made, 8, tokens=1500)
        mend = cut(made.membership.connections[0])
        await until(lambda: at(made, 1) == 8)
        assert all(len(stream.deaths) == (stream.submit.crashes > 0) for stream in streams)
        assert sum(stream.submit.crashes for stream in streams) == 4  # for all we know
        made.abort([stream for stream in streams if stream.deaths][:1])
        assert not idle(a)
        mend()
        await until(lambda: idle(a))
        assert not any(stream.deaths for stream in streams if stream.end is None)
        await until(lambda: len(made.membership.ready()) == 2)
        again = await made.submit([9], sampling(3))
        assert at(made, 0) == 1 and (await whole(again))[0] == expected([9], 3)
        made.abort(streams)
        await until(lambda: idle(b))


async def test_a_worker_that_forgot_us_gets_its_streams_again(tmp_path: Path) -> None:
    with Worker(tmp_path, runner=slow(), lease_timeout=0.5) as worker:
        async with fleet(worker) as made:
            streams = await start(made, 4, tokens=450)
            mend = cut(made.membership.connections[0])
            await until(lambda: not made.membership.readiness.ready and idle(worker))
            mend()
            await check(streams, tokens=450)
            assert made.counters.lost == 0 and not any(stream.submit.crashes for stream in streams)
            worker.scheduler.check()


async def test_streams_of_a_worker_that_hangs_go_on_at_the_other(two: tuple[Worker, Worker]) -> None:
    a, b = two
    async with fleet(a, b, stall_timeout=0.5) as made:
        streams = await start(made, 6)
        going_on = threading.Event()
        a.runner.trouble = lambda sequence: going_on.wait(PATIENCE_S) and None
        await until(lambda: at(made, 1) == 6)
        assert "stalled" in made.membership.connections[0].readiness.text
        going_on.set()
        await check(streams)
        await until(lambda: idle(a) and len(made.membership.ready()) == 2)


async def test_a_worker_without_room_is_passed_over(tmp_path: Path) -> None:
    with (
        Worker(tmp_path / "a", runner=slow(), max_batch=1, max_waiting=1) as a,
        Worker(tmp_path / "b", runner=slow(), max_batch=1, max_waiting=1) as b,
    ):
        async with fleet(a, b) as made:
            first = [await made.submit([1] * 100, sampling(400)) for _ in range(3)]  # all with the same beginning
            late = await made.submit([1] * 100, sampling(400))
            with pytest.raises(Overloaded) as refused:
                await made.submit([1] * 100, sampling(5))
            assert refused.value.code == "queue_full" and (refused.value.retry_after or 0) >= 1
            assert (at(made, 0), at(made, 1)) == (2, 2)
            made.abort([*first, late])
            await until(lambda: idle(a) and idle(b))


async def test_a_moved_stream_waits_for_room(tmp_path: Path) -> None:
    with (
        Worker(tmp_path / "a", runner=slow()) as a,
        Worker(tmp_path / "b", runner=slow(), max_batch=1, max_waiting=1) as b,
    ):
        async with fleet(a, b) as made:
            streams = [await made.submit([i, i + 1], sampling(60, seed=i)) for i in range(4)]
            a.kill()
            await check(streams, tokens=60)
            assert made.counters.lost == 0
            b.scheduler.check()


async def test_a_worker_that_drains_finishes_what_it_has_and_passes_on_the_rest(two: tuple[Worker, Worker]) -> None:
    a, b = two
    async with fleet(a, b) as made:
        streams = await start(made, 6, tokens=300)
        a.request_table.draining = True
        await until(lambda: len(made.membership.ready()) == 1)
        assert at(made, 0) == 3
        more = [await made.submit([i + 6, i + 7], sampling(300, seed=i + 6)) for i in range(3)]
        assert (at(made, 0), at(made, 1)) == (3, 6)
        a.end()
        await check([*streams, *more], tokens=300)
        assert made.counters.lost == 0


async def test_workers_join_and_leave_by_a_file(tmp_path: Path) -> None:
    file = tmp_path / "workers"
    file.write_text(f"ipc://{tmp_path}/a\n")
    with Worker(tmp_path / "a", runner=slow()) as a, Worker(tmp_path / "b", runner=slow()) as b:
        async with fleet(a, file=file, resolve_s=0.05) as made:
            streams = await start(made, 4)
            file.write_text(f"ipc://{tmp_path}/b  # the only one now\n")
            await until(lambda: [link.leaving for link in made.membership.connections] == [True, False])
            await until(lambda: len(made.membership.ready()) == 1)
            more = [await made.submit([i + 4, i + 5], sampling(200, seed=i + 4)) for i in range(2)]
            assert (at(made, 0), at(made, 1)) == (4, 2)
            await check([*streams, *more])
            await until(lambda: len(made.membership.connections) == 1)
            assert (
                made.counters.resumed == 0 and idle(a) and made.membership.statuses()[0].address == f"ipc://{b.folder}"
            )


async def test_a_worker_that_does_not_fit_is_refused_with_the_reason(tmp_path: Path) -> None:
    with (
        Worker(tmp_path / "a") as a,
        Worker(tmp_path / "b", max_seq_len=1024) as b,
        Worker(tmp_path / "c", model="other") as c,
    ):
        async with fleet(a, b, c, ready=1, model="fake") as made:
            await until(lambda: all(link.welcome for link in made.membership.connections))
            good = next(link for link in made.membership.connections if link.readiness.ready)
            reasons = {member.address: member.reason for member in made.membership.statuses()}
            assert "'other', this frontend 'fake'" in reasons[f"ipc://{c.folder}"]
            assert any("--max-seq-len" in reason for reason in reasons.values())
            {f"ipc://{a.folder}": a, f"ipc://{b.folder}": b}[good.address.name].kill()
            await until(
                lambda: not good.readiness.ready and made.membership.readiness.ready
            )  # its kind is gone: now the next decides


async def test_another_protocol_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "PROTOCOL_VERSION", m.PROTOCOL_VERSION + 1)
    with Worker(tmp_path) as worker:
        async with fleet(worker, ready=0) as made:
            said = f"the worker speaks protocol {m.PROTOCOL_VERSION - 1}, this frontend {m.PROTOCOL_VERSION}"
            await until(lambda: made.membership.readiness == not_ready(said))
            with pytest.raises(Overloaded, match=said):
                await made.submit([1], sampling(1))


async def test_a_request_in_flight_in_two_deaths_is_not_tried_a_third_time(tmp_path: Path) -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(tmp_path / name)) for name in "abc"]
        for worker in workers:  # they hear, and die before they have made a token
            worker.stopped = True
            worker.thread.join()
        async with fleet(*workers) as made:
            poison = asyncio.ensure_future(made.submit([1], sampling(5)))
            for _ in range(2):
                await until(lambda: bool(made.live))
                victim = next(i for i in range(3) if at(made, i))
                workers[victim].link.close()
                await until(lambda victim=victim: not at(made, victim))  # type: ignore[misc]
            with pytest.raises(Overloaded, match="the worker was lost"):
                await poison
            assert len(made.membership.ready()) == 1
        for worker in workers:
            worker.link.close()
