"""Which samplers a request is drawn with: none beyond the plain ones where these give the same, else a chain."""

from typing import Any

import pytest

from frontend.text.tokenizer import Tokenizer
from shared.messages import SamplerChain, Sampling
from tests.fakes import MODEL
from tests.frontend.serving import completing, http_client

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"model": MODEL, "prompt": "Hi"},
    "/completion": {"prompt": "Hi"},
}


async def sampling_of(tokenizer: Tokenizer, route: str = "/completion", **fields: Any) -> Sampling:
    pool = completing(tokenizer)
    async with http_client(pool, tokenizer) as http:
        answer = await http.post(route, json={**ROUTES[route], **fields})
    assert answer.status_code == 200, answer.text
    return pool.submitted[0].sampling


async def chain_of(tokenizer: Tokenizer, route: str = "/completion", **fields: Any) -> SamplerChain | None:
    return (await sampling_of(tokenizer, route, **fields)).chain


@pytest.mark.parametrize("route", ROUTES)
async def test_every_sampler_is_taken_by_its_name(route: str, tokenizer: Tokenizer) -> None:
    values = {
        "min_keep": 2, "repeat_last_n": 9, "top_n_sigma": 1.5, "typical_p": 0.9, "xtc_probability": 0.25,
        "xtc_threshold": 0.2, "dynatemp_range": 0.5, "dynatemp_exponent": 2.0, "dry_multiplier": 0.8, "dry_base": 1.5,
        "dry_allowed_length": 3, "dry_penalty_last_n": 50,
    }  # fmt: skip
    chain = await chain_of(
        tokenizer, route, **values, presence_penalty=1.0, top_k=9, top_p=0.9, dry_sequence_breakers=["b"]
    )
    assert chain is not None
    assert {name: getattr(chain, name) for name in values} == values
    assert chain.order == ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "xtc", "temperature")
    (b,) = tokenizer.encode_now(["b"], False)[0]
    assert chain.dry_breakers[b] == ((),)
    mirostat = await chain_of(tokenizer, route, mirostat=2, mirostat_tau=3.0, mirostat_eta=0.2, top_k=5)
    assert mirostat == SamplerChain((), mirostat=2, mirostat_tau=3.0, mirostat_eta=0.2)


@pytest.mark.parametrize(
    ("fields", "order"),
    [
        ({}, None),
        ({"temperature": 0.5, "top_p": 0.9}, None),
        ({"temperature": 0.5, "top_k": 9, "samplers": ["top_k", "temperature"]}, None),
        ({"temperature": 0.5, "top_p": 0.9, "samplers": "tp"}, None),
        ({"temperature": 0.5, "top_p": 0.9, "samplers": "pt"}, ("top_p", "temperature")),
        ({"samplers": ["dry", "xtc", "infill", "top_k"], "top_k": 3}, None),
        ({"repeat_penalty": 1.5, "repeat_last_n": -1}, None),
        ({"repeat_penalty": 1.5, "repeat_last_n": 0}, None),
        ({"repeat_penalty": 1.5, "repeat_last_n": 64}, ("penalties",)),
        ({"min_keep": 5, "top_k": 3}, None),
        ({"min_keep": 5, "min_p": 0.5}, ("min_p",)),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.6}, None),
        ({"xtc_probability": 0.5, "samplers": "k"}, None),
        ({"dry_multiplier": 1.0, "dry_penalty_last_n": 0}, None),
        ({"typical_p": 0.5, "temperature": 0.5}, ("typ_p", "temperature")),
    ],
)
async def test_chain_is_made_only_where_it_changes_something(
    fields: dict[str, Any], order: tuple[str, ...] | None, tokenizer: Tokenizer
) -> None:
    chain = await chain_of(tokenizer, **fields)
    assert (None if chain is None else chain.order) == order


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("field", "value"),
    [("samplers", ["top_z"]), ("samplers", "kz"), ("typical_p", 2), ("dry_base", 0.9), ("mirostat", 3),
     ("min_keep", -1), ("dry_sequence_breakers", [""]), ("dry_sequence_breakers", ["x"] * 17),
     ("xtc_threshold", "much")],
)  # fmt: skip
async def test_other_values_are_refused_by_the_name_of_the_field(
    route: str, field: str, value: Any, tokenizer: Tokenizer
) -> None:
    pool = completing(tokenizer)
    async with http_client(pool, tokenizer) as http:
        answer = await http.post(route, json={**ROUTES[route], field: value})
    assert answer.status_code in (400, 422) and field in answer.json()["error"]["param"], answer.text
    assert not pool.submitted
