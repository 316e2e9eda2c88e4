"""Renders messages as the text of a prompt, with a checkpoint's chat template. It does not tokenize.

The Jinja environment is the one that Hugging Face templates expect (sandboxed, trimmed blocks, `raise_exception`,
`strftime_now`, plain `tojson`, `{% break %}`, `{% generation %}`); a test compares it with `apply_chat_template`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from frontend.errors import BadRequest
from frontend.text.plain_template import MOST_SOURCE, NotHere, PlainEnvironment, is_plain, with_bounds
from shared.config.declaration import ConfigError
from shared.sandbox import CpuLimit

DATE = "strftime_now"  # the template function that returns the date
HERE_S = 0.1  # processor time of a rendering on the event loop; ordinary chats take a thousandth of it
HERE = CpuLimit(HERE_S, lambda: NotHere("the chat takes long to render", slow=True))
# Renders a template in another process. It has the arguments and the result of `rendered`.
Renderer = Callable[..., list[str]]


class TemplateError(BadRequest):
    """The template is missing or broken, or refuses these messages."""

    def __init__(self, message: str, *, param: str = "messages") -> None:
        super().__init__(message, param=param)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is a block without effect."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own type)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now(UTC).strftime(pattern)  # in UTC, so that prompts do not depend on the server's time zone


def _strftime_at(time: object) -> Callable[[str], str]:
    """Returns the template function `strftime_now` for a time that a client gives."""
    try:
        return datetime.fromisoformat(time if isinstance(time, str) else "").strftime
    except ValueError:
        raise TemplateError(
            f"`chat_template_kwargs.{DATE}` must be a date or a time in ISO 8601, such as 2026-11-27",
            param=f"chat_template_kwargs.{DATE}",
        ) from None


def _environment(kind: type[ImmutableSandboxedEnvironment] = ImmutableSandboxedEnvironment) -> jinja2.Environment:
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json  # Jinja's own filter escapes HTML
    environment.globals["raise_exception"] = _raise
    environment.globals[DATE] = _strftime_now
    return environment


def _compiled(environment: jinja2.Environment, source: str | nodes.Template) -> jinja2.Template:
    """Compiles a template. Raises jinja2.TemplateError for any error, even in a constant that Jinja computes."""
    try:
        return environment.from_string(source)
    except jinja2.TemplateError:
        raise
    except Exception as error:
        # The line number of `error` is left out: it is a line of Jinja's code.
        raise jinja2.TemplateError(getattr(error, "msg", "") or _words(error)) from error


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def given_template(file: Path) -> dict[str, str]:
    """Returns {"default": the template of `--chat-template`}. Raises ConfigError if it cannot be read or compiled."""
    try:
        source = file.expanduser().read_text(encoding="utf-8")
        _compiled(_environment(), source)
    except FileNotFoundError as error:
        raise ConfigError(f"--chat-template {file}: there is no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {file} cannot be read: {error}") from error
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"--chat-template {file} does not compile: line {error.lineno}: {error}") from error
    except jinja2.TemplateError as error:
        raise ConfigError(f"--chat-template {file} does not compile: {error}") from error
    return {"default": source}


def template_problem(source: str) -> str:
    """Returns why a template does not compile, in a sentence; empty if it does."""
    try:
        _compiled(_environment(), source)
    except jinja2.TemplateError as error:
        return f"it does not compile: {error}"
    return ""


class ChatTemplate:
    """The named templates of one checkpoint ("default", "tool_use"), each compiled when it is first rendered.

    templates: sources by name
    specials: the special tokens that a template may write (`bos_token`, `eos_token`, ...)
    supports_vision: whether the model takes images
    renderer: renders the template in another process, if it comes from a request
    field: the request's field that holds the template, for error messages; empty: the template is the model's
    expendable: whether this process may take all time and memory to render it, because its parent ends it

    A missing or broken template raises only at the first `render`, because completions need no template.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        specials: Mapping[str, str],
        *,
        supports_vision: bool = False,
        field: str = "",
        renderer: Renderer | None = None,
        expendable: bool = False,
    ) -> None:
        self._called, self._field = (f"`{field}`", field) if field else ("the model's chat template", "messages")
        self._templates = dict(templates)
        self._supports_vision, self._renderer = supports_vision, renderer
        self.takes_parts = supports_vision and self.mentions(
            "image"
        )  # whether a message is given as parts, not as text
        self._compiled: dict[str, jinja2.Template | None] = {}  # None: it may not be compiled in this process
        self._expendable = expendable
        self._environment = _environment() if expendable else _environment(PlainEnvironment)
        self._specials: dict[str, object] = dict(specials)
        self.seconds: float | None = None  # the time that templates get, in seconds since 1970
        self.writes_date = self.mentions(DATE)

    def __bool__(self) -> bool:
        """Whether the model has a template."""
        return bool(self._templates)

    @property
    def is_slow(self) -> bool:
        """Whether `render` may take long, so that it belongs in a thread."""
        return self._renderer is not None

    def rendered_by(self, renderer: Renderer) -> "ChatTemplate":
        """Returns a copy that is rendered in another process."""
        other = copy(self)
        other._renderer = renderer
        return other

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of the templates."""
        return tuple(self._templates.values())

    def at(self, seconds: float) -> "ChatTemplate":
        """Returns a copy that renders with this time, in seconds since 1970, because some templates write the date."""
        other = copy(self)
        other.seconds = seconds
        other._specials = {**self._specials, DATE: datetime.fromtimestamp(seconds, UTC).strftime}
        return other

    def mentions(self, variable: str) -> bool:
        """Whether the source of some template contains this word."""
        return any(variable in source for source in self._templates.values())

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        /,
        **kwargs: object,
    ) -> str:
        """Renders the prompt for `messages`. The prompt has its special tokens, so encode it without adding any.

        kwargs: variables of the template (`enable_thinking=False`). They replace anything but the messages, so a
            client's `chat_template_kwargs` can be passed on unchecked. `strftime_now` is the time to render with, in
            ISO 8601

        Raises TemplateError with the template's own words when it refuses the messages, and NotHere if this process may
        not take the time or the memory that it needs.
        """
        if self.takes_parts:  # and no marks of images, which are no Unicode, go to another process
            messages = [{**one, "content": parts_of(one.get("content"))} for one in messages]
        if self._renderer is not None:
            specials = {name: value for name, value in self._specials.items() if name != DATE}
            parts = (
                self._templates,
                specials,
                self._supports_vision,
                self.seconds,
                messages,
                add_generation_prompt,
                tools,
                kwargs,
            )
            text, *refused = self._renderer(*parts)
            if refused:
                raise TemplateError(text, param=refused[0])
            return text
        if "messages" in kwargs:
            raise TemplateError("the chat template's messages cannot be replaced", param="chat_template_kwargs")
        defaults: dict[str, object] = {
            "add_generation_prompt": add_generation_prompt, "tools": tools, "documents": None,
        }  # fmt: skip
        if DATE in kwargs:
            kwargs[DATE] = _strftime_at(kwargs[DATE])
        variables = {**self._specials, **defaults, **kwargs, "messages": messages}
        template = self._choose(variables["tools"] is not None)
        try:
            if self._expendable:
                return template.render(variables)
            with HERE:
                return template.render(variables)
        except NotHere:
            raise
        except Exception as exc:  # a template is a program: unexpected messages can make it raise anything
            raise TemplateError(f"{self._called} refused the messages: {_words(exc)}") from exc

    def _choose(self, with_tools: bool) -> jinja2.Template:
        if not self._templates:
            raise TemplateError("this model has no chat template; use /v1/completions")
        if with_tools and "tool_use" in self._templates:
            return self._compile("tool_use")
        if "default" not in self._templates:
            raise TemplateError(f"this model has no default chat template, only {', '.join(sorted(self._templates))}")
        return self._compile("default")

    def _compile(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            try:
                source = self._source(name)
                self._compiled[name] = None if source is None else _compiled(self._environment, source)
            except jinja2.TemplateError as exc:
                raise TemplateError(f"{self._called} does not compile: {exc}", param=self._field) from exc
        if (compiled := self._compiled[name]) is None:
            raise NotHere("the template is not plain")
        return compiled

    def _source(self, name: str) -> str | nodes.Template | None:
        """Returns what is compiled; None for a template that may not be compiled in this process."""
        source = self._templates[name]
        if self._expendable:
            return source
        try:
            tree = None if len(source) > MOST_SOURCE else self._environment.parse(source)
        except Exception:  # it does not compile, which the caller reports
            return source
        return None if tree is None or not is_plain(tree) else with_bounds(tree)


def rendered(
    templates: dict[str, str],
    specials: dict[str, str],
    supports_vision: bool,
    seconds: float | None,
    messages: list[dict[str, Any]],
    generate: bool,
    tools: list[dict[str, Any]] | None,
    kwargs: dict[str, Any],
) -> list[str]:
    """Renders a template of a request in a child process (shared/sandbox.py).

    Returns [the text] or, if the template refuses the messages, [the TemplateError's message, its parameter]
    """
    parts = messages, generate, tools, kwargs
    return _rendered(_template(tuple(templates.items()), tuple(specials.items()), supports_vision), seconds, *parts)


def rendered_of_model(
    templates: dict[str, str], specials: dict[str, str], supports_vision: bool, seconds: float | None, *parts: Any
) -> list[str]:
    """Does the same as `rendered` with the model's template, for a chat that is too large for the event loop."""
    return _rendered(_template(tuple(templates.items()), tuple(specials.items()), supports_vision, ""), seconds, *parts)


def _rendered(
    template: ChatTemplate,
    seconds: float | None,
    messages: list[dict[str, Any]],
    generate: bool,
    tools: list[dict[str, Any]] | None,
    kwargs: dict[str, Any],
) -> list[str]:
    try:
        template = template if seconds is None else template.at(seconds)
        return [template.render(messages, generate, tools, **kwargs)]
    except TemplateError as error:
        return [error.message, error.param or "messages"]


@lru_cache(maxsize=8)
def _template(
    templates: tuple[tuple[str, str], ...],
    specials: tuple[tuple[str, str], ...],
    supports_vision: bool,
    field: str = "chat_template",
) -> ChatTemplate:
    return ChatTemplate(dict(templates), dict(specials), supports_vision=supports_vision, field=field, expendable=True)


# Marks: short texts that stand for images in a message's text until the chat template renders the message.
#
# A mark begins and ends with half of a surrogate pair. A client cannot send these characters, because JSON in UTF-8
# cannot hold them, so a mark cannot be forged. Code that joins, trims or moves texts needs no special case for marks.
#
# PARTED stands between two texts of a message. A template that gets parts gets both texts as parts; for any other
# template, PARTED becomes a line break.

OPEN, CLOSE, PARTED = "\udcf0", "\udcf1", "\udcf2"
MARK = re.compile(f"{OPEN}([0-9a-f]{{64}}){CLOSE}")
IMAGE_SOURCES = "image_sources"  # the key of the sources of a message's images, by their marks


class Source(NamedTuple):
    """Where an image comes from.

    url: a data:, http(s): or file: URL
    detail: the field of OpenAI's formats
    path: where the request has the image, for error messages: "messages[0].content[1]"
    """

    url: str
    detail: str = "auto"
    path: str = ""

    @property
    def mark(self) -> str:
        """The text that stands for the image in a message. Equal sources have equal marks."""
        digest = hashlib.sha256(self.url.encode(errors="surrogatepass") + b"\0" + self.detail.encode()).hexdigest()
        return OPEN + digest + CLOSE


def base64_source(data: str, kind: str = "image/*") -> Source:
    """Returns the source of an image that a request has in base64. kind: its media type"""
    return Source(f"data:{kind};base64,{data}")


def found_in(parts: Iterable[Any], name: str, first: int = 0) -> dict[str, Any]:
    """Returns `{"image_sources": {mark: source, ...}}`, to add to a message; {} if the message's parts have no image.

    name: the field with the parts, which becomes the path of the sources; first: the number of the first part
    """
    found: dict[str, Source] = {}
    for number, part in enumerate(parts, first):
        if (source := getattr(part, "source", None)) is not None:
            found.setdefault(source.mark, source._replace(path=f"{name}[{number}]"))
    return {IMAGE_SOURCES: found} if found else {}


def within(message: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns the message with `place` before the paths of its images: "messages[0]"."""
    if (found := message.get(IMAGE_SOURCES)) is None:
        return message
    return message | {IMAGE_SOURCES: {mark: one._replace(path=f"{place}.{one.path}") for mark, one in found.items()}}


def has_marks(text: object) -> bool:
    return isinstance(text, str) and OPEN in text


def parts_of(content: object) -> object:
    """Returns a message's text as the list of parts that a template for images expects; other content unchanged."""
    if not isinstance(content, str):
        return content
    parts: list[dict[str, str]] = []
    for place, piece in enumerate(MARK.split(content)):  # texts at even places, digests of marks at odd places
        if place % 2:
            parts.append({"type": "image"})
        else:
            parts += [{"type": "text", "text": text} for text in piece.split(PARTED) if text]
    return parts


def joined(texts: Iterable[str]) -> str:
    """Joins the parts of a message, in which marks stand for images, to its text. Leaves out empty parts."""
    pieces: list[str] = []
    for text in filter(None, texts):
        if pieces and not (pieces[-1].endswith(CLOSE) or text.startswith(OPEN)):
            pieces.append(PARTED)
        pieces.append(text)
    return "".join(pieces)


def whole(text: str) -> str:
    """Returns a message's text with line breaks between its parts."""
    return text.replace(PARTED, "\n")


def without_sources(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Source]]:
    """Returns the messages without their `image_sources`, and the sources of all images by their marks."""
    sources: dict[str, Source] = {}
    for one in messages:
        sources = one.get(IMAGE_SOURCES, {}) | sources  # of equal images, the first one is named
    return [{key: value for key, value in one.items() if key != IMAGE_SOURCES} for one in messages], sources


def in_order(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the marks of all messages, in the order of the text."""
    contents = [one["content"] for one in messages if isinstance(one.get("content"), str)]
    return [match.group() for content in contents for match in MARK.finditer(content)]
