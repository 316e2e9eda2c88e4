"""Chat requests with their own template, with documents, or with roles that only some templates know."""

from dataclasses import replace
from typing import Any

from frontend.errors import Overloaded, Unprocessable
from frontend.model_context import ModelContext
from frontend.output_parser.model_format import ModelFormat
from frontend.text.chat_template import ChatTemplate, TemplateError
from frontend.turns import FairChildren
from shared.sandbox import Killed, Lost, NotStarted, Raised

SECONDS = 2.0  # time limit for rendering one template
MEGABYTES = 256  # memory limit of the process that renders a template
# Templates of one tenant wait for each other, and for no other tenant's.
CHILDREN = FairChildren(
    "template", "frontend.text.chat_template:rendered", 2, megabytes=MEGABYTES, most_waiting=64,
    doing="chat templates wait to be rendered",
)  # fmt: skip
# Compiling computes constants (`9**(9**9)`), so it is for a child, too.
CHECKS = FairChildren(
    "template-check", "frontend.text.chat_template:template_problem", 1, megabytes=MEGABYTES, most_waiting=16,
    doing="chat templates wait to be checked",
)  # fmt: skip


async def compile_problem(source: str) -> str:
    """Returns why a template does not compile within the limits, in a sentence; empty if it does. Raises Overloaded."""
    try:
        problem: str = await CHECKS.call(source, seconds=SECONDS)
        return problem
    except (NotStarted, Killed) as error:
        raise Overloaded(f"the template was not compiled: {error}", code="not_ready", retry_after=1.0) from error
    except (Lost, Raised) as error:
        return f"it does not compile: {error}"


def with_template(context: ModelContext, source: str | None, created: int | None = None) -> ModelContext:
    """Returns the context for a request with its own chat template. The output is still parsed by the model's format.

    source: the request's template; None: it has none
    created: when the answer to continue was created, if its receipt says so; the template gets this date

    Raises Unprocessable if the server does not trust templates of requests.
    """
    if created is not None:
        context = context.at(created)
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
    supports_vision = context.tokenizer.image_format is not None
    template = ChatTemplate(
        {"default": source}, context.tokenizer.named_tokens, supports_vision=supports_vision, renderer=_in_child
    )
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
