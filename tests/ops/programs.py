"""Context managers that run Prometheus and nginx with the files that deploy/ ships.

They change only ports and paths and, to save time, Prometheus' intervals and the delays of alerts.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.server import ROOT, _environment, free_port

DEPLOY = ROOT / "deploy"
PATIENCE_S = 120.0


def until(condition: Callable[[], Any], what: str, timeout: float = PATIENCE_S) -> Any:
    """Polls `condition` and returns its first true value; connection errors count as false."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            if value := condition():
                return value
        except (httpx.TransportError, KeyError, IndexError):
            pass
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.1)


@contextmanager
def running(command: Sequence[str], log: Path, cwd: Path = ROOT) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process and ends it with SIGTERM; checks exit code 0, unless the process was killed before."""
    environment = _environment()
    if cwd != ROOT:
        environment.pop("PYTHONPATH", None)
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=cwd, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            code = process.wait(60)
        assert code in (0, -signal.SIGKILL), f"exit code {code}: {log.read_text()[-2000:]}"


@dataclass(frozen=True)
class Prometheus:
    url: str

    def series(self, query: str) -> list[tuple[dict[str, str], float]]:
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": query}, timeout=30).json()
        assert answer["status"] == "success", answer
        return [(entry["metric"], float(entry["value"][1])) for entry in answer["data"]["result"]]

    def value(self, query: str) -> float:
        return self.series(query)[0][1]

    def names(self) -> set[str]:
        return set(httpx.get(f"{self.url}/api/v1/label/__name__/values", timeout=30).json()["data"])

    def firing(self) -> set[str]:
        alerts = httpx.get(f"{self.url}/api/v1/alerts", timeout=30).json()["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


@contextmanager
def prometheus(folder: Path, frontends: list[int], workers: list[int]) -> Iterator[Prometheus]:
    """Runs a Prometheus that scrapes and evaluates once a second; delays of alerts are 2 s instead of minutes."""
    shutil.copytree(DEPLOY / "monitoring", folder)
    config = folder / "prometheus.yml"
    config.write_text(re.sub(r"_interval: 15s", "_interval: 1s", config.read_text()))
    alerts = folder / "alerts.yml"
    alerts.write_text(re.sub(r"for: \w+", "for: 2s", alerts.read_text()))
    for name, ports in (("frontends", frontends), ("workers", workers)):
        targets = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
        (folder / "targets" / f"{name}.yml").write_text(json.dumps(targets))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with running([*command, f"--web.listen-address={address}"], folder / "log"):
        server = Prometheus(f"http://{address}")
        until(lambda: httpx.get(f"{server.url}/-/ready").status_code == 200, "Prometheus")
        yield server


NGINX = """\
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/upstream.conf;
    include {folder}/sluice.conf;
}}
"""


@contextmanager
def nginx(folder: Path, frontends: Sequence[int], change: Callable[[str], str] = str) -> Iterator[str]:
    """Runs nginx and yields its URL. `change`: edits proxy.conf."""
    (folder / "sluice").mkdir(parents=True)
    port = free_port()
    upstream = (DEPLOY / "nginx/upstream.conf").read_text()
    for shipped, real in zip(("8000", "8002"), frontends, strict=True):
        upstream = upstream.replace(f"127.0.0.1:{shipped} ", f"127.0.0.1:{real} ")
    (folder / "upstream.conf").write_text(upstream)
    server = (DEPLOY / "nginx/sluice.conf").read_text()
    (folder / "sluice.conf").write_text(server.replace("listen 80;", f"listen 127.0.0.1:{port};"))
    (folder / "sluice/proxy.conf").write_text(change((DEPLOY / "nginx/proxy.conf").read_text()))
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder))
    with running(["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder)], folder / "log"):
        url = f"http://127.0.0.1:{port}"
        until(lambda: httpx.get(f"{url}/health").status_code, "nginx")
        yield url


def frontend_only(folder: Path) -> list[str]:
    """Returns the command `sluice` of a new environment without torch, made like the frontend's image."""
    source = folder / "source"
    skipped = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "*.so", "tests", "shared/seeds")
    shutil.copytree(ROOT, source, ignore=skipped)
    python = folder / "venv/bin/python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(folder / "venv")],
        [*pip, "-r", str(source / "requirements-frontend.txt")],
        [*pip, "--no-deps", str(source)],
    ):
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    shutil.rmtree(source)
    missing = subprocess.run([str(python), "-c", "import torch"], capture_output=True, cwd=folder)
    assert b"ModuleNotFoundError" in missing.stderr
    return [str(folder / "venv/bin/sluice")]
