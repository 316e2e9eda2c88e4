"""The sampling parameters that the options of llama.cpp's routes become."""

from pathlib import Path
from typing import Any

import pytest

from frontend.api.llama_cpp.options import Options
from frontend.schema.decoding import convert
from frontend.text.tokenizer import Tokenizer
from shared.messages import Sampling
from tests.fakes import FakePool
from tests.frontend.serving import completing, http_client
from tests.frontend.text.tokenizers import byte_level, save


async def sampling_of(tokenizer: Tokenizer, **fields: Any) -> Sampling:
    pool: FakePool = completing(tokenizer)
    async with http_client(pool, tokenizer) as http:
        answer = await http.post("/completion", json={"prompt": "Hi", **fields})
    assert answer.status_code == 200, answer.text
    return pool.submitted[0].sampling


async def test_options_have_their_effect(tokenizer: Tokenizer) -> None:
    chosen = await sampling_of(
        tokenizer, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, repeat_penalty=1.1, presence_penalty=0.5,
        frequency_penalty=0.25, seed=42, n_predict=7,
    )  # fmt: skip
    assert chosen == Sampling(7, 0.8, 0.95, 40, 0.05, 1.1, 0.5, 0.25, 42)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": -1.0}, {"temperature": 0.0}),
        ({"top_k": -5}, {"top_k": 0}),
        ({"seed": -1}, {"seed": None}),
        ({"seed": 4294967295}, {"seed": None}),
        ({"repeat_penalty": 1.5, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
        ({"repeat_penalty": 1.5, "samplers": "e"}, {"repetition_penalty": 1.5, "chain": None}),
        ({"top_k": 5, "top_p": 0.5, "samplers": ["top_p"]}, {"top_k": 0, "top_p": 0.5}),
        ({"top_k": 5, "temperature": 0.5, "samplers": "k"}, {"top_k": 5, "temperature": 1.0}),
        ({"min_p": 0.5, "repeat_penalty": 1.5, "samplers": "tm"}, {"min_p": 0.5, "repetition_penalty": 1.0}),
    ],
)
async def test_option_means_what_it_means_to_llama_cpp(
    tokenizer: Tokenizer, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    chosen = await sampling_of(tokenizer, **fields)
    assert {name: getattr(chosen, name) for name in expected} == expected


async def test_ends_are_forbidden_and_not_passed_over(tmp_path: Path) -> None:
    ends = {"generation_config": {"eos_token_id": 265}}
    chosen = await sampling_of(Tokenizer.load(save(byte_level(), tmp_path / "ends", **ends)), ignore_eos=True)
    assert chosen.bad_words == ((265,),) and not chosen.ignore_eos


async def test_grammars_reach_the_worker(tokenizer: Tokenizer) -> None:
    assert "start" in (await sampling_of(tokenizer, grammar='root ::= "a"{5,5}')).grammar
    assert "json_schema" in (await sampling_of(tokenizer, json_schema={"const": "42"})).grammar
    assert not (await sampling_of(tokenizer, grammar="")).grammar


async def test_prompt_that_is_not_cached_has_a_salt_of_its_own(tokenizer: Tokenizer) -> None:
    pool = completing(tokenizer)
    async with http_client(pool, tokenizer) as http:
        for cached in (True, False, False):
            await http.post("/completion", json={"prompt": "Hi", "cache_prompt": cached})
    first, second, third = (one.stream.submit.cache_salt for one in pool.submitted)
    assert first == "" and second and third and second != third


def test_limit_has_two_names() -> None:
    limits = [convert(body, Options).limit for body in ({}, {"n_predict": 3}, {"max_tokens": 4}, {"n_predict": 0})]
    assert limits == [-1, 3, 4, 0]
