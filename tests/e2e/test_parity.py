"""Answers over HTTP equal those of transformers: greedy ids of eight families, one request at a time and 16 at once,
and the log-likelihoods that evaluation harnesses request.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.checkpoints import TEXT, WINDOW
from tests.e2e.conftest import Served
from tests.e2e.server import Server
from tests.worker.models.harness import Oracle

pytestmark = pytest.mark.parametrize(
    "served", ["qwen3", "llama3", "gemma3", "qwen3-moe", "mixtral", "gpt-oss", "qwen3_5", "qwen3_5-moe"], indirect=True
)

LENGTHS = [1, 15, 16, 17, WINDOW - 1, WINDOW + 1, 40, 63, 64, 65, 100, 130, 33, 7, 90, 48]
NEW = 64


def prompts_of(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in LENGTHS]


def test_greedy_ids_alone_and_concurrent_match_transformers(served: Served) -> None:
    folder, server = served.folder, served.server
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = prompts_of(500)
    oracle = Oracle(folder)

    def check(index: int) -> list[int]:
        events = server.events(prompts[index], NEW, ignore_eos=True)
        assert events.done is not None, events.error
        assert events.text == tokenizer.decode(events.ids, skip_special_tokens=True)
        assert events.done["finish_reason"] == "length"
        usage = events.done["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompts[index]), NEW)
        assert len(events.ids) == NEW
        return events.ids

    alone = [check(index) for index in range(4)]
    with ThreadPoolExecutor(16) as pool:
        concurrent = list(pool.map(check, range(16)))
    assert concurrent[:4] == alone
    assert concurrent == [oracle.choices(prompt, ids) for prompt, ids in zip(prompts, concurrent, strict=True)]
    server.until_idle()


@dataclass
class Scored:
    """A context and a continuation, the continuation's log-probability, and whether greedy decoding yields it."""

    context: list[int]
    continuation: list[int]
    logprob: float
    greedy: bool


@cache
def scored(folder: Path) -> list[Scored]:
    """Scores as lm-evaluation-harness does locally. Every fourth continuation is the result of greedy decoding."""
    oracle = Oracle(folder)
    found = []
    for index, prompt in enumerate(prompts_of(500)):
        ids = [0, *prompt]
        at = 1 + len(prompt) // 2
        if index % 4 == 0:
            ids[at:] = oracle.greedy(ids[:at], len(ids) - at or 1)
        logprobs = oracle.logits(ids).log_softmax(-1)
        places = range(at, len(ids))
        sums = sum(float(logprobs[place - 1, ids[place]]) for place in places)
        greedy = all(int(logprobs[place - 1].argmax()) == ids[place] for place in places)
        found.append(Scored(ids[:at], ids[at:], sums, greedy))
    return found


def choices(server: Server, prompts: list[Any], **fields: Any) -> list[dict[str, Any]]:
    """Sends the exact body of lm-evaluation-harness' `local-completions`; `fields` override parts of it."""
    body = {"model": "m", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    answer = server.client.post("/v1/completions", json={**body, "echo": True, **fields})
    assert answer.status_code == 200, answer.text
    return sorted(answer.json()["choices"], key=lambda choice: choice["index"])


def told(choice: dict[str, Any], context: int, end: int | None) -> tuple[float, bool]:
    """Reads a choice as the harness does: the log-probabilities after the context, except those of generated tokens."""
    logprobs = choice["logprobs"]["token_logprobs"][context:end]
    tops = choice["logprobs"]["top_logprobs"][context:end]
    return sum(logprobs), all(own == max(top.values()) for own, top in zip(logprobs, tops, strict=True))


@pytest.mark.parametrize(("new", "end"), [(1, -1), (0, None)])
def test_log_likelihoods_of_continuations_match_transformers(served: Served, new: int, end: int | None) -> None:
    wanted = scored(served.folder)
    ids = [one.context + one.continuation for one in wanted]
    batches = choices(served.server, ids[:10], max_tokens=new) + choices(served.server, ids[10:], max_tokens=new)
    for one, choice in zip(wanted, batches, strict=True):
        assert len(choice["logprobs"]["token_logprobs"]) == len(one.context + one.continuation) + new
        logprob, greedy = told(choice, len(one.context), end)
        assert logprob == pytest.approx(one.logprob, abs=1e-3) and greedy == one.greedy
    assert {one.greedy for one in wanted} == {True, False}
    ended = choices(served.server, ids[:2], max_tokens=1, logit_bias={"2": 100})  # an end-of-text token is scored, too
    for choice, other in zip(ended, batches, strict=False):
        shown = choice["logprobs"]["token_logprobs"]
        assert shown[1 : len(shown) - 1] == other["logprobs"]["token_logprobs"][1 : len(shown) - 1]
    served.server.until_idle()


def test_prompt_as_text_is_scored_like_its_ids(served: Served) -> None:
    texts = [TEXT[0], TEXT[2], TEXT[3][:40]]
    tokenizer = AutoTokenizer.from_pretrained(served.folder)
    by_text = choices(served.server, texts)
    by_ids = choices(served.server, [tokenizer(text).input_ids for text in texts])
    for text, one, other in zip(texts, by_text, by_ids, strict=True):
        assert one["text"].startswith(text)
        assert one["logprobs"]["tokens"] == other["logprobs"]["tokens"]
        assert one["logprobs"]["token_logprobs"] == other["logprobs"]["token_logprobs"]
