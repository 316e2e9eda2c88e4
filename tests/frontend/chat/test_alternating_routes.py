"""A chat template that raises unless roles alternate, on every route with messages: all give it the same prompt."""

from dataclasses import replace
from typing import Any

import pytest

from frontend.api.anthropic import messages
from frontend.api.ollama.chat import CHAT as ollama
from frontend.api.openai import chat, responses
from frontend.api.openai.chat_request import TemplateRequest, TokenizeRequest
from frontend.routes.tokenize import apply_template, tokenize
from frontend.schema.decoding import convert
from frontend.text.chat_template import ChatTemplate
from frontend.text.tokenizer import Tokenizer
from tests.fakes import MODEL, context
from tests.frontend.api.harness import parse

STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
SAID = [
    {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "system", "content": "c"},
    {"role": "user", "content": "d"},
]  # fmt: skip
EXPECTED = "<user>a<assistant>b<user>c\nd"
ROUTES: dict[str, tuple[Any, str]] = {
    "chat": (chat, "messages"), "responses": (responses, "input"), "messages": (messages, "messages"),
    "ollama": (ollama, "messages"),
}  # fmt: skip


@pytest.mark.parametrize(("route", "field"), ROUTES.values(), ids=ROUTES)
async def test_later_system_message_goes_to_the_user(tokenizer: Tokenizer, route: Any, field: str) -> None:
    where = replace(context(tokenizer, max_seq_len=200), template=ChatTemplate({"default": STRICT}, {}))
    limit = {} if route in (ollama, responses) else {"max_tokens": 9}
    request = await parse(route, {"model": MODEL, field: SAID, **limit}, where)
    assert tokenizer.decode(request.prompts[0], skip_special=False) == EXPECTED


async def test_routes_that_show_a_prompt_agree(tokenizer: Tokenizer) -> None:
    where = replace(context(tokenizer), template=ChatTemplate({"default": STRICT}, {}))
    shown = await apply_template(convert({"messages": SAID}, TemplateRequest), where)
    counted = await tokenize(convert({"messages": SAID, "model": MODEL}, TokenizeRequest), where)
    assert shown.prompt == EXPECTED
    assert tokenizer.decode([one for one in counted.tokens if isinstance(one, int)], skip_special=False) == EXPECTED
