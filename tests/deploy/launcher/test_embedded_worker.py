"""A worker owned by a Python process; here the worker is a small script. tests/e2e/test_llm.py has a real worker."""

import sys
from pathlib import Path

import pytest

from deploy.launcher.child_command import CliError
from deploy.launcher.embedded_worker import EmbeddedWorker, embedded_worker
from shared.config.settings import Settings
from tests.deploy.launcher.harness import until

COUNT = "import os, pathlib; epoch = os.environ['SLUICE_EPOCH']; (pathlib.Path({folder!r}) / epoch).touch()\n"


@pytest.fixture
def starts(tmp_path: Path) -> Path:
    """A folder in which each process of the worker makes a file named after its epoch."""
    folder = tmp_path / "starts"
    folder.mkdir()
    return folder


def run_script(monkeypatch: pytest.MonkeyPatch, starts: Path, code: str) -> None:
    argv = [sys.executable, "-I", "-S", "-c", COUNT.format(folder=str(starts)) + code]
    monkeypatch.setattr("deploy.launcher.embedded_worker.command_line", lambda *_: argv)


def ended(worker: EmbeddedWorker) -> bool:
    try:
        worker.raise_if_ended()
    except CliError:
        return True
    return False


async def test_worker_that_ends_before_it_was_ready_is_not_restarted(
    monkeypatch: pytest.MonkeyPatch, starts: Path
) -> None:
    run_script(monkeypatch, starts, "print('sluice worker: no weights'); raise SystemExit(3)")
    async with embedded_worker(Settings()) as worker:
        await until(lambda: ended(worker))
        with pytest.raises(CliError, match=r"^the worker cannot start: no weights$"):
            worker.raise_if_ended()
    assert [file.name for file in starts.iterdir()] == ["1"]


async def test_silent_end_is_reported_as_such(monkeypatch: pytest.MonkeyPatch, starts: Path) -> None:
    run_script(monkeypatch, starts, "raise SystemExit(1)")
    async with embedded_worker(Settings()) as worker:
        await until(lambda: ended(worker))
        with pytest.raises(CliError, match="it printed nothing"):
            worker.raise_if_ended()


async def test_worker_that_was_ready_is_restarted_with_the_next_epoch(
    monkeypatch: pytest.MonkeyPatch, starts: Path
) -> None:
    wait = "import time\nwhile epoch == '1' and not (pathlib.Path({folder!r}) / 'die').exists(): time.sleep(0.01)\n"
    code = wait.format(folder=str(starts)) + "if epoch != '1': import signal; signal.pause()"
    run_script(monkeypatch, starts, code)
    async with embedded_worker(Settings()) as worker:
        worker.mark_ready()
        (starts / "die").touch()
        await until(lambda: (starts / "2").exists())
        worker.raise_if_ended()


async def test_end_of_the_block_kills_the_worker_and_removes_its_folder(
    monkeypatch: pytest.MonkeyPatch, starts: Path
) -> None:
    run_script(monkeypatch, starts, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.pause()")
    async with embedded_worker(Settings()) as worker:
        await until(lambda: (starts / "1").exists())
        folder = Path(worker.wire.run_dir)
        assert folder.is_dir()
    assert ended(worker) and not folder.exists()
