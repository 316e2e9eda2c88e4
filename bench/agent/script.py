"""The session's script: the project, the system prompt, and what the user asks in each of the twelve turns.

The agent reads files before some turns, by calls that the script makes, so that prompts grow in the same way with every
server: to about 16,000 tokens of a vocabulary like Qwen's, fewer if the model breaks the edits off. All other calls are
the model's own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from bench.agent.world import TOOLS, World, prose, source

EDITED = "src/stock.py"
SYSTEM_WORDS = 2590  # 3,000 tokens
EDITED_LINES, OTHER_LINES, DESIGN_WORDS = 300, 150, 600  # with the file that is read twice, 8,000 tokens
CALL_TOKENS, ANSWER_TOKENS, EDIT_TOKENS = 200, 150, 4000
MOST_OF_FILE = 0.8  # of the edited file's characters, with `long_edits`
SMALL = 0.1
LEAST = 12  # lines of a file, at any scale

RULES = """You are a coding agent. You work in a project of Python files with the tools that you are given. Call a \
tool whenever you need to see or change something; do not describe what you would do. Paths are relative to the \
project's folder. When you write a file, write all of it. Answer questions in plain sentences.

These are the project's rules:

"""
REPORT: dict[str, Any] = {
    "type": "object", "additionalProperties": False, "required": ["summary", "changed_files", "tests_passed", "risk"],
    "properties": {
        "summary": {"type": "string"}, "changed_files": {"type": "array", "items": {"type": "string"}},
        "tests_passed": {"type": "boolean"}, "risk": {"enum": ["none", "low", "high"]},
    },
}  # fmt: skip
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT, "strict": True}}


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of the session.

    reads: files that the script reads before it. tool: the tool that the user asks for; empty: an answer in text.
    edited: what the edited file should be like after the turn; None: the turn edits nothing.
    more: further fields of the request
    """

    name: str
    asked: str
    most_tokens: int
    reads: tuple[str, ...] = ()
    tool: str = ""
    edited: Callable[[str], str] | None = None
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Script:
    """A whole session.

    world: returns the project as it is at the beginning. tools: what each request offers
    """

    system: str
    turns: tuple[Turn, ...]
    world: Callable[[], World]
    tools: list[dict[str, Any]]


def script(scale: float = 1.0, *, long_edits: bool = False) -> Script:
    """Returns the session.

    scale: multiplies all lengths. A small one is for trying things out: below SMALL, only the tools that turns ask for
    are offered. long_edits: whether the schema of write_file
    demands a content nearly as long as the edited file, because small models break an edit off after a line
    """

    def scaled(count: int, least: int = 1) -> int:
        return max(least, round(count * scale))

    def project() -> World:
        files = {
            EDITED: source(EDITED, scaled(EDITED_LINES, LEAST)),
            "src/orders.py": source("src/orders.py", scaled(OTHER_LINES, LEAST)),
            "src/routes.py": source("src/routes.py", scaled(OTHER_LINES, LEAST)),
            "docs/design.md": prose("docs/design.md", scaled(DESIGN_WORDS)),
            "tests/test_stock.py": source("tests/test_stock.py", LEAST),
            "README.md": "A warehouse in Python.\n",
        }
        return World(files)

    call, answer, edit = (scaled(count, 64) for count in (CALL_TOKENS, ANSWER_TOKENS, EDIT_TOKENS))
    turns = (
        Turn("list a folder", "Which files are in src? List the folder.", call, tool="list_folder"),
        Turn("search", "Search all files for lines with `raise ValueError`.", call, tool="search_text"),
        Turn("explain", f"You have read {EDITED}. What is it for? Answer in three sentences.", answer, (EDITED,)),
        Turn("edit by a call", f"In {EDITED}, rename the parameter and variable `entries` to `records` everywhere. "
             "Write the whole file with write_file.", edit, tool="write_file",
             edited=lambda text: text.replace("entries", "records")),
        Turn("run the tests", "Run the tests in the folder tests.", call, tool="run_tests"),
        Turn("compare", "What do the functions of src/orders.py return? Answer in three sentences.", answer,
             ("src/orders.py",)),
        Turn("read a file", "Read lines 1 to 20 of src/routes.py.", call, ("src/routes.py",), tool="read_file"),
        Turn("explain the design", "What does the design say about errors? Answer in three sentences.", answer,
             ("docs/design.md",)),
        Turn("edit by text", f"In {EDITED}, rename the variable `total` to `amount` everywhere. Reply with the whole "
             "file in one code block, without a call.", edit, (EDITED,),
             edited=lambda text: text.replace("total", "amount")),
        Turn("show a difference", f"Show what has changed in {EDITED} since the last commit.", call, tool="git_diff"),
        Turn("commit", "Commit the changes with a message of one sentence.", call, tool="git_commit"),
        Turn("report", "Report what was done, as JSON.", call, more={"response_format": RESPONSE_FORMAT}),
    )  # fmt: skip
    asked = {turn.tool for turn in turns}
    offered = [tool for tool in TOOLS.values() if scale >= SMALL or tool.name in asked]
    tools = [tool.declared for tool in offered]
    if long_edits:
        write = TOOLS["write_file"]
        content = write.parameters["properties"]["content"]
        least = {"content": content | {"minLength": round(MOST_OF_FILE * len(project().files[EDITED]))}}
        longer = replace(write, parameters=write.parameters | {"properties": write.parameters["properties"] | least})
        tools = [longer.declared if tool is write else tool.declared for tool in offered]
    return Script(RULES + prose("rules", scaled(SYSTEM_WORDS)), turns, project, tools)
