"""The agent's session: what is sent, what is judged, and what is reported."""

import asyncio
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from bench.agent.__main__ import main, report
from bench.agent.script import EDITED, script
from bench.agent.session import Turned, run
from bench.client.load_client import Target
from bench.client.server import BenchError
from tests.bench.fake_server import DONE, END, HEAD, chunk, serving

SCRIPT = script(0.05)
Reply = list[dict[str, Any]]  # the deltas of an answer


def event(delta: dict[str, Any] | None, **more: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": None}]
    return chunk(b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n")


def calling(name: str, arguments: str) -> Reply:
    """Returns the deltas of a call whose arguments come in two pieces."""
    begin = {"index": 0, "id": "x", "function": {"name": name, "arguments": arguments[:5]}}
    return [{"tool_calls": [begin]}, {"tool_calls": [{"index": 0, "function": {"arguments": arguments[5:]}}]}]


def saying(text: str) -> Reply:
    return [{"content": text[:3]}, {"content": text[3:]}]


def session(reply: Callable[[dict[str, Any]], Reply], **usage: Any) -> tuple[list[Turned], list[dict[str, Any]]]:
    """Runs the session against a server that answers with `reply(body)`. Returns the turns and the requests."""

    def answer(body: dict[str, Any]) -> Sequence[bytes]:
        told = {"prompt_tokens": 100, "completion_tokens": 7, **usage}
        return [HEAD, *map(event, reply(body)), event(None, usage=told), chunk(DONE) + END]

    async def main() -> tuple[list[Turned], list[dict[str, Any]]]:
        async with serving(answer) as server:
            return await asyncio.to_thread(run, server.target, SCRIPT), server.bodies

    return asyncio.run(main())


def perfect(body: dict[str, Any]) -> Reply:
    """Answers every turn as it is asked."""
    asked, files = body["messages"][-1]["content"], SCRIPT.world().files
    renamed = files[EDITED].replace("entries", "records")
    if body.get("response_format"):
        return saying('{"summary": "s", "changed_files": [], "tests_passed": true, "risk": "none"}')
    for word, name, arguments in (
        ("List the folder", "list_folder", {"path": "src"}),
        ("Search all files", "search_text", {"pattern": "raise ValueError"}),
        (
            "Write the whole file",
            "write_file",
            {"path": EDITED, "content": files[EDITED].replace("entries", "records")},
        ),
        ("Run the tests", "run_tests", {"folder": "tests"}),
        ("Read lines 1 to 20", "read_file", {"path": "src/routes.py", "first_line": 1, "last_line": 20}),
        ("Show what has changed", "git_diff", {"path": EDITED}),
        ("Commit the changes", "git_commit", {"message": "Renamed."}),
    ):
        if word in asked:
            return calling(name, json.dumps(arguments))
    if "in one code block" in asked:
        return saying(f"Here:\n```python\n{renamed.replace('total', 'amount')}```\n")
    return saying("It counts things.")


def test_perfect_answers_are_all_as_asked() -> None:
    turns, bodies = session(perfect, prompt_tokens_details={"cached_tokens": 60})
    judged = [turned for turned in turns if turned.kept is not None]
    assert len(judged) == 9 and all(turned.kept for turned in judged)
    assert sum(turned.valid for turned in turns) == 7 and not any(turned.invalid for turned in turns)
    assert all(turned.answer.computed == 40 and turned.answer.tokens == 7 for turned in turns)
    assert all(0 < turned.answer.first <= turned.answer.last for turned in turns)
    assert len(bodies) == 12 and all(body["temperature"] == 0 and len(body["tools"]) == 7 for body in bodies)
    for before, after in pairwise(bodies):
        assert after["messages"][: len(before["messages"])] == before["messages"], "the history only grows"
    last = bodies[-1]["messages"]
    results = [message["content"] for message in last if message["role"] == "tool"]
    assert "committed as 0000001" in results and any("records" in text for text in results)
    ids = {call["id"] for message in last for call in message.get("tool_calls", ())}
    assert ids == {message["tool_call_id"] for message in last if message["role"] == "tool"} and len(ids) == len(
        results
    )


@pytest.mark.parametrize(
    ("reply", "invalid"),
    [
        (calling("read_it", "{}"), 12),
        (calling("read_file", '{"path": "src/'), 12),
        (calling("read_file", '{"file": "README.md"}'), 12),
        (saying("I would list the folder."), 0),
    ],
)
def test_wrong_answers_are_counted_and_asked_for_only_once(reply: Reply, invalid: int) -> None:
    turns, bodies = session(lambda body: reply)
    assert len(bodies) == 12 and sum(turned.invalid for turned in turns) == invalid
    assert not any(turned.valid or turned.kept for turned in turns)
    for body in bodies:
        for message in body["messages"]:
            for call in message.get("tool_calls", ()):
                assert isinstance(json.loads(call["function"]["arguments"]), dict), "servers refuse other histories"
    assert all(turned.answer.computed != turned.answer.computed for turned in turns), "the server did not say"


def test_refused_requests_are_failed_turns() -> None:
    async def refused() -> list[Turned]:
        writes = [b'HTTP/1.1 400 Bad Request\r\ncontent-length: 16\r\n\r\n{"error": "no"}\n']
        async with serving(lambda body: writes) as server:
            return await asyncio.to_thread(run, server.target, SCRIPT)

    turns = asyncio.run(refused())
    assert len(turns) == 12 and all(turned.answer.error.startswith("400: ") for turned in turns)
    assert "failed requests" in report({"a": turns})
    answered, _ = session(perfect, prompt_tokens_details={"cached_tokens": 60})
    (line,) = (
        line for line in report({"a": [*answered[:-1], turns[-1]]}).splitlines() if "prompt tokens computed" in line
    )
    assert line.split("|")[2].strip() == str(11 * 40), "what a refused request computed does not count"


def test_server_that_is_not_there_is_an_error() -> None:
    with pytest.raises(BenchError, match=r"127\.0\.0\.1:9"):
        run(Target("http://127.0.0.1:9", "m"), SCRIPT)


def test_report_has_a_column_a_server_and_a_line_a_turn() -> None:
    turns, _ = session(perfect)
    other, _ = session(lambda body: saying("No."))
    text = report({"ours": turns, "theirs": other})
    lines = text.splitlines()
    assert any("turns as asked" in line and "9 of 9" in line and "0 of 9" in line for line in lines)
    assert any("calls: valid, invalid" in line and "7, 0" in line and "0, 0" in line for line in lines)
    assert any("answers like the first" in line and "12 of 12" in line and "0 of 12" in line for line in lines)
    assert sum(line.startswith("| edit by a call") for line in lines) == 2


@pytest.mark.parametrize(
    ("words", "code", "told"), [([], 2, "--url"), (["--servers", "none"], 2, "none"), (["--scale", "0"], 2, "scale")]
)
def test_wrong_flags_are_named(words: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    assert told in capsys.readouterr().err
