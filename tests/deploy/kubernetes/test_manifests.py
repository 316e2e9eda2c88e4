"""deploy/kubernetes/: the Kubernetes API accepts the objects, and they fit each other."""

import copy
import os
import subprocess
from pathlib import Path

import jsonschema
import jsonschema_rs
import pytest

from deploy.generate.release import FILES, FOLDER
from tests.deploy.kubernetes.objects import Object, check, objects, of_files, pods
from tests.deploy.kubernetes_programs import program
from tests.patience import PATIENCE_S

PLAIN = [path for path in sorted(FOLDER.rglob("*.yaml")) if path.name != "kustomization.yaml"]


@pytest.mark.parametrize("file", PLAIN, ids=lambda file: str(file.relative_to(FOLDER)))
def test_every_object_is_valid(file: Path) -> None:
    found = objects(file.read_text())
    assert found
    for one in found:
        check(one)


def test_check_refuses_wrong_types_and_unknown_fields() -> None:
    good = {one["kind"]: one for one in of_files(*PLAIN)}
    for kind, path, value in (
        ("StatefulSet", ("spec", "replicas"), "one"),
        ("StatefulSet", ("spec", "template", "spec", "runtimeClas"), "nvidia"),
        ("Deployment", ("spec", "template", "spec", "terminationGracePeriodSeconds"), "60s"),
        ("ScaledObject", ("spec", "minReplicas"), 1),
        ("HTTPRoute", ("spec", "rules", 0, "timeouts", "request"), 0),
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0, "authorization"), {"secret": "x"}),
    ):
        bad = copy.deepcopy(good[kind])
        inner: Object = bad
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = value
        with pytest.raises((jsonschema.ValidationError, jsonschema_rs.ValidationError)):
            check(bad)


def test_every_made_file_is_there_and_every_file_is_made_or_named() -> None:
    written = {str(path.relative_to(FOLDER)) for path in PLAIN}
    assert {name for name in FILES if "gateway/pool" not in name} | {"namespace.yaml"} == written


def test_workers_on_gpus_and_on_cpus_differ_in_device_and_size_alone() -> None:
    [(_, gpu)], [(_, cpu)] = (list(pods(of_files(FOLDER / file))) for file in ("worker.yaml", "worker-cpu.yaml"))
    gpu, cpu = gpu["spec"]["containers"][0], cpu["spec"]["containers"][0]
    assert cpu["image"] == gpu["image"] + "-cpu"
    assert gpu["resources"]["limits"]["nvidia.com/gpu"] == 1 and set(cpu["resources"]["limits"]) == {"memory"}
    assert set(gpu["args"]) ^ set(cpu["args"]) == {"--device=cuda", "--device=cpu", "--kv-cache-gb=4"}


@pytest.mark.parametrize("component", [None, *sorted(path.name for path in (FOLDER / "components").iterdir())])
def test_kustomize_builds_every_component(tmp_path: Path, component: str | None) -> None:
    kubectl = program("kubectl")
    to = os.path.relpath(FOLDER, tmp_path)
    components = f"\ncomponents: [{to}/components/{component}]" if component else ""
    (tmp_path / "kustomization.yaml").write_text(f"resources: [{to}]{components}\n")
    done = subprocess.run([kubectl, "kustomize", tmp_path], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    built = {(one["kind"], one["metadata"]["name"]): one for one in objects(done.stdout)}
    for one in built.values():
        check(one)
        assert one["kind"] == "Namespace" or one["metadata"]["namespace"] == "sluice"
    address = "--worker-addresses=tcp://sluice-worker:5555"
    frontend, worker = built["Deployment", "sluice-frontend"], built["StatefulSet", "sluice-worker"]
    arguments = [each["spec"]["template"]["spec"]["containers"][0]["args"] for each in (frontend, worker)]
    if component == "prefill":
        prefill = built["StatefulSet", "sluice-prefill"]["spec"]["template"]["spec"]
        assert f"{address},tcp://sluice-prefill:5555" in arguments[0]
        assert {*prefill["containers"][0]["args"]} ^ {*arguments[1]} == {"--role=prefill", "--role=decode"}
        pod = worker["spec"]["template"]["spec"]
        for part in (lambda each: each["volumes"], lambda each: each["containers"][0]["volumeMounts"]):
            assert sorted(part(prefill), key=str) == sorted(part(pod), key=str)
    else:
        assert address in arguments[0] and not [word for word in arguments[1] if "--role" in word]
    scaled = component in ("keda", "custom-metrics")
    assert ("replicas" in built["StatefulSet", "sluice-worker"]["spec"]) == (not scaled)
