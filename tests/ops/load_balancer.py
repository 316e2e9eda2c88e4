"""Checks two frontends without torch behind nginx: tokens are not buffered, and no answer is lost without need."""

import json
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx

from tests.e2e.server import free_port
from tests.ops.programs import frontend_only, nginx, running, until

Frontend = subprocess.Popen[bytes]
AT_ONCE = 8  # requests in flight
BODY = {"model": "m", "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Outcome:
    status: int
    complete: bool  # whether the answer has a proper end


def load_balancer(folder: Path) -> None:
    sluice = frontend_only(folder)
    ports, run_dir = (free_port(), free_port()), folder / "run"
    run_dir.mkdir(mode=0o700)
    with ExitStack() as stack:
        model = ["--model", "demo", "--served-model-name", "m", "--run-dir", str(run_dir)]
        worker = [
            sys.executable,
            "-m",
            "deploy.cli.main",
            "worker",
            *model,
            "--threads",
            "1",
            "--worker-metrics-port",
            "0",
        ]
        stack.enter_context(running(worker, folder / "worker.log"))

        def start(port: int) -> Frontend:
            command = [*sluice, "frontend", *model, "--port", str(port)]
            process = stack.enter_context(running(command, folder / f"{port}-{time.monotonic()}.log", cwd=folder))
            until(lambda: httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200, "a frontend")
            return process

        frontends = [start(port) for port in ports]
        health = httpx.get(f"http://127.0.0.1:{ports[0]}/health").json()
        print(f"frontends without torch: /health {health}, resident {_megabytes(frontends[0])} MB", flush=True)
        url = stack.enter_context(nginx(folder / "nginx", ports))
        _check_streaming(url, ports, folder)
        _check_kill(url, frontends[0])
        frontends[0] = start(ports[0])
        _check_drain(url, frontends[0])


def _megabytes(process: Frontend) -> int:
    (line,) = (x for x in Path(f"/proc/{process.pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) // 1024


# tokens are not buffered


def _arrivals(url: str, tokens: int = 300) -> list[float]:
    """Returns the arrival time of each token of a stream, in seconds since the first."""
    stamps = []
    body = {**BODY, "prompt": "Once upon a time", "max_tokens": tokens, "stream_format": "events"}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        stamps = [time.monotonic() for line in answer.iter_lines() if line == "event: token"]
    assert len(stamps) == tokens
    return [stamp - stamps[0] for stamp in stamps]


def _check_streaming(url: str, ports: tuple[int, int], folder: Path) -> None:
    def with_defaults(conf: str) -> str:
        """Changes nginx's configuration: nginx buffers, and ignores the header by which Sluice disables buffering."""
        conf = conf.replace("proxy_buffering off;", "proxy_ignore_headers X-Accel-Buffering;")
        return conf.replace("proxy_http_version 1.1;", "")

    direct = f"http://127.0.0.1:{ports[0]}"
    with nginx(folder / "unconfigured", ports, with_defaults) as unconfigured:
        urls = {"directly": direct, "through nginx": url, "through unconfigured nginx": unconfigured}
        arrivals = {route: _arrivals(at) for route, at in urls.items()}
    for route, stamps in arrivals.items():
        gaps = [after - before for before, after in pairwise(stamps)]
        distinct = len({round(stamp, 4) for stamp in stamps})
        print(
            f"{len(stamps)} tokens {route}: at {distinct} distinct times within {stamps[-1]:.2f} s, "
            f"gaps p50 {1e3 * statistics.median(gaps):.2f} ms, longest {1e3 * max(gaps):.0f} ms",
            flush=True,
        )
    spread = {route: len({round(stamp, 4) for stamp in stamps}) for route, stamps in arrivals.items()}
    assert spread["through nginx"] > 0.7 * spread["directly"] > 5 * spread["through unconfigured nginx"], spread


# a frontend is killed or drains


def _send(url: str, stream: bool) -> Outcome:
    body = {**BODY, "prompt": "Once upon a time", "max_tokens": 100, "stream": stream}
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    except httpx.TransportError:
        return Outcome(0, False)
    if answer.status_code != 200:
        return Outcome(answer.status_code, False)
    complete = answer.text.endswith("data: [DONE]\n\n") if stream else "choices" in json.loads(answer.text)
    return Outcome(200, complete)


def _send_during(url: str, stream: bool, process: Frontend, signum: signal.Signals) -> list[Outcome]:
    """Sends 160 requests, AT_ONCE at a time; after the first 40 a frontend receives the signal."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = [pool.submit(_send, url, stream) for _ in range(160)]
        until(lambda: sum(job.done() for job in jobs) > 40, "some answers")
        process.send_signal(signum)
        return [job.result() for job in jobs]


def _check_kill(url: str, frontend: Frontend) -> None:
    """Asserts that only requests to the killed frontend end in 502, because nginx does not repeat them."""
    outcomes = _send_during(url, False, frontend, signal.SIGKILL)
    lost = [outcome for outcome in outcomes if not outcome.complete]
    assert len(lost) <= AT_ONCE and all(outcome.status == 502 for outcome in lost), outcomes
    print(f"kill -9 of a frontend among {len(outcomes)} unstreamed answers: {len(lost)} lost (502)", flush=True)
    after = [_send(url, True) for _ in range(20)]
    assert all(outcome.complete for outcome in after), after
    print(f"{len(after)} streams afterwards: all complete", flush=True)


def _check_drain(url: str, frontend: Frontend) -> None:
    """Asserts that running streams are completed, and that later requests are completed or refused with 503."""
    outcomes = _send_during(url, True, frontend, signal.SIGTERM)
    refused = [outcome for outcome in outcomes if not outcome.complete]
    assert all(outcome.status == 503 for outcome in refused), outcomes
    code = frontend.wait(60)
    assert code == 0, code
    print(f"SIGTERM to a frontend among {len(outcomes)} streams: {len(refused)} got 503, exit code {code}", flush=True)
