"""Texts that are longer than the model can read, as the mean of their segments' vectors, over a fake worker."""

import base64
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frontend.api.pooling.fields import SegmentedText, merged, segmented
from frontend.errors import Unprocessable
from frontend.request import Segments
from frontend.text.tokenizer import Tokenizer
from shared import messages as m
from shared.checkpoint import Task
from tests import encoders
from tests.fakes import FakePool, pooling
from tests.frontend.serving import http_client

WORDS = "red house old mill stone bridge river light"  # 8 tokens, and [CLS] (2) and [SEP] (3) around them
EMBED = Task("embed", m.PoolingKind.MEAN, normalized=True, encoder=True, prompts={"query": "red mill "})
ROUTES = (
    ("/v1/embeddings", "input", lambda told: told["data"][0]["embedding"]),
    ("/pooling", "input", lambda told: told["data"][0]["data"]),
    ("/embed", "inputs", lambda told: told[0]),
    ("/v2/embed", "texts", lambda told: told["embeddings"]["float"][0]),
    ("/api/embed", "input", lambda told: told["embeddings"][0]),
    ("/embedding", "content", lambda told: told[0]["embedding"][0]),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("wordpiece")
    encoders.word_piece().save_pretrained(folder)
    found = Tokenizer.load(folder)
    found.task = EMBED
    return found


def welcomed(most: int) -> FakePool:
    """A pool whose model reads `most` tokens, and gives a prompt the vector [its last id but one, its length]."""
    pool = FakePool(play=pooling(lambda ids: [float(ids[-2]), float(len(ids))]))
    pool.welcome = m.Welcome(1, 1, 4711, "tiny", "", m.Limits(most, encoders.VOCAB, (), 2))
    return pool


@pytest.mark.parametrize(("path", "field", "vector"), ROUTES)
async def test_vector_of_a_long_text_is_the_mean_of_its_segments(
    tokenizer: Tokenizer, path: str, field: str, vector: Callable[[Any], list[float]]
) -> None:
    pool, ids = welcomed(5), tokenizer.encode_now([WORDS])[0]
    body: dict[str, Any] = {"model": "tiny", field: [WORDS]}
    async with http_client(pool, tokenizer) as http:
        whole = {"/v2/embed": {"truncate": "NONE"}, "/api/embed": {"truncate": False}}.get(path, {})
        refused = await http.post(path, json=body | whole)
        answer = await http.post(path, json=body | {"long_inputs": "mean"})
        short = await http.post(path, json=body | {field: ["red"], "long_inputs": "mean"})
        plain = await http.post(path, json=body | {field: ["red"]})
    assert 400 <= refused.status_code < 500
    assert answer.status_code == 200, answer.text
    inner = ids[1:-1]
    prompts = [[2, *inner[:2], 3], [2, *inner[2:5], 3], [2, *inner[5:], 3]]
    numbers = [one[-2] for one in prompts], [*map(len, prompts)]
    assert [one.prompt for one in pool.submitted[:3]] == prompts
    total = [sum((len(one) - 2) * row for one, row in zip(prompts, rows, strict=True)) for rows in numbers]
    assert vector(answer.json()) == pytest.approx([one / math.hypot(*total) for one in total])
    assert vector(short.json()) == vector(plain.json()), "a text that fits gets its own vector"


async def test_response_says_how_many_segments_and_counts_their_tokens(tokenizer: Tokenizer) -> None:
    pool = welcomed(6)
    async with http_client(pool, tokenizer) as http:
        body = {"input": [WORDS, [5, 6, 7], list(range(5, 18))], "long_inputs": "mean", "encoding_format": "base64"}
        told = (await http.post("/v1/embeddings", json=body)).json()
        pooled = (await http.post("/pooling", json=body)).json()
        silent = (await http.post("/v1/embeddings", json={"input": "red"})).json()
    assert [one["segments"] for one in told["data"]] == [one["segments"] for one in pooled["data"]] == [2, 1, 3]
    assert told["usage"]["prompt_tokens"] == 8 + 2 * 2 + 3 + 13 and "segments" not in silent["data"][0]
    assert [one.prompt for one in pool.submitted[3:6]] == [[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16, 17]]
    assert struct.unpack("<2f", base64.b64decode(told["data"][1]["embedding"])) == (6.0, 3.0)


async def test_each_segment_has_the_checkpoints_prompt(tokenizer: Tokenizer) -> None:
    pool, (ids, before) = welcomed(8), tokenizer.encode_now([WORDS, "red mill"])
    async with http_client(pool, tokenizer) as http:
        body = {"input": WORDS, "prompt_name": "query", "long_inputs": "mean"}
        assert (await http.post("/v1/embeddings", json=body)).status_code == 200
    inner = ids[1:-1]
    assert [one.prompt for one in pool.submitted] == [[*before[:3], *inner[:4], 3], [*before[:3], *inner[4:], 3]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "red", "truncate_prompt_tokens": 3}),
        ("/embed", {"inputs": "red", "truncate": True}),
        ("/v2/embed", {"texts": ["red"], "truncate": "END"}),
        ("/v2/embed", {"texts": ["red"], "max_tokens": 3}),
        ("/v2/embed", {"texts": ["red"], "max_tokens": 3, "truncate": "NONE"}),
        ("/api/embed", {"model": "tiny", "input": "red", "truncate": True}),
        ("/embedding", {"content": "red", "pooling": "none"}),
        ("/pooling", {"input": "red", "task": "token_embed"}),
        ("/v1/embeddings", {"input": WORDS, "prompt_name": "query"}),
    ],
)
async def test_what_excludes_segments_is_refused(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    pool = welcomed(4)
    async with http_client(pool, tokenizer) as http:
        refused = await http.post(path, json=body | {"long_inputs": "mean"})
        unknown = await http.post(path, json=body | {"long_inputs": "first"})
    assert 400 <= refused.status_code < 500 and "`long_inputs`" in refused.text and not pool.submitted
    assert 400 <= unknown.status_code < 500 and "`long_inputs`" in unknown.text


async def test_labels_have_no_segments(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "task", Task("score", labels=2, encoder=True))
    async with http_client(welcomed(4), tokenizer) as http:
        refused = await http.post("/pooling", json={"input": "red", "long_inputs": "mean"})
    assert refused.status_code == 400 and "`long_inputs`" in refused.text


@pytest.mark.parametrize("length", range(1, 40))
def test_segments_are_the_fewest_of_equal_lengths_and_lose_nothing(tokenizer: Tokenizer, length: int) -> None:
    context = type("Context", (), {"max_seq_len": 7})
    ids = [2, 9, *range(100, 100 + length), 3]
    prompts, segments = segmented([SegmentedText(ids, 2, 1)], 99, "input", context)  # type: ignore[arg-type]
    assert segments.counts == (len(prompts),) == (-(-length // 4),)
    assert [id for one in prompts for id in one[2:-1]] == ids[2:-1]
    assert all(one[:2] == [2, 9] and one[-1] == 3 and len(one) <= 7 for one in prompts)
    assert max(map(len, prompts)) - min(map(len, prompts)) <= 1


def test_too_many_segments_are_refused_by_the_fields_name(tokenizer: Tokenizer) -> None:
    context = type("Context", (), {"max_seq_len": 2})
    with pytest.raises(Unprocessable, match="`texts` makes more than 3 segments"):
        segmented([SegmentedText([1] * 7)], 3, "texts", context)  # type: ignore[arg-type]


async def test_mean_that_is_not_normalized_is_that_of_all_tokens() -> None:
    packed = [struct.pack("<2f", 1.0, 2.0), struct.pack("<2f", 4.0, -1.0), struct.pack("<2f", 0.1, 0.2)]
    found = await merged(packed, Segments((2, 1), (1, 2, 1)), False)
    assert [struct.unpack("<2f", one) for one in found] == [(3.0, 0.0), struct.unpack("<2f", packed[2])]
    zero = await merged([bytes(8), bytes(8)], Segments((2,), (1, 1)), True)
    assert zero == [bytes(8)]
