"""The sampling parameters that a checkpoint recommends."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.model_context import recommended
from frontend.text.tokenizer import Tokenizer
from tests.fakes import MODEL
from tests.frontend.speaking import Model
from tests.frontend.text.tokenizers import byte_level, save

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


GENERATION = {
    "bos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05,
    "max_new_tokens": 2048, "transformers_version": "4.51.0",
}  # fmt: skip


NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


PLAIN = (1.0, 1.0, 0, 0.0, 1.0)


QUESTION = [{"role": "user", "content": "Hi"}]


BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "a"}, "chat/completions": {"messages": QUESTION},
    "messages": {"messages": QUESTION, "max_tokens": 9}, "responses": {"input": "Hi"},
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Model:
    files = {"tokenizer_config": {"chat_template": TEMPLATE}, "generation_config": GENERATION}
    return Model(Tokenizer.load(save(byte_level(), tmp_path, **files)), ["a"] * 9)


async def asked(model: Model, path: str, given: dict[str, Any], **config: Any) -> tuple[Any, ...]:
    async with model.served(**config) as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post(f"/v1/{path}", json={"model": MODEL, **BODIES[path], **given})
        assert answer.status_code == 200, answer.text
    sampling = model.pool.submitted[-1].sampling
    return tuple(getattr(sampling, name) for name in NAMES)


@pytest.mark.parametrize("path", BODIES)
async def test_sampling_default_is_the_checkpoints_with_sampling_defaults_model(model: Model, path: str) -> None:
    assert await asked(model, path, {}) == PLAIN
    told = {"sampling_defaults": "model"}
    assert await asked(model, path, {}, **told) == (0.6, 0.95, 20, 0.0, 1.05)
    assert await asked(model, path, {"temperature": None, "top_p": 1}, **told) == (0.6, 1.0, 20, 0.0, 1.05)
    assert await asked(model, path, {"temperature": 0, "top_k": 5}, **told) == (0.0, 0.95, 5, 0.0, 1.05)


async def test_response_reports_its_sampling_parameters(model: Model) -> None:
    async with model.served(sampling_defaults="model") as url, httpx.AsyncClient(base_url=url) as http:
        answer = (await http.post("/v1/responses", json={"model": MODEL, "input": "Hi", "top_p": 0.5})).json()
    assert (answer["temperature"], answer["top_p"]) == (0.6, 0.5)


@pytest.mark.parametrize(
    ("generation", "found"),
    [
        ({}, {}),
        ({"do_sample": False, "temperature": 0.1}, {}),
        ({"top_k": 64, "top_p": 0.95, "cache_implementation": "hybrid"}, {"top_k": 64, "top_p": 0.95}),
        ({"temperature": 1, "top_k": -2, "top_p": 1.0, "min_p": None}, {"temperature": 1.0, "top_p": 1.0}),
        ({"temperature": "warm", "top_p": 7, "min_p": 0.05}, {"min_p": 0.05}),
    ],
)
def test_recommended_of_a_generation_config(generation: dict[str, Any], found: dict[str, Any]) -> None:
    assert recommended(generation) == found
