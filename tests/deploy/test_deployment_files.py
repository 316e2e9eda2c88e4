"""systemd, Docker, Kubernetes and nginx: every process they start gets settings that it takes, and time to drain."""

import configparser
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.supervisor.child_command import FRONTEND_FLAGS, SERVE_FLAGS, WORKER_FLAGS
from shared.config import Settings
from shared.flags import Parser, add_flags, all_flags, read

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FOLDERS = ("systemd", "docker", "kubernetes", "nginx", "monitoring")
FLAGS = {"serve": SERVE_FLAGS, "worker": WORKER_FLAGS, "frontend": FRONTEND_FLAGS}
DEFAULTS = {flag.name: flag.field.default for flag in all_flags()}


@dataclass(frozen=True)
class Start:
    """How a file starts a process, and how long it waits for its end."""

    where: str
    words: list[str]
    environment: Mapping[str, str]
    stop_timeout: float

    def settings(self) -> Settings:
        parser = Parser()
        add_flags(parser, FLAGS[self.words[0]])
        return read(parser.read(self.words[1:]), self.environment, FLAGS[self.words[0]])


def documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def units() -> Iterator[Start]:
    shared = dict(
        line.split("=", 1) for line in (DEPLOY / "systemd/sluice.env").read_text().splitlines() if line[0] != "#"
    )
    for file in sorted((DEPLOY / "systemd").glob("*.service")):
        instance = "8000" if "frontend" in file.name else "0"
        lines = [line for line in file.read_text().replace("%i", instance).splitlines() if line[:1] != "#"]
        own = [word for line in lines if line.startswith("Environment=") for word in line.partition("=")[2].split()]
        section = configparser.ConfigParser(strict=False, interpolation=None)
        section.optionxform = str  # type: ignore[assignment,method-assign]
        section.read_string("\n".join(lines))
        service = section["Service"]
        words = service["ExecStart"].split()[1:]
        environment = {**shared, **dict(word.split("=", 1) for word in own)}
        yield Start(file.name, words, environment, float(service["TimeoutStopSec"]))


def pods() -> Iterator[Start]:
    (settings,) = documents(DEPLOY / "kubernetes/settings.yaml")
    for file in ("worker.yaml", "frontend.yaml"):
        for found in documents(DEPLOY / "kubernetes" / file):
            if "template" in found["spec"]:
                pod = found["spec"]["template"]["spec"]
                (container,) = pod["containers"]
                yield Start(file, container["args"], settings["data"], pod["terminationGracePeriodSeconds"])


def stages() -> dict[str, list[str]]:
    """The Dockerfile's stages, by name."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "docker/Dockerfile").read_text())
    parts = re.split(r"^FROM \S+ AS (\S+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], (part.strip().splitlines() for part in parts[2::2]), strict=True))


def containers() -> Iterator[Start]:
    found = stages()
    (baked,) = (line.removeprefix("ENV ").split() for line in found["base"] if line.startswith("ENV "))
    for name, service in documents(DEPLOY / "docker/compose.yml")[0]["services"].items():
        if "build" in service:
            (command,) = (
                line.removeprefix("CMD ") for line in found[service["build"]["target"]] if line.startswith("CMD ")
            )
            environment = dict(word.split("=", 1) for word in baked)
            environment |= {k: re.sub(r"\$\{\w+:-(.*)\}", r"\1", v) for k, v in service["environment"].items()}
            yield Start(name, json.loads(command), environment, float(service["stop_grace_period"].rstrip("s")))


STARTS = [*units(), *pods(), *containers()]


@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.where)
def test_started_process_accepts_its_settings_and_has_time_to_drain(start: Start) -> None:
    settings = start.settings()
    assert settings.model.model
    needed = settings.launch.stop_timeout if start.words[0] == "serve" else settings.worker.drain_timeout
    assert start.stop_timeout >= needed + 15
    if start.words[0] != "serve":
        wire, frontend = settings.wire, settings.frontend
        assert wire.run_dir or wire.request_address or frontend.worker_addresses, "it has no address"


def test_every_start_is_covered() -> None:
    assert len(STARTS) == 3 + 2 + 3


@pytest.mark.parametrize("folder", FOLDERS)
def test_variables_exist_and_figures_in_comments_are_the_defaults(folder: str) -> None:
    files = [path for path in (DEPLOY / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    texts = {path: path.read_text() for path in files}
    variables = {flag.variable for flag in all_flags()}
    assert texts
    for path, text in texts.items():
        named = set(re.findall(r"\bSLUICE_[A-Z_]*[A-Z]", text)) - {"SLUICE_WORKER_PORT"}  # which Kubernetes would make
        assert named <= variables, path
        for flag, figure in re.findall(r"--([a-z][a-z-]+) \((\d+) s\)", text):
            assert DEFAULTS[flag.replace("-", "_")] == float(figure), f"{path}: --{flag}"


def test_nginx_limits_match_the_defaults() -> None:
    proxy = (DEPLOY / "nginx/proxy.conf").read_text()
    (size,) = re.findall(r"client_max_body_size (\d+)m;", proxy)
    assert int(size) << 20 == DEFAULTS["max_body_bytes"]
    for path in (DEPLOY / "nginx/upstream.conf", DEPLOY / "docker/upstream.conf"):
        (kept,) = re.findall(r"keepalive_timeout (\d+)s;", path.read_text())
        assert int(kept) < DEFAULTS["idle_timeout"]


def test_compose_names_files_targets_and_volumes_that_exist() -> None:
    (compose,) = documents(DEPLOY / "docker/compose.yml")
    for service in compose["services"].values():
        assert service.get("build", {"target": "base"})["target"] in stages()
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (DEPLOY / "docker" / source).exists() if source.startswith(".") else source in compose["volumes"]


def test_kubernetes_objects_belong_together() -> None:
    (list_of_files,) = documents(DEPLOY / "kubernetes/kustomization.yaml")
    found = [entry for file in list_of_files["resources"] for entry in documents(DEPLOY / "kubernetes" / file)]
    pods = {e["metadata"]["name"]: e["spec"]["template"] for e in found if "template" in e.get("spec", {})}
    labels = [pod["metadata"]["labels"] for pod in pods.values()]
    for entry in found:
        selector = entry.get("spec", {}).get("selector") or entry.get("spec", {}).get("podSelector")
        assert selector is None or selector.get("matchLabels", selector) in labels, entry["metadata"]
    for pod in (template["spec"] for template in pods.values()):
        assert pod["enableServiceLinks"] is False, "Kubernetes would set SLUICE_PORT"
        (container,) = pod["containers"]
        assert {m["name"] for m in container["volumeMounts"]} >= {v["name"] for v in pod["volumes"]}
    (address,) = (
        word for word in pods["sluice-frontend"]["spec"]["containers"][0]["args"] if "worker-addresses" in word
    )
    services = {e["metadata"]["name"]: e["spec"]["ports"] for e in found if e["kind"] == "Service"}
    name, port = re.fullmatch(r".*=tcp://([\w-]+):(\d+)", address).groups()  # type: ignore[union-attr]
    assert [int(port), int(port) + 1] == [p["port"] for p in services[name]][:2]


def test_images_and_units_start_without_a_shell() -> None:
    """Exec form: the signal reaches the process itself."""
    for lines in stages().values():
        commands = [line.split(" ", 1)[1] for line in lines if line.startswith(("CMD", "ENTRYPOINT"))]
        assert all(json.loads(command) for command in commands)
    for target in ("worker", "frontend"):
        assert any(line.startswith("USER 10001") for line in stages()[target])


def test_worker_requirements_include_the_frontend_requirements() -> None:
    own = (ROOT / "requirements-frontend.txt").read_text()
    every = (ROOT / "requirements.txt").read_text()
    assert "-r requirements-frontend.txt" in every
    names = [re.findall(r"^([\w.-]+)==", text, re.MULTILINE) for text in (own, every)]
    assert not set(names[0]) & set(names[1]), "pinned twice"
    assert not {"torch", "transformers", "triton"} & set(names[0])  # numpy is for the process that translates GGUF
