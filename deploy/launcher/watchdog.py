"""Judges by its heartbeat whether a process hangs, and by its exit code whether its own work killed it.

Knows how long each counter may stand still; kills no process. Time is the sum of the intervals between checks, and each
interval is capped, so that a machine that was asleep, or a stopped launcher, does not make a process look hung.

    serving          `alive` or `progress` standing still for `stall_s` is a hang
    before serving   no `progress` and no output for `load_s` is a hang
"""

import asyncio
import contextlib
import json
import shlex
import signal
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.heartbeat import Heartbeat, Phase

CHECK_INTERVAL_S = 0.5
CLEAN_EXITS = (0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Timeouts:
    stall_s: float = 30.0
    load_s: float = 600.0


@dataclass(slots=True)
class StallTimer:
    """Measures for how long a counter has not changed."""

    value: int = -1
    seconds: float = 0.0

    def update(self, value: int, elapsed: float) -> float:
        self.seconds = self.seconds + elapsed if value == self.value else 0.0
        self.value = value
        return self.seconds


class Watchdog:
    """Watches the successive processes of one child."""

    def __init__(self, heartbeat: Heartbeat, timeouts: Timeouts, oom_kills: Callable[[], int] | None = None) -> None:
        """`oom_kills`: returns how many processes the system has killed for lack of memory."""
        self.heartbeat = heartbeat
        self._timeouts = timeouts
        self._oom_kills = oom_kills or _system_oom_kills
        self.start()

    @property
    def serving(self) -> bool:
        return self.heartbeat.phase is Phase.SERVING

    def start(self) -> None:
        """Begins to watch a new process."""
        self.heartbeat.start()
        self._alive, self._progress = StallTimer(), StallTimer()
        self._oom_kills_before = self._oom_kills()

    def check(self, elapsed: float, output_bytes: int) -> str:
        """Describes how the process hangs; returns an empty string if it does not.

        elapsed: seconds since the last check.
        output_bytes: the number of bytes that the process has printed so far.
        """
        serving, elapsed = self.serving, min(elapsed, 2 * CHECK_INTERVAL_S)
        silent = self._alive.update(self.heartbeat.alive_count, elapsed)
        stuck = self._progress.update(self.heartbeat.progress_count + (0 if serving else output_bytes), elapsed)
        if not serving:
            return f"no loading progress for {stuck:.0f} s" if stuck > self._timeouts.load_s else ""
        if silent > self._timeouts.stall_s:
            return f"no sign of life for {silent:.0f} s"
        return f"no progress for {stuck:.0f} s" if stuck > self._timeouts.stall_s else ""

    def ended(self, code: int, *, hung: bool) -> None:
        """Tells the next process, through the heartbeat file, whether the ended process died of its own work. A `kill
        -9` from outside does not count as its own work."""
        if self.serving:
            own_work = code != -signal.SIGKILL or hung or self._oom_kills() > self._oom_kills_before
            self.heartbeat.blamed = own_work and code not in CLEAN_EXITS


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process. Always False outside Linux."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _system_oom_kills() -> int:
    """Returns the system's count of processes killed for lack of memory; 0 if the system does not report one."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


# Polls a server's /ready, and makes the message that a ready server prints. Knows no other route.

QUESTION = {"role": "user", "content": "What is the capital of France?"}
TEXT = {"prompt": "Once upon a time", "max_tokens": 48}


@dataclass(frozen=True, slots=True)
class Readiness:
    """The response of /ready. progress: progress of loading, from 0 to 1. task: what the ready server is used for.

    `task` is a key of EXAMPLES: "chat" if the model has a chat template, else the task of the model.
    """

    ready: bool = False
    reason: str = "starting"
    progress: float = 0.0
    task: str = "generate"


EXAMPLES: Mapping[
    str, tuple[tuple[str, str, Mapping[str, Any]], ...]
] = {  # task → (words for its use, path, body of an example without `model`)
    "chat": (
        ("ask a question", "/v1/chat/completions", {"messages": [QUESTION], "stream": True}),
        ("stream of typed events, one per token", "/v1/completions", {**TEXT, "stream_format": "events"}),
    ),
    "generate": (
        ("stream in OpenAI's format", "/v1/completions", {**TEXT, "stream": True}),
        ("stream of typed events, one per token", "/v1/completions", {**TEXT, "stream_format": "events"}),
    ),
    "embed": (("vectors", "/v1/embeddings", {"input": ["A first text", "a second one"]}),),
    "score": (("documents by relevance", "/v1/rerank", {"query": "A text", "documents": ["one", "another"]}),),
}


async def poll_ready(host: str, port: int, timeout: float = 2.0, *, secure: bool = False) -> Readiness | None:
    """Requests /ready, over TLS if `secure`; returns None if no valid answer arrives within `timeout` seconds."""
    with contextlib.suppress(OSError, ValueError, TimeoutError):
        return _parse(await asyncio.wait_for(_get(host, port, _tls() if secure else None), timeout))
    return None


def _tls() -> ssl.SSLContext:
    """Returns a TLS context that accepts any certificate: the server is our own, and its certificate seldom names the
    local address."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def _get(host: str, port: int, tls: ssl.SSLContext | None) -> bytes:
    reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    try:
        writer.write(f"GET /ready HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        return await reader.read(-1)
    finally:
        writer.close()


def _parse(response: bytes) -> Readiness:
    head, _, body = response.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/") else 0
    fields = json.loads(body)
    if not isinstance(fields, dict) or status not in (200, 503):
        raise ValueError("not an answer of /ready")
    return Readiness(
        status == 200,
        str(fields.get("reason", "")),
        float(fields.get("progress") or 0.0),
        "chat" if fields.get("chat") else str(fields.get("task", "generate")),
    )


def ready_message(url: str, model: str, task: str, *, keys: bool) -> str:
    """Returns the message for a server that is ready: how to use it, as commands to paste."""
    auth = ' -H "Authorization: Bearer $API_KEY"' if keys else ""
    insecure = " -k" if url.startswith("https:") else ""  # curl does not need -k where the certificate is trusted
    lines = [f"\n{model} is ready at {url} (open it in a browser for a playground)\n"]
    for words, path, body in EXAMPLES.get(task, ()):
        data = shlex.quote(json.dumps({"model": model, **body}))
        lines += [f"{words}:", f"  curl -N{insecure} {url}{path} -H 'Content-Type: application/json'{auth} -d {data}"]
    return "\n".join(lines) + "\n"
