"""Decides where a chat is rendered: on the event loop, or in a child process if rendering it may take long.

A chat template is a program that loops over what a client sends, at some microseconds for each value, and all streams
of this frontend wait meanwhile. Ordinary chats take a tenth of a millisecond and stay on the event loop. A chat with
thousands of values is prepared in a thread, and its template is rendered in a child process with limits of time and
memory. So is the chat of a template that might take all time or memory (frontend/text/chat_template.py), and one that
took too long on the event loop; the next chats of such a client go to a child at once.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from frontend.errors import Overloaded
from frontend.model_context import ModelContext
from frontend.text.chat_template import HERE_S, TemplateError
from frontend.text.plain_template import NotHere
from frontend.turns import FairChildren, tenant
from shared.sandbox import Killed, Lost, NotStarted, Raised, SlowTenants

FEW_BYTES = 32 << 10  # a request body of at most this size has only as many values as are rendered in 0.1 s
MOST_VALUES = 4096  # values (entries of arrays and objects) of a larger body that are rendered on the event loop
MOST_MESSAGES = 1000  # the same for messages, each of which costs ten times as much as another value
SECONDS = 2.0  # limit on the time of one rendering
MEGABYTES = 256  # limit on the memory of the child

CHILDREN = FairChildren(
    "large-chat", "frontend.text.chat_template:rendered_of_model", 2, megabytes=MEGABYTES, most_waiting=512,
    doing="large chats wait to be rendered",
)  # fmt: skip
SLOW = SlowTenants(HERE_S)  # whose chats take too long on the event loop

body_bytes: ContextVar[int] = ContextVar("body_bytes", default=0)  # size of the body of the request of this task

T = TypeVar("T")


async def prepared(
    make: Callable[[ModelContext], T], context: ModelContext, messages: Sequence[Any], values: Mapping[str, Any]
) -> T:
    """Returns make(context): here if this takes little time, else in a thread, with a template that a child renders.

    messages: those of the chat; values: by the request's field, what the template gets besides the messages
    """
    field = None if body_bytes.get() <= FEW_BYTES else _large_field(messages, values)
    if field is None and tenant.get() not in SLOW:
        try:
            return make(context)
        except NotHere as elsewhere:
            if elsewhere.slow:
                SLOW.note(tenant.get(), HERE_S)
    field = field or "messages"
    template = context.template.rendered_by(partial(_in_child, field))
    return await CHILDREN.threads.run(make, replace(context, template=template))


def _large_field(messages: Sequence[Any], values: Mapping[str, Any]) -> str | None:
    """Returns the field with too many values for the event loop; None if there is none."""
    left = MOST_VALUES
    for field, value in values.items():
        left = _left(value, left)
        if left < 0:
            return field
    return "messages" if len(messages) > MOST_MESSAGES else None


def _left(value: Any, left: int) -> int:
    """Returns how many of `left` values remain after those in `value`; negative if it has more."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, Collection) or isinstance(value, str | bytes):
        return left
    left -= len(value)
    for one in value if left >= 0 else ():
        if left < 0:
            break
        if not isinstance(one, str | int | float | None):
            left = _left(one, left)
    return left


def _in_child(field: str, *arguments: Any) -> list[str]:
    try:
        text: list[str] = CHILDREN.call_now(*arguments, seconds=SECONDS)
        return text
    except OverflowError:  # msgpack has no longer ones
        raise TemplateError(f"`{field}`: in a large chat, integers may have at most 64 bits", param=field) from None
    except (NotStarted, Killed) as error:
        raise Overloaded(f"the chat was not rendered: {error}", code="not_ready", retry_after=1.0) from error
    except (Lost, Raised) as error:
        raise TemplateError(f"`{field}` cannot be rendered by the chat template: {error}", param=field) from error
