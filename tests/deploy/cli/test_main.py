"""The `sluice` command: help, errors, exit codes."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli import main
from tests.patience import PATIENCE_S

SLUICE = [sys.executable, "-m", "deploy.cli.main"]


def run_process(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SLUICE, *argv], capture_output=True, text=True, timeout=PATIENCE_S)


def fail(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main.main(argv)
    return code, capsys.readouterr().err.strip()


def test_help_imports_no_heavy_library() -> None:
    check = (
        "import sys; from deploy.cli.main import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'asyncio', 'starlette', 'zmq', 'msgspec', 'huggingface_hub'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "--prefill-chunk-size" in done.stdout


def test_no_command_lists_all_commands() -> None:
    done = run_process()
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("serve", "worker", "frontend", "bench"))


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["srve"], 2, "sluice: there is no command 'srve'; did you mean serve?"),
        (["nonsense"], 2, "'nonsense'; see sluice --help"),
        (["--port", "80"], 2, "sluice: --port must follow a command, as in `sluice serve --port`"),
        (["serve", "--prot", "1"], 2, "sluice serve: unknown flag --prot; did you mean --port?"),
        (["serve", "--batching-mode", "static", "--use-chunked-prefill"], 2, "--use-chunked-prefill"),
        (["serve", "--model", "/no/such/folder"], 3, "--model /no/such/folder: there is no such file or folder"),
        (["serve", "--model", "./missing"], 3, "--model ./missing"),
        (["serve", "/no/such/folder"], 3, "--model /no/such/folder: there is no such file or folder"),
        (["serve", "--port=0", "/no/such/folder", "--insecure"], 3, "--model /no/such/folder: there is no such"),
        (["serve", "demo", "other"], 2, "unexpected argument 'other'"),
        (["serve", "demo", "--model=other"], 2, "'demo' and --model both name the model"),
        (["serve", "--model", "demo", "--run-dir", "/" + "x" * 120], 1, "--run-dir"),
        (["worker", "--model", "demo", "--run-dir", "/" + "x" * 120], 2, "--run-dir: /x+/requests.sock has 135"),
        (
            ["frontend", "--model", "demo", "--run-dir", "/" + "x" * 120],
            2,
            "--run-dir: /x+/requests.sock has 135",
        ),
        (["worker"], 2, "--run-dir"),
        (["frontend"], 2, "--run-dir"),
        (["worker", "--frontends", "2"], 2, "unknown flag --frontends"),
    ],
)
def test_mistake_is_one_line_with_an_exit_code(
    capsys: pytest.CaptureFixture[str], argv: list[str], code: int, words: str
) -> None:
    got, text = fail(capsys, *argv, *(["--port", "0"] if argv[0] == "serve" and "--run-dir" in argv else []))
    assert got == code
    assert re.search(words.replace("?", r"\?"), text), text
    assert "\n" not in text


def test_bad_variable_is_one_line_with_an_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_PORT", "eighty")
    assert fail(capsys, "serve") == (2, "sluice serve: SLUICE_PORT must be a whole number, not 'eighty'")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_output_that_cannot_be_written_is_told_in_a_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*SLUICE, "completion", "bash"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S
        )
    assert (done.returncode, done.stderr) == (1, "sluice completion: No space left on device\n")


def test_reader_that_has_enough_ends_the_command_without_a_word() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*SLUICE, "completion", "bash"], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("command", [["doctor"], ["run", "--list"]])
def test_terminal_and_locale_without_unicode_get_all_lines(command: list[str]) -> None:
    """`doctor` prints arrows, and the table of names has letters beyond ASCII."""
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    done = subprocess.run([*SLUICE, *command], capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
    assert done.stdout.isascii() and "Traceback" not in done.stderr and "cannot be read" not in done.stderr, done.stderr
