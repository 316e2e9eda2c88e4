"""SGLang's /generate: continues texts or token ids."""

from frontend.api.chat import structured_output_fields
from frontend.api.model_context import ModelContext, check_model
from frontend.api.openai.completions import error
from frontend.api.openai.completions_input import tokenized
from frontend.api.prepare import Reading, prepare
from frontend.api.requests.likely_tokens import check_repeated
from frontend.api.response_context import ResponseContext
from frontend.api.sglang.fields import MOST_TOKENS, GenerateRequest, SamplingParams
from frontend.api.sglang.output import DONE, EventWriter, complete
from frontend.errors import SluiceError, Unprocessable, api_status
from frontend.request import GenerationRequest
from frontend.server.sse import SERVER_SENT_EVENTS

__all__ = [
    "FRAMING", "NAME", "PREFIX", "REQUEST", "complete", "error", "parse", "status", "stream_error", "stream_writer",
]  # fmt: skip

NAME, PREFIX = "sglang generate", "gen"
FRAMING = SERVER_SENT_EVENTS
REQUEST = GenerateRequest
status = api_status


async def parse(request: GenerateRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    if request.scores_prompt and request.stream:
        raise Unprocessable(
            "`logprob_start_len` cannot go with `stream`", param="logprob_start_len", code="conflicting_fields"
        )
    params = _params(request)
    most = MOST_TOKENS if params.max_new_tokens is None else params.max_new_tokens
    if request.stream and request.return_logprob:
        check_repeated(max(0, request.top_logprobs_num or 0), most, "max_new_tokens")
    reading = Reading(
        fields := request.fields(params), request.param, most, n=params.n,
        logprobs=(request.top_logprobs_num or 0) if request.return_logprob else None,
        form=structured_output_fields.openai(fields, None, ""), format_data=request,
    )  # fmt: skip
    prompts = await tokenized(request.prompts, context, add_special_tokens=True, param=request.param)
    return await prepare(reading, prompts, context)


def _params(request: GenerateRequest) -> SamplingParams:
    """Returns the parameters of all prompts. Raises Unprocessable if they differ."""
    given = request.sampling_params
    if not isinstance(given, list):
        return given or SamplingParams()
    if len(given) != len(request.prompts):
        problem = f"must have {len(request.prompts)} entries, one for each prompt"
    elif any(one != given[0] for one in given):
        problem = "must be equal for all prompts of a request"
    else:
        return given[0]
    raise Unprocessable(f"`sampling_params` {problem}", param="sampling_params", code="out_of_range")


def stream_writer(context: ResponseContext) -> EventWriter:
    return EventWriter(context)


def stream_error(exc: SluiceError, request_id: str, context: ResponseContext) -> bytes:
    """Encodes the end of a failed stream: the error, then the same end mark as in other streams."""
    return b"data: " + error(exc, request_id) + b"\n\n" + DONE
