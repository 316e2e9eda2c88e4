"""Requests that /v1/completions accepts and refuses; each refusal names its field."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.api.formats import requested_stream_format
from frontend.api.openai import completions
from frontend.api.openai.completions import CompletionRequest
from frontend.errors import BadRequest, SluiceError, Unprocessable
from frontend.request import GenerationRequest
from frontend.text.tokenizer import Tokenizer
from tests.fakes import MODEL, context
from tests.frontend.api.harness import JSON, parse


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "abc", "max_tokens": 8} | more


async def parsed(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> GenerationRequest:
    return await parse(completions, dict(fields), context(tokenizer))


async def test_completion_defaults(tokenizer: Tokenizer) -> None:
    request = await parse(completions, {"model": MODEL, "prompt": "ab"}, context(tokenizer, max_seq_len=256))
    assert request.prompts == ([264, *tokenizer.encode_now(["ab"], False)[0]],)
    assert (request.n, request.stream, request.stops) == (1, False, ())
    assert (request.features.echo, request.shown.timings) == ((), False)
    chosen = request.sampling
    assert (chosen.max_tokens, chosen.temperature, chosen.top_p, chosen.top_k, chosen.min_p) == (128, 1.0, 1.0, 0, 0.0)
    assert (chosen.repetition_penalty, chosen.presence_penalty, chosen.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (chosen.seed, chosen.min_tokens, chosen.stop_token_ids, chosen.ignore_eos) == (None, 0, (), False)
    assert (chosen.logit_bias, chosen.logprobs, chosen.prompt_logprobs) == ((), None, False)


async def test_completion_every_field_arrives(tokenizer: Tokenizer) -> None:
    request = await parsed(
        tokenizer,
        body(
            temperature=0, top_p=0.5, top_k=7, min_p=0.1, repetition_penalty=1.5, presence_penalty=-1,
            frequency_penalty=2, logit_bias={"5": -100, "6": 1.5}, seed=-1, stop="x", stop_token_ids=[4],
            ignore_eos=True, min_tokens=3, n=2, best_of=2, logprobs=20, echo=True, stream=True, timings=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True}, user="u", metadata={"a": "b"},
            store=True, service_tier="auto", stream_format="openai", suffix=None,
        ),
    )  # fmt: skip
    s = request.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.repetition_penalty) == (0.0, 0.5, 7, 0.1, 1.5)
    assert (s.presence_penalty, s.frequency_penalty, s.seed, s.min_tokens) == (-1.0, 2.0, 2**64 - 1, 3)
    assert s.logit_bias == ((5, -100.0), (6, 1.5)) and s.stop_token_ids == (4,) and s.ignore_eos
    assert (s.logprobs, s.prompt_logprobs) == (20, True)
    assert (request.n, request.stops, bool(request.features.echo), request.stream, request.shown.timings) == (
        2,
        ("x",),
        True,
        True,
        True,
    )
    assert request.shown.usage and request.shown.continuous_usage


@pytest.mark.parametrize(
    ("prompt", "count"), [("ab", 1), ([1, 2], 1), (["a", "b"], 2), ([[1], [2, 3]], 2), (["a", [1]], 2)]
)
async def test_prompt_in_every_shape_is_accepted(tokenizer: Tokenizer, prompt: Any, count: int) -> None:
    assert len((await parsed(tokenizer, body(prompt=prompt))).prompts) == count


async def test_stop_of_one_text_or_sixteen_is_accepted(tokenizer: Tokenizer) -> None:
    many = [f"s{i}" for i in range(16)]
    assert (await parsed(tokenizer, body(stop=many))).stops == tuple(many)
    assert (await parsed(tokenizer, body(stop="a"))).stops == ("a",)
    assert (await parsed(tokenizer, body(stop=[]))).stops == ()


async def test_max_tokens_of_zero_with_echo_is_accepted(tokenizer: Tokenizer) -> None:
    assert (await parsed(tokenizer, body(max_tokens=0, echo=True))).sampling.max_tokens == 0


async def test_prompt_that_just_fits_is_accepted(tokenizer: Tokenizer) -> None:
    assert (await parsed(tokenizer, body(prompt=[1] * 56))).prompts == ([1] * 56,)


WRONG_TYPES: list[tuple[str, Any]] = [
    ("prompt", 5), ("prompt", [1, "a"]), ("prompt", ["a", 1]), ("prompt", [True]), ("prompt", [[1, None]]),
    ("prompt", [1.0]), ("prompt", {}), ("model", 1), ("max_tokens", "8"), ("max_tokens", 8.5), ("max_tokens", True),
    ("temperature", "1"), ("temperature", True), ("temperature", [1]), ("top_p", "x"), ("top_k", 1.5), ("n", True),
    ("seed", 1.5), ("stop", 5), ("stop", [1]), ("stop_token_ids", 4), ("stop_token_ids", [True]), ("echo", 1),
    ("stream", "true"), ("ignore_eos", 0), ("logit_bias", []), ("logit_bias", {"1": "x"}), ("stream_options", True),
    ("logprobs", True), ("timings", "yes"), ("stream_format", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES)
async def test_field_of_the_wrong_type_is_400_and_named(tokenizer: Tokenizer, name: str, value: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        await parsed(tokenizer, body(**{name: value}))
    param = refused.value.param or ""
    assert param.partition("[")[0] == name and f"`{param}`" in refused.value.message


@pytest.mark.parametrize(
    ("name", "value", "entry"),
    [("prompt", [[1], [2, None]], "[1][1]"), ("stop", ["a", 1], "[1]"), ("stop_token_ids", [1, -1], "[1]")],
)
async def test_wrong_entry_of_an_array_is_named(tokenizer: Tokenizer, name: str, value: Any, entry: str) -> None:
    with pytest.raises(SluiceError) as refused:
        await parsed(tokenizer, body(**{name: value}))
    assert refused.value.param == f"{name}{entry}" and f"`{name}{entry}`" in refused.value.message


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], [[1], []]])
async def test_prompt_that_is_empty_is_400(tokenizer: Tokenizer, prompt: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        await parsed(tokenizer, body(prompt=prompt))
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("missing", ["prompt"])
async def test_required_field_missing_is_400(tokenizer: Tokenizer, missing: str) -> None:
    with pytest.raises(BadRequest) as refused:
        await parsed(tokenizer, body(**{missing: None}))
    assert refused.value.param == missing


OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("max_tokens", 0), ("max_tokens", -3), ("temperature", -0.1), ("top_p", 0), ("top_p", 1.01), ("top_k", -2),
    ("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0), ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1), ("logit_bias", {"1": 101}), ("logit_bias", {"x": 1}), ("logit_bias", {"269": 1}),
    ("seed", 2**64), ("seed", -(2**63) - 1), ("stop", ""), ("stop", ["a", ""]), ("stop", ["x"] * 16385),
    ("stop_token_ids", [-1]), ("stop_token_ids", [269]), ("min_tokens", 9), ("min_tokens", -1), ("n", 0), ("n", 129),
    ("logprobs", 21), ("logprobs", -1), ("best_of", 2), ("suffix", "x"), ("stream_format", "xml"), ("foo", 1),
    ("prompt", [269]), ("prompt", [-1]), ("prompt", [2**70]), ("model", "other"), ("tools", []),
    ("temperature", 10**400), ("temperature", 1e39), ("top_k", 2**31), ("top_k", 2**63), ("top_k", 2**64),
    ("repetition_penalty", 1e-7), ("repetition_penalty", 1e7), ("max_tokens", 2**63),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
async def test_field_out_of_range_or_unknown_is_422_and_named(tokenizer: Tokenizer, name: str, value: Any) -> None:
    with pytest.raises(Unprocessable) as refused:
        await parsed(tokenizer, body(**{name: value}))
    param = refused.value.param or ""
    assert param.partition("[")[0] == name and f"`{param}`" in refused.value.message


async def test_negative_limit_is_the_end_of_the_context(tokenizer: Tokenizer) -> None:
    limits = [
        await parsed(tokenizer, body(**given)) for given in ({"max_tokens": -1}, {"max_tokens": -2}, {"n_predict": -1})
    ]
    assert len({one.sampling.max_tokens for one in limits}) == 1
    assert limits[0].sampling.max_tokens > (await parsed(tokenizer, body())).sampling.max_tokens


async def test_refusal_codes(tokenizer: Tokenizer) -> None:
    async def code(**more: Any) -> str | None:
        with pytest.raises(SluiceError) as refused:
            await parsed(tokenizer, body(**more))
        return refused.value.code

    assert await code(model="gpt-4") == "model_not_found"
    assert await code(prompt=[1] * 57) == "context_length_exceeded"
    assert await code(foo=1) == "unknown_field"
    assert await code(stream_options={"foo": True}) == "unknown_field"


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted({*CompletionRequest.__struct_fields__, *CompletionRequest.ONLY})), JSON, max_size=5
    )
)
async def test_any_body_is_parsed_or_refused(tokenizer: Tokenizer, more: dict[str, Any]) -> None:
    try:
        request = await parsed(tokenizer, body(**more))
    except (BadRequest, Unprocessable) as refused:
        assert refused.message
    else:
        assert all(request.prompts)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"stream_format": "events", "temperature": -1}', "events"),
        (b'{"prompt": "a"}', None),
        (b'{"stream_format": null}', None),
        (b'{"stream_format": "events"', None),
        (b'["stream_format"]', None),
    ],
)
def test_requested_stream_format_of_any_body(body: bytes, expected: Any) -> None:
    assert requested_stream_format(body) == expected


async def test_logprobs_false_is_the_same_as_none(tokenizer: Tokenizer) -> None:
    for more in ({}, {"echo": True}):
        absent = await parsed(tokenizer, body(**more))
        assert await parsed(tokenizer, body(logprobs=False, **more)) == absent
        assert absent.sampling.logprobs is None and not absent.sampling.prompt_logprobs
    assert (await parsed(tokenizer, body(logprobs=0))).sampling.logprobs == 0


async def test_fields_of_other_servers_have_their_effect(tokenizer: Tokenizer) -> None:
    whole = (await parsed(tokenizer, {"prompt": "abcdef", "max_tokens": 2})).prompts[0]
    for side, kept in (("left", whole[-3:]), ("right", whole[:3]), (None, whole[-3:])):
        cut = {"prompt": "abcdef", "max_tokens": 2, "truncate_prompt_tokens": 3, "truncation_side": side}
        assert (await parsed(tokenizer, cut)).prompts[0] == kept
    bare = await parsed(tokenizer, {"prompt": "abcdef", "max_tokens": 2, "add_special_tokens": False})
    assert bare.prompts[0] == tokenizer.encode_now(["abcdef"], False)[0]
    named = {"regex": "a+", "ebnf": 'root ::= "a"'}
    for name, value in named.items():
        ours = {"regex": "guided_regex", "ebnf": "guided_grammar"}[name]
        grammars = [
            (await parsed(tokenizer, {"prompt": "a", "max_tokens": 2, field: value})).sampling.grammar
            for field in (name, ours)
        ]
        assert grammars[0] == grammars[1] != ""
