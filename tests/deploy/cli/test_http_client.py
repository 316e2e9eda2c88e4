"""The client of `sluice chat` against a scripted server."""

import pytest

from deploy.cli.http_client import Server
from tests.deploy.cli.harness import Reply, chunk, refuses, says, scripted_server, sluice


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
