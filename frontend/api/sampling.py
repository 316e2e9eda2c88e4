"""Turns the sampling fields of a request, which have OpenAI's names, into the message to a worker."""

from typing import Any

from frontend.api.model_context import ModelContext, check_ids
from frontend.api.requests.request_model import SMALLEST
from frontend.api.requests.request_types import GenerationFields
from frontend.errors import Unprocessable
from shared.messages import Sampling

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "min_tokens", "stop_token_ids", "ignore_eos", "logit_bias", "allowed_token_ids", "bad_words",
)  # fmt: skip


async def chosen_sampling(request: GenerationFields, max_tokens: int, context: ModelContext, **more: Any) -> Sampling:
    """Does the same as `sampling`, but also reads a request that sets its own chain of samplers."""
    chosen = sampling(request, max_tokens, context, **more)
    if not request.wants_chain:
        return chosen
    from frontend.api.chat.samplers import with_chain

    return await with_chain(chosen, request, context)


def sampling(request: GenerationFields, max_tokens: int, context: ModelContext, **more: Any) -> Sampling:
    """Makes the worker's Sampling. A missing field gets the checkpoint's recommendation, or else Sampling's default.

    more: values of fields that only some API formats have
    """
    given = {name: value for name in SAMPLING if (value := getattr(request, name, None)) is not None}
    if (factor := getattr(request, "repeat_penalty", None)) is not None:
        given.setdefault("repetition_penalty", factor)
    values = {name: _for_worker(name, value, context) for name, value in {**context.recommended, **given}.items()}
    if values.get("min_tokens", 0) > max_tokens:
        raise Unprocessable("`min_tokens` is more than the tokens asked for", param="min_tokens", code="out_of_range")
    return Sampling(max_tokens=max_tokens, **values, **more)


def _for_worker(name: str, value: Any, context: ModelContext) -> Any:
    match name:
        case "seed":
            return value % (1 << 64)  # reinterprets a signed 64-bit integer as unsigned
        case "top_k":
            # 0, -1 and numbers above the vocabulary's size turn top_k off. The message cannot hold very large numbers.
            return min(value, context.vocab_size) if value > 0 else 0
        case "stop_token_ids":
            check_ids(name, value, context.vocab_size)
            return tuple(value)
        case "allowed_token_ids":
            if not value:
                raise Unprocessable(f"`{name}` is empty, so no token is allowed", param=name, code="out_of_range")
            check_ids(name, value, context.vocab_size)
            return tuple(dict.fromkeys(value))
        case "bad_words":
            return _bad_words(value, context)
        case "logit_bias":
            check_ids(name, list(value), context.vocab_size)
            return tuple((token, _float32(bias)) for token, bias in value.items())
    return _float32(value) if type(value) is float else value


def _bad_words(words: list[str], context: ModelContext) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids of each word, both at the beginning of a text and after a space. Raises Unprocessable."""
    bare = [word.lstrip() or word for word in words]
    encoded = context.tokenizer.encode_now([*bare, *[" " + word for word in bare]], False)
    for place, ids in enumerate(encoded):
        check_ids(f"bad_words[{place % len(words)}]", ids, context.vocab_size)
    return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))


def _float32(value: float) -> float:
    """Returns the value, or 0 if it is below the normal range of the worker's float32."""
    return value if abs(value) >= SMALLEST else 0.0
