"""Makes the receipt of an answer, for requests that ask for one."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from frontend.api.receipts.receipt import VERSION, Receipt
from frontend.api.requests.encoding import to_json
from frontend.api.response_context import ResponseContext
from frontend.request import Delta, Finish, GenerationRequest
from shared.messages import Picture, Sampling
from shared.pictures.identity import with_digests
from shared.wire.codec import pack_u32

ALWAYS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
IF_SET = ("min_tokens", "stop_token_ids", "ignore_eos", "allowed_token_ids", "bad_words")


def made(context: ResponseContext, delta: Delta, output_ids: list[int]) -> Receipt:
    """Returns the receipt of a choice. delta: the choice's last delta; output_ids: all ids of its output"""
    request, finish = context.request, delta.finish or Finish.LENGTH
    receipt = Receipt(
        version=VERSION,
        fingerprint=context.fingerprint,
        model=request.model,
        route=context.route,
        index=delta.index,
        prompt_sha256=prompt_hash(request.prompts[delta.index // request.n], request.features.pictures),
        sampling=sampling_used(request, delta.seed or 0),
        output_ids=output_ids,
        finish_reason=finish.value,  # type: ignore[arg-type]
        created=context.created,
    )
    return receipt if context.signer is None else receipt.signed(context.signer)


def prompt_hash(ids: list[int], pictures: Sequence[Picture] = ()) -> str:
    return hashlib.sha256(with_digests(pack_u32(ids), pictures)).hexdigest()


def sampling_used(request: GenerationRequest, seed: int) -> dict[str, Any]:
    """Returns the sampling parameters of a request, with the names of the API."""
    sampling = request.sampling
    used: dict[str, Any] = {name: getattr(sampling, name) for name in ALWAYS} | {"seed": seed}
    used |= {name: value for name in IF_SET if (value := getattr(sampling, name))}
    used |= _rules(sampling)
    if request.stops:
        used["stop"] = request.stops
    plain: dict[str, Any] = msgspec.json.decode(to_json(used))  # comparable with a decoded receipt
    return plain


def _rules(sampling: Sampling) -> Mapping[str, Any]:
    rules: dict[str, Any] = {}
    if sampling.logit_bias:
        rules["logit_bias"] = {str(id): bias for id, bias in sampling.logit_bias}
    if sampling.grammar:
        rules["grammar_sha256"] = hashlib.sha256(sampling.grammar.encode()).hexdigest()
    if sampling.thinking is not None:
        rules["max_thinking_tokens"] = sampling.thinking.tokens
    if sampling.chain is not None:
        from frontend.api.receipts.sampler_chain import told

        rules["chain"] = told(sampling.chain)
    return rules
