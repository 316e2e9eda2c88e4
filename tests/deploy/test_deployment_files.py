"""systemd, Docker, Kubernetes and nginx: every process they start gets valid settings, and time to drain."""

import json
import re
from pathlib import Path

import pytest

from frontend.server.bodies import largest_body
from shared.config.flags import all_flags
from tests.deploy.kubernetes.objects import selects
from tests.deploy.starts import DEFAULTS, DEPLOY, ROOT, Start, containers, documents, pods, stages, units

FOLDERS = ("systemd", "docker", "kubernetes", "helm", "nginx", "monitoring")
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
    assert len(STARTS) == 3 + 5 + 3


@pytest.mark.parametrize("folder", FOLDERS)
def test_variables_exist_and_figures_in_comments_are_the_defaults(folder: str) -> None:
    files = [path for path in (DEPLOY / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    texts = {path: path.read_text() for path in files}
    variables = {flag.variable for flag in all_flags()}
    assert texts
    for path, text in texts.items():
        # variables that Kubernetes itself would set
        named = set(re.findall(r"\bSLUICE_[A-Z_]*[A-Z]", text)) - {"SLUICE_WORKER_PORT"}
        assert named <= variables, path
        for flag, figure in re.findall(r"--([a-z][a-z-]+) \((\d+) s\)", text):
            assert DEFAULTS[flag.replace("-", "_")] == float(figure), f"{path}: --{flag}"


def test_nginx_limits_match_the_defaults() -> None:
    proxy = (DEPLOY / "nginx/proxy.conf").read_text()
    (size,) = re.findall(r"client_max_body_size (\d+)m;", proxy)
    assert int(size) << 20 == largest_body(DEFAULTS["max_images_per_request"])
    for path in (DEPLOY / "nginx/upstream.conf", DEPLOY / "docker/upstream.conf"):
        (kept,) = re.findall(r"keepalive_timeout (\d+)s;", path.read_text())
        assert int(kept) < DEFAULTS["idle_timeout"]


def test_compose_names_files_targets_and_volumes_that_exist() -> None:
    (compose,) = documents(DEPLOY / "docker/compose.yml")
    for service in compose["services"].values():
        assert all(
            re.match(r"127\.0\.0\.1:|\$\{BIND_ADDRESS:-127\.0\.0\.1\}:", port) for port in service.get("ports", ())
        )
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
        matches = [selects(entry, each) for each in labels]
        assert None in matches or any(matches), entry["metadata"]
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
    """Commands are in exec form, so that signals reach the process itself."""
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
    # numpy is allowed: the process that translates GGUF needs it
    assert not {"torch", "transformers", "triton"} & set(names[0])


UNHASHED = {"torch", "triton"}  # their files, and what they need, differ from index to index
LOCKS = {
    "deploy/docker/requirements-frontend.lock": ("requirements-frontend.txt",),
    "requirements.lock": ("requirements-frontend.txt", "requirements.txt"),
    "requirements-dev.lock": ("requirements-dev.txt",),
}


def pins(text: str) -> list[str]:
    found = [line.lower().replace("_", "-") for line in re.findall(r"^[\w.-]+==[\w.]+", text, re.M)]
    return sorted(line for line in found if line.partition("==")[0] not in UNHASHED)


@pytest.mark.parametrize("lock", LOCKS)
def test_locks_have_the_pinned_packages_with_hashes(lock: str) -> None:
    text = (ROOT / lock).read_text()
    own = pins("\n".join((ROOT / name).read_text() for name in LOCKS[lock]))
    assert pins(text) == own, "make the lock again: its first lines say how"
    entries = [entry for entry in re.split(r"^(?=[\w])", text, flags=re.M) if entry[0] != "#"]
    assert len(entries) == len(own) and all("--hash=sha256:" in entry for entry in entries)


def test_images_and_make_install_the_locks() -> None:
    for target in ("frontend-packages", "worker"):
        assert any("--require-hashes" in line for line in stages()[target])
    make = (ROOT / "Makefile").read_text()
    assert all(
        f"--no-deps --require-hashes -r {lock}" in make for lock in ("requirements.lock", "requirements-dev.lock")
    )


def test_nginx_after_an_error_does_not_repeat_a_post() -> None:
    text = (Path(__file__).parents[2] / "deploy/nginx/proxy.conf").read_text()
    directives = [line.split("#")[0] for line in text.splitlines()]
    (rule,) = [line for line in directives if line.startswith("proxy_next_upstream ")]
    assert "error" in rule and "non_idempotent" not in rule
