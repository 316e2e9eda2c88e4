"""Where chats are rendered: small ones on the event loop, large ones in a child process with a limit on its time."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from frontend.chat import large_chats
from frontend.chat.large_chats import FEW_BYTES, MOST_VALUES, body_bytes, prepared
from frontend.errors import BadRequest
from frontend.model_context import ModelContext
from frontend.text.chat_template import ChatTemplate
from shared.config.frontend import FrontendConfig

LOOP = "{% for one in values %}{{ one }}{% endfor %}{% for one in messages %}{{ one.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def large_body() -> Iterator[None]:
    token = body_bytes.set(FEW_BYTES + 1)
    yield
    body_bytes.reset(token)


def context(tokenizer: Any, source: str = LOOP) -> ModelContext:
    made = ModelContext.of(["m"], tokenizer, FrontendConfig())
    return replace(made, template=ChatTemplate({"default": source}, {}))


def render(found: list[str], **kwargs: Any) -> Any:
    def make(context: ModelContext) -> str:
        found.append(threading.current_thread().name)
        return context.template.render([{"role": "user", "content": "x"}], True, None, **kwargs)

    return make


async def test_chat_with_many_values_is_rendered_elsewhere_with_the_same_text(tokenizer: Any) -> None:
    few, many, threads = [1] * MOST_VALUES, [1] * (MOST_VALUES + 1), list[str]()
    for values in (few, many, {"a": many}, [[1, 2]] * MOST_VALUES):
        text = await prepared(render(threads, values=values), context(tokenizer), (), {"chat_template_kwargs": values})
        assert text == "".join(map(str, values)) + "x"
    assert [name.startswith("large-chat") for name in threads] == [False, True, True, True]
    body_bytes.set(FEW_BYTES)
    await prepared(render(threads, values=many), context(tokenizer), (), {"chat_template_kwargs": many})
    assert not threads[-1].startswith("large-chat"), "a small body has few values, whatever they are"


async def test_integers_of_more_than_64_bits_are_refused_by_the_field(tokenizer: Any) -> None:
    many = [1 << 64] * (MOST_VALUES + 1)
    with pytest.raises(BadRequest, match=r"`chat_template_kwargs`.*64 bits"):
        await prepared(render([], values=many), context(tokenizer), (), {"chat_template_kwargs": many})


async def test_rendering_that_takes_too_long_is_refused_by_the_field(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_chats, "SECONDS", 0.2)
    many = [1] * (MOST_VALUES + 1)
    slow = "{% for one in values %}{% for two in values %}{{ two }}{% endfor %}{% endfor %}"
    with pytest.raises(BadRequest, match=r"`chat_template_kwargs` cannot be rendered.*takes longer") as refused:
        await prepared(render([], values=many), context(tokenizer, slow), (), {"chat_template_kwargs": many})
    assert refused.value.param == "chat_template_kwargs"
