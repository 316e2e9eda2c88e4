"""The record of requests: the contents of a line, and what must never be in a line."""

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.errors import Overloaded
from frontend.observability.recording import Recorder
from frontend.text.tokenizer import Tokenizer
from shared.checkpoint import Task
from shared.config.declaration import ConfigError
from shared.messages import Outcome
from shared.wire import pack_u32
from tests.fakes import MODEL, FakePool, pooling, sending
from tests.frontend.serving import app_over

PATH = "/v1/completions"
BODY = {"model": MODEL, "prompt": "secret words", "max_tokens": 8, "temperature": 0.5, "stop": ["hidden"]}


def hash_of(ids: list[int]) -> str:
    return hashlib.sha256(pack_u32(ids)).hexdigest()


@asynccontextmanager
async def client(pool: FakePool, tokenizer: Tokenizer, **config: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of an app. The app's record is complete after the `with`."""
    app = app_over(pool, tokenizer, **config)
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        yield http


async def recorded(
    file: Path, pool: FakePool, tokenizer: Tokenizer, *bodies: dict[str, Any], path: str = PATH, **config: Any
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the lines of the record, and the responses that the clients got."""
    async with client(pool, tokenizer, record=str(file), **config) as http:
        answers = [await http.post(path, json=body, headers={"Authorization": "Bearer sk-key"}) for body in bodies]
    return [json.loads(line) for line in file.read_text().splitlines()], [answer.text for answer in answers]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "record.jsonl"


async def test_line_has_parameters_seeds_outcome_hashes_and_times(tokenizer: Tokenizer, file: Path) -> None:
    ids = tokenizer.encode_now(["hello"], False)[0]
    pool = FakePool(sending(ids, outcome=Outcome.LENGTH))
    (line,), _ = await recorded(file, pool, tokenizer, BODY | {"n": 2})
    assert line["sluice_record"] == 1 and line["fingerprint"].startswith("fp_")
    assert (line["route"], line["status"], line["outcome"], line["n"]) == (PATH, 200, "finished", 2)
    assert (line["sampling"]["temperature"], line["sampling"]["max_tokens"]) == (0.5, 8)
    assert line["prompts"] == [hash_of(pool.submitted[0].prompt)]
    assert line["outputs"] == [hash_of(ids)] * 2 and line["seeds"] == [77, 77]
    assert line["finish_reasons"] == ["length"] * 2
    assert (line["prompt_tokens"], line["completion_tokens"]) == (len(pool.submitted[0].prompt), 2 * len(ids))
    assert 0 < line["ttft_ms"] <= line["total_ms"]


@pytest.mark.parametrize("stream", [False, True])
async def test_texts_and_keys_are_not_in_it(tokenizer: Tokenizer, file: Path, stream: bool) -> None:
    ids = tokenizer.encode_now(["hello"], False)[0]
    (line,), _ = await recorded(file, FakePool(sending(ids)), tokenizer, BODY | {"stream": stream}, api_key="sk-key")
    assert line["stream" if stream else "outcome"] and "request" not in line and "answer" not in line
    assert not any(word in file.read_text() for word in ("secret", "hidden", "hello", "sk-key", "Bearer"))


@pytest.mark.parametrize("stream", [False, True])
async def test_record_text_has_the_request_and_the_answer_as_they_were_sent(
    tokenizer: Tokenizer, file: Path, stream: bool
) -> None:
    ids = tokenizer.encode_now(["hello"], False)[0]
    pool, body = FakePool(sending(ids, ids)), BODY | {"stream": stream}
    (line,), (answer,) = await recorded(file, pool, tokenizer, body, record_text=True, api_key="sk-key")
    assert (line["request"], line["answer"]) == (body, answer) and "hello" in answer
    assert "sk-key" not in file.read_text()


async def test_request_written_on_several_lines_is_one_line_of_the_record(tokenizer: Tokenizer, file: Path) -> None:
    async with client(FakePool(sending([104])), tokenizer, record=str(file), record_text=True) as http:
        await http.post(PATH, content=json.dumps(BODY, indent=2))
    (line,) = file.read_text().splitlines()
    assert json.loads(line)["request"] == BODY


async def test_refused_request_has_its_outcome_and_unreadable_ones_no_line(tokenizer: Tokenizer, file: Path) -> None:
    pool = FakePool(refusals={0: Overloaded("full", code="queue_full")})
    (line,), _ = await recorded(file, pool, tokenizer, BODY, BODY | {"temperature": -1})
    assert (line["status"], line["outcome"], line["error"]) == (503, "refused", "queue_full")
    assert "outputs" not in line and "fingerprint" not in line


async def test_requests_that_generate_nothing_have_no_line(tmp_path: Path, tokenizer: Tokenizer, file: Path) -> None:
    tokenizer.task = Task("embed")
    try:
        lines, _ = await recorded(
            file, FakePool(play=pooling(lambda ids: [1.0])), tokenizer, {"input": "x"}, path="/v1/embeddings"
        )
    finally:
        tokenizer.task = Task("generate")
    assert lines == []


async def test_several_frontends_add_to_one_file(tokenizer: Tokenizer, file: Path) -> None:
    for count in (1, 2):
        lines, _ = await recorded(file, FakePool(sending([104])), tokenizer, BODY)
        assert len(lines) == count
    assert file.stat().st_mode & 0o777 == 0o600


def test_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--record .*/missing/record cannot be written: No such file or directory"):
        Recorder.to(str(tmp_path / "missing" / "record"), 0, 1)


async def test_full_disk_costs_lines_and_says_how_many(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async with client(FakePool(sending([104])), tokenizer, record="/dev/full") as http:
        answers = [await http.post(PATH, json=BODY) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert "--record /dev/full lacks 2 requests" in caplog.text
