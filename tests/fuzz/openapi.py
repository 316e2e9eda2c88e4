"""Requests generated from the OpenAPI document: valid ones, and ones with small violations."""

from collections import Counter
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode

from tests.fuzz.checks import CHECKS, events_conform, no_server_error
from tests.fuzz.narrow import narrowed
from tests.patience import PATIENCE_S

TIMEOUT_S = PATIENCE_S
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example]
ROUTES = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
    "/v1/responses/input_tokens", "/v1/messages/count_tokens", "/tokenize", "/detokenize",
)  # fmt: skip
Tally = Counter[tuple[str, str, int]]  # route, mode, status


def with_integers(value: Any) -> Any:
    """Replaces floats with integral values by integers: 1.0 is an integer in JSON Schema, but not for the server."""
    match value:
        case dict():
            return {name: with_integers(inner) for name, inner in value.items()}
        case list():
            return [with_integers(inner) for inner in value]
        case float():
            return int(value) if value.is_integer() and abs(value) < 2**53 else value
        case _:
            return value


def fuzz_openapi(url: str, model: str, examples: int, *, deterministic: bool = False) -> Tally:
    """Sends valid and slightly invalid requests to every route; raises the error of a failed check.

    examples: number of examples for each mode and each route of ROUTES; other routes get a tenth
    deterministic: use the same examples in every run
    """
    document = narrowed(httpx.get(f"{url}/openapi.json", timeout=TIMEOUT_S).json(), model)
    openapi = schemathesis.openapi.from_dict(document)
    events_check = events_conform(document)
    tally: Tally = Counter()

    def run(path: str, method: str, mode: GenerationMode, max_examples: int) -> None:
        cases: Any = openapi[path][method].as_strategy(generation_mode=mode)

        @settings(
            max_examples=max_examples,
            deadline=None,
            suppress_health_check=SLOW,
            database=None,
            derandomize=deterministic,
        )
        @given(case=cases)
        def send(case: Case) -> None:
            if mode is GenerationMode.POSITIVE:
                case.body = with_integers(case.body)
            response = case.call(base_url=url, timeout=TIMEOUT_S)
            tally[path, mode.value, response.status_code] += 1
            case.validate_response(response, checks=CHECKS, additional_checks=[no_server_error, events_check])

        send()

    for path in ROUTES:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            run(path, "POST", mode, examples)
    for path in sorted(set(document["paths"]) - set(ROUTES)):
        for method in {"get", "post"} & set(document["paths"][path]):
            run(path, method.upper(), GenerationMode.POSITIVE, max(1, examples // 10))
    return tally
