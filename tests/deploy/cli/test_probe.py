"""`sluice probe` against servers with fixed answers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from deploy.cli.main import main
from tests.e2e.server import free_port


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        log_message: Callable[..., None] = lambda *_: None

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/health"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "words", "code"),
    [
        (200, b"ok", (), 0),
        (503, b"loading 3 %", (), 1),
        (200, b"# HELP\nx_worker_last_step_age_seconds 3.5\n", ("--max-step-age", "4"), 0),
        (200, b'# HELP\nx_worker_last_step_age_seconds{model_name="a } b"} 3.5\n', ("--max-step-age", "4"), 0),
        (200, b'# HELP\nx_worker_last_step_age_seconds{model_name="a } b"} 3.5\n', ("--max-step-age", "3"), 1),
        (200, b"nothing of the kind", ("--max-step-age", "3"), 1),
    ],
)
def test_exit_code_reports_the_health(
    status: int, body: bytes, words: tuple[str, ...], code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with answering(status, body) as url:
        assert main(["probe", url, *words]) == code
    assert bool(capfd.readouterr().err) == bool(code)


def test_probe_ignores_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    with answering(200, b"ok") as url:
        assert main(["probe", url]) == 0


def test_unreachable_url_and_bad_url_have_exit_codes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", f"http://127.0.0.1:{free_port()}/health"]) == 1
    assert main(["probe", "localhost"]) == 2
    assert "does not answer" in capfd.readouterr().err


@pytest.mark.parametrize("url", ["http://[::1", "http://a..b:1", "http://h/ü", "http://h:abc", "http://"])
def test_malformed_url_is_told_in_a_sentence(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", url]) == 2
    assert f"sluice probe: {url} is no URL: " in capfd.readouterr().err
