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
from frontend.text.chat_template import ChatTemplate, Source
from frontend.text.plain_template import NotHere
from frontend.turns import tenant
from shared.config.frontend import FrontendConfig
from shared.sandbox import SlowTenants

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


BOMBS = [  # programs that take all time or memory
    "{{ 'a' * 10**10 }}", "{{ 9**(9**9) }}", "{{ 'a'.ljust(10**10) }}", "{{ '%9999999999d' % 1 }}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    "{{ ns.x | length }}",
    "{% set ns = namespace(x=['a']) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x | tojson }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(x) %}{{ m(x) }}{{ m(x) }}{% endmacro %}{{ m(1) }}",
]  # fmt: skip


@pytest.mark.parametrize("source", BOMBS)
async def test_template_of_a_model_takes_little_time_and_memory_here(
    tokenizer: Any, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body_bytes.set(0)
    monkeypatch.setattr(large_chats, "SECONDS", 0.3)
    monkeypatch.setattr(large_chats, "SLOW", SlowTenants(0.1))
    with pytest.raises(BadRequest, match=r"emory|longer|recursion") as refused:
        await prepared(render([]), context(tokenizer, source), (), {})
    assert refused.value.param == "messages"
    with pytest.raises((NotHere, BadRequest)):
        context(tokenizer, source).template.render([{"role": "user", "content": "x"}])


async def test_template_that_is_not_plain_is_rendered_elsewhere_with_the_same_text(tokenizer: Any) -> None:
    body_bytes.set(0)
    threads = list[str]()
    for source in ("{{ 'ab' | center(9) }}", "{% for one in messages %}{{ loop.cycle('a', 'b') }}{% endfor %}"):
        text = await prepared(render(threads), context(tokenizer, source), (), {})
        assert text == ("    ab    "[:9] if "center" in source else "a")
    assert all(name.startswith("large-chat") for name in threads[1::2]) and len(threads) == 4


async def test_client_whose_chat_took_long_is_served_elsewhere_for_a_while(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    body_bytes.set(0)
    monkeypatch.setattr(large_chats, "SLOW", SlowTenants(0.1))
    monkeypatch.setattr(large_chats, "SECONDS", 60.0)
    slow = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}{{ n }}"
    threads, token = list[str](), tenant.set("a")
    for number, name in ((4000, "a"), (2, "a"), (2, "b")):
        tenant.set(name)
        assert await prepared(render(threads, n=number), context(tokenizer, slow), (), {}) == str(number)
    tenant.reset(token)
    assert [name.startswith("large-chat") for name in threads] == [False, True, True, False]


async def test_marks_of_images_do_not_go_to_the_child(tokenizer: Any) -> None:
    source = Source("data:,x")
    template = "{% for part in messages[0].content %}{{ part.type }}{% endfor %}{# image #}"
    made = replace(context(tokenizer), template=ChatTemplate({"default": template}, {}, supports_vision=True))
    many = [1] * (MOST_VALUES + 1)

    def make(context: ModelContext) -> str:
        return context.template.render([{"role": "user", "content": f"a{source.mark}b"}])

    assert await prepared(make, made, (), {"chat_template_kwargs": many}) == "textimagetext"
