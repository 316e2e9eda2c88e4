"""Measures drafts on an agent's answers: `python -m bench.real.tool_drafts --model FILE [--rounds 3] [FLAGS of serve]`.

Two servers, with and without drafts, are asked the same in turns, at temperature 0. Each request offers tools or asks
for a schema, so that a grammar constrains its answer. The answers are compared; the speed is that of the tokens after
the first one, as the server measures it (`timings`). Each request has a scope of its own (`cache_salt`), so that no
draft comes from an earlier answer to the same question; bench/real/copied_files.py measures that.

--draft-model FILE gives the server with drafts a smaller model that proposes them, and also asks for new code and
prose.
"""

import argparse
import inspect
import json
import statistics
import textwrap
import urllib.request
from typing import Any

from bench.client.load_client import Target
from bench.client.server import served

SOURCE = textwrap.dedent(inspect.getsource(textwrap.TextWrapper._wrap_chunks))
SHORT = textwrap.dedent(inspect.getsource(textwrap.indent))
TEXT = {"type": "string"}
NUMBER = {"type": "integer"}

RENAME = f"```python\n{SOURCE}```\nRename `chunks` to `pieces`. Reply with the whole function, in a code block."


def tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    """Returns a function tool whose parameters are all required."""
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("read_file", "Reads lines of a file.", path=TEXT, first_line=NUMBER, last_line=NUMBER),
    tool("write_file", "Writes a file.", path=TEXT, content=TEXT),
    tool("edit_file", "Replaces a text in a file by another.", path=TEXT, old_string=TEXT, new_string=TEXT),
    tool("run_command", "Runs a command in a shell.", command=TEXT, timeout_seconds=NUMBER),
    tool("search_files", "Searches files for a regular expression.", pattern=TEXT, folder=TEXT,
         kind={"enum": ["source files only", "documentation only", "every file"]}),
]  # fmt: skip
REPORT = {
    "type": "object", "additionalProperties": False, "required": ["function_name", "parameters", "raises_exceptions"],
    "properties": {
        "function_name": TEXT, "raises_exceptions": {"type": "array", "items": TEXT},
        "parameters": {"type": "array", "items": {
            "type": "object", "additionalProperties": False, "required": ["parameter_name", "has_default_value"],
            "properties": {"parameter_name": TEXT, "has_default_value": {"type": "boolean"}},
        }},
    },
}  # fmt: skip


def forced(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


# task → the request, besides what all have
TASKS: dict[str, dict[str, Any]] = {
    "a call with short arguments": {
        "content": "Show me lines 120 to 180 of src/text/wrapping.py.", "tools": TOOLS, "tool_choice": "required",
    },
    "a call that writes a whole function": {
        "content": f"Write this function to src/wrapping.py, with the name wrap_all_chunks:\n\n{SOURCE}",
        "tools": TOOLS, "tool_choice": forced("write_file"),
    },
    "a call that edits a function": {
        "content": f"In src/indent.py, rename the parameter `prefix` to `margin`:\n\n{SHORT}",
        "tools": TOOLS, "tool_choice": forced("edit_file"),
    },
    "a function rewritten as text, tools offered": {
        "content": RENAME,
        "tools": TOOLS,
    },
    "an answer to a schema": {
        "content": f"Describe this function:\n\n{SHORT}",
        "response_format": {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT, "strict": True}},
    },
    "a function rewritten with penalties and log-probabilities": {
        "content": RENAME,
        "presence_penalty": 0.1, "logprobs": True, "top_logprobs": 3,
    },
}  # fmt: skip


# what repeats nothing of its prompt, so that only a draft model has drafts for it
FREE_TASKS: dict[str, dict[str, Any]] = {
    "new code": {"content": "Write a Python class for a least-recently-used cache, with get and put, and tests."},
    "prose": {"content": "Explain in four paragraphs how a refrigerator works, and why its back is warm."},
}  # fmt: skip


def ask(target: Target, task: dict[str, Any], new: int, scope: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the choice that answers a task, and its timings. scope: requests with equal ones share texts and K/V"""
    body = {key: value for key, value in task.items() if key != "content"}
    body |= {"model": target.model, "max_tokens": new, "temperature": 0, "seed": 1, "timings": True,
             "cache_salt": scope, "messages": [{"role": "user", "content": task["content"]}]}  # fmt: skip
    request = urllib.request.Request(
        f"{target.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        told = json.load(answer)
    (choice,) = told["choices"]
    for call in choice["message"].get("tool_calls") or ():
        del call["id"]  # drawn anew for each request
    return choice, told["timings"] | {"tokens": told["usage"]["completion_tokens"]}


def speed(timings: dict[str, Any]) -> float:
    """Returns the tokens after the first one in a second."""
    seconds = timings["decode_ms"] / 1e3
    return float((timings["tokens"] - 1) / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--new", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft-model", metavar="FILE")
    args, flags = parser.parse_known_args()
    print("| answer | tokens | tokens/s without | speedup with drafts | drafts per token | accepted |")
    print("|---|--:|--:|--:|--:|--:|")
    drafting = {"method": "draft_model", "model": args.draft_model} if args.draft_model else None
    drafts = ["--speculative-config", json.dumps(drafting)] if drafting else []
    tasks = FREE_TASKS | TASKS if drafting else TASKS
    with served(args.model, ["--speculation", "off", *flags]) as off, served(args.model, [*drafts, *flags]) as on:
        for name, task in tasks.items():
            plain, _ = ask(off, task, args.new, "plain")
            ask(on, task, args.new, "warm-up")
            ratios, speeds, timings = [], [], dict[str, Any]()
            for at in range(args.rounds):
                without = ask(off, task, args.new, str(at))
                choice, timings = ask(on, task, args.new, str(at))
                assert without[0] == plain == choice, f"{name}: drafts change the answer"
                speeds.append(speed(without[1]))
                ratios.append(speed(timings) / speeds[-1])
            drafted, accepted = timings["draft_tokens"], timings["accepted_draft_tokens"]
            print(
                f"| {name} | {timings['tokens']} | {statistics.median(speeds):.1f} | {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f}) | {drafted / timings['tokens']:.2f} | "
                f"{accepted / max(1, drafted):.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
