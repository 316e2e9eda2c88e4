"""Routes that count the tokens of a request in OpenAI's Responses and in Anthropic's format, without a worker."""

from starlette.requests import Request
from starlette.responses import Response

from frontend.api.anthropic import messages
from frontend.api.anthropic.messages_request import MessageCountRequest
from frontend.api.openai import responses
from frontend.api.openai.responses_request import ResponseCountRequest, check_stateless
from frontend.app_state import AppState, json_response
from frontend.routes.generate import while_connected
from frontend.routes.kept import Wish, following, tenant_of, whole_request
from frontend.routes.tokenize import answering

of_messages = answering(MessageCountRequest, messages.count_tokens)


async def of_response(app: AppState, request: Request) -> Response:
    """Counts the items of the response or conversation that the request follows, too."""
    body = await app.body(request)
    decoded = await app.decode(request, body, ResponseCountRequest)
    if app.kept is None:
        check_stateless(decoded)
    else:
        body, earlier = await whole_request(app, following(Wish(tenant_of(request)), decoded), body)
        decoded = await app.decode(request, body, ResponseCountRequest) if earlier else decoded
    model = await app.usable_model(request, decoded, computing=False)
    return json_response(await while_connected(request, responses.count_tokens(decoded, model.context)))
