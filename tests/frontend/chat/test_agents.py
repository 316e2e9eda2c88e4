"""Two turns of coding agents, as each client sends them: the call arrives, its result is taken, and the prompt goes on
where the last one and its answer ended, so that a worker computes the result only."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
import pytest

from tests.fakes import MODEL
from tests.frontend.speaking import Model
from tests.patience import PATIENCE_S

Body = dict[str, Any]
SAID = '<tool_call>\n{"name": "run", "arguments": {"command": "python3 a.py"}}\n</tool_call>'
COMPACT = '{"command":"python3 a.py"}'  # the arguments as JavaScript writes them
TASK, RESULT = "Run a.py.", "[2, 3]\n"
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = [{"type": "function", "function": {"name": "run", "description": "Runs.", "parameters": SCHEMA}}]
SYSTEM, USER = {"role": "system", "content": "You are an agent."}, {"role": "user", "content": TASK}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
TEXT = {"type": "text", "text": TASK}


class Agent(NamedTuple):
    """A client: its route, its body without the turns, the name of the turns, the first ones, and those that follow a
    call with this id."""

    path: str
    body: Body
    turns: str
    first: list[Body]
    later: Callable[[str], list[Body]]


def chat(body: Body, first: list[Body], said: Body, result: Any = RESULT, call: Body | None = None) -> Agent:
    """An agent on chat completions. said: what its message of a call has beside the call"""

    def later(id: str) -> list[Body]:
        function = call or {"name": "run", "arguments": COMPACT}
        return [
            {"role": "assistant", **said, "tool_calls": [{"id": id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": id, "content": result},
        ]

    return Agent("/v1/chat/completions", {**body, "tools": TOOLS}, "messages", first, later)


def codex(id: str) -> list[Body]:
    call = {"name": "run", "arguments": '{"command": "python3 a.py"}', "call_id": id}
    return [
        {"type": "function_call", "status": "completed", "id": f"fc_{id}", **call},
        {"type": "function_call_output", "id": "fco_1", "call_id": id, "output": RESULT},
    ]


def claude_code(id: str) -> list[Body]:
    result = {"tool_use_id": id, "type": "tool_result", "content": RESULT, "is_error": False}
    return [
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": id, "name": "run", "input": {"command": "python3 a.py"}},
        ]},
        {"role": "user", "content": [result | {"cache_control": {"type": "ephemeral"}}]},
    ]  # fmt: skip


CODEX: Body = {
    **{"stream": True, "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "auto"}},
    "store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "a", "client_metadata": {"b": "c"},
    "tools": [{"type": "function", "name": "run", "description": "Runs.", "strict": False, "parameters": SCHEMA}],
}  # fmt: skip
CODEX_TURNS: list[Body] = [
    {"type": "message", "id": f"msg_{role}", "role": role, "content": [{"type": "input_text", "text": TASK}]}
    for role in ("developer", "user")
]
CLAUDE_CODE: Body = {
    "system": [TEXT | {"cache_control": {"type": "ephemeral"}}], "metadata": {"user_id": "{}"}, "max_tokens": 500,
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "stream": True,
    "tools": [{"name": "run", "description": "Runs.", "input_schema": SCHEMA, "eager_input_streaming": True}],
    "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
}  # fmt: skip
AGENTS: dict[str, Agent] = {
    "opencode": chat({**STREAM, "max_tokens": 500, "tool_choice": "auto"}, [SYSTEM, USER], {"content": ""}),
    "Cline": chat({**STREAM, "tool_choice": "auto"}, [SYSTEM, USER], {"content": None}),
    "Continue": chat({**STREAM, "max_tokens": 500}, [SYSTEM, USER], {"content": ""}),
    "pi": chat({**STREAM, "store": False, "max_completion_tokens": 500}, [SYSTEM, USER], {"content": None}),
    "Qwen Code": chat(
        {**STREAM, "max_tokens": 500}, [SYSTEM, {"role": "user", "content": [TEXT]}], {"content": None},
        [{"type": "text", "text": RESULT}],
    ),
    "mini-SWE-agent": chat({}, [SYSTEM, USER], {}, call={"arguments": '{"command": "python3 a.py"}', "name": "run"}),
    "Codex": Agent("/v1/responses", CODEX, "input", CODEX_TURNS, codex),
    "Claude Code": Agent(
        "/v1/messages?beta=true", CLAUDE_CODE, "messages", [{"role": "user", "content": [TEXT]}], claude_code
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AGENTS)
async def test_second_turn_goes_on_where_the_first_ended(qwen: Model, name: str) -> None:
    agent, qwen.says = AGENTS[name], [SAID, "Done."]
    async with qwen.served() as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        body = {"model": MODEL, **agent.body}
        called = await http.post(agent.path, json={**body, agent.turns: agent.first})
        assert called.status_code == 200 and "x-sluice-ignored-fields" not in called.headers, called.text
        assert '"name":"run"' in called.text and "<tool_call>" not in called.text, called.text
        (id,) = set(re.findall(r'"((?:call|toolu)_[0-9a-f]+)"', called.text))
        ended = await http.post(agent.path, json={**body, agent.turns: [*agent.first, *agent.later(id)]})
    assert ended.status_code == 200, ended.text
    before, after = qwen.prompts
    thought = "<think>\n\n</think>\n\n"  # what the template puts before an answer that does not think
    assert after.replace(thought, "").startswith((before + SAID).replace(thought, "")), after
    assert RESULT.strip() in after.removeprefix(before)
