"""The receipt of an answer: the fingerprint of server and model, a summary of the request, and the answer's token ids.

It contains no API key, no header and no text of the prompt. A grammar appears only as a hash. making.py makes receipts.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.api.requests.encoding import to_json
from frontend.api.requests.request_model import RequestModel
from frontend.api.requests.request_types import Count, TextIds, doc
from frontend.api.response_context import ResponseContext
from frontend.request import Delta
from shared import signing
from shared.signing import Check, Signer

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
    from frontend.api.receipts.making import made

    return made(context, delta, delta.added.output)


def receipt_field(context: ResponseContext, delta: Delta) -> bytes:
    """Returns the receipt as one more field of a JSON object; empty if the request asks for none."""
    receipt = receipt_of(context, delta)
    return b"" if receipt is UNSET else b',"receipt":' + to_json(receipt)
