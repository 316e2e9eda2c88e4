"""deploy/helm/sluice: the output of `helm template` for several sets of values fits the schemas of Kubernetes.

These tests need Helm (tests/deploy/kubernetes_programs.py). The files of deploy/kubernetes are the chart's rendered
defaults; their tests need no Helm.
"""

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.generate.release import CHART, helm, template
from frontend.server.bodies import largest_body
from shared.config.flags import Parser, add_flags, read
from shared.config.worker import GPU_SEQUENCES, SEQUENCES
from tests.deploy.kubernetes.objects import Object, check, objects, pods, selects
from tests.deploy.kubernetes_programs import program
from tests.deploy.starts import DEFAULTS, FLAGS
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module", autouse=True)
def needs_helm() -> None:
    program("helm")


SETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "cpu": {"device": "cpu", "model": {"name": "org/big", "weightsGb": 15.3, "kvCacheGb": 20}},
    "large": {"model": {"weightsGb": 141, "servedName": "llama, other"}, "worker": {"gpus": 2, "cpus": "7500m"}},
    "replica": {"modelVolume": {"mode": "replica", "storageClassName": "fast"}, "image": {"tag": "1.2"}},
    "existing": {
        "modelVolume": {"mode": "existing", "existingClaim": "weights"},
        "model": {"name": "/models/mine"},
        "networkPolicy": {"enabled": False},
    },
    "open": {
        "modelVolume": {"mode": "none"}, "keys": {"enabled": False}, "apiKeys": {"enabled": False},
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}, "frontendAutoscaling": {"enabled": False},
    },
    "placed": {
        "image": {"registry": "registry.example.com/team/", "pullSecrets": [{"name": "pull"}]},
        "worker": {
            "runtimeClassName": "nvidia", "nodeSelector": {"gpu": "l4"}, "priorityClassName": "high",
            "tolerations": [{"key": "spot", "operator": "Exists"}], "podAnnotations": {"a": "b"},
            "affinity": {"nodeAffinity": {}}, "extraArgs": ["--max-batch-size=64"],
        },
        "frontend": {"extraArgs": ["--max-connections", "500"], "service": {"type": "LoadBalancer"}},
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    },
    "reachable": {
        "ingress": {"enabled": True, "tlsSecret": "cert"}, "drainTimeoutSeconds": 300, "metricsPrefix": "vllm:",
        "gatewayRoute": {"enabled": True, "gatewayNamespace": "edge"}, "workerAutoscaling": {"kind": "keda"},
        "apiKeys": {"admins": True}, "store": {"enabled": True},
    },
    "groups": {
        "device": "cpu", "model": {"weightsGb": 15.3, "kvCacheGb": 20}, "worker": {"hosts": 4, "replicas": 2},
        "podMonitor": {"enabled": True},
    },
    "roles": {
        "device": "cpu", "model": {"weightsGb": 15.3, "kvCacheGb": 20}, "podMonitor": {"enabled": True},
        "workerAutoscaling": {"kind": "keda"}, "modelVolume": {"mode": "replica"},
        "worker": {"replicas": 2, "extraArgs": ["--max-batch-size=64"], "nodeSelector": {"disk": "near"}},
        "prefill": {
            "replicas": 3, "store": {"sizeGb": 100, "storageClassName": "fast"},
            "worker": {"cpus": 16, "extraArgs": ["--max-step-tokens=4096"], "nodeSelector": {"cores": "many"}},
        },
    },
    "metrics": {"workerAutoscaling": {"kind": "metrics", "maxReplicas": 9}, "podMonitor": {"enabled": True}},
    "pool": {
        "topology": "all-in-one", "gatewayRoute": {"enabled": True}, "podMonitor": {"enabled": True},
        "workerAutoscaling": {"kind": "keda"}, "inferencePool": {"objectives": "interactive=-10,batch=10"},
    },
    "servers": {
        "topology": "all-in-one", "device": "cpu", "modelVolume": {"mode": "none"}, "apiKeys": {"enabled": False},
        "inferencePool": {"enabled": False}, "ingress": {"enabled": True}, "gatewayRoute": {"enabled": True},
        "workerAutoscaling": {"kind": "metrics"}, "metricsPrefix": "vllm:", "drainTimeoutSeconds": 300,
    },
}  # fmt: skip


@cache
def rendered(name: str, release: str = "sluice") -> list[Object]:
    words = [word for key, value in SETS[name].items() for word in ("--set-json", f"{key}={json.dumps(value)}")]
    return objects(template(*words, release=release))


def by_kind(name: str, kind: str, **more: str) -> Object:
    [found] = [one for one in rendered(name, **more) if one["kind"] == kind]
    return found


def containers(name: str) -> dict[str, Object]:
    return {pod["containers"][0]["name"]: pod["containers"][0] for pod in specs(name).values()}


def specs(name: str) -> dict[str, Object]:
    return {controller: template["spec"] for controller, template in pods(rendered(name))}


@pytest.mark.parametrize("name", SETS)
def test_objects_of_every_set_of_values_are_valid_and_fit_each_other(name: str) -> None:
    found = rendered(name)
    labels = [template["metadata"]["labels"] for _, template in pods(found)]
    names = {(one["kind"], one["metadata"]["name"]) for one in found}
    assert len(names) == len(found)
    for one in found:
        check(one)
        spec = one.get("spec", {})
        assert not (matches := [selects(one, each) for each in labels]) or None in matches or any(matches)
        if target := spec.get("scaleTargetRef"):
            assert (target["kind"], target["name"]) in names
    for pod in specs(name).values():
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert {m["name"] for m in container["volumeMounts"]} <= _volumes(found, pod)
    computing = "LeaderWorkerSet" if name == "groups" else "StatefulSet"
    for controller in (one for one in found if one["kind"] in ("Deployment", computing)):
        target = controller["kind"], controller["metadata"]["name"]
        refs = [one["spec"]["scaleTargetRef"] for one in found if "scaleTargetRef" in one.get("spec", {})]
        scaled = target in {(ref["kind"], ref["name"]) for ref in refs}
        controller = controller["spec"]
        assert ("replicas" in controller) == (not scaled), "an autoscaler and the chart would fight over the number"


def _volumes(found: list[Object], pod: Object) -> set[str]:
    templates = (one["spec"].get("volumeClaimTemplates", ()) for one in found if one["kind"] == "StatefulSet")
    return {v["name"] for v in pod["volumes"]} | {claim["metadata"]["name"] for one in templates for claim in one}


@pytest.mark.parametrize("name", SETS)
def test_processes_accept_their_settings_and_have_time_to_drain(name: str) -> None:
    environment = by_kind(name, "ConfigMap")["data"]
    for pod in specs(name).values():
        container = pod["containers"][0]
        if container["name"] == "fetch":
            continue
        role, *words = container["args"]
        parser = Parser()
        add_flags(parser, FLAGS[role])
        settings = read(parser.read(words), environment, FLAGS[role])
        pause = 5 if "lifecycle" in container else 0
        stopping = settings.launch.stop_timeout if role == "serve" else settings.worker.drain_timeout
        assert pod["terminationGracePeriodSeconds"] >= stopping + pause + 15
        assert settings.worker.drain_timeout == SETS[name].get("drainTimeoutSeconds", 30)
        assert settings.frontend.metrics_prefix == SETS[name].get("metricsPrefix", "sluice_")
        assert settings.model.name == environment["SLUICE_SERVED_MODEL_NAME"].partition(",")[0]


def test_sizes_follow_from_the_model() -> None:
    def memory(name: str) -> tuple[str, str]:
        resources = containers(name)["worker"]["resources"]
        return resources["requests"]["memory"], resources["limits"]["memory"]

    assert memory("defaults") == ("6Gi", "11Gi")
    assert memory("large") == ("41Gi", "150Gi"), "a quarter of the weights, and all of them in the file cache"
    assert memory("cpu") == ("41Gi", "41Gi"), (
        "1.1 times 15.3 for weights, 20 for K/V, 3 for the process, 1 for /dev/shm"
    )
    assert by_kind("large", "PersistentVolumeClaim")["spec"]["resources"]["requests"]["storage"] == "175Gi"
    assert containers("large")["worker"]["resources"]["limits"]["nvidia.com/gpu"] == 2


def test_shared_volume_is_filled_once_and_read_by_all() -> None:
    job = by_kind("defaults", "Job")
    [fetch] = job["spec"]["template"]["spec"]["containers"]
    marker = re.search(r"/models/\.complete-\w+", fetch["command"][-1])
    assert marker and "sluice fetch" in fetch["command"][-1]
    assert next(one for one in fetch["env"] if one["name"] == "HF_TOKEN")["valueFrom"]["secretKeyRef"]["optional"]
    for controller, pod in specs("defaults").items():
        if "model" not in controller:
            assert marker[0] in pod["initContainers"][0]["command"][-1]
            assert {"name": "HF_HUB_OFFLINE", "value": "1"} in pod["containers"][0]["env"]
            mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
            assert mounts["models"]["readOnly"]
    other = objects(template("--set", "model.name=org/other"))
    assert [one["metadata"]["name"] for one in other if one["kind"] == "Job"] != [job["metadata"]["name"]]
    for name in ("existing", "replica", "open"):
        assert not [one for one in rendered(name) if one["kind"] == "Job"]


def test_worker_runs_where_the_values_say() -> None:
    pod = specs("placed")["sluice-worker"]
    assert (pod["runtimeClassName"], pod["nodeSelector"], pod["priorityClassName"]) == ("nvidia", {"gpu": "l4"}, "high")
    assert [toleration["key"] for toleration in pod["tolerations"]] == ["nvidia.com/gpu", "spot"]
    [shm] = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert pod["containers"][0]["image"].startswith("registry.example.com/team/sluice-worker:")
    assert "tolerations" not in specs("cpu")["sluice-worker"], "it would take the place of a pod that needs the GPU"


def test_autoscalers_ask_for_what_workers_export() -> None:
    triggers = by_kind("reachable", "ScaledObject")["spec"]["triggers"]
    queries = [trigger["metadata"]["query"] for trigger in triggers]
    assert queries[0] == (
        'sum(vllm:num_requests_waiting{job="sluice-worker", namespace="sluice", model_name="Qwen/Qwen3-0.6B"} '
        'and on (instance) vllm:worker_role_info{job="sluice-worker", role!="prefill"})'
    )
    assert "vllm:num_requests_running" in queries[1]
    assert triggers[1]["metadata"]["threshold"] == str(GPU_SEQUENCES * 3 // 4)
    on_cpu = template("--set", "workerAutoscaling.kind=keda,device=cpu", "--show-only", "templates/worker-keda.yaml")
    assert objects(on_cpu)[0]["spec"]["triggers"][1]["metadata"]["threshold"] == str(SEQUENCES * 3 // 4)
    [scaler] = [s for s in rendered("metrics") if s["kind"] == "HorizontalPodAutoscaler" and "worker" in str(s)]
    metrics = [metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]]
    assert metrics == ["sluice_num_requests_waiting", "sluice_num_requests_running"]


def test_pool_selects_whole_servers_and_opens_their_ports_to_the_picker_alone() -> None:
    [container] = specs("pool")["sluice-server"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    pool = by_kind("pool", "InferencePool")
    [route] = by_kind("pool", "HTTPRoute")["spec"]["rules"]
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == [ports["http"]]
    assert [backend["name"] for backend in route["backendRefs"]] == [pool["metadata"]["name"]]
    assert route["backendRefs"][0]["kind"] == "InferencePool"
    rules = by_kind("pool", "NetworkPolicy")["spec"]["ingress"]
    assert [[port["port"] for port in rule["ports"]] for rule in rules if "from" not in rule] == [[ports["http"]]]
    assert {port["port"] for rule in rules for port in rule["ports"]} == set(ports.values())
    (sources,) = (rule["from"] for rule in rules if ports["kv-events"] in [port["port"] for port in rule["ports"]])
    assert sources == [{"podSelector": {"matchLabels": {"inferencepool": "sluice-epp"}}}], "tokens are not for all pods"
    endpoints = by_kind("pool", "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert {one["port"]: one["relabelings"][0]["replacement"] for one in endpoints} == {
        "metrics": "sluice-worker",
        "http": "sluice-frontend",
    }
    assert not any("worker:5555" in str(one) for one in rendered("pool")), "frontend and worker are one pod"
    [alone] = specs("servers")["sluice-server"]["containers"]
    assert {port["name"] for port in alone["ports"]} == {"http", "metrics"}
    assert "--gateway-headers" in container["args"] and "--gateway-headers" not in alone["args"]
    [rule] = by_kind("servers", "HTTPRoute")["spec"]["rules"]
    assert [backend.get("kind", "Service") for backend in rule["backendRefs"]] == ["Service"]


def test_groups_are_reached_by_their_leaders_alone_and_begin_anew_as_one() -> None:
    group = by_kind("groups", "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    assert (group["size"], group["restartPolicy"]) == (4, "RecreateGroupOnPodRestart")
    leader, rank = (group[name]["metadata"]["labels"] for name in ("leaderTemplate", "workerTemplate"))
    found = [one for one in rendered("groups") if one["kind"] in ("Service", "PodMonitor")]
    assert any(selects(one, leader) for one in found) and not any(selects(one, rank) for one in found)
    [container] = group["workerTemplate"]["spec"]["containers"]
    assert not {"ports", "readinessProbe"} & {*container} and "--curve-dir=/keys" in container["args"]
    assert "--request-address=tcp://0.0.0.0:5555" not in container["args"]
    for one in (container, group["leaderTemplate"]["spec"]["containers"][0]):
        assert {"--rank-group=lws", "--tensor-parallel-size=4"} <= {*one["args"]}
    assert container["resources"]["requests"]["memory"] == "15Gi", "a quarter of weights and K/V, embeddings in each"
    scaled = objects(template("--set", "device=cpu,worker.hosts=2,workerAutoscaling.kind=keda"))
    [target] = [
        one["spec"]["scaleTargetRef"]
        for one in scaled
        if one["metadata"]["name"] == "sluice-worker" and "scaleTargetRef" in one["spec"]
    ]
    assert target == {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": "sluice-worker"}
    policies = [one for one in rendered("groups") if one["kind"] == "NetworkPolicy" and selects(one, rank)]
    assert [policy["spec"]["ingress"][0]["ports"] for policy in policies] == [[{"port": 5558, "endPort": 5560}]]


def test_prefill_workers_share_a_store_with_those_that_generate_and_are_reached_and_seen_like_them() -> None:
    args = {name: one["args"] for name, one in containers("roles").items()}
    for name, own in (
        ("worker", ("--role=decode", "--max-batch-size=64")),
        ("prefill", ("--role=prefill", "--max-step-tokens=4096")),
    ):
        assert {*own, "--kv-store=/kv/pages", "--kv-store-gb=100"} <= {*args[name]}
        pod = specs("roles")[f"sluice-{name}"]
        [store] = [volume["persistentVolumeClaim"] for volume in pod["volumes"] if volume["name"] == "kv"]
        assert store == {"claimName": "sluice-kv"}
    assert "--worker-addresses=tcp://sluice-worker:5555,tcp://sluice-prefill:5555" in args["frontend"]
    assert containers("roles")["prefill"]["resources"]["requests"] == {"cpu": "16", "memory": "41Gi"}
    assert containers("roles")["worker"]["resources"]["requests"]["cpu"] == "4"
    assert specs("roles")["sluice-prefill"]["nodeSelector"] == {"disk": "near", "cores": "many"}
    [claim] = [one["spec"] for one in rendered("roles") if one["metadata"]["name"] == "sluice-kv"]
    assert claim["resources"]["requests"]["storage"] == "120Gi" and claim["storageClassName"] == "fast"
    number = {one["metadata"]["name"]: one.get("spec", {}).get("replicas") for one in rendered("roles")}
    assert number["sluice-prefill"] == 3 and number["sluice-worker"] is None, "only the others are scaled"
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(rendered("roles"))}
    both = {"NetworkPolicy", "PodMonitor"}
    for one in rendered("roles"):
        found = {name for name in ("sluice-worker", "sluice-prefill") if selects(one, labels[name])}
        assert len(found) < 2 or one["kind"] in both, "each set has a Service, a controller and a budget of its own"
        assert len(found) != 1 or one["kind"] not in both
    monitors = {one["metadata"]["name"]: one["spec"] for one in rendered("roles") if one["kind"] == "PodMonitor"}
    [endpoint] = monitors["sluice-worker"]["podMetricsEndpoints"]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "sluice-worker"}], "rules know this job"
    own = objects(template("--set", "prefill.replicas=1,prefill.store.existingClaim=mine"))
    assert "sluice-kv" not in str(own) and {"claimName": "mine"} in [
        volume.get("persistentVolumeClaim") for _, pod in pods(own) for volume in pod["spec"]["volumes"]
    ]


def test_without_prefill_workers_nothing_knows_of_roles() -> None:
    assert not re.search("--role|--kv-store|sluice-prefill:|/kv", str(rendered("defaults")))


def test_two_releases_in_a_namespace_share_no_name_and_no_pod() -> None:
    first, second = rendered("defaults"), rendered("defaults", release="other")
    assert not {one["metadata"]["name"] for one in first} & {one["metadata"]["name"] for one in second}
    selectors = [
        {tuple(one["spec"]["selector"]["matchLabels"].values()) for one in found if one["kind"] == "Deployment"}
        for found in (first, second)
    ]
    assert not selectors[0] & selectors[1]


def test_limits_of_the_ingress_are_the_servers() -> None:
    annotations = by_kind("reachable", "Ingress")["metadata"]["annotations"]
    size = int(annotations["nginx.ingress.kubernetes.io/proxy-body-size"].rstrip("m"))
    assert size << 20 == largest_body(DEFAULTS["max_images_per_request"])


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("worker.gpu=2", "gpu"),
        ("device=tpu", "device"),
        ("modelVolume.mode=existing", "existingClaim"),
        ("topology=whole", "topology"),
        ("topology=all-in-one,modelVolume.mode=replica", "mode"),
        ("worker.replicas=two", "replicas"),
        ("worker.hosts=9", "hosts"),
        ("worker.hosts=2", "device cpu"),
        ("workerAutoscaling.minReplicas=0", "minReplicas"),
        ("prefill.worker.hosts=2", "hosts"),
        ("prefill.worker.gpu=2", "gpu"),
        ("prefill.replicas=1,topology=all-in-one", "prefill.replicas"),
        ("prefill.replicas=1,worker.hosts=2,device=cpu", "prefill.replicas"),
        ("prefill.store.sizeGb=0", "sizeGb"),
    ],
)
def test_wrong_value_is_refused_by_name(value: str, named: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        template("--set", value)
    assert named in refused.value.stderr


def test_helm_lints_the_chart_and_the_schema_knows_every_value() -> None:
    done = subprocess.run([helm(), "lint", "--strict", CHART], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout
    schema, values = (json.loads((CHART / "values.schema.json").read_text()), _values())

    def compare(schema: Object, values: Any, place: str) -> None:
        for name in values if "properties" in schema else ():
            assert name in schema["properties"], f"{place}{name}"
            compare(schema["properties"][name], values[name], f"{place}{name}.")

    compare(schema, values, "")


def test_documented_values_exist() -> None:
    page = (CHART.parents[2] / "docs/kubernetes.md").read_text()
    named = set(re.findall(rf"`((?:{'|'.join(_values())})\.\w+)[`:]", page))
    assert len(named) > 10
    for name in named:
        record, _, value = name.partition(".")
        assert value in _values()[record], name


def _values() -> Any:
    return yaml.safe_load((Path(CHART) / "values.yaml").read_text())


def test_keys_of_administrators_are_those_of_the_secret() -> None:
    [container] = specs("reachable")["sluice-frontend"]["containers"]
    assert "--admin-keys=/secrets/admin-keys" in container["args"]
    [container] = specs("defaults")["sluice-frontend"]["containers"]
    assert not [word for word in container["args"] if "admin" in word]
