"""llama.cpp's /infill: prompts with fill-in-the-middle tokens, which clients' texts cannot forge."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.text.tokenizer import Tokenizer
from tests.fakes import MODEL, FakePool
from tests.frontend.serving import http_client
from tests.frontend.speaking import Model, tokenizer_with
from tests.templates import QWEN3

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
FILES = ["<|repo_name|>", "<|file_sep|>"]
BODY: dict[str, Any] = {"input_prefix": "int main() {\n", "input_suffix": "}\n"}
EXTRA = [{"filename": "a.h", "text": "int a;\n"}, {"text": "int b;\n"}]


async def fill(coder: Model, **fields: Any) -> httpx.Response:
    coder.says = coder.says or ["return 0;"]
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
    assert spelled_ends(repository) == ["<|fim_pad|>", *FILES]


def spelled_ends(model: Model) -> list[str]:
    return [model.tokenizer.token_text(id) for id in model.pool.submitted[-1].sampling.stop_token_ids]


RAW = "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
BIAS = {"logit_bias": {"5": 1.0}}
FILLING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "suffix": "b", **BIAS}), ("/v1/completions", {"prompt": "", "suffix": "b"}),
    ("/v1/completions", {"prompt": RAW}), ("/completion", {"prompt": RAW, **BIAS}),
    ("/completion", {"prompt": ["x", RAW]}), ("/generate", {"text": RAW}),
    ("/api/generate", {"model": MODEL, "prompt": RAW, "raw": True}),
    ("/api/generate", {"model": MODEL, "prompt": "a", "suffix": "b"}), ("/infill", {**BODY, **BIAS}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), FILLING)
async def test_every_route_ends_a_middle_at_the_end_of_the_file(
    repository: Model, path: str, body: dict[str, Any]
) -> None:
    repository.says = ["b", "b"]
    async with http_client(repository.pool, repository.tokenizer) as http:
        answer = await http.post(path, json=body | {"stream": False})
        assert answer.status_code == 200, answer.text
        assert spelled_ends(repository) == ["<|fim_pad|>", *FILES]
        repository.says = ["b"]
        plain = {
            name: "no middle" if RAW in (value if isinstance(value, list) else [value]) else value
            for name, value in body.items()
        }
        if plain != body:
            await http.post(path, json=plain | {"stream": False})
            assert spelled_ends(repository) == []


async def test_clients_own_stop_ids_stay_and_ignore_eos_leaves_a_middle_open(repository: Model) -> None:
    repository.says = ["b", "b"]
    async with http_client(repository.pool, repository.tokenizer) as http:
        await http.post("/v1/completions", json={"prompt": RAW, "stop_token_ids": [70]})
        assert spelled_ends(repository)[1:] == ["<|fim_pad|>", *FILES]
        await http.post("/v1/completions", json={"prompt": RAW, "ignore_eos": True})
        assert spelled_ends(repository) == []


INDENTED = "x = 1\n    y = 2\n    z = 3\nprint(x)"
LINES: list[tuple[str, dict[str, Any], Any]] = [
    ("/infill", BODY, lambda it: (it["content"], it["stop_type"], it["stopping_word"], it["truncated"])),
    ("/completion", {"prompt": "a"}, lambda it: (it["content"], it["stop_type"], it["stopping_word"], it["truncated"])),
    ("/v1/completions", {"prompt": "a"}, lambda it: (it["choices"][0]["text"], it["choices"][0]["finish_reason"])),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "none"},
     lambda it: (it["choices"][0]["message"]["content"], it["choices"][0]["finish_reason"])),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "read"), LINES)
async def test_answer_ends_before_a_line_with_less_indentation(
    coder: Model, path: str, body: dict[str, Any], read: Any
) -> None:
    coder.says = [INDENTED, INDENTED]
    async with http_client(coder.pool, coder.tokenizer) as http:
        answer = await http.post(path, json=body | {"n_indent": 4})
        whole = await http.post(path, json=body | {"n_indent": 0})
        refused = await http.post(path, json=body | {"n_indent": 4, "receipt": True})
    text, reason, *rest = read(answer.json())
    assert text == "x = 1\n    y = 2\n    z = 3" and reason in ("limit", "length") and rest in ([], ["", False])
    assert read(whole.json())[0] == INDENTED and "`receipt`" in refused.text
    assert coder.pool.aborted == [1]


async def test_stream_takes_back_no_line(coder: Model) -> None:
    coder.says, coder.size = [INDENTED], 1
    answer = await fill(coder, n_indent=4, stream=True)
    parts = [json.loads(block.removeprefix("data: ")) for block in answer.text.split("\n\n") if block]
    assert "".join(part["content"] for part in parts) == "x = 1\n    y = 2\n    z = 3"


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
