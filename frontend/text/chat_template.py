"""Renders messages as the text of a prompt, with a checkpoint's chat template. It does not tokenize.

The Jinja environment is the one that Hugging Face templates expect (sandboxed, trimmed blocks, `raise_exception`,
`strftime_now`, plain `tojson`, `{% break %}`, `{% generation %}`); a test compares it with `apply_chat_template`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from copy import copy
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from frontend.errors import BadRequest
from shared.config.declaration import ConfigError
from shared.sandbox import CpuLimit

# Decides which chat templates may be rendered on the event loop, and bounds what they compute there.
#
# A template is a program of whoever wrote the checkpoint. In Jinja's sandbox it cannot leave its process, but it can
# take all time and memory. A *plain* template uses only what real chat templates use: operations whose result is at
# most a few times as large as what they are given. What such a template computes in a loop is bounded by two more
# things: the sizes of what it keeps (`bounded`, `output`, `PlainEnvironment.call_binop`), and the processor time of a
# rendering. A template that is not plain is rendered in a child process (frontend/chat/large_chats.py).

MOST_SOURCE = 1 << 16  # characters of a plain template
MOST_SIZE = 1 << 22  # characters of a text, or entries of a list, that a template may make on the event loop
MOST_BITS = 1 << 12  # of an integer
MOST_CONSTANT = 64  # characters of a constant that is put between or in place of parts of a text
MOST_INDENT = 16
FILTERS = frozenset({
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "indent", "int", "items", "join",
    "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round",
    "safe", "select", "selectattr", "sort", "string", "title", "tojson", "trim", "unique", "upper",
})  # fmt: skip
# Filters whose result is a text, whatever they get.
TEXTS = frozenset({"capitalize", "join", "lower", "string", "title", "tojson", "trim", "upper"})
WITH_ARGUMENTS = frozenset({"indent", "join", "map", "replace", "tojson"})  # filters whose arguments decide the size
METHODS = frozenset({
    "capitalize", "count", "endswith", "find", "format", "get", "index", "isalnum", "isalpha", "isdigit", "items",
    "join", "keys", "lower", "lstrip", "replace", "rfind", "rstrip", "split", "splitlines", "startswith", "strip",
    "title", "upper", "values",
})  # fmt: skip
FUNCTIONS = frozenset({"dict", "namespace", "raise_exception", "range", "strftime_now"})
REFUSED = (
    nodes.Import, nodes.FromImport, nodes.Include, nodes.Extends, nodes.Block, nodes.CallBlock, nodes.FilterBlock,
    nodes.ExtensionAttribute, nodes.ImportedName, nodes.InternalName, nodes.EnvironmentAttribute,
)  # fmt: skip
GROWING = (nodes.Add, nodes.Concat, nodes.Mul, nodes.Filter, nodes.Call)  # may make something large
MAKERS = (nodes.List, nodes.Tuple, nodes.Dict, nodes.Call)  # make something that has other things
BOUNDED = "bounded"  # the name of the filter that checks a size
WIDE = re.compile(r"%[^a-zA-Z%]*(\d{3}|\*)")  # a format with a large or a computed width


class NotHere(Exception):
    """This chat is to be rendered in a child process. slow: because it takes too long here"""

    def __init__(self, problem: str, *, slow: bool = False) -> None:
        super().__init__(problem)
        self.slow = slow


def bounded(value: object) -> object:
    """Returns a value that a template keeps. Raises NotHere if it is large."""
    if isinstance(value, Sized) and len(value) > MOST_SIZE:
        raise NotHere("the template makes a large value")
    return value


def output(pieces: Iterable[str]) -> str:
    """Joins the pieces of an output. Raises NotHere if they are large together."""
    found = list(pieces)
    if sum(map(len, found)) > MOST_SIZE:
        raise NotHere("the template makes a large text")
    return "".join(found)


class PlainEnvironment(ImmutableSandboxedEnvironment):
    """Compiles plain templates, and raises NotHere when one makes something large."""

    intercepted_binops = frozenset({"*", "**", "%"})  # which are not computed when a template is compiled, either
    concat = staticmethod(output)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.filters[BOUNDED] = bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str) and WIDE.search(left):
            raise NotHere("the template formats a number with a large width")
        if operator == "*" and _product(left, right) > MOST_SIZE:
            raise NotHere("the template repeats a value often")
        if operator != "%" and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(0, right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MOST_BITS:
                raise NotHere("the template computes a large number")
        return super().call_binop(context, operator, left, right)


def _product(left: object, right: object) -> int:
    """Returns the size of a text or a list times a number; 0 for other factors."""
    for several, times in ((left, right), (right, left)):
        if isinstance(several, Sized) and isinstance(times, int):
            return len(several) * max(0, times)
    return 0


class _Bounding(NodeTransformer):
    """Puts `bounded` around what a template keeps beyond one expression: in variables, arguments and loops."""

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        self.generic_visit(node)
        node.node = _checked(node.node)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _checked(node.iter)
        return node

    def visit_With(self, node: nodes.With) -> nodes.Node:
        self.generic_visit(node)
        node.values = [_checked(one) for one in node.values]
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        self.generic_visit(node)
        node.args = [_checked(one) for one in node.args]
        for keyword in node.kwargs:
            keyword.value = _checked(keyword.value)
        return node


def _checked(node: Any) -> Any:
    """Returns an expression, with a check if its value may be large."""
    if not _all(node, GROWING):
        return node
    return nodes.Filter(node, BOUNDED, [], [], None, None, lineno=node.lineno)


def with_bounds(tree: nodes.Template) -> nodes.Template:
    """Returns a plain template in which everything that it keeps is checked."""
    made: nodes.Template = _Bounding().visit(tree)
    return made


def is_plain(tree: nodes.Template) -> bool:
    """Whether a template only uses what real chat templates use. It may still be slow."""
    macros = {macro.name for macro in tree.find_all(nodes.Macro)}
    stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    functions = FUNCTIONS | macros
    if stored & functions or macros & FUNCTIONS:
        return False  # a call may mean something else than its name
    return all(_is_plain(node, functions) for node in tree.find_all(nodes.Node)) and not _nests(tree)


def _is_plain(node: nodes.Node, functions: frozenset[str]) -> bool:
    if isinstance(node, REFUSED):
        return False
    if isinstance(node, nodes.Filter | nodes.Call | nodes.Test) and (node.dyn_args or node.dyn_kwargs):
        return False
    if isinstance(node, nodes.Filter):
        return node.name in FILTERS and (node.name not in WITH_ARGUMENTS or _is_plain_filter(node))
    return not isinstance(node, nodes.Call) or _is_plain_call(node, functions)


def _is_plain_filter(node: nodes.Filter) -> bool:
    constants = _constants([*node.args, *(one.value for one in node.kwargs)])
    if constants is None:
        return False
    match node.name:
        case "map":
            applied = constants[: len(node.args)]
            return not applied or (len(applied) == 1 and applied[0] in FILTERS - WITH_ARGUMENTS | {"tojson"})
        case "replace":
            return len(constants) == 2 and bool(constants[0])
    return all(not isinstance(one, int) or one <= MOST_INDENT for one in constants)


def _is_plain_call(node: nodes.Call, functions: frozenset[str]) -> bool:
    called = node.node
    if isinstance(called, nodes.Name):
        if called.name != "strftime_now":
            return called.name in functions
        formats = _constants(node.args)
        return formats is not None and not any(re.search(r"\d", str(one)) for one in formats)
    if not isinstance(called, nodes.Getattr) or called.attr not in METHODS:
        return False
    owner = _constants([called.node])
    match called.attr:
        case "join":
            return owner is not None
        case "format":
            return owner is not None and not re.search(r"\{[^}]*[:!]", str(owner[0]))
        case "replace":
            constants = _constants(node.args)
            return constants is not None and len(constants) == 2 and bool(constants[0])
    return True


def _constants(expressions: Iterable[nodes.Expr]) -> list[Any] | None:
    """Returns the values of constants, of which texts are short; None if one is no constant."""
    found = []
    for one in expressions:
        if any(not isinstance(part, nodes.Const | nodes.Tuple) for part in (one, *one.find_all(nodes.Expr))):
            return None
        found.append(one.as_const())
    return None if any(len(str(one)) > MOST_CONSTANT for one in found) else found


def _nests(tree: nodes.Template) -> bool:
    """Whether a template may put lists into lists again and again.

    `x = [x, x]`, thirty times, is a small list whose text has a billion characters, which no size of a list tells.
    """
    made: set[str] = set()  # names that may have a list or an object that the template has made
    parts = [_flow(one) for one in tree.find_all((nodes.Assign, nodes.For, nodes.With))]
    before = -1
    while before < len(made):
        before = len(made)
        for targets, values in parts:
            if any(_makes(value) or _names(value) & made for value in values):
                made |= targets
    if made:  # arguments are not followed
        made |= {one.name for macro in tree.find_all(nodes.Macro) for one in macro.args}
    return any(_names(item) & made for maker in tree.find_all(MAKERS) for item in _items(maker))


def _flow(node: Any) -> tuple[set[str], list[nodes.Node]]:
    """Returns the names to which an Assign, a For or a With assigns, and the values that they get."""
    if isinstance(node, nodes.With):
        return {name for target in node.targets for name in _names(target)}, [*node.values]
    return _names(node.target), [node.iter if isinstance(node, nodes.For) else node.node]


def _all(node: nodes.Node, kinds: Any) -> list[Any]:
    """Returns the parts of these kinds, among them the node itself."""
    return [*([node] if isinstance(node, kinds) else []), *node.find_all(kinds)]


def _names(node: nodes.Node) -> set[str]:
    return {one.name for one in _all(node, (nodes.Name, nodes.NSRef))}


def _makes(node: nodes.Node) -> bool:
    """Whether an expression makes a list or an object that has more than constants and texts."""
    return any(_names(item) for maker in _all(node, MAKERS) for item in _items(maker))


def _items(maker: nodes.Expr) -> list[nodes.Node]:
    """Returns what is put into a list or an object, and may be a list or an object itself."""
    if isinstance(maker, nodes.Tuple) and maker.ctx != "load":
        return []
    parts: list[nodes.Node] = [*maker.iter_child_nodes()]
    if isinstance(maker, nodes.Call):
        makes = isinstance(maker.node, nodes.Name) and maker.node.name in ("dict", "namespace")
        parts = parts[1:] if makes else []  # the first part is the function
    items = [one.value if isinstance(one, nodes.Pair | nodes.Keyword) else one for one in parts]
    return [one for one in items if not _is_text(one)]


def _is_text(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Add):
        return _is_text(node.left) or _is_text(node.right)
    if isinstance(node, nodes.Filter):
        return node.name in TEXTS
    return isinstance(node, nodes.Concat) or (isinstance(node, nodes.Const) and isinstance(node.value, str))


# The templates of a checkpoint.

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
