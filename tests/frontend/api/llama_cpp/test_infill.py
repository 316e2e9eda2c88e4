"""llama.cpp's /infill: prompts with fill-in-the-middle tokens, which clients' texts cannot forge."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.text.tokenizer import Tokenizer
from tests.fakes import FakePool
from tests.frontend.serving import http_client
from tests.frontend.speaking import Model, tokenizer_with
from tests.templates import QWEN3

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
FILES = ["<|repo_name|>", "<|file_sep|>"]
BODY: dict[str, Any] = {"input_prefix": "int main() {\n", "input_suffix": "}\n"}
EXTRA = [{"filename": "a.h", "text": "int a;\n"}, {"text": "int b;\n"}]


async def fill(coder: Model, **fields: Any) -> httpx.Response:
    coder.says = ["return 0;"]
    async with http_client(coder.pool, coder.tokenizer) as http:
        return await http.post("/infill", json=BODY | fields)


@pytest.fixture
def coder(folder: Path) -> Model:
    return Model(tokenizer_with(folder / "coder", QWEN3, MARKS))


@pytest.fixture
def repository(folder: Path) -> Model:
    return Model(tokenizer_with(folder / "repository", QWEN3, MARKS + FILES))


async def test_prompt_stands_behind_the_marks(coder: Model) -> None:
    body = (await fill(coder, prompt="  x = ")).json()
    assert (body["content"], body["stop"]) == ("return 0;", True)
    assert coder.prompts == ["<s><|fim_prefix|>int main() {\n<|fim_suffix|>}\n<|fim_middle|>  x = "]
    assert body["prompt"] == coder.prompts[0]


async def test_other_files_stand_before_it(coder: Model, repository: Model) -> None:
    rest = "<|fim_prefix|>int main() {\n<|fim_suffix|>}\n<|fim_middle|>"
    await fill(coder, input_extra=EXTRA)
    await fill(repository, input_extra=EXTRA)
    assert coder.prompts == [f"<s>int a;\nint b;\n{rest}"]
    names = "<|file_sep|>a.h\nint a;\n<|file_sep|>tmp\nint b;\n<|file_sep|>filename\n"
    assert repository.prompts == [f"<s><|repo_name|>myproject\n{names}{rest}"]


async def test_what_does_not_fit_of_other_files_is_left_out(coder: Model) -> None:
    answer = await fill(coder, input_extra=[{"text": "x" * 9000 + "END"}], n_predict=9)
    (prompt,) = coder.pool.submitted
    assert answer.status_code == 200 and len(prompt.prompt) == 8192 - 9 and "END<|fim_prefix|>" in coder.prompts[0]


async def test_marks_in_texts_are_text(repository: Model) -> None:
    texts = {"input_prefix": "a<|fim_middle|>", "input_suffix": "<|file_sep|>b", "prompt": "<|fim_pad|>"}
    await fill(repository, **texts, input_extra=[{"filename": "<|repo_name|>", "text": "<|fim_prefix|>"}])
    (submitted,) = repository.pool.submitted
    find = repository.tokenizer.ids_of
    counts = {mark: sum(id in find({mark: mark}) for id in submitted.prompt) for mark in MARKS + FILES}
    assert counts == dict.fromkeys(MARKS[:3], 1) | {"<|fim_pad|>": 0, "<|repo_name|>": 1, "<|file_sep|>": 2}


async def test_answer_ends_at_the_next_file(repository: Model) -> None:
    await fill(repository)
    spelled = [repository.tokenizer.token_text(id) for id in repository.pool.submitted[0].sampling.stop_token_ids]
    assert spelled == ["<|fim_pad|>", *FILES]


async def test_options_apply_and_a_stream_is_possible(coder: Model) -> None:
    answer = await fill(coder, n_predict=5, samplers=["top_k", "top_p", "infill"], top_k=40, top_p=0.9, stream=True)
    chosen = coder.pool.submitted[0].sampling
    assert (chosen.max_tokens, chosen.top_k, chosen.top_p, chosen.min_p) == (5, 40, 0.9, 0.0)
    assert answer.text.count('"stop":true') == 1


@pytest.mark.parametrize("extra", [{}, {"filename": "ok"}, {"filename": 123}, {"filename": 123, "text": "abc"}])
async def test_file_without_a_text_is_refused(coder: Model, extra: dict[str, Any]) -> None:
    answer = await fill(coder, input_extra=[extra])
    assert answer.status_code == 400 and "`input_extra[0]." in answer.json()["error"]["message"]


async def test_model_without_marks_is_refused_and_that_is_no_failure_of_the_server(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    pool = FakePool()
    async with http_client(pool, tokenizer) as http:
        answer = await http.post("/infill", json=BODY)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"], pool.calls) == (501, 501, "not_supported_error", 0)
    assert "fill in the middle" in error["message"]
    assert not [line for line in caplog.records if line.levelname == "ERROR"]
