"""The headers of a gateway: the tenant for fairness, and the priority of a request."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from frontend.errors import BadRequest
from frontend.server.access import admission_of
from frontend.text.tokenizer import Tokenizer
from shared.config.declaration import ConfigError
from shared.config.frontend import FrontendConfig
from tests.fakes import MODEL
from tests.frontend.serving import app_over, completing

FAIRNESS, OBJECTIVE = "x-llm-d-inference-fairness-id", "x-llm-d-inference-objective"


def read(headers: dict[str, str], tenant: str = "", objectives: str = "") -> Mapping[str, Any]:
    config = FrontendConfig(gateway_headers=True, objectives=objectives)
    return admission_of(config)(Headers(headers), tenant)


def test_fairness_id_is_a_part_of_the_tenant() -> None:
    assert read({}) == {} and read({}, "key") == {"tenant": "key"}
    assert read({FAIRNESS: "blue"}) == {"tenant": "/blue"}
    assert read({FAIRNESS: "blue"}, "key") == {"tenant": "key/blue"}
    assert read({"x-gateway-inference-fairness-id": "old"}, "key") == {"tenant": "key/old"}


def test_objective_is_a_number_or_a_name() -> None:
    names = "chat=-5, batch=+10"
    assert read({OBJECTIVE: "7"}) == {"priority": 7}
    assert read({OBJECTIVE: "-2147483648"}) == {"priority": -(2**31)}
    assert [read({OBJECTIVE: name}, objectives=names) for name in ("chat", "batch", "unknown")] == [
        {"priority": -5}, {"priority": 10}, {},
    ]  # fmt: skip
    assert read({"x-gateway-inference-objective": "chat"}, "k", names) == {"tenant": "k", "priority": -5}


@pytest.mark.parametrize(
    ("name", "value"),
    [(FAIRNESS, "a/b"), (FAIRNESS, "x" * 65), (FAIRNESS, "a b"), (OBJECTIVE, "2147483648"), (OBJECTIVE, "-2147483649")],
)
def test_header_that_is_none_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(BadRequest, match=f"`{name}`"):
        read({name: value})


@pytest.mark.parametrize("objectives", ["chat", "=1", "chat=high", "chat=99999999999", "chat=2147483648"])
def test_objectives_that_are_none_are_refused(objectives: str) -> None:
    with pytest.raises(ConfigError, match="--objectives takes NAME=PRIORITY"):
        admission_of(FrontendConfig(gateway_headers=True, objectives=objectives))


async def test_requests_get_what_the_headers_say_if_they_are_believed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one alice\n")
    keys.chmod(0o600)
    headers = {"Authorization": "Bearer sk-one", FAIRNESS: "blue", OBJECTIVE: "chat", "x-request-id": "gw-1"}
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 3, "priority": 1}
    for believed, expected in ((True, ("alice/blue", -5)), (False, ("alice", 1))):
        pool = completing(tokenizer)
        more = {"gateway_headers": True, "objectives": "chat=-5"} if believed else {}
        transport = httpx.ASGITransport(app_over(pool, tokenizer, api_keys=str(keys), **more))
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as http:
            answer = await http.post("/v1/completions", json=body)
        submit = pool.submitted[0].stream.submit
        assert (submit.tenant, submit.priority) == expected
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "gw-1")
