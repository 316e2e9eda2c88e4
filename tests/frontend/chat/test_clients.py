"""Images in the fields that well-known clients send, as recorded from each client."""

from types import ModuleType
from typing import Any

import pytest

from frontend.api.anthropic import messages
from frontend.api.ollama.chat import CHAT as ollama_chat
from frontend.api.ollama.chat import GENERATE as ollama_generate
from frontend.api.openai import chat, responses
from frontend.model_context import ModelContext
from frontend.request import GenerationRequest
from tests.frontend.api.harness import parse
from tests.frontend.chat.test_prompt import context_of, data, openai_part, text, url
from tests.images import drawn, seeing_checkpoint

IMAGE = drawn(40, 30)
PART, ORIGINAL = openai_part(IMAGE), openai_part(IMAGE, detail="original")
INPUT_TEXT, INPUT = {"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": url(IMAGE)}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data(IMAGE)}}
ARGUMENTS = {"name": "shot", "arguments": "{}"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": ARGUMENTS}]}
USES: dict[str, Any] = {"type": "tool_use", "id": "c1", "name": "shot", "input": {}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def result(**more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c1", "content": [text("here"), BLOCK], **more}


CLIENTS: dict[str, tuple[ModuleType, int, dict[str, Any]]] = {  # client → (API format, number of images, body)
    "openai": (chat, 2, {"messages": [user(PART, ORIGINAL, text("What?"))], "max_tokens": 5}),
    "langchain-openai": (chat, 2, {"messages": [user(text("a"), PART, PART)], "max_completion_tokens": 5}),
    "langchain-openai, the result of a tool": (chat, 1, {
        "messages": [user(text("look")), CALLED, {"role": "tool", "tool_call_id": "c1", "content": [text("a"), PART]}],
    }),
    "Vercel's AI SDK and Open WebUI": (chat, 1, {
        "stream": True, "messages": [user(text("a"), PART)], "stream_options": {"include_usage": True},
    }),
    "vLLM's, without type": (chat, 2, {
        "messages": [user("a", {"image_url": url(IMAGE), "uuid": "1"}, {"image_url": {"url": url(IMAGE)}})],
    }),
    "parts of the Responses API in a chat": (chat, 1, {"messages": [user(INPUT_TEXT, INPUT | {"detail": "low"})]}),
    "openai, responses": (responses, 1, {"input": [user(INPUT | {"detail": "auto"}, INPUT_TEXT)]}),
    "langchain-openai, responses": (responses, 2, {
        "stream": False, "input": [user(INPUT_TEXT, INPUT, INPUT) | {"type": "message"}], "max_output_tokens": 5,
    }),
    "Vercel's AI SDK, responses, the result of a tool": (responses, 1, {"input": [
        user(INPUT_TEXT), {"type": "function_call", "call_id": "c1", **ARGUMENTS},
        {"type": "function_call_output", "call_id": "c1", "output": [INPUT_TEXT, INPUT]},
    ]}),
    "anthropic": (messages, 2, {
        "messages": [user(BLOCK, BLOCK | {"cache_control": {"type": "ephemeral"}}, text("a"))], "max_tokens": 5,
    }),
    "langchain-anthropic, the result of a tool": (messages, 1, {"max_tokens": 5, "messages": [
        user(text("look")), {"role": "assistant", "content": [USES]}, user(result(is_error=False)),
    ]}),
    "Vercel's AI SDK, messages, the result of a tool": (messages, 1, {"max_tokens": 16, "messages": [
        user(text("look")), {"role": "assistant", "content": [USES]}, user(result()),
    ]}),
    "ollama and langchain-ollama": (ollama_chat, 2, {
        "messages": [{"role": "user", "content": "\nWhat?", "images": [data(IMAGE)] * 2}], "stream": True, "tools": [],
        "options": {"num_predict": 5},
    }),
    "langchain-ollama, the result of a tool": (ollama_chat, 1, {"tools": [], "messages": [
        {"role": "user", "content": "look"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "shot", "arguments": {}}}]},
        {"role": "tool", "content": "\nhere", "images": [data(IMAGE)]},
    ]}),
    "a page that sends data: URLs to Ollama's route": (ollama_chat, 1, {
        "messages": [{"role": "user", "content": "What?", "images": [url(IMAGE)]}],
    }),
    "ollama, without a chat": (ollama_generate, 1, {"prompt": "What?", "images": [data(IMAGE)], "stream": False}),
}  # fmt: skip


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> ModelContext:
    return context_of(seeing_checkpoint("gemma3", tmp_path_factory.mktemp("seeing") / "model"))


@pytest.mark.parametrize("client", CLIENTS)
async def test_client_has_its_images_seen(context: ModelContext, client: str) -> None:
    kind, images, body = CLIENTS[client]
    request = await parse(kind, {"model": context.model, **body}, context)
    assert isinstance(request, GenerationRequest)
    assert len(request.features.images) == images
    assert len({image.digest for image in request.features.images}) == 1
