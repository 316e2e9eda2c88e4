"""Checks receipts, scores, and a record with its replay, with answers of the real model."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.server import ROOT, Server
from tests.patience import PATIENCE_S
from tests.real.questions import PLAIN
from tests.real.report import Row

SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.02, "repetition_penalty": 1.1, "seed": 8},
    {"temperature": 1.0, "n": 2, "stop": ["\n\n"], "frequency_penalty": 0.4, "seed": 9},
)


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 50, **fields}


def check_receipts(server: Server, questions: int) -> Row:
    row, checked = Row("receipts"), 0
    for number, text in enumerate(PLAIN[:questions]):
        sent = chat(text, receipt=True, **SAMPLED[number % len(SAMPLED)])
        for choice in server.client.post("/v1/chat/completions", json=sent).json()["choices"]:
            asked = {"receipt": choice["receipt"], "request": sent}
            verdict = server.client.post("/v1/receipts/verify", json=asked).json()
            row.expect(verdict.get("identical") is True, f"{text}: {verdict}")
            checked += 1
    row.compared = f"{checked} answers, checked by one prefill each"
    return row


def check_scores(server: Server, questions: int) -> Row:
    """Asserts that the log-probabilities of decoding equal those of a prefill, bit for bit."""
    row, tokens = Row("log-probabilities"), 0
    for number, text in enumerate(PLAIN[:questions]):
        sent = chat(text, logprobs=True, return_token_ids=True, ignore_eos=True, **SAMPLED[number % 3])
        (choice,) = server.client.post("/v1/chat/completions", json=sent).json()["choices"]
        told = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        asked = {"messages": sent["messages"], "answer": [choice["token_ids"]]}
        scored = server.client.post("/v1/logprobs", json=asked).json()
        (again,) = scored["data"]
        same = sum(one == other for one, other in zip(told, again["token_logprobs"], strict=True))
        row.expect(same == len(told) == 50, f"{text}: {len(told) - same} of {len(told)} differ")
        tokens += len(told)
    row.compared = f"{tokens} tokens while decoding and by /v1/logprobs, bit for bit"
    return row


def check_replay(recording: Server, record: Path, server: Server, questions: int) -> Row:
    """Sends requests to a server that writes `record`, and replays the record on another server."""
    for number, text in enumerate(PLAIN[:questions]):
        recording.client.post("/v1/chat/completions", json=chat(text, **SAMPLED[number % len(SAMPLED)]))
    recording.until(lambda _: record.exists() and len(record.read_bytes().splitlines()) >= questions)
    command = [sys.executable, "-m", "deploy.cli.main", "replay", str(record), "--url", server.url, "--pace", "max"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    row = Row("record and replay", (ended.stdout.strip() or ended.stderr.strip()).splitlines()[-1])
    row.expect(ended.returncode == 0, ended.stdout + ended.stderr)
    return row
