"""The client of `sluice chat` against a scripted server."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from deploy.cli.http_client import Server
from deploy.launcher.child_command import CliError
from tests.deploy.cli.harness import Reply, chunk, refuses, says, scripted_server, sluice
from tests.patience import PATIENCE_S


@pytest.mark.parametrize(
    ("reply", "printed", "words"),
    [
        (refuses(422, "`top_p` must be at most 1"), "", "`top_p` must be at most 1 (HTTP 422)"),
        ((500, b"it broke"), "", "it broke (HTTP 500)"),
        ((404, b'{"detail": "Not Found"}'), "", "Not Found (HTTP 404)"),
        (says("so far", end=b'data: {"error": {"message": "the worker failed"}}'), "so far\n", "the worker failed"),
        (says("so far", end=b""), "so far\n", "the server closed the stream before the answer was complete"),
    ],
)
def test_failure_carries_the_servers_message(
    capsys: pytest.CaptureFixture[str], reply: Reply, printed: str, words: str
) -> None:
    with scripted_server(reply) as server:
        got = sluice(capsys, "complete", "x", "--model=m", "--url", server.url)
    assert got == (1, printed, f"sluice complete: {words}\n")


def test_stream_separates_reasoning_from_the_answer() -> None:
    delta = b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"Hm"}}]}'
    with scripted_server((200, b"\n\n".join([delta, chunk("Hi"), b"data: [DONE]", b""]))) as server:
        reasoning: list[str] = []
        answer = list(Server(server.url).stream("chat/completions", {}, reasoning.append))
    assert (reasoning, answer) == (["Hm"], ["", "Hi"])


@pytest.mark.parametrize("url", ["http://[::1", "http://a..b:1", "http://h/ü", "http://h:abc", "http://"])
def test_malformed_url_is_told_in_a_sentence(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, words = sluice(capsys, "complete", "x", "--model=m", "--url", url)
    assert code == 2 and words.startswith(f"sluice complete: --url {url}") and words.count("\n") == 1


@pytest.mark.parametrize("key", ["a\nb", "a€"])
def test_key_that_no_header_can_have_is_told_in_a_sentence(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, words = sluice(capsys, "complete", "x", "--model=m", "--api-key", key)
    assert code == 2 and words.startswith("sluice complete: --api-key") and key not in words


def test_abort_ends_an_answer_that_another_thread_waits_for() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent, ThreadPoolExecutor(1) as threads:
        server = Server(f"http://127.0.0.1:{silent.getsockname()[1]}")
        waiting = threads.submit(server.exchange, "/v1/completions", {})
        with closing(silent.accept()[0]) as connection:
            connection.recv(1 << 16)
            server.abort()
            with pytest.raises(CliError, match="no answer"):
                waiting.result(PATIENCE_S)
        with pytest.raises(CliError, match="stopped"):
            server.models()
