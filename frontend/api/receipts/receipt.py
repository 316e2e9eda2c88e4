"""The receipt of an answer: the fingerprint of what computed it, its request in short, and its token ids.

It holds no key, no header and no text of the prompt. A grammar is only hashed.
"""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.api.common import ResponseContext, to_json
from frontend.api.receipts import signing
from frontend.api.receipts.signing import Check, Signer
from frontend.api.request_model import RequestModel
from frontend.api.request_types import Count, TextIds, doc
from frontend.request import Delta, GenerationRequest
from shared.codec import pack_u32
from shared.messages import Sampling

VERSION = 1
LAST_SECOND = 253_000_000_000  # of what a date can hold, in seconds since 1970
ALWAYS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
IF_SET = ("min_tokens", "stop_token_ids", "ignore_eos", "allowed_token_ids", "bad_words")


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
    created: Annotated[int, Meta(ge=0, le=LAST_SECOND), doc("When the answer began, in seconds since 1970")]
    signature: Annotated[Signature | None, doc("If the server has a `--receipt-key`")] = None

    @property
    def content(self) -> dict[str, Any]:
        """What is signed: all fields but the signature."""
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
    """Returns the receipt of the choice that `delta` ends; UNSET if the request asks for none."""
    request = context.request
    if delta.output is None or delta.finish is None:
        return UNSET
    receipt = Receipt(
        version=VERSION,
        fingerprint=context.fingerprint,
        model=request.model,
        route=context.route,
        index=delta.index,
        prompt_sha256=prompt_hash(request.prompts[delta.index // request.n]),
        sampling=sampling_used(request, delta.seed or 0),
        output_ids=delta.output,
        finish_reason=delta.finish.value,  # type: ignore[arg-type]
        created=context.created,
    )
    return receipt if context.signer is None else receipt.signed(context.signer)


def receipt_field(context: ResponseContext, delta: Delta) -> bytes:
    """Returns the receipt as a further field of a JSON object; nothing if the request asks for none."""
    receipt = receipt_of(context, delta)
    return b"" if receipt is UNSET else b',"receipt":' + to_json(receipt)


def prompt_hash(ids: list[int]) -> str:
    return hashlib.sha256(pack_u32(ids)).hexdigest()


def sampling_used(request: GenerationRequest, seed: int) -> dict[str, Any]:
    """Returns how the tokens of a request are drawn, by the names of the API."""
    sampling = request.sampling
    used: dict[str, Any] = {name: getattr(sampling, name) for name in ALWAYS} | {"seed": seed}
    used |= {name: value for name in IF_SET if (value := getattr(sampling, name))}
    used |= _rules(sampling)
    if request.stops:
        used["stop"] = request.stops
    plain: dict[str, Any] = msgspec.json.decode(to_json(used))  # as it is when the receipt comes back
    return plain


def _rules(sampling: Sampling) -> Mapping[str, Any]:
    rules: dict[str, Any] = {}
    if sampling.logit_bias:
        rules["logit_bias"] = {str(id): bias for id, bias in sampling.logit_bias}
    if sampling.grammar:
        rules["grammar_sha256"] = hashlib.sha256(sampling.grammar.encode()).hexdigest()
    if sampling.thinking is not None:
        rules["max_thinking_tokens"] = sampling.thinking.tokens
    return rules
