"""A worker and two frontends without torch behind nginx: tokens flow at once, and a frontend's end harms few."""

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
BODY = {"model": "m", "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Outcome:
    status: int
    whole: bool  # it ended as it should


def balanced(room: Path) -> None:
    sluice = frontend_only(room)
    ports, run = (free_port(), free_port()), room / "run"
    run.mkdir(mode=0o700)
    with ExitStack() as stack:
        model = ["--model", "demo", "--served-model-name", "m", "--run-dir", str(run)]
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
        stack.enter_context(running(worker, room / "worker.log"))

        def start(port: int) -> Frontend:
            command = [*sluice, "frontend", *model, "--port", str(port)]
            found = stack.enter_context(running(command, room / f"{port}-{time.monotonic()}.log", cwd=room))
            until(lambda: httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200, "a frontend")
            return found

        frontends = [start(port) for port in ports]
        health = httpx.get(f"http://127.0.0.1:{ports[0]}/health").json()
        print(f"frontends without torch: /health {health}, resident {_megabytes(frontends[0])} MB", flush=True)
        url = stack.enter_context(nginx(room / "nginx", ports))
        _check_flow(url, ports, room)
        _check_death(url, frontends[0])
        frontends[0] = start(ports[0])
        _check_leaving(url, frontends[0])


def _megabytes(process: Frontend) -> int:
    (line,) = (x for x in Path(f"/proc/{process.pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) // 1024


# tokens flow at once


def _stamps(url: str, tokens: int = 300) -> list[float]:
    """When each token of a stream arrived, in seconds since the first."""
    stamps = []
    body = {**BODY, "prompt": "Once upon a time", "max_tokens": tokens, "stream_format": "events"}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        stamps = [time.monotonic() for line in answer.iter_lines() if line == "event: token"]
    assert len(stamps) == tokens
    return [stamp - stamps[0] for stamp in stamps]


def _check_flow(url: str, ports: tuple[int, int], room: Path) -> None:
    def careless(conf: str) -> str:
        """What nginx does by itself, were it not that Sluice's answers ask it to pass them on."""
        conf = conf.replace("proxy_buffering off;", "proxy_ignore_headers X-Accel-Buffering;")
        return conf.replace("proxy_http_version 1.1;", "")

    direct = f"http://127.0.0.1:{ports[0]}"
    with nginx(room / "careless", ports, careless) as wrong:
        places = {"directly": direct, "through nginx": url, "through careless nginx": wrong}
        found = {where: _stamps(at) for where, at in places.items()}
    for where, stamps in found.items():
        gaps = [after - before for before, after in pairwise(stamps)]
        moments = len({round(stamp, 4) for stamp in stamps})
        print(
            f"{len(stamps)} tokens {where}: at {moments} moments within {stamps[-1]:.2f} s, "
            f"gaps p50 {1e3 * statistics.median(gaps):.2f} ms, longest {1e3 * max(gaps):.0f} ms",
            flush=True,
        )
    spread = {where: len({round(stamp, 4) for stamp in stamps}) for where, stamps in found.items()}
    assert spread["through nginx"] > 0.7 * spread["directly"] > 5 * spread["through careless nginx"], spread


# a frontend ends


def _ask(url: str, stream: bool) -> Outcome:
    body = {**BODY, "prompt": "Once upon a time", "max_tokens": 100, "stream": stream}
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    except httpx.TransportError:
        return Outcome(0, False)
    if answer.status_code != 200:
        return Outcome(answer.status_code, False)
    whole = answer.text.endswith("data: [DONE]\n\n") if stream else "choices" in json.loads(answer.text)
    return Outcome(200, whole)


def _during(url: str, stream: bool, process: Frontend, sign: signal.Signals) -> list[Outcome]:
    """160 requests, 8 at a time; after the first 40 a frontend gets a signal."""
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(_ask, url, stream) for _ in range(160)]
        until(lambda: sum(job.done() for job in jobs) > 40, "some answers")
        process.send_signal(sign)
        return [job.result() for job in jobs]


def _check_death(url: str, frontend: Frontend) -> None:
    outcomes = _during(url, False, frontend, signal.SIGKILL)
    assert all(outcome.whole for outcome in outcomes), outcomes
    print(f"kill -9 of a frontend among {len(outcomes)} whole answers: every one came, with 200", flush=True)
    after = [_ask(url, True) for _ in range(20)]
    assert all(outcome.whole for outcome in after), after
    print(f"{len(after)} streams after it: every one whole", flush=True)


def _check_leaving(url: str, frontend: Frontend) -> None:
    outcomes = _during(url, True, frontend, signal.SIGTERM)
    assert all(outcome.whole for outcome in outcomes), outcomes
    code = frontend.wait(60)
    assert code == 0, code
    print(f"SIGTERM to a frontend among {len(outcomes)} streams: every one whole, exit code {code}", flush=True)
