"""Sluice as an application of Ray Serve: each replica is a whole server, and Ray starts, scales and replaces replicas.

    serve run deploy.integrations.ray_serve:build_app model=Qwen/Qwen3-0.6B min_replicas=1 max_replicas=4
    flags="--device cuda"

A replica starts `sluice serve` on a free port of its node, forwards requests to it, and passes streams on as they
arrive. If the server's worker dies, the server restarts it and streams continue. If a replica dies, its streams break;
Ray Serve starts another replica and sends it the next requests.
"""

import asyncio
import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from ray import serve
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

ROOT = str(Path(__file__).resolve().parents[2])
ANSWERS_S = 3600.0  # largest pause between two pieces of an answer, in seconds
# headers that are not passed on
HOP = frozenset({"host", "connection", "content-length", "transfer-encoding", "keep-alive"})

# Makes the launcher die with the replica, however the replica dies. The launcher's own processes then end, too.
WITH_PARENT = (
    "import os, sys; from deploy.launcher.child_command import die_with; die_with(int(sys.argv[1])); "
    "os.execv(sys.executable, [sys.executable, '-m', 'deploy.cli.main', *sys.argv[2:]])"
)


class Replica:
    """One server, and a client of it."""

    def __init__(self, model: str, flags: str, python: str, start_s: float) -> None:
        """python: an interpreter with Sluice. Raises RuntimeError if the server is not ready after `start_s`."""
        port, metrics = _free_ports(2)
        words = ["serve", "--model", model, "--host", "127.0.0.1", "--port", str(port)]
        words += ["--worker-metrics-port", str(metrics), *shlex.split(flags)]
        command = [python, "-c", WITH_PARENT, str(os.getpid()), *words]
        self._process = subprocess.Popen(command, cwd=ROOT)
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=httpx.Timeout(ANSWERS_S))
        self._wait(f"http://127.0.0.1:{port}/ready", start_s)

    def _wait(self, url: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"`sluice serve` ended with {self._process.returncode}; its log says why")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url).status_code == 200:
                    return
            time.sleep(0.2)
        self._process.terminate()
        raise RuntimeError(f"the server is not ready after {seconds:g} s")

    async def check_health(self) -> None:
        """Raises if the launcher has ended or no frontend answers. Ray then replaces the replica."""
        (await self._http.get("/health", timeout=5)).raise_for_status()

    async def __call__(self, request: Request) -> Response:
        """Forwards a request to the server, and returns the answer."""
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP]
        asked = self._http.build_request(request.method, path, headers=headers, content=await request.body())
        answer = await self._http.send(asked, stream=True)
        kept = {name: value for name, value in answer.headers.items() if name not in HOP}
        return StreamingResponse(_pieces(answer), answer.status_code, kept)

    def __del__(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None and process.poll() is None:
            process.terminate()  # the launcher then drains


async def _pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yields an answer as it arrives. If the client disconnects, the request to the server is closed, and the server
    aborts it."""
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await answer.aclose()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def build_app(args: dict[str, Any]) -> serve.Application:
    """Returns the application, for `serve run` and `serve.run`.

    args: `model`, as for `sluice serve`. Optional are the following, with their defaults at the end:
        flags: the flags of `sluice serve`
        min_replicas, max_replicas: 1 and 1
        target_requests: requests in progress per replica, above which Ray starts another replica; 16
        max_requests: the most requests in progress at a replica; 256
        cpus, gpus: the resources of a replica, for Ray's placement; 1 and 0
        python: the interpreter of an environment with Sluice; Ray's own
        start_s: how long a replica may take to be ready; 600
    Raises ValueError for any other argument, or if `model` is missing.
    """
    known: dict[str, Any] = {
        "model": "", "flags": "", "min_replicas": 1, "max_replicas": 1, "target_requests": 16, "max_requests": 256,
        "cpus": 1.0, "gpus": 0.0, "python": sys.executable, "start_s": 600.0,
    }  # fmt: skip
    if unknown := args.keys() - known.keys():
        raise ValueError(f"unknown arguments: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    given = {name: type(default)(args.get(name, default)) for name, default in known.items()}
    if not given["model"]:
        raise ValueError("the argument `model` is missing")
    replica = serve.deployment(
        Replica,
        name="sluice",
        max_ongoing_requests=given["max_requests"],
        autoscaling_config={
            "min_replicas": given["min_replicas"], "max_replicas": max(given["min_replicas"], given["max_replicas"]),
            "target_ongoing_requests": given["target_requests"],
        },
        ray_actor_options={"num_cpus": given["cpus"], "num_gpus": given["gpus"]},
        health_check_period_s=2,
        health_check_timeout_s=10,
    )  # fmt: skip
    return replica.bind(given["model"], given["flags"], given["python"], given["start_s"])
