"""The agent's session of bench/agent against a real server, whose grammar makes an untrained model's calls valid."""

from dataclasses import replace

import pytest

from bench.agent.__main__ import report
from bench.agent.script import script
from bench.agent.session import run
from bench.client.load_client import Target
from tests.e2e.server import Server

pytestmark = pytest.mark.parametrize("served", ["mistral"], indirect=True)


def test_session_reads_the_servers_streams(server: Server) -> None:
    whole = script(0.01)
    told = replace(whole, system="You are an agent.", turns=(*whole.turns[:2], whole.turns[-1]))
    turns = run(Target(f"{server.url}/v1", "m"), told, "named")
    first, second, last = (turned.answer for turned in turns)
    assert not any(turned.answer.error for turned in turns)
    assert [call.name for call in first.calls] == ["list_folder"] and second.calls[0].name == "search_text"
    assert first.tokens and first.prompt_tokens == first.computed and 0 < first.first <= first.last
    assert 0 < second.computed <= second.prompt_tokens > first.prompt_tokens
    assert last.text and not last.calls
    assert "search" in report({"ours": turns})
