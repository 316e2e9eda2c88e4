"""Checks long contexts: what fits, what is refused with which figures, and equal bytes after long prompts."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

from tests.e2e.server import Server
from tests.patience import PATIENCE_S
from tests.real.questions import long_text
from tests.real.report import Row
from tests.real.streams import Streamed, read

CONTEXT = 8192
LEFT = 5
FAR, NEW = 6000, 160


def check_end(server: Server) -> Row:
    row = Row("the context to its end", "an exact fit, one token too many, chats that reach the end")
    ids = ids_of(server, CONTEXT + 1)
    _fits(server, ids, row)
    _refusals(server, ids, row)
    _chats(server, row)
    return row


def check_bytes(server: Server, plain: Server, prompt: int = FAR, new: int = NEW) -> Row:
    """Compares answers after a long prompt: with drafts, without drafts, and from a worker that is killed halfway.

    server: a server with drafts, which can be held. plain: a server without drafts
    """
    row = Row(f"the same bytes after {prompt} tokens")
    ids = ids_of(server, prompt)
    drafted = server.stats()["speculation"]["drafted"]
    with_drafts, without = (continued(one, ids, new) for one in (server, plain))
    row.expect(server.stats()["speculation"]["drafted"] > drafted, "nothing was drafted")
    row.expect(plain.stats()["speculation"]["drafted"] == 0, "the other server drafted, too")
    row.expect(with_drafts == without, f"drafts change {without.text!r} to {with_drafts.text!r}")
    pid = server.stats()["worker"]["pid"]
    with ThreadPoolExecutor(1) as pool, server.hold.at(new // 2):
        stream = pool.submit(continued, server, ids, new)
        server.hold.wait()
        os.kill(pid, signal.SIGKILL)
        server.hold.release()
        resumed = stream.result(timeout=2 * PATIENCE_S)
    server.until(lambda stats: stats["worker"]["pid"] != pid)
    row.expect(resumed == with_drafts, f"a killed worker changes {with_drafts.text!r} to {resumed.text!r}")
    row.compared = f"{new} tokens with drafts, without, and with kill -9 of the worker after {new // 2}"
    return row


def ids_of(server: Server, count: int) -> list[int]:
    ids: list[int] = server.client.post("/tokenize", json={"prompt": long_text(count + 900)}).json()["tokens"]
    assert len(ids) >= count
    return ids[:count]


def continued(server: Server, ids: list[int], new: int) -> Streamed:
    body = {"prompt": ids, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    found = read(server.client, "/v1/completions", body)
    if found.usage:
        found.usage.pop("prompt_tokens_details")  # counts cached tokens, which may differ
    return found


def _fits(server: Server, ids: list[int], row: Row) -> None:
    for prompt, most in ((CONTEXT - LEFT, LEFT), (CONTEXT - 1, 1)):
        body = {"prompt": ids[:prompt], "max_tokens": most, "temperature": 0, "ignore_eos": True}
        answer = server.client.post("/v1/completions", json=body).json()
        usage, (choice,) = answer["usage"], answer["choices"]
        told = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"], choice["finish_reason"])
        row.expect(told == (prompt, most, CONTEXT, "length"), f"{prompt} + {most}: {told}")


def _refusals(server: Server, ids: list[int], row: Row) -> None:
    """Asserts that the error states the context's length and the requested lengths, whose sum exceeds it."""
    for prompt, most in ((CONTEXT - LEFT, LEFT + 1), (CONTEXT - LEFT, None), (CONTEXT, 1), (CONTEXT + 1, 1)):
        body = {"prompt": ids[:prompt], "max_tokens": most}
        answer = server.client.post("/v1/completions", json=body)
        error = answer.json()["error"]
        figures = [int(number) for number in re.findall(r"\d+", error["message"])]
        row.expect(answer.status_code == 422 and error["code"] == "context_length_exceeded", f"{error}")
        row.expect(figures[0] == CONTEXT < figures[1] and prompt in figures[1:], error["message"])


def _chats(server: Server, row: Row) -> None:
    """Asserts that an answer without `max_tokens` ends at the end of the context, with the finish reason for it."""
    system = {"role": "system", "content": "Go on."}
    for bare in (CONTEXT - 40, CONTEXT - 100):
        text = server.client.post("/detokenize", json={"tokens": ids_of(server, bare)}).json()["prompt"]
        messages = [system, {"role": "user", "content": text}]
        body = {"messages": messages, "temperature": 0, "ignore_eos": True}
        streamed = read(server.client, "/v1/chat/completions", body)
        usage = streamed.usage or {}
        total, told = usage.get("total_tokens"), usage.get("completion_tokens")
        row.expect(total == CONTEXT, f"a chat ends after {total} tokens")
        row.expect(streamed.finish_reason == "length", f"a chat at the end of its context: {streamed.finish_reason}")
        row.expect(told == len(streamed.ids), f"usage tells {told} tokens of {len(streamed.ids)}")
