"""Sending recorded requests: their seeds, their pace, their failures."""

import json
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from deploy.cli.replay_requests import bodies_of, replay, replay_one
from tests.deploy.cli.requests import FakeServer, completion, recorded, refuse


def test_request_is_sent_with_the_seed_that_was_drawn() -> None:
    assert list(bodies_of(recorded())) == [(None, {"prompt": "p", "seed": 7})]
    assert list(bodies_of(recorded(seeds=[7, 8], n=2))) == [(None, {"prompt": "p", "seed": 7})]
    ollama = recorded(route="/api/chat", request={"options": {"top_k": 3}})
    ((_, body),) = bodies_of(ollama)
    assert body["options"] == {"top_k": 3, "seed": 7}


def test_chat_is_sent_with_the_time_at_which_it_was_recorded() -> None:
    for route, sent in (("/v1/messages", {"messages": []}), ("/v1/responses", {"input": "x"}), ("/api/generate", {})):
        ((_, body),) = bodies_of(recorded(route=route, request=sent | {"chat_template_kwargs": None}))
        assert body["chat_template_kwargs"] == {"strftime_now": recorded().began}
    own = {"strftime_now": "2020-01-01", "x": 1}
    ((_, body),) = bodies_of(recorded(request={"messages": [], "chat_template_kwargs": own}))
    assert body["chat_template_kwargs"] == own


def test_choices_with_seeds_of_their_own_are_sent_apart() -> None:
    body = {"prompt": ["a", "b"], "n": 2}
    assert list(bodies_of(recorded(request=body, n=2, seeds=[5, 9, 3, 1]))) == [
        (0, {"prompt": "a", "seed": 5}),
        (1, {"prompt": "a", "seed": 9}),
        (2, {"prompt": "b", "seed": 3}),
        (3, {"prompt": "b", "seed": 1}),
    ]
    chat = recorded(request={"messages": [], "n": 2}, n=2, seeds=[5, 9])
    assert [choice for choice, _ in bodies_of(chat)] == [0, 1]


def test_answers_to_choices_sent_apart_are_compared_together() -> None:
    choices = [json.loads(completion(text, index))["choices"][0] for index, text in enumerate(("five", "nine"))]
    request = recorded(json.dumps({"choices": choices}), n=2, seeds=[5, 9])
    server = FakeServer(lambda body: completion({5: "five", 9: "nine"}[body["seed"]]))
    assert replay_one(server, request, 0.0).difference is None
    server.play = lambda body: completion({5: "five", 9: "none"}[body["seed"]])
    found = replay_one(server, request, 0.0).difference
    assert found is not None and (found.path, found.position) == ("choices[1].text", 1)


@pytest.mark.parametrize("play", [refuse, lambda body: "no JSON: {", lambda body: '{"error": {"message": "broken"}}'])
def test_failure_is_an_error_and_no_difference(play: Any) -> None:
    (result,) = replay(FakeServer(play), [recorded()], paced=False, concurrency=1)
    assert (result.error and result.difference is None) or play is not refuse
    assert (result.error == "full (HTTP 503)") == (play is refuse)


def test_results_are_in_the_order_of_the_requests() -> None:
    requests = [recorded(request={"prompt": str(i)}) for i in range(6)]

    def play(body: dict[str, Any]) -> str:
        time.sleep(0.01 if body["prompt"] == "0" else 0)
        return completion("hello")

    counts: list[int] = []
    results = replay(FakeServer(play), requests, paced=False, concurrency=3, on_done=counts.append)
    assert [one.request for one in results] == requests and counts == [1, 2, 3, 4, 5, 6]
    assert {one.fingerprint for one in results} == {"fp_new"} and not any(
        one.error or one.difference for one in results
    )


@pytest.mark.parametrize(("paced", "later"), [(True, timedelta(seconds=0.1)), (False, timedelta(days=1))])
def test_pace_is_the_recorded_one_if_it_is_asked_for(paced: bool, later: timedelta) -> None:
    first = datetime(2026, 1, 2, tzinfo=UTC)
    begun = time.monotonic()
    requests = [recorded(began=(first + share * later).isoformat()) for share in (0.0, 0.5, 1.0)]
    replay(FakeServer(), requests, paced=paced, concurrency=2)
    assert (time.monotonic() - begun >= later.total_seconds()) == paced
