"""Decoding at a depth: the prompt is as long as asked, and the speed is that of the tokens after the first one."""

import asyncio
from math import isnan

import pytest
from tokenizers import Tokenizer

from bench.peers.__main__ import main
from bench.peers.scenarios import NEW, PROMPT, TEMPLATE, Figures, Prompts, at_depth
from deploy.launcher.child_command import DEMO_MODEL
from tests.bench.fake_server import event, serving, stream


def measured(depth: int, tokens: int) -> tuple[Figures, int]:
    """Returns the figures at a depth, of a server that sends so many tokens, and the tokens of the prompt it got."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))

    async def run() -> tuple[Figures, int]:
        events = stream(*(event("x", usage=at + 1) for at in range(tokens)), event(usage=tokens))
        async with serving(lambda body: events, pause=0.002) as server:
            figures = await asyncio.to_thread(at_depth(depth).run, server.target, Prompts(tokenizer, "seed"))
            (body,) = server.bodies
            assert body["max_tokens"] == NEW
            return figures, len(tokenizer.encode(body["prompt"], add_special_tokens=False).ids)

    return asyncio.run(run())


@pytest.mark.parametrize(("depth", "prompt"), [(0, PROMPT), (1024, 1024 - NEW - TEMPLATE)])
def test_prompt_reaches_the_depth(depth: int, prompt: int) -> None:
    figures, tokens = measured(depth, 5)
    (name,) = figures
    assert name.startswith(f"decode at a depth of {depth or PROMPT}") and 0 < figures[name] < 1000
    assert abs(tokens - prompt) <= 2


def test_answer_of_one_token_has_no_speed() -> None:
    assert isnan(*measured(0, 1)[0].values())


@pytest.mark.parametrize("depths", ["4k,x", "-1", "k"])
def test_wrong_depths_are_named(depths: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--depth={depths}"]) == 2
    assert "--depth" in capsys.readouterr().err
