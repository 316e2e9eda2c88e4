"""Chat requests with their own template, with documents, or with roles that only some templates know."""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from frontend.api.chat.call_history import COMMON_ROLES, ChatMessage
from frontend.api.chat.chat_prompt import render
from frontend.api.chat.continuation_fields import ContinueFrom
from frontend.api.model_context import ModelContext
from frontend.errors import Overloaded, Unprocessable
from frontend.output_parser.formats import ModelFormat
from frontend.output_parser.tool_choice import Function
from frontend.text.chat_template import ChatTemplate, TemplateError
from frontend.turns import FairChildren
from shared.processes.expendable import Killed, Lost, NotStarted, Raised

SECONDS = 2.0  # time limit for rendering one template
MEGABYTES = 256  # memory limit of the process that renders a template
# Templates of one tenant wait for each other, and for no other tenant's.
CHILDREN = FairChildren(
    "template", "frontend.text.chat_template:rendered", 2, megabytes=MEGABYTES, most_waiting=64,
    doing="chat templates wait to be rendered",
)  # fmt: skip
SHOWN = "\ue001"  # a private-use character; put around a message's number to find out if the template shows the message


def with_template(context: ModelContext, source: str | None, continued: ContinueFrom | None = None) -> ModelContext:
    """Returns the context for a request with its own chat template. The output is still parsed by the model's format.

    source: the request's template; None: it has none
    continued: the answer to continue; if it is given by a receipt, the template gets the receipt's date

    Raises Unprocessable if the server does not trust templates of requests.
    """
    if continued is not None and continued.receipt is not None:
        context = context.at(continued.receipt.created)
    if source is None:
        return context
    if not context.trusts_templates:
        raise Unprocessable(
            "`chat_template`: the server renders templates of requests only with --trust-request-chat-template",
            param="chat_template", code="unsupported_field",
        )  # fmt: skip
    shown = ModelFormat.of({"default": source})
    style = replace(
        context.style, shows_tools=shown.shows_tools, thinking_switch=shown.thinking_switch,
        has_reasoning_effort=shown.has_reasoning_effort,
    )  # fmt: skip
    sees = context.tokenizer.pictures is not None
    template = ChatTemplate({"default": source}, context.tokenizer.named_tokens, sees=sees, renderer=_in_child)
    if (seconds := context.template.seconds) is not None:
        template = template.at(seconds)
    return replace(context, template=template, style=style)


def _in_child(*arguments: Any) -> list[str]:
    """Renders a template in a child process, because Jinja's sandbox limits neither time nor memory."""
    try:
        text: list[str] = CHILDREN.call_now(*arguments, seconds=SECONDS)
        return text
    except (NotStarted, Killed) as error:
        raise Overloaded(f"`chat_template` was not rendered: {error}", code="not_ready", retry_after=1.0) from error
    except (Lost, Raised) as error:
        raise TemplateError(f"`chat_template` cannot be rendered: {error}", param="chat_template") from error


def document_arguments(documents: list[dict[str, Any]] | None, context: ModelContext) -> dict[str, Any]:
    """Returns the template variable for documents. Raises Unprocessable if the template shows no documents."""
    if not documents:
        return {}
    if not context.template.mentions("documents"):
        raise Unprocessable(
            "`documents`: this model's chat template has no place for them", param="documents", code="unsupported_field"
        )
    return {"documents": documents}


def check_roles(
    messages: Sequence[ChatMessage], context: ModelContext, kwargs: Mapping[str, Any], offered: Sequence[Function]
) -> None:
    """Checks that the chat template shows every message whose role is not in `COMMON_ROLES`.

    The arguments are those of `render`.

    Raises Unprocessable if the template refuses such a message or leaves it out.
    """
    own = [i for i, one in enumerate(messages) if one["role"] not in COMMON_ROLES]
    signs = {i: f"{SHOWN}{i}{SHOWN}" for i in own}
    signed = [one | {"content": one["content"] + signs.get(i, "")} for i, one in enumerate(messages)]

    def text_with(count: int) -> str:
        """Renders the conversation with only the first `count` of the messages whose role is uncommon."""
        left_out = {*own[count:]}
        kept = [one for i, one in enumerate(signed) if i not in left_out]
        return render(kept, context, kwargs, offered, generate=False).marked if kept else ""

    def refused(count: int) -> bool:
        try:
            text_with(count)
        except TemplateError:
            return True
        return False

    try:
        text = text_with(len(own))
    except TemplateError as error:
        if error.param != "messages" or refused(0):
            raise  # the template refuses the conversation for another reason
        at = own[bisect_left(range(1, len(own)), True, key=refused)]
        raise _refusal(messages, at, error.message) from error
    shown = {int(number) for number in re.findall(f"{SHOWN}(\\d+){SHOWN}", text)}
    if hidden := [i for i in own if i not in shown]:
        raise _refusal(messages, hidden[0], "the model's chat template leaves such messages out")


def _refusal(messages: Sequence[ChatMessage], at: int, problem: str) -> Unprocessable:
    param = f"messages[{at}].role"
    return Unprocessable(f"`{param}` is {messages[at]['role']!r}, and {problem}", param=param, code="unsupported_field")
