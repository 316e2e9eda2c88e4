"""Measures drafts on copies of files: `python -m bench.real.copied_files --model FILE [--files 6] [FLAGS of serve]`.

A model is asked to write a file of the standard library again with a name changed: as text, and by a call, whose JSON
string has escapes in place of line ends and quotation marks. Small models end such a call after a line, so its
`content` has a least length. Each is asked twice in a scope of its own: first without an earlier answer, and then
again, as agents do that try again. Two servers, with and without drafts, answer in turns at temperature 0; the answers
are compared. The speed is that of the tokens after the first one, as the server measures it.
"""

import argparse
import bisect
import fnmatch
import inspect
import shlex
import statistics
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from bench.client.load_client import Target
from bench.client.server import served
from bench.real.tool_drafts import TEXT, ask, forced, speed, tool

MODULES: tuple[tuple[ModuleType, str, str], ...] = (  # a module, a name in it, and the new name
    (shlex, "quotes", "marks"), (bisect, "lo", "first"), (fnmatch, "pat", "pattern"), (textwrap, "margin", "edge"),
    (inspect, "object", "thing"), (argparse, "action", "handler"),
)  # fmt: skip
LINES = 60
LEAST = 1200  # characters that a call must write


def source(module: ModuleType) -> str:
    """Returns the first lines of a module that define something."""
    lines = inspect.getsource(module).splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith(("class ", "def ")))
    return "\n".join(lines[begin : begin + LINES]) + "\n"


def tasks(module: ModuleType, old: str, new: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the kind and the request of each edit of a module."""
    code = f"```python\n{source(module)}```\n"
    write = tool("write_file", "Writes a file.", path=TEXT, content={"type": "string", "minLength": LEAST})
    yield "text", {"content": f"{code}Rename `{old}` to `{new}`. Reply with the whole file, in a code block."}
    yield "a call", {
        "content": f"{code}Rename `{old}` to `{new}` and write the whole file to {module.__name__}.py.",
        "tools": [write], "tool_choice": forced("write_file"),
    }  # fmt: skip


def ratios(on: Target, off: Target, task: dict[str, Any], new: int, scope: str) -> tuple[float, float, int]:
    """Returns the speedup of a first answer, that of the same answer asked again, and the answer's tokens."""
    plain, without = ask(off, task, new, scope)
    first, again = ask(on, task, new, scope), ask(on, task, new, scope)
    assert plain == first[0] == again[0], f"{scope}: drafts change the answer"
    return speed(first[1]) / speed(without), speed(again[1]) / speed(without), without["tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--new", type=int, default=700)
    parser.add_argument("--files", type=int, default=len(MODULES))
    args, flags = parser.parse_known_args()
    found: dict[str, list[tuple[float, float, int]]] = {}
    with served(args.model, ["--speculation", "off", *flags]) as off, served(args.model, flags) as on:
        for module, old, new in MODULES[: args.files]:
            for kind, task in tasks(module, old, new):
                found.setdefault(kind, []).append(ratios(on, off, task, args.new, f"{module.__name__} {kind}"))
                print(f"{module.__name__}, {kind}: {found[kind][-1]}", flush=True)
    print("| edit by | tokens | speedup | of the same answer again |\n|---|--:|--:|--:|")
    for kind, all_ratios in found.items():
        first, again, tokens = zip(*all_ratios, strict=True)
        told = [f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in (first, again)]
        print(f"| {kind} | {min(tokens)} to {max(tokens)} | {told[0]} | {told[1]} |")


if __name__ == "__main__":
    main()
