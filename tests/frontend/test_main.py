"""A frontend process: imports, start, signals, exit."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from frontend.__main__ import serve
from frontend.text.tokenizer_files import TokenizerError
from shared.config.settings import ModelConfig, Settings, WireConfig
from shared.config.worker import WorkerConfig
from tests.fakes import MODEL
from tests.frontend.text.tokenizers import byte_level, save
from tests.patience import PATIENCE_S

SERVER = """
import socket, sys
import frontend.__main__ as main
from shared.config import ModelConfig, Settings, WorkerConfig
from tests.fakes import FakePool

def play(pool, stream):
    def say():
        pool.send_tokens(stream, [65])
        if len(stream.output) < stream.submit.sampling.max_tokens:
            pool.later(say, 0.05)
        else:
            pool.end(stream, "length")
    pool.later(say)

main.WorkerPool = lambda *_, **__: FakePool(play)
settings = Settings(
    model=ModelConfig(model=sys.argv[1], served_model_name="tiny"),
    worker=WorkerConfig(drain_timeout=float(sys.argv[3])),
)
main.serve(settings, [socket.socket(fileno=int(sys.argv[2]))])
"""


@contextmanager
def process(folder: Path, drain_timeout: float) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.fileno()
        command = [sys.executable, "-c", SERVER, str(folder), str(number), str(drain_timeout)]
        child = subprocess.Popen(command, pass_fds=(number,))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
            yield child, http
    finally:
        child.kill()
        child.wait()


def wait_ready(http: httpx.Client) -> list[str]:
    """Waits until the server is ready. Returns the reasons that it gave before for not being ready."""
    reasons: list[str] = []
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        answer = http.get("/ready")
        if answer.status_code == 200:
            return reasons
        reasons.append(answer.json()["reason"])
        time.sleep(0.01)
    raise AssertionError(reasons)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(byte_level(), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("drain_timeout", "tokens", "end"), [(PATIENCE_S, 20, "data: [DONE]"), (3.0, 400, '"code":"shutdown"}}')]
)
def test_sigterm_lets_streams_finish_or_fails_them_and_exits_0(
    folder: Path, drain_timeout: float, tokens: int, end: str
) -> None:
    body = {"model": MODEL, "prompt": [1], "max_tokens": tokens, "stream": True}
    with process(folder, drain_timeout) as (child, http):
        assert set(wait_ready(http)) <= {"loading the tokenizer"}
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + PATIENCE_S
            while (answer := httpx.get(f"{http.base_url}/ready", timeout=PATIENCE_S)).status_code != 503:
                assert time.monotonic() < deadline
            assert answer.json()["reason"] == "draining"
            rest = [line for line in lines if line]
        assert rest[-1].endswith(end)
        assert child.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(("pause", "finishes"), [(0.1, True), (1.2, False)])
def test_second_signal_cuts_streams_off_only_after_a_second(folder: Path, pause: float, finishes: bool) -> None:
    body = {"model": MODEL, "prompt": [1], "max_tokens": 40, "stream": True}
    with process(folder, PATIENCE_S) as (child, http):
        wait_ready(http)
        rest = ["cut off"]
        with suppress(httpx.RemoteProtocolError), http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            time.sleep(pause)
            child.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert (rest[-1] == "data: [DONE]") is finishes
        assert child.wait(PATIENCE_S) == 0


def test_folder_without_a_tokenizer_ends_the_process_with_its_error(tmp_path: Path) -> None:
    wire = WireConfig(run_dir=str(tmp_path))
    settings = Settings(model=ModelConfig(model=str(tmp_path)), wire=wire, worker=WorkerConfig(drain_timeout=1))
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TokenizerError):
        serve(settings, [listener])


def test_import_loads_no_torch_and_takes_little_memory() -> None:
    code = (
        "import re, sys, time; begun = time.perf_counter(); import frontend.__main__; "
        "took = time.perf_counter() - begun; heavy = {'torch', 'transformers', 'worker', 'numpy'} & set(sys.modules); "
        "kib = int(re.search(r'VmRSS:\\s+(\\d+)', open('/proc/self/status').read())[1]); "
        "print(f'{took:.2f} s'); print(kib // 1024, *heavy)"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    print(f"imports: {said}")
    memory, *heavy = said.splitlines()[1].split()
    assert heavy == [] and int(memory) < 120
