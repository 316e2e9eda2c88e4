"""Values of a Submit that only a faulty or hostile frontend sends are refused."""

from typing import Any

import pytest

from shared import messages as m
from shared.wire import pack_u32
from worker.engine.validation import MAX_LOGPROBS, MAX_NAME_CHARS, MAX_TOP, check_submit

VOCAB = 100


def submit(prompt: bytes | None = None, tenant: str = "", cache_salt: str = "", **sampling: Any) -> m.Submit:
    packed = pack_u32([1, 2]) if prompt is None else prompt
    return m.Submit(1, packed, m.Sampling(5, **sampling), tenant=tenant, cache_salt=cache_salt)


def test_valid_submit_has_no_problem() -> None:
    assert check_submit(submit(temperature=0.7, top_k=5, logit_bias=((3, -1.0),), stop_token_ids=(99,)), VOCAB) == ""


@pytest.mark.parametrize(
    ("invalid", "words"),
    [
        (submit(b"abc"), "`prompt` is not a whole number of token ids"),
        (submit(b""), "`prompt` is empty"),
        (submit(pack_u32([1, VOCAB])), "`prompt` has the token id 100, outside 0 to 99"),
        (submit(stop_token_ids=(VOCAB,)), "`stop_token_ids` has the token id 100, outside 0 to 99"),
        (submit(logit_bias=((3, 0.0), (VOCAB, 1.0))), "`logit_bias` has the token id 100, outside 0 to 99"),
        (submit(allowed_token_ids=(1, VOCAB + 7)), "`allowed_token_ids` has the token id 107, outside"),
        (submit(bad_words=((1, 2), (VOCAB,))), "`bad_words` has the token id 100, outside 0 to 99"),
        (submit(bad_words=((1, 2), ())), "`bad_words`: a word has no token"),
        (submit(stop_token_ids=(1,) * 2000), "`stop_token_ids` has 2000 ids; at most 1024"),
        (submit(tenant="x" * (MAX_NAME_CHARS + 1)), "the name of the API key is too long"),
        (submit(cache_salt="x" * (MAX_NAME_CHARS + 1)), "`cache_salt` is too long"),
        (submit(seed=1 << 64), "`seed` is out of range"),
        (submit(logprobs=VOCAB + 1), "`logprobs` is out of range"),
        (submit(prompt_logprobs=True, prompt_top=VOCAB + 1), "`prompt_logprobs` is out of range"),
        (submit(temperature=float("nan")), "`temperature` is out of range"),
        (submit(repetition_penalty=0.0), "`repetition_penalty` is out of range"),
        (submit(presence_penalty=float("inf")), "`presence_penalty` is out of range"),
        (submit(logit_bias=((3, float("inf")),)), "`logit_bias` is out of range"),
    ],
)  # fmt: skip
def test_invalid_submit_names_the_problem(invalid: m.Submit, words: str) -> None:
    assert check_submit(invalid, VOCAB).startswith(words)


def test_log_probabilities_of_all_places_have_a_bound() -> None:
    places = MAX_LOGPROBS // (2 * MAX_TOP)  # the most scored tokens that prompt and output together may have
    prompt = pack_u32([1] * (places - 5))
    for more, problem in ((0, ""), (1, "`prompt_logprobs` is out of range")):
        assert check_submit(submit(prompt, prompt_logprobs=True, prompt_top=2 * MAX_TOP + more), 1 << 17) == problem
    assert check_submit(submit(pack_u32([1] * MAX_LOGPROBS), logprobs=MAX_TOP), 1 << 17) == ""
