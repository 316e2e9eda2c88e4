"""Checks Kubernetes objects against the schemas of Kubernetes and of the operators that SPECS names."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema_rs import validator_for

KUBERNETES = "1.32"
Object = dict[str, Any]


def closed(required: tuple[str, ...] = (), **fields: Any) -> Object:
    """Returns the schema of an object with these fields and no others."""
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


STRING, INTEGER, ANY = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "object"}
STRINGS = {"type": "object", "additionalProperties": STRING}
DURATION = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}


def several(schema: Object) -> Object:
    return {"type": "array", "items": schema, "minItems": 1}


# The fields that the manifests use, as the operators' definitions have them; other fields are refused.
SPECS: dict[tuple[str, str], Object] = {
    ("keda.sh/v1alpha1", "ScaledObject"): closed(
        ("scaleTargetRef", "triggers"),
        scaleTargetRef=closed(("name",), apiVersion=STRING, kind=STRING, name=STRING),
        minReplicaCount=INTEGER,
        maxReplicaCount=INTEGER,
        pollingInterval=INTEGER,
        cooldownPeriod=INTEGER,
        advanced=closed(horizontalPodAutoscalerConfig=closed(behavior=ANY, name=STRING)),
        triggers=several(
            closed(
                ("type", "metadata"),
                type={"const": "prometheus"},
                metricType={"enum": ["AverageValue", "Value"]},
                metadata={**STRINGS, "required": ["serverAddress", "query", "threshold"]},
            )
        ),
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): closed(
        parentRefs=several(closed(("name",), name=STRING, namespace=STRING, sectionName=STRING)),
        hostnames=several(STRING),
        rules=several(
            closed(
                matches=several(closed(path=closed(type={"enum": ["Exact", "PathPrefix"]}, value=STRING))),
                timeouts=closed(request=DURATION, backendRequest=DURATION),
                backendRefs=several(closed(("name",), group=STRING, kind=STRING, name=STRING, port=INTEGER)),
            )
        ),
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): closed(
        ("selector", "targetPorts", "endpointPickerRef"),
        selector=closed(("matchLabels",), matchLabels=STRINGS),
        targetPorts=several(closed(("number",), number=INTEGER)),
        endpointPickerRef=closed(
            ("name",),
            group=STRING,
            kind=STRING,
            name=STRING,
            port=closed(("number",), number=INTEGER),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
    ("serving.kserve.io/v1alpha1", "LLMInferenceService"): closed(
        ("model",),
        model=closed(("uri",), uri={"type": "string", "pattern": "^(hf|s3|pvc|oci)://"}, name=STRING),
        replicas=INTEGER,
        router=closed(gateway=ANY, route=ANY, scheduler=ANY),
        template=ANY,
    ),
    ("serving.kserve.io/v1alpha1", "ServingRuntime"): closed(
        ("containers",),
        supportedModelFormats=several(
            closed(("name",), name=STRING, version=STRING, autoSelect={"type": "boolean"}, priority=INTEGER)
        ),
        protocolVersions=several({"enum": ["v1", "v2", "grpc-v1", "grpc-v2"]}),
        containers=several(ANY),
    ),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): closed(
        ("leaderWorkerTemplate",),
        replicas=INTEGER,
        leaderWorkerTemplate=closed(
            ("workerTemplate",),
            size=INTEGER,
            restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},
            leaderTemplate=ANY,
            workerTemplate=ANY,
        ),
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): closed(
        ("selector", "podMetricsEndpoints"),
        jobLabel=STRING,
        selector=closed(
            matchLabels=STRINGS,
            matchExpressions=several(
                closed(("key", "operator", "values"), key=STRING, operator={"const": "In"}, values=several(STRING))
            ),
        ),
        podMetricsEndpoints=several(
            closed(
                port=STRING,
                interval=DURATION,
                relabelings=several(closed(targetLabel=STRING, replacement=STRING)),
                authorization=closed(credentials=closed(("key",), name=STRING, key=STRING)),
            )
        ),
    ),
}


def objects(text: str) -> list[Object]:
    """Returns the objects in a stream of YAML documents."""
    return [found for found in yaml.safe_load_all(text) if found]


def of_files(*files: Path) -> list[Object]:
    return [found for file in files for found in objects(file.read_text())]


def check(found: Object) -> None:
    """Raises an error if the API would refuse the object, or ignore a part of it."""
    kind = found["apiVersion"], found["kind"]
    if kind in SPECS:
        schema = closed(
            ("metadata", "spec"),
            apiVersion=STRING,
            kind=STRING,
            spec=SPECS[kind],
            metadata=closed(("name",), name=STRING, namespace=STRING, labels=STRINGS),
        )
        validator_for(schema).validate(found)
        for name, template in pods([found]):
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template}
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    else:
        kubernetes_validate.validate(found, KUBERNETES, strict=True)


def selects(one: Object, labels: dict[str, str]) -> bool | None:
    """Returns whether the selector of a Service, controller, monitor or policy matches the labels; None without one."""
    selector = one.get("spec", {}).get("selector") or one.get("spec", {}).get("podSelector")
    if selector is None:
        return None
    equal = selector.get("matchLabels", {} if "matchExpressions" in selector else selector)
    within = selector.get("matchExpressions", ())
    return bool(
        (equal or within)
        and equal.items() <= labels.items()
        and all(labels.get(each["key"]) in each["values"] for each in within)
    )


def pods(found: list[Object]) -> Iterator[tuple[str, Object]]:
    """Yields the pods that the objects create, as (name of the controller, template of the pod)."""
    for one in found:
        name, spec = one["metadata"]["name"], one.get("spec", {})
        if "leaderWorkerTemplate" in spec:
            yield name, spec["leaderWorkerTemplate"]["leaderTemplate"]
            yield f"{name}/ranks", spec["leaderWorkerTemplate"]["workerTemplate"]
        elif "template" in spec and one["kind"] != "LLMInferenceService":
            yield name, spec["template"]
