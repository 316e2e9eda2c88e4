"""The routes that load and unload models. They respond at once; /v1/models shows the progress."""

from starlette.requests import Request
from starlette.responses import Response

from frontend.api.app_state import AppState, json_response
from frontend.api.many.fields import ModelRequest
from frontend.api.requests.response_types import Accepted
from frontend.errors import BadRequest, NotFound
from frontend.server.auth import check_admin


async def load_model(app: AppState, request: Request) -> Response:
    """Has a model loaded. Raises NotFound for an unknown name, and BadRequest if the model is already loaded."""
    name, state = await _asked(app, request)
    if state in ("loaded", "loading"):
        raise BadRequest(f"the model `{name}` is {state} already", param="model", code="model_loaded")
    app.models.load(name)
    return json_response(Accepted())


async def unload_model(app: AppState, request: Request) -> Response:
    """Has a model unloaded as soon as no request needs it. Raises NotFound for an unknown name, BadRequest if not
    loaded."""
    name, state = await _asked(app, request)
    if state not in ("loaded", "loading"):
        raise BadRequest(f"the model `{name}` is not loaded", param="model", code="model_not_loaded")
    app.models.keep(name, 0.0)
    return json_response(Accepted())


async def _asked(app: AppState, request: Request) -> tuple[str, str]:
    """Returns the first name and the state of the model that the body names."""
    check_admin(request)
    written = app.decode(request, await app.body(request), ModelRequest).model
    found = app.models.get(written)
    if found is None:
        raise NotFound(f"the model `{written}` does not exist", param="model", code="model_not_found")
    known = app.models.state_of(found.name)
    if known is None:
        raise BadRequest("this server has one model, which is always loaded", code="not_allowed")
    return found.name, known.state
