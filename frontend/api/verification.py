"""A claim says that a request, run with the seed in its receipt, gives the answer in the receipt.

`Features.checked` makes a worker check an answer in one prefill. The worker sends the ids that the request really
gives, up to the first id that differs, and then the finish reason. These ids are searched for stop strings, as usual.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from frontend.api.answer import AsyncDeltas
from frontend.api.receipts import Receipt
from frontend.errors import BadRequest, SluiceError, Unprocessable
from frontend.model_context import ModelContext
from frontend.request import Admission, Delta, Features, Finish, GenerationRequest
from frontend.schema.base import MOST, RequestModel, ResponseModel, to_json
from frontend.schema.decoding import UnknownFields, decode
from frontend.schema.request_fields import Positive, doc
from frontend.schema.responses import Size
from shared.signing import Check, Signer

SEED = "receipt.sampling.seed"


class VerifyRequest(RequestModel):
    receipt: Annotated[Receipt, doc("The receipt, as the answer had it")]
    request: Annotated[dict[str, Any], doc("The body of the request that was answered, as it was sent")]
    force: Annotated[bool, doc("Check a receipt of another fingerprint, too")] = False
    priority: Annotated[
        int, Meta(ge=-MOST - 1, le=MOST), doc("Lower values run first, among requests of one API key's name")
    ] = 0
    deadline_ms: Annotated[Positive | None, doc("Time limit from the request's arrival; then 504")] = None


class Verification(ResponseModel):
    """The result of a check. `position` counts the answer's tokens from 0."""

    identical: bool
    position: Annotated[Size | None, Meta(description="Of the first token that differs")]
    fingerprint_matches: bool
    fingerprint: Annotated[str, Meta(description="Of this server")]
    expected: Annotated[Size | None, Meta(description="The receipt's token id at `position`")]
    found: Annotated[Size | None, Meta(description="The id that the request gives there")]
    signature: Check
    own_signature: Annotated[bool, Meta(description="Whether the signature is valid and of this server's key")]
    reason: Annotated[str | None, Meta(description="Why the receipt is not identical")]
    tokens: Annotated[Size, Meta(description="The answer's tokens")]


@dataclass(frozen=True, slots=True)
class Claim:
    """A receipt together with its request, ready to be checked.

    generation: the request that checks the answer; None if nothing has to be computed
    problem: why the receipt does not belong to its request; "" if it does
    """

    receipt: Receipt
    generation: GenerationRequest | None
    problem: str

    @classmethod
    def of(cls, asked: VerifyRequest, request: GenerationRequest, vocab_size: int, worker: str) -> "Claim":
        """Makes the claim of a receipt. If the prompts differ, the claim has no generation.

        request: the request, read by the route that the receipt names
        worker: the fingerprint that the checking worker must have; "": any
        Raises BadRequest or Unprocessable, which name the field.
        """
        from frontend.api.receipts import prompt_hash, sampling_used

        receipt = asked.receipt
        seed = _seed(receipt)
        if receipt.index >= len(request.prompts) * request.n:
            raise Unprocessable(
                f"`receipt.index` must be below {len(request.prompts) * request.n}, the number of choices",
                param="receipt.index", code="out_of_range",
            )  # fmt: skip
        prompt = request.prompts[receipt.index // request.n]
        if receipt.prompt_sha256 != prompt_hash(prompt, request.features.images):
            return cls(receipt, None, "the prompt of the request is not the one of the receipt (prompt_sha256)")
        sampling = msgspec.structs.replace(
            request.sampling, seed=seed, logprobs=None, prompt_logprobs=False, prompt_top=0
        )
        known = [id if id < vocab_size else 0 for id in receipt.output_ids[: sampling.max_tokens]]
        checking = replace(
            request, prompts=(prompt,), sampling=sampling, n=1, stream=False,
            features=Features(
                checked=known, receipt=True, continued=request.features.continued, adapter=request.features.adapter,
                images=request.features.images,
            ),
            admission=Admission(request.admission.cache_salt, asked.deadline_ms or 0, asked.priority, "", worker),
        )  # fmt: skip
        return cls(receipt, checking, _sampling_problem(receipt, request, sampling_used(request, seed)))

    async def verdict(self, arriving: AsyncDeltas | None, fingerprint: str, signer: Signer | None) -> Verification:
        """Compares the receipt with the answer that the model now computes for the same request.

        arriving: the deltas of `generation`; None if there is no generation
        fingerprint: this server's fingerprint
        """
        last = await _last(arriving) if arriving is not None else None
        receipt, signature = self.receipt, self.receipt.signature
        expected, found = receipt.output_ids, last.extras.output or [] if last else []
        position = _first_difference(expected, found, last.finish == receipt.finish_reason) if last else None
        check = receipt.signature_check
        reason = self.problem or (_reason(receipt, found, position, last) if last else "")
        return Verification(
            identical=not reason,
            position=position,
            fingerprint_matches=bool(fingerprint) and receipt.fingerprint == fingerprint,
            fingerprint=fingerprint,
            expected=_at(expected, position),
            found=_at(found, position),
            signature=check,
            own_signature=check == "valid" and bool(signer and signature and signature.public_key == signer.public_key),
            reason=reason or None,
            tokens=len(expected),
        )


def checking_worker(asked: VerifyRequest, context: ModelContext, workers: Iterable[str]) -> str:
    """Returns the fingerprint of the workers that must check the receipt; "" if any worker may.

    Raises Unprocessable for a receipt with another fingerprint, unless `force` is set.
    """
    theirs = asked.receipt.fingerprint
    ours = {context.fingerprint_with(worker): worker for worker in workers if worker}
    if theirs in ours or asked.force:
        return ours.get(theirs, "")
    words = f"the receipt was made with the fingerprint {theirs}" if theirs else "the receipt has no fingerprint"
    raise Unprocessable(
        f"{words}, but this server has {' and '.join(ours) or 'none'}, so another answer would prove nothing; send "
        "`force`: true to check it all the same",
        param="receipt.fingerprint", code="fingerprint_mismatch",
    )  # fmt: skip


def _seed(receipt: Receipt) -> int:
    seed = receipt.sampling.get("seed")
    if type(seed) is not int:
        raise BadRequest(f"`{SEED}` must be an integer", param=SEED, code="wrong_type")
    if not 0 <= seed < 1 << 64:
        raise Unprocessable(f"`{SEED}` must be an unsigned integer of 64 bits", param=SEED, code="out_of_range")
    return seed


def _sampling_problem(receipt: Receipt, request: GenerationRequest, used: dict[str, Any]) -> str:
    seed = used["seed"]
    wanted = request.sampling.seed
    if wanted is not None and seed != (drawn := (wanted + receipt.index % request.n) % (1 << 64)):
        return f"the request gives this choice the seed {drawn}, but the receipt has {seed}"
    names = [name for name in {**used, **receipt.sampling} if used.get(name) != receipt.sampling.get(name)]
    return f"the sampling of the request is not the one of the receipt: {', '.join(sorted(names))}" if names else ""


async def _last(arriving: AsyncDeltas) -> Delta:
    last: Delta | None = None
    async for deltas in arriving:
        last = deltas[-1]
    assert last is not None and last.finish is not None, "a generation without an error ends with a finish"
    return last


def _first_difference(expected: list[int], found: list[int], same_finish: bool) -> int | None:
    for position, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return position
    if len(expected) != len(found):
        return min(len(expected), len(found))
    return None if same_finish else len(expected)


def _reason(receipt: Receipt, found: list[int], position: int | None, last: Delta) -> str:
    if position is None:
        return ""
    if position < min(len(found), len(receipt.output_ids)):
        return f"token {position} is {found[position]}, but the receipt has {receipt.output_ids[position]}"
    if position < len(receipt.output_ids):
        return f"the answer ends before token {position} ({last.finish})"
    if last.finish is Finish.CHECKED:
        return f"the answer goes on with token {position}, where the receipt's ends"
    return f"the answer ends with {last.finish}, but the receipt has {receipt.finish_reason}"


def _at(ids: list[int], position: int | None) -> int | None:
    return ids[position] if position is not None and position < len(ids) else None


# Reads the request of a receipt as its original route does, so that the receipt can be checked. Runs nothing.


class Format(Protocol):
    """The part of an API format that reads a request; see frontend/api/formats.py."""

    @property
    def REQUEST(self) -> type[RequestModel]: ...

    async def parse(self, request: Any, context: ModelContext, /) -> GenerationRequest | bytes: ...


# decodes a body into a type; the last argument is the route
Decode = Callable[[bytes, type[RequestModel], str], Awaitable[Any]]


async def _decode(body: bytes, kind: type[RequestModel], path: str) -> Any:
    return decode(body, kind, UnknownFields("auto").reader(path, {}))


async def read_claim(
    asked: VerifyRequest,
    context: ModelContext,
    workers: Sequence[str],
    formats: Mapping[str, Format],
    decode_for: Decode = _decode,
) -> Claim:
    """Reads the request of a receipt. Raises BadRequest or Unprocessable, which name the field.

    workers: the fingerprints of the ready workers
    formats: by route, the API formats whose answers can have receipts
    """
    worker = checking_worker(asked, context, workers)
    route = asked.receipt.route
    if route not in formats:
        known = ", ".join(formats)
        raise BadRequest(f"`receipt.route` must be one of {known}, got {route!r:.80}", param="receipt.route")
    chosen = formats[route]
    context = context.at(asked.receipt.created)
    try:
        parsed = await chosen.parse(await decode_for(to_json(asked.request), chosen.REQUEST, route), context)
    except SluiceError as error:
        error.message = f"the `request` of the receipt cannot be read: {error.message}"
        error.param = f"request.{error.param}" if error.param else "request"
        raise
    if not isinstance(parsed, GenerationRequest):
        raise BadRequest("`request` asks for no tokens, so it has no receipt", param="request")
    return Claim.of(asked, parsed, context.vocab_size, worker)
