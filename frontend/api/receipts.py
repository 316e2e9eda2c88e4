"""The receipt of an answer: the fingerprint of server and model, a summary of the request, and the answer's token ids.

It contains no API key, no header and no text of the prompt. A grammar appears only as a hash. This module also makes
receipts, and reads `continue_from`, with which a client continues an earlier answer.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.api.answer import ResponseContext
from frontend.errors import BadRequest, Unprocessable
from frontend.model_context import ModelContext, check_ids
from frontend.request import Delta, Finish, GenerationRequest
from frontend.schema.base import FieldError, RequestModel, to_json
from frontend.schema.request_fields import Count, GenerationFields, TextIds, doc
from shared import signing
from shared.images import with_digests
from shared.messages import Dry, PromptImage, SamplerChain, Sampling
from shared.signing import Check, Signer
from shared.wire import pack_u32

VERSION = 1
LAST_SECOND = 253_000_000_000  # the last time that a date can represent, in seconds since 1970


class Signature(RequestModel):
    algorithm: Annotated[Literal["ed25519"], doc("Ed25519, RFC 8032")]
    public_key: Annotated[str, doc("Of the server, in base64")]
    value: Annotated[str, doc("The signature, in base64, of the receipt without this field as canonical JSON")]


class Receipt(RequestModel):
    version: Annotated[int, Meta(ge=VERSION, le=VERSION), doc("1")]
    fingerprint: Annotated[str, doc("The server's `system_fingerprint`; empty if it has none")]
    model: Annotated[str, doc("The served name")]
    route: Annotated[str, doc("The route of the request, which says how to read it")]
    index: Annotated[Count, doc("Which choice of the response this is")]
    prompt_sha256: Annotated[str, doc("Of the prompt's token ids, each as 4 bytes, little-endian")]
    sampling: Annotated[dict[str, Any], doc("How the tokens were drawn, by the names of the API, with the seed")]
    output_ids: Annotated[TextIds, doc("Of the whole answer, with what it goes on from and what ended it")]
    finish_reason: Annotated[Literal["eos", "stop", "length"], doc("Why the answer ended")]
    created: Annotated[int, Meta(ge=0, le=LAST_SECOND), doc("When the request was read, in seconds since 1970")]
    signature: Annotated[Signature | None, doc("If the server has a `--receipt-key`")] = None

    @property
    def content(self) -> dict[str, Any]:
        """The signed content: all fields except the signature."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        fields.pop("signature", None)
        return fields

    def signed(self, signer: Signer) -> "Receipt":
        signature = Signature(
            algorithm=signing.ALGORITHM, public_key=signer.public_key, value=signer.sign(self.content)
        )
        return msgspec.structs.replace(self, signature=signature)

    @property
    def signature_check(self) -> Check:
        if self.signature is None:
            return "absent"
        return signing.check(self.content, self.signature.public_key, self.signature.value)


def receipt_of(context: ResponseContext, delta: Delta) -> Receipt | UnsetType:
    """Returns the receipt of a choice, from its last delta; UNSET if the request asks for none."""
    if delta.added is None or delta.added.output is None:
        return UNSET

    return made(context, delta, delta.added.output)


def receipt_field(context: ResponseContext, delta: Delta) -> bytes:
    """Returns the receipt as one more field of a JSON object; empty if the request asks for none."""
    receipt = receipt_of(context, delta)
    return b"" if receipt is UNSET else b',"receipt":' + to_json(receipt)


# Makes the receipt of an answer, for requests that ask for one.

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
        prompt_sha256=prompt_hash(request.prompts[delta.index // request.n], request.features.images),
        sampling=sampling_used(request, delta.seed or 0),
        output_ids=output_ids,
        finish_reason=finish.value,  # type: ignore[arg-type]
        created=context.created,
    )
    return receipt if context.signer is None else receipt.signed(context.signer)


def prompt_hash(ids: list[int], images: Sequence[PromptImage] = ()) -> str:
    return hashlib.sha256(with_digests(pack_u32(ids), images)).hexdigest()


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
        rules["chain"] = told(sampling.chain)
    return rules


# A chain of samplers in the form that a receipt states.


def told(chain: SamplerChain) -> dict[str, object]:
    """Returns the chain with the names of the API. The breakers of DRY appear only as a hash."""
    names = [name for name in chain.__struct_fields__ if chain.mirostat or not name.startswith("mirostat")]
    names.remove("reports")  # does not change a token
    values = {name: value for name in names if (value := getattr(chain, name)) is not None}
    if chain.penalties is not None:
        values["penalties"] = msgspec.structs.asdict(chain.penalties)
    if chain.dry is not None:
        values["dry"] = _dry(chain.dry)
    return values


def _dry(dry: Dry) -> dict[str, object]:
    kept = {name: getattr(dry, name) for name in ("multiplier", "base", "allowed_length", "last_n")}
    digest = hashlib.sha256(msgspec.msgpack.encode((dry.breakers, dry.long_breakers))).hexdigest()
    return kept | {"breakers_sha256": digest}


# `continue_from`: the server continues an earlier answer from any of its tokens on.
#
# A client names the earlier answer by its token ids or by its receipt, and otherwise sends the same request again.
# Everything that counts the tokens of an answer (`max_tokens`, `min_tokens`, penalties, a budget for reasoning, the
# random numbers) also counts the tokens of the earlier answer. Therefore the continuation equals the rest of the
# earlier answer.


def continued_ids(
    request: GenerationFields,
    prompts: Sequence[list[int]],
    max_tokens: int,
    context: ModelContext,
    images: Sequence[PromptImage] = (),
) -> tuple[int, ...]:
    """Returns the first tokens of the earlier answer, which the new answer shall begin with.

    prompts: the prompts of the request, as ids; images: the images of the prompt
    max_tokens: the limit on the whole answer, including its earlier tokens

    Raises Unprocessable if the request cannot continue that answer.
    """
    given: ContinueFrom = getattr(request, CONTINUE_FROM)
    _check_conflicts(request, len(prompts))
    ids = _ids_of_receipt(given.receipt, prompt_hash(prompts[0], images), context) if given.receipt else given.ids or []
    source = "receipt" if given.receipt else "ids"
    check_ids(f"{CONTINUE_FROM}.{source}", ids, context.vocab_size)
    position = len(ids) if given.position is None else given.position
    if position > len(ids):
        raise _refusal("position", f"is {position}, but the answer has {len(ids)} tokens")
    if position > max_tokens:
        raise _refusal(
            "position" if given.position is not None else source,
            f"leaves nothing to generate: {position} tokens are there, and `max_tokens`, which counts them, too, is "
            f"{max_tokens}",
        )
    return tuple(ids[:position])


def _ids_of_receipt(receipt: Receipt, prompt: str, context: ModelContext) -> list[int]:
    """Returns the token ids in the receipt. prompt: the hash of the request's prompt.

    Raises Unprocessable for the receipt of another model or prompt.
    """
    if receipt.model not in {context.model, *context.names}:
        raise _refusal("receipt.model", f"is `{receipt.model}`, but this server serves `{context.model}`")
    if receipt.prompt_sha256 != prompt:
        raise _refusal("receipt.prompt_sha256", "is that of another prompt than the request's")
    if receipt.signature_check == "invalid":
        raise _refusal("receipt.signature", "is not valid: the receipt was changed after it was signed")
    return receipt.output_ids


def _check_conflicts(request: GenerationFields, prompts: int) -> None:
    """Raises Unprocessable for a field that asks about tokens which a continuation does not compute again."""
    if prompts > 1:
        raise Unprocessable(f"`{CONTINUE_FROM}` needs a single prompt", param=CONTINUE_FROM, code="conflicting_fields")
    asked: dict[str, Any] = {"echo": False, "prompt_logprobs": None}
    for name, absent in asked.items():
        if getattr(request, name, absent) != absent:
            raise Unprocessable(f"`{CONTINUE_FROM}` cannot go with `{name}`", param=name, code="conflicting_fields")


def _refusal(field: str, problem: str) -> Unprocessable:
    param = f"{CONTINUE_FROM}.{field}"
    return Unprocessable(f"`{param}` {problem}", param=param, code="out_of_range")


# The field `continue_from`, which names an earlier answer by its token ids or by its receipt.

CONTINUE_FROM = "continue_from"


def _given(name: str) -> dict[str, Any]:
    """Returns a JSON schema that requires a non-null value of the field `name`."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


class ContinueFrom(RequestModel):
    SCHEMA: ClassVar = ({"oneOf": [_given("ids"), _given("receipt")]},)

    ids: Annotated[TextIds | None, doc("The tokens of an answer")] = None
    receipt: Annotated[Receipt | None, doc("The receipt of an answer, in place of `ids`")] = None
    position: Annotated[Count | None, doc("How many of its tokens to keep, from the first on; absent: all")] = None

    def __post_init__(self) -> None:
        if (self.ids is None) == (self.receipt is None):
            raise FieldError("ids", "or else `receipt` must be given", BadRequest, "missing_field")


ContinueFromField = Annotated[ContinueFrom | None, doc("Go on from a place in an answer to the same prompt")]
