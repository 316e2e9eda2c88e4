"""The agent's world: a small project of generated files, and twenty tools that read and change it.

Everything is deterministic: the same calls have the same results in every run. A call is executed as the model wrote
it. If it is wrong, the world says so, as a real tool would, and nothing mends it.
"""

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Schema = dict[str, Any]
Arguments = Mapping[str, Any]

MOST_SHOWN = 40  # lines of a result
NOUNS = (
    "order", "parcel", "shelf", "label", "batch", "pallet", "ticket", "invoice", "route", "driver", "depot", "stock",
    "crate", "scale", "customer",
)  # fmt: skip
VERBS = (
    "count", "move", "sort", "check", "merge", "split", "print", "close", "reserve", "release", "weigh", "assign",
    "collect", "return",
)  # fmt: skip
FIELDS = ("width", "height", "weight", "owner", "state", "place", "number", "price")
PROSE = (
    "The {0} keeps every {1} that belongs to it until the {2} is closed.",
    "Do not {3} a {1} before its {0} has been checked, because the {2} would be counted twice.",
    "A {2} without a {0} is refused with an error that names the {1}.",
    "Whoever has to {3} the {0} reads the {1} first, and then the {2}.",
    "When a {0} fails, the {2} stays as it was and the {1} is reported in one sentence.",
    "Each {1} has one {0}; the {2} shows which one, and when somebody last had to {3} it.",
)


@dataclass(frozen=True, slots=True)
class Call:
    """A call as a model wrote it. arguments: the text that should be a JSON object."""

    name: str
    arguments: str


@dataclass
class World:
    """The files of the project, by path, and what was done to them."""

    files: dict[str, str]
    todos: list[str] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    saved: dict[str, str] = field(default_factory=dict)  # the files at the last commit

    def __post_init__(self) -> None:
        self.saved = dict(self.files)

    def execute(self, call: Call) -> tuple[str, bool]:
        """Executes a call. Returns the text for the model, and whether the call was valid: a known tool, arguments
        that fit its schema, and something that can be done."""
        tool = TOOLS.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r}", False
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError as error:
            return f"error: the arguments are not JSON: {error}", False
        if wrong := problem(arguments, tool.parameters):
            return f"error: {wrong}", False
        try:
            return tool.run(self, arguments), True
        except (WorldError, re.error) as error:
            return f"error: {error}", False

    def file(self, path: str) -> str:
        if path not in self.files:
            raise WorldError(f"there is no file {path!r}")
        return self.files[path]

    def changed(self) -> list[str]:
        names = sorted({*self.files, *self.saved})
        return [name for name in names if self.files.get(name) != self.saved.get(name)]


class WorldError(Exception):
    """What a call asks for cannot be done."""


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: Schema
    run: Callable[[World, Arguments], str]

    @property
    def declared(self) -> dict[str, Any]:
        """The tool as a request offers it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def problem(arguments: Any, parameters: Schema) -> str:
    """Returns what does not fit the schema of a tool; empty if everything does."""
    if not isinstance(arguments, dict):
        return "the arguments are no object"
    known = parameters["properties"]
    for name in parameters["required"]:
        if name not in arguments:
            return f"`{name}` is missing"
    for name, value in arguments.items():
        if name not in known:
            return f"`{name}` is no parameter"
        if not _fits(value, known[name]):
            return f"`{name}` must be {known[name].get('type') or known[name]['enum']}"
    return ""


def _fits(value: Any, schema: Schema) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "array":
        return isinstance(value, list) and all(_fits(item, schema["items"]) for item in value)
    kind = {"string": str, "integer": int, "boolean": bool}[schema["type"]]
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


# The tools.


def _read(world: World, arguments: Arguments) -> str:
    lines = world.file(arguments["path"]).splitlines()
    first = max(1, arguments.get("first_line", 1))
    return "\n".join(lines[first - 1 : arguments.get("last_line", len(lines))])


def _list(world: World, arguments: Arguments) -> str:
    folder = arguments["path"].strip("./")
    names = [name for name in sorted(world.files) if not folder or name.startswith(folder + "/") or name == folder]
    if not names:
        raise WorldError(f"there is no folder {arguments['path']!r}")
    return "\n".join(names)


def _search(world: World, arguments: Arguments) -> str:
    pattern = re.compile(arguments["pattern"])
    found = [
        f"{name}:{at}: {line}"
        for name in sorted(world.files)
        if name.startswith(arguments.get("folder", "").strip("./"))
        for at, line in enumerate(world.files[name].splitlines(), 1)
        if pattern.search(line)
    ]
    return "\n".join(found[:MOST_SHOWN]) or "no line matches"


def _write(world: World, arguments: Arguments) -> str:
    world.files[arguments["path"]] = arguments["content"]
    return f"wrote {len(arguments['content'].splitlines())} lines to {arguments['path']}"


def _replace(world: World, arguments: Arguments) -> str:
    path, old = arguments["path"], arguments["old_text"]
    count = world.file(path).count(old) if old else 0
    if not count:
        raise WorldError(f"{path} does not have the text in `old_text`")
    if count > 1 and not arguments.get("every"):
        raise WorldError(f"{path} has this text {count} times; set `every`")
    world.files[path] = world.files[path].replace(old, arguments["new_text"])
    return f"replaced it {count} times in {path}"


def _append(world: World, arguments: Arguments) -> str:
    world.files[arguments["path"]] = world.file(arguments["path"]) + arguments["text"]
    return f"appended to {arguments['path']}"


def _delete(world: World, arguments: Arguments) -> str:
    world.file(arguments["path"])
    del world.files[arguments["path"]]
    return f"deleted {arguments['path']}"


def _move(world: World, arguments: Arguments) -> str:
    world.files[arguments["to"]] = world.file(arguments["path"])
    del world.files[arguments["path"]]
    return f"moved {arguments['path']} to {arguments['to']}"


def _run(world: World, arguments: Arguments) -> str:
    return f"$ {arguments['command']}\nexit code 0"


def _tests(world: World, arguments: Arguments) -> str:
    return f"{len([name for name in world.files if name.endswith('.py')]) * 7} passed in 0.41 s"


def _status(world: World, arguments: Arguments) -> str:
    return "\n".join(f"M {name}" for name in world.changed()) or "nothing has changed"


def _diff(world: World, arguments: Arguments) -> str:
    path = arguments["path"]
    before, after = world.saved.get(path, "").splitlines(), world.file(path).splitlines()
    gone, new = set(before) - set(after), set(after) - set(before)
    lines = [f"-{line}" for line in before if line in gone] + [f"+{line}" for line in after if line in new]
    return "\n".join(lines[:MOST_SHOWN]) or "nothing has changed"


def _commit(world: World, arguments: Arguments) -> str:
    world.commits.append(arguments["message"])
    world.saved = dict(world.files)
    return f"committed as {len(world.commits):07x}"


def _log(world: World, arguments: Arguments) -> str:
    return "\n".join(world.commits[::-1][: arguments.get("count", 10)]) or "there is no commit yet"


def _todo(world: World, arguments: Arguments) -> str:
    world.todos += arguments["items"]
    return "\n".join(world.todos)


def _done(text: str) -> Callable[[World, Arguments], str]:
    return lambda world, arguments: text


def _tool(
    name: str, description: str, run: Callable[[World, Arguments], str], /, optional: str = "", **properties: Schema
) -> Tool:
    """optional: the names of the parameters that may be missing, separated by spaces"""
    required = [name for name in properties if name not in optional.split()]
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Tool(name, description, parameters, run)


def _text(description: str) -> Schema:
    return {"type": "string", "description": description}


def _number(description: str) -> Schema:
    return {"type": "integer", "description": description}


PATH = _text("Path of the file, relative to the project's folder, such as src/main.py.")
TOOLS = {
    tool.name: tool
    for tool in (
        _tool("read_file", "Reads a text file of the project. Returns its lines, or the lines of the given range. Read "
              "a file before you change it.", _read, "first_line last_line", path=PATH,
              first_line=_number("The first line to return, counted from 1."), last_line=_number("The last line.")),
        _tool("list_folder", "Lists all files below a folder of the project, one path a line.", _list,
              path=_text("Path of the folder; . for the whole project.")),
        _tool("search_text", "Searches the lines of all files for a regular expression. Returns path, number and text "
              "of each line that matches.", _search, "folder", pattern=_text("A regular expression of Python."),
              folder=_text("Search only below this folder.")),
        _tool("write_file", "Writes a whole file, new or in place of the old one. The content must be complete: "
              "nothing of the old file is kept.", _write, path=PATH,
              content=_text("The complete new content of the file.")),
        _tool("replace_text", "Replaces a text in a file by another one. The old text must be in the file exactly as "
              "given, with all spaces.", _replace, "every", path=PATH, old_text=_text("The text to replace."),
              new_text=_text("The text to write in its place."),
              every={"type": "boolean", "description": "Whether to replace it wherever it occurs."}),
        _tool("append_text", "Appends a text to the end of a file.", _append, path=PATH, text=_text("The text.")),
        _tool("delete_file", "Deletes a file of the project. This cannot be undone.", _delete, path=PATH),
        _tool("move_file", "Moves or renames a file of the project.", _move, path=PATH, to=_text("The new path.")),
        _tool("run_command", "Runs a command in a shell, in the project's folder, and returns what it prints.", _run,
              "timeout_seconds", command=_text("The command line."),
              timeout_seconds=_number("When to stop the command.")),
        _tool("run_tests", "Runs the project's tests, all or those of one folder, and returns the summary.", _tests,
              "folder verbose", folder=_text("Run the tests below this folder only."),
              verbose={"type": "boolean", "description": "Whether to print each test's name."}),
        _tool("git_status", "Lists the files that have changed since the last commit.", _status),
        _tool("git_diff", "Shows what has changed in a file since the last commit.", _diff, path=PATH),
        _tool("git_commit", "Commits all changes.", _commit, message=_text("What has changed, in one sentence.")),
        _tool("git_log", "Lists the messages of the latest commits.", _log, "count", count=_number("How many.")),
        _tool("format_code", "Formats a source file by the project's rules.", _done("formatted"), path=PATH),
        _tool("lint_code", "Checks a source file for mistakes and returns them, one a line.", _done("no mistakes"),
              path=PATH, rules={"enum": ["all", "errors", "style"], "description": "Which rules to check."}),
        _tool("fetch_page", "Fetches a page of the web as text.", _done("error: there is no network"),
              url=_text("The page's address, with https://.")),
        _tool("ask_user", "Asks the user a question and waits for the answer.", _done("Decide yourself."),
              question=_text("The question, in one sentence.")),
        _tool("add_todos", "Adds items to the list of what is left to do.", _todo,
              items={"type": "array", "items": {"type": "string"}, "description": "The items, one sentence each."}),
        _tool("finish", "Ends the work and reports the result to the user.", _done("finished"),
              summary=_text("What was done, in a few sentences.")),
    )
}  # fmt: skip


# The project's files. The same names and seeds make the same texts in every run.


def source(name: str, lines: int) -> str:
    """Returns a Python file of exactly so many lines."""
    draw = random.Random(name)
    text = [
        f'"""The {draw.choice(NOUNS)} of the {draw.choice(NOUNS)}."""',
        "",
        "import json",
        "from typing import Any",
        "",
    ]
    while len(text) < lines:
        noun, verb, other, key = draw.choice(NOUNS), draw.choice(VERBS), draw.choice(NOUNS), draw.choice(FIELDS)
        text += [
            "",
            f"def {verb}_{noun}_{len(text)}(entries: list[Any], {other}: str) -> int:",
            f'    """Returns the {key} of the {other}."""',
            f'    {noun}s = [entry["{key}"] for entry in entries]',
            f"    if not {noun}s:",
            f'        raise ValueError("no {noun} to {verb}")',
            f"    total = sum({noun}s)",
            f'    print(json.dumps({{"{other}": total}}))',
            f"    return total + {draw.randrange(1000)}",
            "",
        ]  # fmt: skip
    return "\n".join(text[:lines]) + "\n"


def prose(name: str, words: int) -> str:
    """Returns paragraphs of at least so many words."""
    draw = random.Random(name)
    text, count = [], 0
    while count < words:
        sentences = [draw.choice(PROSE).format(*draw.sample(NOUNS, 3), draw.choice(VERBS)) for _ in range(5)]
        text.append(" ".join(sentences))
        count += len(text[-1].split())
    return "\n\n".join(text) + "\n"
