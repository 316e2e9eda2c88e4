"""`sluice chat`, `complete`, `env` and `completion` as a person meets them, before a server that is a script."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from deploy.cli import main
from deploy.cli.chat import Reasoning
from deploy.cli.commands import COMMANDS, TOOLS
from deploy.cli.http_client import Server
from tests.patience import PATIENCE_S

Reply = tuple[int, bytes]


def chunk(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text, "delta": {"content": text}}]}).encode()


def says(*texts: str, end: bytes = b"data: [DONE]") -> Reply:
    role = b'data: {"choices":[{"delta":{"role":"assistant"}}]}'
    return 200, b"\n\n".join([b": a comment", role, *map(chunk, texts), b'data: {"choices":[]}', end, b""])


def refuses(status: int, message: str) -> Reply:
    return status, json.dumps({"error": {"message": message, "type": "invalid_request_error"}}).encode()


@dataclass
class Script:
    """Answers each POST with the next reply, and keeps what was asked."""

    replies: list[Reply]
    url: str = ""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)  # until then the last reply does not end
    holding: bool = False


@contextmanager
def server(*replies: Reply, holding: bool = False) -> Iterator[Script]:
    script = Script(list(replies), holding=holding)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            script.keys.append(self.headers["Authorization"])
            self._reply(200, b'{"data": [{"id": "first"}, {"id": "second"}]}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            script.asked.append((self.path, body))
            self._reply(*script.replies.pop(0))
            if script.holding and not script.replies:
                self.wfile.flush()
                script.hold.wait(PATIENCE_S)

        def _reply(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data)

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
    thread.start()
    script.url = f"http://127.0.0.1:{listener.server_port}"
    try:
        yield script
    finally:
        script.hold.set()
        listener.shutdown()
        thread.join()
        listener.server_close()


def sluice(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main.main(argv)
    return code, *capsys.readouterr()


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


# complete


def test_a_text_is_continued_with_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with server(says(" a", " time")) as script:
        flags = ["--max-tokens=5", "--temperature", "0", "--stop", "x", "--stop=y", "--url", script.url + "/v1/"]
        assert sluice(capsys, "complete", "Once upon", *flags) == (0, " a time\n", "")
    asked = {"max_tokens": 5, "temperature": 0, "stop": ["x", "y"], "stream": True}
    assert script.asked == [("/v1/completions", {"model": "first", "prompt": "Once upon", **asked})]


def test_a_text_from_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "two\nlines\n")
    with server(says("three\n")) as script:
        assert sluice(capsys, "complete", "--model=second", "--url", script.url) == (0, "three\n", "")
    assert script.asked == [("/v1/completions", {"model": "second", "prompt": "two\nlines\n", "stream": True})]


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
def test_a_failure_is_told_in_the_servers_words(
    capsys: pytest.CaptureFixture[str], reply: Reply, printed: str, words: str
) -> None:
    with server(reply) as script:
        got = sluice(capsys, "complete", "x", "--model=m", "--url", script.url)
    assert got == (1, printed, f"sluice complete: {words}\n")


def test_no_server_and_no_address(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = sluice(capsys, "complete", "x", "--url", "http://127.0.0.1:9")
    assert (code, err) == (1, "sluice complete: no answer from http://127.0.0.1:9: Connection refused\n")
    code, _, err = sluice(capsys, "chat", "--url", "ftp://x")
    assert (code, err) == (2, "sluice chat: --url ftp://x is not an http:// or https:// address\n")
    code, _, err = sluice(capsys, "chat", "--max-token", "3")
    assert (code, err) == (2, "sluice chat: unknown flag --max-token; did you mean --max-tokens?\n")


def test_the_key_is_sent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_API_KEY", "secret")
    with server(says("a"), says("a")) as script:
        sluice(capsys, "complete", "x", "--url", script.url)
        sluice(capsys, "complete", "x", "--url", script.url, "--api-key=other")
    assert script.keys == ["Bearer secret", "Bearer other"]


# chat


def test_a_conversation_is_told_whole_each_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "hi\n\nand?\n/reset\nagain\n/system be brief\nwho?\n/what\n/quit\nnot this\n")
    with server(says("hel", "lo"), says("so"), says("new"), says("I")) as script:
        code, out, err = sluice(capsys, "chat", "--system", "be kind", "--url", script.url, "--seed=1")
    assert (code, out) == (0, "hello\nso\nnew\nI\n")
    assert "/reset starts over" in err
    told = [[f"{turn['role'][0]} {turn['content']}" for turn in body["messages"]] for _, body in script.asked]
    assert told == [
        ["s be kind", "u hi"],
        ["s be kind", "u hi", "a hello", "u and?"],
        ["s be kind", "u again"],
        ["s be brief", "u who?"],
    ]
    assert {(path, body["model"], body["seed"]) for path, body in script.asked} == {
        ("/v1/chat/completions", "first", 1)
    }


def test_a_refusal_ends_a_chat_that_nobody_sits_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "hi\nthere\n")
    with server(refuses(503, "the queue is full")) as script:
        got = sluice(capsys, "chat", "--url", script.url)
    assert got == (1, "", "sluice chat: the queue is full (HTTP 503)\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_at_a_terminal_a_refused_question_is_forgotten(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("hi\nthere\n"))
    with server(refuses(503, "the queue is full"), says("yes")) as script:
        code, out, err = sluice(capsys, "chat", "--url", script.url)
    assert code == 0
    assert "the queue is full" in err
    assert "yes" in out
    assert [turn["content"] for turn in script.asked[1][1]["messages"]] == ["there"]


def interrupted(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; a signal between the prompt and the reading of an answer is seen by Python too late."""
    for _ in range(20):
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.wait(1)
    raise AssertionError("it goes on after the second")


def test_ctrl_c_stops_the_answer_and_a_second_one_leaves() -> None:
    """At a real terminal, which a pseudo one is for the process."""
    with server(says("first", end=b": wait"), holding=True) as script:
        control, terminal = os.openpty()
        command = [sys.executable, "-m", "deploy.cli.main", "chat", "--url", script.url]
        process = subprocess.Popen(command, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
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


# env and completion


def test_env_names_versions_and_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_PORT", "99")
    monkeypatch.setenv("SLUICE_API_KEY", "secret")
    code, out, _ = sluice(capsys, "env")
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    assert code == 0
    assert lines["python"].strip().startswith(".".join(map(str, sys.version_info[:3])))
    assert lines["torch"].strip()[0].isdigit()
    assert {"cpu", "cpu kernels", "gpu", "memory", "model cache", "triton cache"} <= lines.keys()
    assert "SLUICE_PORT=99" in out
    assert "secret" not in out
    _, out, _ = sluice(capsys, "env", "--json")
    assert json.loads(out).keys() == lines.keys()


def test_env_does_not_import_torch() -> None:
    check = "import sys; from deploy.cli.main import main; main(['env']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, timeout=PATIENCE_S).returncode == 0


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["comple"], ["complete", "completion"]),
        (["serve", "--kv-cache-b"], ["--kv-cache-backend"]),
        (["serve", "--kv-cache-backend", ""], ["paged", "contiguous"]),
        (["serve", "--kv-cache-backend", "=", "c"], ["contiguous"]),
        (["worker", "--no-use"], ["--no-use-chunked-prefill"]),
        (["worker", "--front"], []),
        (["chat", "--sys"], ["--system"]),
        (["serve", "--model", ""], []),  # files: the shell's own business
    ],
)
def test_bash_completes(capsys: pytest.CaptureFixture[str], words: list[str], offered: list[str]) -> None:
    _, script, _ = sluice(capsys, "completion", "bash")
    ask = f'COMP_WORDS=(sluice "$@"); COMP_CWORD={len(words)}; _sluice; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-uc", script + "\n" + ask, "bash", *words], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (offered, "")


def test_zsh_gets_every_command_and_flag(capsys: pytest.CaptureFixture[str]) -> None:
    _, script, _ = sluice(capsys, "completion", "zsh")
    assert all(f" {name}:'" in script for name in (*COMMANDS, *TOOLS))
    assert "--kv-cache-backend=[paged\\: pages of --page-size tokens" in script
    assert ':value:(paged contiguous)"' in script
    assert sluice(capsys, "completion", "fish")[0] == 2


def test_thoughts_are_dim_on_a_terminal_and_no_part_of_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    def told(shown: bool) -> str:
        reasoning = Reasoning(shown)
        reasoning.show("Hm")
        print("".join(reasoning.before(iter(["", "Hi", "!"]))), end="")
        return capsys.readouterr().out

    assert (told(True), told(False)) == ("\x1b[2mHm\x1b[0m\n\nHi!", "Hi!")


def test_what_is_thought_is_not_what_is_said() -> None:
    delta = b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"Hm"}}]}'
    with server((200, b"\n\n".join([delta, chunk("Hi"), b"data: [DONE]", b""]))) as script:
        thoughts: list[str] = []
        said = list(Server(script.url).stream("chat/completions", {}, thoughts.append))
    assert (thoughts, said) == (["Hm"], ["", "Hi"])
