"""Which requests get a chain of samplers, and with which values, on the routes that llama.cpp's clients use."""

from typing import Any

import pytest

from frontend.api.llama_cpp.completion import COMPLETION as completion
from frontend.api.openai import chat, completions
from frontend.chat import samplers as dry_breakers
from frontend.chat.samplers import breaker_ids
from frontend.errors import SluiceError, Unprocessable
from frontend.text.tokenizer import Tokenizer
from shared.messages import Sampling, WindowPenalties
from shared.wire import unpack_u32
from tests.fakes import MODEL, context
from tests.frontend.api.harness import parse

PROMPTS: list[tuple[Any, dict[str, Any]]] = [
    (completions, {"model": MODEL, "prompt": "abc", "max_tokens": 8}),
    (chat, {"model": MODEL, "messages": [{"role": "user", "content": "abc"}], "max_tokens": 8}),
    (completion, {"prompt": "abc", "n_predict": 8}),
]
on_every_route = pytest.mark.parametrize(("route", "body"), PROMPTS, ids=["completions", "chat", "llama.cpp"])


async def chosen(tokenizer: Tokenizer, route: Any, body: dict[str, Any]) -> Sampling:
    return (await parse(route, body, context(tokenizer))).sampling


@on_every_route
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 0.5},
        {"samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"], "temperature": 0.7, "top_p": 0.9},
        {"samplers": "kt", "temperature": 0.7, "top_k": 5},  # the order of temperature and top-k changes nothing
        {"repeat_last_n": 5, "temperature": 0.7, "top_p": 0.9},  # without a penalty, repeat_last_n has no effect
        {"dry_multiplier": 0.0, "xtc_probability": 0.0, "typical_p": 1.0, "top_n_sigma": -1.0, "dynatemp_range": 0.0},
        {"mirostat": 0, "min_keep": 3},
    ],
)
async def test_request_that_plain_sampling_serves_gets_no_chain(
    tokenizer: Tokenizer, route: Any, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert (await chosen(tokenizer, route, body | fields)).chain is None


@on_every_route
async def test_chain_has_the_values_of_the_request_and_plain_sampling_none(
    tokenizer: Tokenizer, route: Any, body: dict[str, Any]
) -> None:
    fields = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8, "xtc_probability": 0.5}
    sampling = await chosen(tokenizer, route, body | fields | {"dynatemp_range": 0.2, "min_keep": 2, "seed": 3})
    assert sampling.seed == 3 and (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1, 0, 1, 0)
    chain = sampling.chain
    assert chain is not None and chain.order == ("top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
    assert (chain.temperature, chain.top_k, chain.top_p, chain.min_p, chain.typical_p) == (0.7, 5, 0.9, 0.1, 0.8)
    assert (chain.xtc_probability, chain.xtc_threshold, chain.dynatemp_range, chain.min_keep) == (0.5, 0.1, 0.2, 2)


@on_every_route
async def test_samplers_run_in_the_order_of_the_request_and_others_are_off(
    tokenizer: Tokenizer, route: Any, body: dict[str, Any]
) -> None:
    fields = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "typical_p": 0.8}
    for samplers in (["top_p", "temperature"], "pt"):
        chain = (await chosen(tokenizer, route, body | fields | {"samplers": samplers})).chain
        assert chain is not None and chain.order == ("top_p", "temperature")
    off = await chosen(tokenizer, route, body | fields | {"samplers": []})
    assert off.chain is None and (off.temperature, off.top_k, off.top_p) == (1.0, 0, 1.0)


@on_every_route
async def test_penalties_in_a_window_are_the_chains(tokenizer: Tokenizer, route: Any, body: dict[str, Any]) -> None:
    sampling = await chosen(
        tokenizer, route, body | {"repeat_last_n": 9, "repeat_penalty": 1.5, "presence_penalty": 0.5}
    )
    assert (
        sampling.chain is not None
        and sampling.chain.penalties == WindowPenalties(9, 1.5, 0.5)
        and not sampling.penalized
    )
    none = await chosen(tokenizer, route, body | {"repeat_last_n": 0, "repeat_penalty": 1.5})
    assert none.chain is None and not none.penalized


@on_every_route
async def test_dry_has_llama_cpps_defaults(tokenizer: Tokenizer, route: Any, body: dict[str, Any]) -> None:
    chain = (await chosen(tokenizer, route, body | {"dry_multiplier": 0.8})).chain
    assert chain is not None and chain.dry is not None and chain.order == ("dry",)
    assert (chain.dry.multiplier, chain.dry.base, chain.dry.allowed_length, chain.dry.last_n) == (0.8, 1.75, 2, -1)
    texts = [tokenizer.token_text(id) for id in unpack_u32(chain.dry.breakers)]
    assert texts and all(set(text) & {"\n", ":", '"', "*"} for text in texts)


async def test_breaker_of_several_tokens_is_found_wherever_it_begins(tokenizer: Tokenizer) -> None:
    single, several = breaker_ids(["ab\n"], tokenizer)
    assert all("ab\n" in tokenizer.token_text(id) for id in unpack_u32(single))
    for one in several:
        for head in unpack_u32(one.heads):
            text = "".join(tokenizer.token_text(id) for id in (head, *one.tail))
            assert text.endswith("ab\n") and "ab\n" not in tokenizer.token_text(head)
    assert several
    begins = {tokenizer.token_text(id) for one in several for id in unpack_u32(one.heads)}
    assert begins == {
        text for id in range(tokenizer.vocab_size) if (text := tokenizer.token_text(id)).endswith(("a", "ab"))
    }


async def test_breakers_that_begin_in_too_many_tokens_are_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, several = breaker_ids(["e!", "t!"], tokenizer)
    heads = sum(len(one.heads) // 4 for one in several)
    monkeypatch.setattr(dry_breakers, "MAX_HEADS", heads)
    assert breaker_ids(["e!", "t!"], tokenizer)[1] == several
    monkeypatch.setattr(dry_breakers, "MAX_HEADS", heads - 1)
    with pytest.raises(Unprocessable, match="dry_sequence_breakers"):
        breaker_ids(["e!", "t!"], tokenizer)


@on_every_route
async def test_breakers_have_a_bound_on_their_characters(
    tokenizer: Tokenizer, route: Any, body: dict[str, Any]
) -> None:
    fits = ["x" * 40] * 3 + ["y" * 8]
    sampling = await chosen(tokenizer, route, body | {"dry_multiplier": 0.8, "dry_sequence_breakers": fits})
    assert sampling.chain is not None and sampling.chain.dry is not None
    with pytest.raises(SluiceError, match="dry_sequence_breakers"):
        await chosen(tokenizer, route, body | {"dry_multiplier": 0.8, "dry_sequence_breakers": [*fits, "z"]})


@on_every_route
async def test_mirostat_leaves_the_temperature_and_turns_off_the_others(
    tokenizer: Tokenizer, route: Any, body: dict[str, Any]
) -> None:
    fields = {"mirostat": 2, "mirostat_tau": 3.0, "temperature": 0.7, "top_k": 5, "repeat_penalty": 1.5, "min_p": 0.1}
    sampling = await chosen(tokenizer, route, body | fields)
    chain = sampling.chain
    assert chain is not None and chain.order == ("temperature",) and chain.temperature == 0.7
    assert (chain.mirostat, chain.mirostat_tau, chain.mirostat_eta, chain.penalties) == (2, 3.0, 0.1, None)
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.penalized) == (1.0, 0, 0.0, False)
