"""The price of a request, refused with the field's name before any message to a worker is made."""

from typing import Any

import pytest

from frontend.errors import Unprocessable
from frontend.generation.service import PRICES
from frontend.text.tokenizer import Tokenizer
from shared.messages import Dry, SamplerChain, Sampling
from shared.messages.requests import LongBreaker
from tests.fakes import FakePool
from tests.frontend.generation.harness import generation_request, make_service

LISTS, SAMPLERS, GRAMMAR = [price.most for price in PRICES]


@pytest.mark.parametrize(
    ("field", "asked", "most"),
    [
        ("logit_bias", {"logit_bias": ((1, 0.0),) * 1000}, LISTS // 1000),
        ("allowed_token_ids", {"allowed_token_ids": (1,) * 1000}, LISTS // 1000),
        ("bad_words", {"bad_words": ((1,) * 100,) * 10}, LISTS // 1000),
        ("stop_token_ids", {"stop_token_ids": (1,) * 1000}, LISTS // 1000),
        (
            "dry_sequence_breakers",
            {"chain": SamplerChain(("dry",), dry=Dry(1, 2, 2, -1, bytes(64_000), (LongBreaker(bytes(4), (1,)),)))},
            LISTS // 1000,
        ),
        ("samplers", {"chain": SamplerChain(("typ_p",) * 16)}, SAMPLERS // 16),
        ("tools", {"grammar": "x" * (1 << 17)}, GRAMMAR >> 17),
    ],
)
async def test_amounts_of_all_sequences_are_bounded_together(
    field: str, asked: dict[str, Any], most: int, tokenizer: Tokenizer
) -> None:
    pool = FakePool()
    service, sampling = make_service(tokenizer, pool), Sampling(9, **asked)
    await service.start(generation_request(n=most, sampling=sampling))
    assert len(pool.submitted) == most
    with pytest.raises(Unprocessable, match=f"`{field}`: .* in each of {most + 1} answers") as refused:
        await service.start(generation_request(n=most + 1, sampling=sampling))
    assert refused.value.param == field and len(pool.submitted) == most
    with pytest.raises(Unprocessable):
        await service.start(generation_request(prompts=([1],) * (most + 1), sampling=sampling))
