"""`sluice chat`, `sluice complete` and `sluice models` against a scripted server."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from deploy.cli.chat import Reasoning, shown
from tests.deploy.cli.harness import feed_stdin, refuses, says, scripted_server, sluice


def test_complete_sends_only_the_explicit_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(says(" a", " time")) as server:
        flags = ["--max-tokens=5", "--temperature", "0", "--stop", "x", "--stop=y", "--url", server.url + "/v1/"]
        assert sluice(capsys, "complete", "Once upon", *flags) == (0, " a time\n", "")
    asked = {"max_tokens": 5, "temperature": 0, "stop": ["x", "y"], "stream": True}
    assert server.asked == [("/v1/completions", {"model": "first", "prompt": "Once upon", **asked})]


def test_complete_reads_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    feed_stdin(monkeypatch, "two\nlines\n")
    with scripted_server(says("three\n")) as server:
        assert sluice(capsys, "complete", "--model=second", "--url", server.url) == (0, "three\n", "")
    assert server.asked == [("/v1/completions", {"model": "second", "prompt": "two\nlines\n", "stream": True})]


def test_recommended_sampling_stands_in_for_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(says("a"), says("b"), says("c")) as server:
        one = {"id": "one", "recommended_sampling": {"temperature": 0.2, "top_p": 0.9, "n": 9}}
        server.models = json.dumps({"data": [one, {"id": "two"}]}).encode()
        for flags in ([], ["--temperature", "1"], ["--model", "two"]):
            sluice(capsys, "complete", "x", "--url", server.url, *flags)
    sent = [{name: body.get(name) for name in ("model", "temperature", "top_p", "n")} for _, body in server.asked]
    assert sent == [
        {"model": "one", "temperature": 0.2, "top_p": 0.9, "n": None},
        {"model": "one", "temperature": 1.0, "top_p": 0.9, "n": None},
        {"model": "two", "temperature": None, "top_p": None, "n": None},
    ]


def test_unreachable_server_and_bad_url_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = sluice(capsys, "complete", "x", "--url", "http://127.0.0.1:9")
    assert (code, err) == (1, "sluice complete: no answer from http://127.0.0.1:9: Connection refused\n")
    code, _, err = sluice(capsys, "chat", "--url", "ftp://x")
    assert (code, err) == (2, "sluice chat: --url ftp://x is not an http:// or https:// address\n")
    code, _, err = sluice(capsys, "chat", "--max-token", "3")
    assert (code, err) == (2, "sluice chat: unknown flag --max-token; did you mean --max-tokens?\n")


def test_api_key_comes_from_variable_or_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_API_KEY", "secret")
    with scripted_server(says("a"), says("a")) as server:
        sluice(capsys, "complete", "x", "--url", server.url)
        sluice(capsys, "complete", "x", "--url", server.url, "--api-key=other")
    assert server.keys == ["Bearer secret", "Bearer other"]


def test_chat_sends_the_whole_conversation_each_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed_stdin(monkeypatch, "hi\n\nand?\n/reset\nagain\n/system be brief\nwho?\n/what\n/quit\nnot this\n")
    with scripted_server(says("hel", "lo"), says("so"), says("new"), says("I")) as server:
        code, out, err = sluice(capsys, "chat", "--system", "be kind", "--url", server.url, "--seed=1")
    assert (code, out) == (0, "hello\nso\nnew\nI\n")
    assert "/reset starts over" in err
    sent = [[f"{turn['role'][0]} {turn['content']}" for turn in body["messages"]] for _, body in server.asked]
    assert sent == [
        ["s be kind", "u hi"],
        ["s be kind", "u hi", "a hello", "u and?"],
        ["s be kind", "u again"],
        ["s be brief", "u who?"],
    ]
    assert {(path, body["model"], body["seed"]) for path, body in server.asked} == {
        ("/v1/chat/completions", "first", 1)
    }


def test_images_go_with_the_next_question_and_stay_in_the_conversation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a b.gif").write_bytes(b"GIF89a and more")
    feed_stdin(monkeypatch, f"/image {tmp_path}/a b.gif\nwhat?\nand?\n/image {tmp_path}/a b.gif\n/reset\nwho?\n")
    with scripted_server(says("red"), says("so"), says("I")) as server:
        assert sluice(capsys, "chat", "--url", server.url)[:2] == (0, "red\nso\nI\n")
    image = {"type": "image_url", "image_url": {"url": "data:image/gif;base64,R0lGODlhIGFuZCBtb3Jl"}}
    shown = {"role": "user", "content": [image, {"type": "text", "text": "what?"}]}
    assert [body["messages"] for _, body in server.asked] == [
        [shown],
        [shown, {"role": "assistant", "content": "red"}, {"role": "user", "content": "and?"}],
        [{"role": "user", "content": "who?"}],
    ]


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "cannot be read: No such file"), (b"RIFF1234WAVE", "is no PNG")]
)
def test_file_that_is_no_image_is_refused_in_words(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    content: bytes | None,
    problem: str,
) -> None:
    file = tmp_path / "a.png"
    if content is not None:
        file.write_bytes(content)
    feed_stdin(monkeypatch, f"/image {file}\nwhat?\n")
    with scripted_server() as server:
        code, _, err = sluice(capsys, "chat", "--url", server.url)
    assert code == 1 and f"/image {file} {problem}" in err


def test_chat_without_terminal_ends_at_a_refusal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed_stdin(monkeypatch, "hi\nthere\n")
    with scripted_server(refuses(503, "the queue is full")) as server:
        got = sluice(capsys, "chat", "--url", server.url)
    assert got == (1, "", "sluice chat: the queue is full (HTTP 503)\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_chat_at_terminal_says_that_an_answer_was_cut_off_and_how_to_go_on_in_a_full_context(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}'
    full = "This model's maximum context length is 8 tokens. Please reduce the length of the messages."
    for terminal, told in ((True, True), (False, False)):
        monkeypatch.setattr(sys, "stdin", Terminal("hi\nthere\n") if terminal else io.StringIO("hi\nthere\n"))
        with scripted_server(says("a", end=cut + b"\n\ndata: [DONE]"), refuses(400, full)) as server:
            _, out, err = sluice(capsys, "chat", "--url", server.url)
        assert out.startswith("> a\n" if terminal else "a\n")
        assert ("The answer was cut off" in err, "/reset starts over." in err.splitlines()[-1]) == (told, told)


def test_chat_at_terminal_forgets_a_refused_question(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("hi\nthere\n"))
    with scripted_server(refuses(503, "the queue is full"), says("yes")) as server:
        code, out, err = sluice(capsys, "chat", "--url", server.url)
    assert code == 0
    assert "the queue is full" in err
    assert "yes" in out
    assert [turn["content"] for turn in server.asked[1][1]["messages"]] == ["there"]


def interrupted(process: subprocess.Popen[bytes]) -> int:
    """Sends SIGINT until the process ends, because Python may miss a signal that arrives just before it reads.

    Returns the exit code.
    """
    for _ in range(20):
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.wait(1)
    raise AssertionError("it goes on after the second")


def test_ctrl_c_stops_the_answer_and_a_second_one_leaves_the_chat() -> None:
    """The chat runs in a pseudo-terminal, which it takes for a real terminal."""
    with scripted_server(says("first", end=b": wait"), holding=True) as server:
        control, terminal = os.openpty()
        command = [sys.executable, "-m", "deploy.cli.main", "chat", "--url", server.url]
        process = subprocess.Popen(
            command, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore SIGINT
        )  # fmt: skip
        try:
            assert process.stdout is not None
            os.write(control, b"hi\n")
            seen = b""
            while b"first" not in seen:
                seen += os.read(process.stdout.fileno(), 100)
            process.send_signal(signal.SIGINT)
            while not seen.endswith(b"> "):
                seen += os.read(process.stdout.fileno(), 100)
            assert process.poll() is None, "it goes on after the first"
            assert interrupted(process) == 130
        finally:
            process.kill()
            process.communicate()
            os.close(control)
            os.close(terminal)


def test_reasoning_is_dimmed_on_a_terminal_and_not_part_of_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(enabled: bool) -> str:
        reasoning = Reasoning(enabled)
        reasoning.show("Hm")
        print("".join(reasoning.before(iter(["", "Hi", "!"]))), end="")
        return capsys.readouterr().out

    assert (shown(True), shown(False)) == ("\x1b[2mHm\x1b[0m\n\nHi!", "Hi!")


def test_models_lists_names_with_status_and_length(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server() as server:
        assert sluice(capsys, "models", "--url", server.url, "--api-key=k") == (
            0,
            "NAME    STATUS  CONTEXT\nfirst   -       -\nsecond  -       -\n",
            "",
        )
        server.models = b"""{"data": [{"id": "a", "max_model_len": 512, "status": {"value": "loaded", "reason": null}},
            {"id": "org/b", "max_model_len": null, "status": {"value": "failed", "reason": "no such file"}}]}"""
        _, out, _ = sluice(capsys, "models", "--url", server.url)
        server.models = b'{"data": ["a"]}'
        refused = sluice(capsys, "models", "--url", server.url)
    assert server.keys[0] == "Bearer k"
    rows = [line.split(maxsplit=3) for line in out.splitlines()]
    assert rows == [["NAME", "STATUS", "CONTEXT"], ["a", "loaded", "512"], ["org/b", "failed", "-", "no such file"]]
    assert refused == (1, "", f"sluice models: {server.url} lists models without an id at /v1/models\n")


def test_control_characters_of_an_answer_reach_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = "a\x1b]52;c;cm0gLXJm\x07\x9b2J\r\x7f\u202eb\tc\n"
    safe = "a\u241b]52;c;cm0gLXJm\u2407\ufffd2J\u240d\u2421\ufffdb\tc\n"
    assert shown(bad) == safe
    for terminal, expected in [(True, safe), (False, bad)]:
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        with scripted_server(says(bad)) as server:
            assert sluice(capsys, "complete", "x", "--url", server.url) == (0, expected, "")
    Reasoning(True).show(bad)
    assert capsys.readouterr().out == f"\x1b[2m{safe}\x1b[0m"
