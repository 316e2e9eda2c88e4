"""deploy/gateway/ and deploy/kserve/: objects fit their definitions, each other, and Sluice's ports and routes."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema_rs import validator_for

from shared.config.flags import Parser, add_flags, read
from shared.config.settings import Settings
from tests.deploy.kubernetes.objects import ANY, INTEGER, KUBERNETES, STRING, STRINGS, check, closed, of_files, several
from tests.deploy.starts import DEPLOY, FLAGS, ROOT

POOL, PICKER = DEPLOY / "gateway/pool.yaml", DEPLOY / "gateway/picker.yaml"
KSERVE = sorted((DEPLOY / "kserve").glob("*.yaml"))
PICKER_CONFIG = {
    **closed(
        ("plugins", "schedulingProfiles"),
        apiVersion={"const": "llm-d.ai/v1alpha1"},
        kind={"const": "EndpointPickerConfig"},
        plugins=several(closed(("type",), name=STRING, type=STRING, parameters=ANY)),
        schedulingProfiles=several(
            closed(("name",), name=STRING, plugins=several(closed(("pluginRef",), pluginRef=STRING, weight=INTEGER)))
        ),
        dataLayer=closed(
            injectDefaults={"type": "boolean"},
            sources=several(
                closed(("pluginRef",), pluginRef=STRING, extractors=several(closed(("pluginRef",), pluginRef=STRING)))
            ),
        ),
    )
}
METRICS = closed(
    ("engineConfigs",),
    defaultEngine=STRING,
    engineConfigs=several(
        {**STRINGS, "required": ["name", "queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec"]}
    ),
)


def settings_of(container: dict[str, Any], environment: dict[str, str] | None = None) -> Settings:
    role, *words = [word.replace("$(POD_IP)", "10.0.0.7") for word in container["args"]]
    parser = Parser()
    add_flags(parser, FLAGS[role])
    return read(parser.read(words), environment or {}, FLAGS[role])


@pytest.mark.parametrize("file", [POOL, *KSERVE], ids=lambda file: file.name)
def test_every_object_is_valid(file: Path) -> None:
    for one in of_files(file):
        check(one)


def test_pool_selects_the_servers_and_calls_their_port() -> None:
    found = {one["kind"]: one.get("spec", {}) for one in of_files(POOL)}
    pod = found["Deployment"]["template"]
    [container] = pod["spec"]["containers"]
    [environment] = [one["data"] for one in of_files(POOL) if one["kind"] == "ConfigMap"]
    settings = settings_of(container, environment)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert found["InferencePool"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert [port["number"] for port in found["InferencePool"]["targetPorts"]] == [ports["http"]]
    assert (ports["http"], ports["metrics"]) == (settings.frontend.port, settings.worker.worker_metrics_port)
    assert settings.worker.kv_events_endpoint.endswith(f":{ports['kv-events']}")
    assert settings.worker.kv_events_replay_endpoint.endswith(f":{ports['kv-replay']}")
    assert pod["spec"]["terminationGracePeriodSeconds"] >= settings.launch.stop_timeout + 5 + 15
    [rule] = found["HTTPRoute"]["rules"]
    [pool] = [one["metadata"]["name"] for one in of_files(POOL) if one["kind"] == "InferencePool"]
    assert [backend["name"] for backend in rule["backendRefs"]] == [pool]


def test_picker_reads_metrics_that_workers_have_and_knows_its_plugins() -> None:
    [config] = list(yaml.safe_load_all(PICKER.read_text()))
    validator_for(PICKER_CONFIG).validate(config)
    plugins = {one.get("name", one["type"]): one for one in config["plugins"]}
    named = [one["pluginRef"] for profile in config["schedulingProfiles"] for one in profile["plugins"]]
    [source] = config["dataLayer"]["sources"]
    assert {*named, source["pluginRef"], *(one["pluginRef"] for one in source["extractors"])} == plugins.keys()
    metrics = plugins["metrics-extractor"]["parameters"]
    validator_for(METRICS).validate(metrics)
    [engine] = metrics["engineConfigs"]
    [deployment] = [one for one in of_files(POOL) if one["kind"] == "Deployment"]
    assert deployment["spec"]["template"]["metadata"]["labels"]["llm-d.ai/engine-type"] == engine["name"]
    exported = (ROOT / "docs/metrics.md").read_text().split("<!-- made: worker metrics -->")[1].split("<!-- end -->")[0]
    names = re.findall(r"^\| `(sluice_\w+)`", exported, re.MULTILINE)
    assert {metric for key, metric in engine.items() if key.endswith("Spec")} <= set(names)
    assert plugins["metrics-source"]["parameters"]["port"] == 8001


@pytest.mark.parametrize("file", KSERVE, ids=lambda file: file.name)
def test_kserve_starts_a_server_that_its_probes_reach(file: Path) -> None:
    [one] = of_files(file)
    pod = one["spec"].get("template", {"containers": one["spec"].get("containers")})
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}
    kubernetes_validate.validate(whole, KUBERNETES, strict=True)
    [container] = pod["containers"]
    settings = settings_of(container)
    assert settings.model.model == "/mnt/models"
    assert container["readinessProbe"]["httpGet"]["port"] == settings.frontend.port
    assert container["ports"][0]["containerPort"] == settings.frontend.port
