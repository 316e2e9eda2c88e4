"""llama.cpp's /embedding and /embeddings over HTTP."""

import base64
import math
import struct
from typing import Any

import httpx
import pytest

from frontend.text.tokenizer import Tokenizer
from shared.checkpoint import Task
from shared.messages import Pooling, PoolingKind
from tests.fakes import FakePool, pooling
from tests.frontend.serving import http_client

VECTOR = [3.0, -4.0]


@pytest.fixture
def embedder(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    monkeypatch.setattr(tokenizer, "task", Task("embed", PoolingKind.LAST, True))
    return tokenizer


async def post(embedder: Tokenizer, pool: FakePool, path: str = "/embedding", **body: Any) -> httpx.Response:
    async with http_client(pool, embedder) as http:
        return await http.post(path, json=body)


def vectors() -> FakePool:
    return FakePool(pooling(lambda ids: VECTOR))


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
@pytest.mark.parametrize("field", ["content", "input"])
async def test_answer_is_an_array_of_vectors(embedder: Tokenizer, path: str, field: str) -> None:
    pool = vectors()
    answer = await post(embedder, pool, path, **{field: ["a", [65, "a"], {"prompt_string": "a"}]})
    assert answer.json() == [{"index": index, "embedding": [VECTOR]} for index in range(3)]
    assert [one.prompt for one in pool.submitted] == [[264, 64], [65, 64], [264, 64]]


@pytest.mark.parametrize(
    ("norm", "by_the_worker", "expected"),
    [
        (None, True, VECTOR),
        (2, True, VECTOR),
        (-1, False, VECTOR),
        (0, False, [24570.0, -32760.0]),
        (1, False, [3 / 7, -4 / 7]),
        (3, False, [3 / 91 ** (1 / 3), -4 / 91 ** (1 / 3)]),
    ],
)
async def test_vector_is_scaled_as_asked(
    embedder: Tokenizer, norm: int | None, by_the_worker: bool, expected: list[float]
) -> None:
    pool = vectors()
    answer = await post(embedder, pool, content="a", embd_normalize=norm)
    ((found,),) = [one["embedding"] for one in answer.json()]
    assert all(math.isclose(one, other, rel_tol=1e-6) for one, other in zip(found, expected, strict=True))
    asked = pool.submitted[0].stream.submit.pooling
    assert isinstance(asked, Pooling) and asked.normalized is by_the_worker


async def test_vector_of_zeros_stays_so(embedder: Tokenizer) -> None:
    pool = FakePool(pooling(lambda ids: [0.0, 0.0]))
    for norm in (0, 1, 3):
        assert (await post(embedder, pool, content="a", embd_normalize=norm)).json()[0]["embedding"] == [[0.0, 0.0]]


async def test_vector_in_base64(embedder: Tokenizer) -> None:
    (one,) = (await post(embedder, vectors(), input="a", encoding_format="base64")).json()
    assert list(struct.unpack("<2f", base64.b64decode(one["embedding"]))) == VECTOR


@pytest.mark.parametrize("body", [{}, {"content": []}, {"content": [1, [2]]}, {"input": {"content": "a"}}])
async def test_wrong_input_is_refused(embedder: Tokenizer, body: dict[str, Any]) -> None:
    answer = await post(embedder, FakePool(), **body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, 400)


async def test_model_that_generates_makes_no_vectors(tokenizer: Tokenizer) -> None:
    answer = await post(tokenizer, FakePool(), content="a")
    assert answer.status_code == 400 and "--task embed" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("norm", "by_the_worker", "expected"),
    [(None, False, [[3, -4], [6, 8]]), (2, True, [[3, -4], [6, 8]]), (1, False, [[3 / 7, -4 / 7], [3 / 7, 4 / 7]])],
)
async def test_without_pooling_each_token_has_a_vector(
    embedder: Tokenizer, norm: int | None, by_the_worker: bool, expected: list[list[float]]
) -> None:
    pool = FakePool(pooling(lambda ids: [3.0, -4.0, 6.0, 8.0]))
    body = {"content": "a", "pooling": "none", "embd_normalize": norm}
    (found,) = (await post(embedder, pool, **body)).json()
    assert found["embedding"] == [pytest.approx(row) for row in expected]
    assert pool.submitted[0].stream.submit.pooling == Pooling(PoolingKind.TOKENS, by_the_worker)
    (packed,) = (await post(embedder, pool, encoding_format="base64", **body)).json()
    numbers = struct.unpack("<4f", base64.b64decode(packed["embedding"]))
    assert numbers == pytest.approx([one for row in expected for one in row])


async def test_unknown_pooling_is_refused_by_its_name(embedder: Tokenizer) -> None:
    refused = await post(embedder, vectors(), content="a", pooling="mean")
    assert refused.status_code == 400 and "`pooling`" in refused.json()["error"]["message"]
