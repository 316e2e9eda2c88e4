"""Compares greedy answers with transformers in float32: where transformers prefers another token, and by how much.

One pass of transformers over prompt and answer gives at each position the margin between our token and its best token.
Formats round differently, so a token may differ if this margin is smaller than the error of the server's format.
"""

from dataclasses import dataclass, field
from typing import Any

from tests.e2e.server import Server
from tests.real.detokenizing import ENDS
from tests.real.questions import TURNS, Message, questions
from tests.real.reference import Reference
from tests.real.report import Row

# Largest margins, in logits. Activations in bfloat16 keep 8 bits, so logits of about 20 are off by some tenths; rounded
# to int8 in blocks, as some processors do by default, by two to three times as much. In float32, logits differ from
# transformers' only by the order of additions.
INT8 = "int8 activations"
MARGINS = {"bfloat16": 0.25, INT8: 0.6, "float32": 1e-3}
LONGEST, SHORTEST = 128, 64


@dataclass
class Compared:
    answers: int = 0
    tokens: int = 0
    differing: int = 0
    errors: list[float] = field(default_factory=list)  # errors of log-probabilities


def check(server: Server, reference: Reference, dtype: str, asked: list[list[Message]], turns: int) -> Row:
    """Compares the answers to each conversation in `asked`, then the answers in the first `turns` turns of TURNS."""
    dtype = INT8 if server.stats()["worker"]["dtype"].endswith(INT8) else dtype
    row, counts = Row(f"greedy answers, {dtype}"), Compared()
    for number, messages in enumerate(asked):
        _one(server, reference, dtype, messages, LONGEST if number % 2 else SHORTEST, row, counts)
    chat: list[Message] = []
    for turn in TURNS[:turns]:
        chat.append({"role": "user", "content": turn})
        text = _one(server, reference, dtype, chat, SHORTEST, row, counts)
        chat.append({"role": "assistant", "content": text})
    errors = sorted(counts.errors)
    row.compared = f"{counts.answers} answers of {counts.tokens} tokens; {counts.differing} tokens differ"
    row.notes.append(
        f"log-probabilities of our tokens differ from transformers' by {errors[len(errors) // 2]:.2g} in the median, "
        f"{errors[int(len(errors) * 0.99)]:.2g} at p99, {errors[-1]:.2g} at most"
    )
    return row


def _one(
    server: Server, reference: Reference, dtype: str, messages: list[Message], tokens: int, row: Row, counts: Compared
) -> str:
    body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": tokens}
    answer = server.client.post(
        "/v1/chat/completions", json={**body, "return_token_ids": True, "logprobs": True}
    ).json()
    (choice,) = answer["choices"]
    name, ids = repr(messages[-1]["content"][-40:]), choice["token_ids"]
    prompt = _prompt_ids(server, reference, messages, row)
    row.expect(answer["prompt_token_ids"] == prompt, f"{name}: the chat's prompt has other ids than /tokenize")
    usage = answer["usage"]
    row.expect(usage["completion_tokens"] == len(ids) and usage["prompt_tokens"] == len(prompt), f"{name}: {usage}")
    ended = choice["finish_reason"] == "stop"
    row.expect(ended == (reference.tokenizer.decode(ids[-1]) in ENDS), f"{name}: ended by {choice['finish_reason']}")
    text: str = choice["message"]["content"]
    row.expect(text == reference.tokenizer.decode(ids, skip_special_tokens=True), f"{name}: the text is not the ids'")
    counts.answers, counts.tokens = counts.answers + 1, counts.tokens + len(ids)
    scored = reference.score(prompt, ids)
    counts.errors += [
        abs(told["logprob"] - own) for told, own in zip(choice["logprobs"]["content"], scored.logprobs, strict=False)
    ]
    for gap in scored.gaps:
        counts.differing += 1
        said = (
            f"{name}, token {gap.place}: {reference.tokenizer.decode([gap.chosen])!r} where transformers has "
            f"{reference.tokenizer.decode([gap.best])!r}, margin {gap.margin:.2g}"
        )
        (row.notes if gap.margin < MARGINS[dtype] else row.wrong).append(said)
    return text


def _prompt_ids(server: Server, reference: Reference, messages: list[Message], row: Row) -> list[int]:
    """Returns the ids of /tokenize. They equal transformers' ids, unless a message spells special tokens."""
    prompt: list[int] = server.client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    spells = any("<|" in message["content"] for message in messages)
    theirs = reference.chat_ids(messages)
    row.expect((prompt == theirs) != spells, f"{messages[-1]['content'][-40:]!r}: /tokenize has other ids")
    return prompt


def some() -> list[list[Message]]:
    """Returns a few questions of different kinds, enough for `make test`."""
    asked = questions()
    return [asked[place] for place in (0, 13, 19, 31, -1)]
