"""How the files of deploy/ start processes: systemd's units, pods, and the containers of the compose file."""

import configparser
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.launcher.child_command import FRONTEND_FLAGS, SERVE_FLAGS, WORKER_FLAGS
from shared.config.flags import Parser, add_flags, all_flags, read
from shared.config.settings import Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PREFILL = ("components/prefill/prefill.yaml", "components/prefill/prefill-cpu.yaml")
FLAGS = {"serve": SERVE_FLAGS, "worker": WORKER_FLAGS, "frontend": FRONTEND_FLAGS}
DEFAULTS = {flag.name: flag.field.default for flag in all_flags()}


@dataclass(frozen=True)
class Start:
    """How a file of deploy/ starts a process, and how long the process may take to end."""

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
    for file in ("worker.yaml", "worker-cpu.yaml", "frontend.yaml", *PREFILL):
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
