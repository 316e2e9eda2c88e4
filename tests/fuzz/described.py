"""Requests made from the published description: such as it allows, and such as it nearly allows."""

from collections import Counter
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode

from tests.fuzz.checks import CHECKS, events_conform, no_fault
from tests.fuzz.narrow import narrowed
from tests.patience import PATIENCE_S

TIMEOUT_S = PATIENCE_S
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example]
ROUTES = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
    "/v1/responses/input_tokens", "/v1/messages/count_tokens", "/tokenize", "/detokenize",
)  # fmt: skip
Tally = Counter[tuple[str, str, int]]  # route, mode, status


def spelled(value: Any) -> Any:
    """Whole numbers written as such: to JSON Schema 1.0 is an integer, to the server it is none."""
    match value:
        case dict():
            return {name: spelled(inner) for name, inner in value.items()}
        case list():
            return [spelled(inner) for inner in value]
        case float():
            return int(value) if value.is_integer() and abs(value) < 2**53 else value
        case _:
            return value


def fuzz_described(url: str, model: str, examples: int, *, again: bool = False) -> Tally:
    """`examples` for each generating route, allowed and nearly; a few for the others; `again`: always the same ones.

    Raises what a check found.
    """
    document = narrowed(httpx.get(f"{url}/openapi.json", timeout=TIMEOUT_S).json(), model)
    described = schemathesis.openapi.from_dict(document)
    also = events_conform(document)
    tally: Tally = Counter()

    def run(path: str, method: str, mode: GenerationMode, most: int) -> None:
        cases: Any = described[path][method].as_strategy(generation_mode=mode)

        @settings(max_examples=most, deadline=None, suppress_health_check=SLOW, database=None, derandomize=again)
        @given(case=cases)
        def answered(case: Case) -> None:
            if mode is GenerationMode.POSITIVE:
                case.body = spelled(case.body)
            response = case.call(base_url=url, timeout=TIMEOUT_S)
            tally[path, mode.value, response.status_code] += 1
            case.validate_response(response, checks=CHECKS, additional_checks=[no_fault, also])

        answered()

    for path in ROUTES:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            run(path, "POST", mode, examples)
    for path in sorted(set(document["paths"]) - set(ROUTES)):
        run(path, "GET", GenerationMode.POSITIVE, max(1, examples // 10))
    return tally
