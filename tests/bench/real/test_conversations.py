"""`bench.real.conversations` prints streams and refusals, and asks for every kind of answer."""

import json

import httpx
import pytest

from bench.real.conversations import TURNS, conversations, main, pasted, show

CHUNKS = (
    {"choices": [{"delta": {"content": " a"}, "finish_reason": None}]},
    {"choices": [{"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "finish_reason": None}]},
    {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "}"}}]}, "finish_reason": "length"}]},
    {"choices": [], "usage": {"total_tokens": 3}},
)


def server(request: httpx.Request) -> httpx.Response:
    body = json.loads(request.content)
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    if body["messages"][-1]["content"] == "no":
        return httpx.Response(400, json={"error": {"message": "refused"}})
    return httpx.Response(200, text="".join(f"data: {json.dumps(chunk)}\n\n" for chunk in CHUNKS) + "data: [DONE]\n\n")


def test_stream_and_refusal_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with httpx.Client(base_url="http://test", transport=httpx.MockTransport(server)) as client:
        assert show(client, "one", {"messages": [{"role": "user", "content": "yes"}]}) == " a"
        assert show(client, "two", {"messages": [{"role": "user", "content": "no"}]}) == ""
    out = capsys.readouterr().out
    assert "--- one: 'yes'\n' a'\nf{}\nlength, {'total_tokens': 3}" in out
    assert "--- two: 'no'\n400: " in out and "refused" in out


def test_every_conversation_is_asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    client = httpx.Client(base_url="http://test", transport=httpx.MockTransport(server))
    monkeypatch.setattr("bench.real.conversations.httpx.Client", lambda **_: client)
    main("http://test")
    titles = [title for title, _ in conversations()]
    assert len(set(titles)) == len(titles) and capsys.readouterr().out.count("---") == len(titles) + len(TURNS)
    assert len(set(pasted(50).splitlines())) == 50
