"""The spare process: it carries out a worker's command as a new process would. If it fails, a new one is started."""

import asyncio
import os
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deploy.launcher import many_spare as spares
from deploy.launcher.child_command import child_environment
from deploy.launcher.many_spare import MOST_BYTES, PREFIX, Spare
from tests.frontend.serving import until

# With SLUICE_ISA in its environment, this command ends with an error that names the variable.
WORDS = [*PREFIX, "deploy.cli.main", "worker", "--model=/no/such/model", "--run-dir=/tmp", "--device=cpu"]


@asynccontextmanager
async def prepared(**fields: int) -> AsyncIterator[tuple[Spare, Process]]:
    spare = Spare(**fields)
    try:
        spare.prepare()
        await until(lambda: spare._process is not None)
        assert spare._process is not None
        yield spare, spare._process
    finally:
        await spare.close()


async def output_of(spare: Spare, words: list[str], **variables: str) -> tuple[Process, str]:
    """Runs a command until it ends. Returns its process and its output."""
    read_end, write_end = os.pipe()
    process = await spare.start(words, child_environment() | variables, (), write_end)
    os.close(write_end)
    with open(read_end) as pipe:
        text = await asyncio.to_thread(pipe.read)
    await process.wait()
    return process, text


async def test_the_spare_process_becomes_the_command_with_its_environment() -> None:
    async with prepared() as (spare, waiting):
        process, text = await output_of(spare, WORDS, SLUICE_ISA="no-such-set")
        assert process is waiting
        assert (process.returncode, text.startswith("sluice worker: SLUICE_ISA")) == (2, True), text
        usual, same = await output_of(spare, WORDS, SLUICE_ISA="no-such-set")
        assert usual is not process, "one process becomes one worker"
        assert (usual.returncode, same) == (2, text)


async def test_ps_shows_the_command_that_it_carries_out() -> None:
    async with prepared() as (spare, waiting):
        read_end, write_end = os.pipe()
        words = [*PREFIX, "http.server", "--bind=127.0.0.1", "0"]
        await spare.start(words, child_environment(), (), write_end)
        os.close(write_end)
        with open(read_end, "rb") as pipe:
            await asyncio.to_thread(pipe.readline)  # reads the line "Serving HTTP on …"
            shown = Path(f"/proc/{waiting.pid}/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
            assert shown == words
            waiting.kill()
            await waiting.wait()


async def test_it_ends_with_its_socket_and_when_it_is_closed() -> None:
    async with prepared() as (spare, waiting):
        assert spare._socket is not None
        spare._socket.close()
        assert await asyncio.wait_for(waiting.wait(), 60) == 0
    async with prepared() as (spare, waiting):
        await spare.close()
        assert waiting.returncode is not None


async def test_a_killed_one_is_replaced_a_few_times() -> None:
    async with prepared(most_failures=2) as (spare, first):
        first.kill()
        await first.wait()
        process, _ = await output_of(spare, WORDS, SLUICE_ISA="no-such-set")
        assert process.returncode == 2, "the command is started as usual"
        spare.prepare()
        await until(lambda: spare._process not in (None, first))
        second = spare._process
        assert second is not None
        second.kill()
        await second.wait()
        spare.prepare()
        assert spare._starting is None and spare._process is None, "two failures are enough"


async def test_what_does_not_fit_starts_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    async def start_process(command: list[str], *_: object) -> str:
        started.append(command)
        return "usual"

    monkeypatch.setattr(spares, "start_process", start_process)
    async with prepared() as (spare, waiting):
        for words, variables, fds in (
            (["/bin/true"], {}, ()), (WORDS, {"LONG": "x" * MOST_BYTES}, ()), (WORDS, {}, (0,)),
        ):  # fmt: skip
            assert await spare.start(words, variables, fds, 1) == "usual"
        assert len(started) == 3 and spare._process is waiting
