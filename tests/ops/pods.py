"""Runs the commands, environments, secrets and probes of the Kubernetes files as processes of this machine.

It replaces only the parts that a cluster provides: host names, ports, mount points of volumes, the model.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.e2e.server import free_port
from tests.ops.programs import DEPLOY, running, until

KEY = "sk-of-prometheus"
SLUICE = [sys.executable, "-m", "deploy.cli.main"]


def pods(folder: Path) -> None:
    with ExitStack() as stack:
        _secrets(folder)
        wire, metrics, port = _pair_of_ports(), free_port(), free_port()
        changes = {
            "0.0.0.0:5555": f"127.0.0.1:{wire}",
            "0.0.0.0:5556": f"127.0.0.1:{wire + 1}",
            "sluice-worker:5555": f"localhost:{wire}",
            "127.0.0.1:8001": f"127.0.0.1:{metrics}",
            "--port=8000": f"--port={port}",
            "/secrets/": f"{folder}/secrets/",
        }
        worker = _container("worker-cpu.yaml")
        command = _replaced(worker["args"], changes | {"/keys": f"{folder}/worker-keys"})
        command += ["--threads=1", "--model=demo", "--kv-cache-gb=1"]
        process = stack.enter_context(
            running([*SLUICE, *command, f"--worker-metrics-port={metrics}"], folder / "worker.log")
        )
        frontend = _container("frontend.yaml")
        command = [*_replaced(frontend["args"], changes | {"/keys": f"{folder}/frontend-keys"}), "--model=demo"]
        stack.enter_context(running([*SLUICE, *command], folder / "frontend.log"))
        url = f"http://127.0.0.1:{port}"
        until(lambda: httpx.get(url + frontend["startupProbe"]["httpGet"]["path"]).status_code == 200, "a start")
        until(lambda: httpx.get(url + frontend["readinessProbe"]["httpGet"]["path"]).status_code == 200, "readiness")
        _check_keys(url)
        _check_liveness(_replaced(worker["livenessProbe"]["exec"]["command"], changes)[1:], process)


def _container(file: str) -> dict[str, Any]:
    specs = (entry["spec"] for entry in yaml.safe_load_all((DEPLOY / "kubernetes" / file).read_text()))
    return next(spec["template"]["spec"]["containers"][0] for spec in specs if "template" in spec)


def _replaced(arguments: list[str], changes: dict[str, str]) -> list[str]:
    for old, new in changes.items():
        arguments = [argument.replace(old, new) for argument in arguments]
    return arguments


def _pair_of_ports() -> int:
    return next(port for port in iter(free_port, 0) if port < 65535)


def _secrets(folder: Path) -> None:
    """Creates the secrets as the README does, and copies them to where the pods mount them."""
    subprocess.run([*SLUICE, "keygen", str(folder / "keys")], check=True, stdout=subprocess.DEVNULL)
    readme = (DEPLOY.parent / "docs/kubernetes.md").read_text()
    for role in ("worker", "frontend"):
        (command,) = re.findall(rf"secret generic sluice-{role}-keys(.*)", readme)
        paths = [folder / path for path in re.findall(r"--from-file=(\S+)", command)]
        (volume,) = (v for v in _volumes(f"{role}.yaml") if v["name"] == "keys")
        items = volume["secret"].get("items") or [{"key": path.name, "path": path.name} for path in paths]
        for item in items:
            (source,) = (path for path in paths if path.name == item["key"])
            target = folder / f"{role}-keys" / item["path"]
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            target.chmod(0o400)
    (folder / "secrets").mkdir()
    (folder / "secrets/api-keys").write_text(f"{KEY} prometheus\n")
    (folder / "secrets/api-keys").chmod(0o600)


def _volumes(file: str) -> list[dict[str, Any]]:
    specs = (entry["spec"] for entry in yaml.safe_load_all((DEPLOY / "kubernetes" / file).read_text()))
    return next(spec["template"]["spec"]["volumes"] for spec in specs if "template" in spec)


def _check_keys(url: str) -> None:
    body = {"model": "demo", "prompt": "Once", "max_tokens": 5}
    allowed = {"Authorization": f"Bearer {KEY}"}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 401
    assert httpx.get(f"{url}/metrics").status_code == 401
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=allowed, timeout=60)
    assert answer.status_code == 200, answer.text
    text = httpx.get(f"{url}/metrics", headers=allowed).text
    assert 'sluice_key_requests_total{key="prometheus",model_name="demo"} 1.0' in text
    print("pods over tcp with CURVE and API keys: started, ready, answering; /metrics requires a key", flush=True)


def _check_liveness(command: list[str], worker: subprocess.Popen[bytes]) -> None:
    def probe() -> int:
        return subprocess.run([*SLUICE, *command], stderr=subprocess.DEVNULL).returncode

    codes = [probe()]
    os.kill(worker.pid, signal.SIGSTOP)
    codes.append(probe())
    os.kill(worker.pid, signal.SIGCONT)
    codes.append(probe())
    assert codes == [0, 1, 0], codes
    print(f"liveness probe of a running, stopped and continued worker: exit codes {codes}", flush=True)
