"""Which parts of an answer a replay compares."""

import json
from typing import Any

import pytest

from deploy.cli.replay_requests import Difference, FailedAnswer, difference, parts_of
from tests.deploy.cli.requests import completion


def sse(*events: dict[str, Any]) -> str:
    return "".join(f"event: x\ndata: {json.dumps(event)}\n\n" for event in events) + ": keep-alive\n\ndata: [DONE]\n\n"


def chunk(text: str, index: int = 0, id: str = "a") -> dict[str, Any]:
    return {"id": id, "choices": [{"index": index, "delta": {"content": text}, "finish_reason": None}]}


def test_stream_is_the_same_however_it_was_cut() -> None:
    one = parts_of(sse(chunk("he"), chunk("x", 1), chunk("llo")))
    other = parts_of(sse(chunk("hello", id="b"), chunk("x", 1, id="b")))
    assert one == other == {"choices[0].delta.content": "hello", "choices[1].delta.content": "x"}


def test_lines_of_json_are_joined_like_events() -> None:
    lines = "".join(
        json.dumps({"message": {"role": "assistant", "content": piece}, "done": False}) + "\n" for piece in "ab"
    )
    assert parts_of(lines) == {"message.content": "ab"}


@pytest.mark.parametrize(
    "noise",
    [
        {"id": "y"}, {"created": 5}, {"system_fingerprint": "fp_x"}, {"usage": {"prompt_tokens": 3}},
        {"meta_info": {"e2e_latency": 0.5, "completion_tokens": 3}},  # SGLang's
        {"tokens_predicted": 3, "tokens_evaluated": 9, "stop": False, "id_slot": -1},  # in each event of llama.cpp's
    ],
)  # fmt: skip
def test_what_no_request_decides_is_not_compared(noise: dict[str, Any]) -> None:
    assert parts_of(completion("hello", **noise)) == parts_of(completion("hello"))


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"text": "hellx"}, "choices[0].text"),
        ({"finish_reason": "length"}, "choices[0].finish_reason"),
        ({"logprobs": {"token_logprobs": [-0.25]}}, "choices[0].logprobs.token_logprobs"),
    ],
)
def test_texts_ends_and_numbers_are_compared(change: dict[str, Any], path: str) -> None:
    choice = {"index": 0, "text": "hello", "finish_reason": "stop", "logprobs": {"token_logprobs": [-0.5]}}
    recorded, replayed = [parts_of(json.dumps({"choices": [one]})) for one in (choice, choice | change)]
    found = difference(recorded, replayed)
    assert found is not None and found.path == path


def test_difference_names_the_first_character() -> None:
    assert difference({"t": "hello"}, {"t": "help"}) == Difference("t", 3, "hello", "help")
    assert difference({"t": "he"}, {"t": "hello"}) == Difference("t", 2, "he", "hello")
    assert difference({"t": "he"}, {}) == Difference("t", 0, "he", "")


def test_numbers_are_compared_one_by_one() -> None:
    one, other = [parts_of(json.dumps({"ids": [{"id": 1, "n": 10}, {"id": 2, "n": n}]})) for n in (20, 21)]
    assert difference(one, other) == Difference("ids.n", 1, ("10", "20"), ("10", "21"))


def test_answer_that_tells_more_does_not_differ() -> None:
    assert difference({"t": "he"}, {"t": "he", "new": "x"}) is None


@pytest.mark.parametrize("error", [{"message": "broken"}, "broken"])
def test_stream_that_ended_with_an_error_failed(error: Any) -> None:
    with pytest.raises(FailedAnswer, match=r"^broken$"):
        parts_of(sse(chunk("he"), {"error": error}))
