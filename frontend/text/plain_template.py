"""Decides which chat templates may be rendered on the event loop, and bounds what they compute there.

A template is a program of whoever wrote the checkpoint. In Jinja's sandbox it cannot leave its process, but it can take
all time and memory. A *plain* template uses only what real chat templates use: operations whose result is at most a few
times as large as what they are given. What such a template computes in a loop is bounded by two more things: the sizes
of what it keeps (`bounded`, `output`, `PlainEnvironment.call_binop`), and the processor time of a rendering. A template
that is not plain is rendered in a child process (frontend/chat/large_chats.py).
"""

import re
from collections.abc import Iterable, Sized
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

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
