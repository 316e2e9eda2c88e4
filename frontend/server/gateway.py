"""Reads the tenant and the priority of a request from the headers of an inference gateway (--gateway-headers).

A fairness id becomes part of the request's tenant, and an objective becomes its priority. The headers' names are those
of llm-d's router and of its predecessor, the Gateway API Inference Extension.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import Headers

from frontend.errors import BadRequest
from shared.config import ConfigError, FrontendConfig, words

FAIRNESS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
OBJECTIVE = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
MOST = 2**31 - 1  # the largest priority, the same as in bodies
_ID = re.compile(r"[A-Za-z0-9._@:+-]{1,64}")  # an id has the same form as the name of an API key
_NUMBER = re.compile(r"[+-]?\d{1,10}")

Admission = Callable[[Headers, str], Mapping[str, Any]]  # (headers, name of the API key) → fields of `Admission`


def admission_of(config: FrontendConfig) -> Admission:
    """Returns the function that reads a request's headers. Raises ConfigError for an invalid --objectives."""
    objectives = _objectives(config)
    return GatewayHeaders(objectives).admission if config.gateway_headers else own_tenant


def own_tenant(headers: Headers, tenant: str) -> Mapping[str, Any]:
    """Returns the name of the request's key as its tenant. Used without --gateway-headers, so it ignores headers."""
    return {"tenant": tenant} if tenant else {}


class GatewayHeaders:
    """Reads the headers of a gateway. objectives: priorities by the name of an objective; lower is scheduled first"""

    def __init__(self, objectives: Mapping[str, int]) -> None:
        self._objectives = objectives

    def admission(self, headers: Headers, tenant: str) -> Mapping[str, Any]:
        """Returns the fields of `Admission` that the headers set. Raises BadRequest, which names the header."""
        name, fairness = _given(headers, FAIRNESS)
        if fairness and not _ID.fullmatch(fairness):
            raise BadRequest(
                f"`{name}` must have 1 to 64 of the characters A-Z a-z 0-9 . _ @ : + -", param=name, code="out_of_range"
            )
        priority = self._priority(*_given(headers, OBJECTIVE))
        found = {"tenant": f"{tenant}/{fairness}"} if fairness else own_tenant(headers, tenant)  # key names have no /
        return found if priority is None else {**found, "priority": priority}

    def _priority(self, name: str, objective: str) -> int | None:
        """Returns the priority of an objective. None if there is no objective, or if only the gateway knows its
        name."""
        if not _NUMBER.fullmatch(objective):
            return self._objectives.get(objective)
        if not -MOST - 1 <= (priority := int(objective)) <= MOST:
            raise BadRequest(f"`{name}` must be a number of 32 bits or a name", param=name, code="out_of_range")
        return priority


def _given(headers: Headers, names: tuple[str, ...]) -> tuple[str, str]:
    """Returns the name and value of the first of these headers that a request has; both empty if it has none."""
    return next(((name, headers[name].strip()) for name in names if name in headers), ("", ""))


def _objectives(config: FrontendConfig) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in words(config.objectives):
        name, _, number = entry.rpartition("=")
        if not name or not _NUMBER.fullmatch(number) or not -MOST - 1 <= int(number) <= MOST:
            raise ConfigError(f"--objectives takes NAME=PRIORITY, a number of 32 bits, not {entry!r}")
        found[name] = int(number)
    return found
