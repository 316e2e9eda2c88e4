"""/v1/receipts/verify with a fake worker, which returns a given answer. tests/e2e has real answers."""

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from deploy.cli.keygen import keygen
from frontend.errors import Overloaded
from frontend.text.tokenizer import Tokenizer
from shared import messages as m
from shared.wire import unpack_u32
from tests.fakes import LIMITS, FakePool, sending
from tests.frontend.serving import http_client
from tests.frontend.text.tokenizers import byte_level, save

SENT = {"prompt": "ab", "max_tokens": 8, "seed": 5, "temperature": 0.7, "receipt": True}
ANSWER = [97, 98, 99, 100, 265]
ROUTE = "/v1/receipts/verify"


async def receipt_of(http: httpx.AsyncClient, sent: dict[str, Any]) -> dict[str, Any]:
    choice = (await http.post("/v1/completions", json=sent)).json()["choices"][0]
    receipt: dict[str, Any] = choice["receipt"]
    return receipt


def fake() -> FakePool:
    """A worker that gives each request the same answer."""
    return FakePool(play=sending(ANSWER))


async def checked(
    tokenizer: Tokenizer, outcome: m.Outcome = m.Outcome.EOS, found: list[int] = ANSWER, **changes: Any
) -> dict[str, Any]:
    """Verifies a receipt with some changed values, on a worker that now gives the answer `found`."""
    pool = fake()
    async with http_client(pool, tokenizer) as http:
        receipt = await receipt_of(http, SENT)
        pool.play = sending(found, outcome=outcome)
        answer = await http.post(ROUTE, json={"receipt": receipt | changes, "request": SENT})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_receipt_has_what_a_check_needs(tokenizer: Tokenizer) -> None:
    async with http_client(fake(), tokenizer) as http:
        answer = await http.post("/v1/completions", json=SENT)
        receipt = answer.json()["choices"][0]["receipt"]
        without = await http.post("/v1/completions", json=SENT | {"receipt": False})
    assert receipt["fingerprint"] == answer.json()["system_fingerprint"] == answer.headers["X-Sluice-Fingerprint"]
    assert receipt["output_ids"] == ANSWER
    assert (receipt["finish_reason"], receipt["route"], receipt["index"]) == ("eos", "/v1/completions", 0)
    assert (receipt["sampling"]["seed"], receipt["sampling"]["temperature"]) == (5, 0.7)
    assert "ab" not in str(receipt)
    assert "receipt" not in without.json()["choices"][0]


async def test_same_answer_is_identical(tokenizer: Tokenizer) -> None:
    verdict = await checked(tokenizer)
    assert verdict["identical"] and verdict["fingerprint_matches"]
    assert (verdict["position"], verdict["reason"], verdict["signature"]) == (None, None, "absent")


async def test_worker_gets_the_answer_the_seed_and_no_more_than_it_can_compute(tokenizer: Tokenizer) -> None:
    pool = fake()
    async with http_client(pool, tokenizer) as http:
        receipt = await receipt_of(http, SENT | {"logprobs": 2, "priority": 3})
        receipt["output_ids"] = [97, LIMITS.vocab_size, *[5] * 20]
        body = {"receipt": receipt, "request": SENT | {"logprobs": 2}, "priority": -4, "deadline_ms": 60_000}
        verdict = (await http.post(ROUTE, json=body)).json()
    submit = pool.submitted[-1].stream.submit
    assert unpack_u32(submit.answer or b"").tolist() == [97, 0, *[5] * 6]
    assert (submit.sampling.seed, submit.sampling.logprobs, submit.priority) == (5, None, -4)
    assert submit.deadline_ms > 0
    assert (verdict["position"], verdict["expected"], verdict["found"]) == (1, LIMITS.vocab_size, 98)


@pytest.mark.parametrize(
    ("ids", "outcome", "found", "position"),
    [
        ([97, 98, 7, 100, 265], m.Outcome.CHECKED, [97, 98, 99], 2),
        (ANSWER[:-1], m.Outcome.CHECKED, ANSWER[:-1], 4),
        ([*ANSWER, 97], m.Outcome.EOS, ANSWER, 5),
        ([], m.Outcome.CHECKED, [], 0),
    ],
)
async def test_other_answer_differs_at_its_first_other_token(
    tokenizer: Tokenizer, ids: list[int], outcome: m.Outcome, found: list[int], position: int
) -> None:
    verdict = await checked(tokenizer, outcome, found, output_ids=ids)
    assert (verdict["identical"], verdict["position"]) == (False, position)
    assert str(position) in verdict["reason"]


async def test_other_finish_differs_after_the_last_token(tokenizer: Tokenizer) -> None:
    verdict = await checked(tokenizer, finish_reason="length")
    assert (verdict["identical"], verdict["position"]) == (False, len(ANSWER))
    assert verdict["reason"] == "the answer ends with eos, but the receipt has length"


async def test_receipt_of_another_prompt_or_sampling_is_not_identical(tokenizer: Tokenizer) -> None:
    other = await checked(tokenizer, prompt_sha256="0" * 64)
    assert not other["identical"] and "prompt" in other["reason"] and other["position"] is None
    warmer = await checked(tokenizer, sampling={**(await used(tokenizer)), "temperature": 0.9})
    assert not warmer["identical"] and warmer["reason"].endswith(": temperature")
    reseeded = await checked(tokenizer, sampling={**(await used(tokenizer)), "seed": 6})
    assert not reseeded["identical"] and "the seed 5, but the receipt has 6" in reseeded["reason"]


async def used(tokenizer: Tokenizer) -> dict[str, Any]:
    async with http_client(fake(), tokenizer) as http:
        sampling: dict[str, Any] = (await receipt_of(http, SENT))["sampling"]
    return sampling


async def test_choices_of_several_prompts_are_checked_with_their_own_prompt_and_seed(tokenizer: Tokenizer) -> None:
    sent, pool = {**SENT, "prompt": ["ab", "cd"], "n": 2}, fake()
    async with http_client(pool, tokenizer) as http:
        choices = (await http.post("/v1/completions", json=sent)).json()["choices"]
        verdicts = [
            (await http.post(ROUTE, json={"receipt": choice["receipt"], "request": sent})).json() for choice in choices
        ]
    assert all(verdict["identical"] for verdict in verdicts)
    made, checks = pool.submitted[:4], pool.submitted[4:]
    assert [one.prompt for one in checks] == [one.prompt for one in made]
    assert [one.sampling.seed for one in checks] == [5, 6, 5, 6]


async def test_another_fingerprint_is_refused_unless_forced(tokenizer: Tokenizer) -> None:
    pool = fake()
    async with http_client(pool, tokenizer) as http:
        receipt = await receipt_of(http, SENT)
        assert pool.welcome is not None
        pool.welcome = msgspec.structs.replace(pool.welcome, fingerprint="fp_new")
        refused = await http.post(ROUTE, json={"receipt": receipt, "request": SENT})
        forced = await http.post(ROUTE, json={"receipt": receipt, "request": SENT, "force": True})
        nameless = await http.post(ROUTE, json={"receipt": receipt | {"fingerprint": ""}, "request": SENT})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "fingerprint_mismatch")
    assert error["param"] == "receipt.fingerprint" and receipt["fingerprint"] in error["message"]
    assert forced.json()["identical"] and not forced.json()["fingerprint_matches"]
    assert nameless.status_code == 400 and "no fingerprint" in nameless.json()["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"output_ids": None}, "receipt.output_ids"),
        ({"output_ids": ["a"]}, "receipt.output_ids[0]"),
        ({"route": "/v1/embeddings"}, "receipt.route"),
        ({"index": 1}, "receipt.index"),
        ({"version": 2}, "receipt.version"),
        ({"sampling": {}}, "receipt.sampling.seed"),
        ({"sampling": {"seed": -1}}, "receipt.sampling.seed"),
        ({"finish_reason": "tired"}, "receipt.finish_reason"),
        ({"signature": {"algorithm": "rsa", "public_key": "", "value": ""}}, "receipt.signature.algorithm"),
    ],
)
async def test_malformed_receipt_gets_400_that_names_the_field(
    tokenizer: Tokenizer, changes: dict[str, Any], param: str
) -> None:
    async with http_client(fake(), tokenizer) as http:
        receipt = await receipt_of(http, SENT)
        answer = await http.post(ROUTE, json={"receipt": receipt | changes, "request": SENT})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert param in answer.json()["error"]["message"]


async def test_problem_of_the_request_names_its_field(tokenizer: Tokenizer) -> None:
    async with http_client(fake(), tokenizer) as http:
        receipt = await receipt_of(http, SENT)
        wrong = await http.post(ROUTE, json={"receipt": receipt, "request": SENT | {"top_p": 3}})
        unknown = await http.post(ROUTE, json={"receipt": receipt, "request": SENT | {"tpo_p": 3}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "request.top_p")
    assert unknown.json()["error"]["param"] == "request.tpo_p"


async def test_full_queue_refuses_a_check_as_any_request(tokenizer: Tokenizer) -> None:
    pool = fake()
    async with http_client(pool, tokenizer) as http:
        receipt = await receipt_of(http, SENT)
        pool.refusals[pool.calls] = Overloaded("full", code="queue_full", retry_after=2.0)
        answer = await http.post(ROUTE, json={"receipt": receipt, "request": SENT})
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")


async def test_signed_receipt_is_checked(tokenizer: Tokenizer, tmp_path: Path) -> None:
    key = tmp_path / "key"
    assert keygen(["--receipt-key", str(key)]) == 0
    async with http_client(fake(), tokenizer, receipt_key=str(key)) as http:
        receipt = await receipt_of(http, SENT)
        good = (await http.post(ROUTE, json={"receipt": receipt, "request": SENT})).json()
        changed = receipt | {"created": receipt["created"] + 1}
        bad = (await http.post(ROUTE, json={"receipt": changed, "request": SENT})).json()
    assert (good["signature"], good["own_signature"]) == ("valid", True)
    assert (bad["signature"], bad["own_signature"], bad["identical"]) == ("invalid", False, True)


async def test_date_of_the_template_is_that_of_the_receipt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{{ strftime_now('%Y-%m-%d') }}: {{ messages[0].content }}"
    dated = Tokenizer.load(save(byte_level(), tmp_path, tokenizer_config={"chat_template": source}))
    pool, path = fake(), "/v1/chat/completions"
    sent: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "receipt": True}
    async with http_client(pool, dated, trust_request_chat_template=True) as http:
        for own in ({}, {"chat_template": source.replace(":", " -")}):
            monkeypatch.setattr("frontend.routes.generate.time.time", lambda: 86_399.9)
            answer = (await http.post(path, json=sent | own)).json()
            monkeypatch.undo()
            receipt = answer["choices"][0]["receipt"]
            assert answer["created"] == receipt["created"] == 86_399
            verdict = (await http.post(ROUTE, json={"receipt": receipt, "request": sent | own})).json()
            assert verdict["identical"], verdict
            again = await http.post(path, json=sent | own | {"continue_from": {"receipt": receipt, "position": 1}})
            assert again.status_code == 200, again.text
            prompts = {dated.decode(one.prompt) for one in pool.submitted}
            assert len(prompts) == 1 and prompts.pop().startswith("1970-01-01")
            pool.submitted.clear()
