"""The routes by which Ollama's clients ask about the server and its model."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import ollama
import pytest
import torch
from safetensors.torch import save_file

from frontend.api.ollama.models import parameter_size
from frontend.text.tokenizer import Tokenizer
from frontend.workers.status import not_ready
from shared.gguf.index import Entry, Index
from shared.gguf.naming import INDEX
from shared.private_files import cache_folder
from tests.fakes import MODEL, FakePool
from tests.fakes import tokenizer as byte_tokenizer
from tests.frontend.serving import http_client
from tests.frontend.speaking import Model, tokenizer_with
from tests.templates import QWEN3


async def test_official_client_finds_the_model(qwen: Model) -> None:
    async with qwen.served() as url, ollama.AsyncClient(url) as client:
        [listed] = (await client.list()).models
        [loaded] = (await client.ps()).models
        shown = await client.show(MODEL)
    assert listed.model == loaded.model == f"{MODEL}:latest"
    assert isinstance(listed.modified_at, datetime) and listed.digest == qwen.tokenizer.hash
    assert loaded.context_length == 8192
    assert shown.capabilities == ["completion", "tools", "thinking"]
    info = dict(shown.modelinfo or {})
    assert info[f"{info['general.architecture']}.context_length"] == 8192
    assert shown.template == qwen.tokenizer.templates["default"]


async def test_size_of_a_listed_model_is_that_of_its_files(tmp_path: Path) -> None:
    async with http_client(FakePool(), byte_tokenizer(tmp_path)) as http:
        [elsewhere] = (await http.get("/api/tags")).json()["models"]  # a frontend without the weights
        (tmp_path / "model-00001-of-00002.safetensors").write_bytes(bytes(700))
        (tmp_path / "model-00002-of-00002.safetensors").write_bytes(bytes(30))
        [listed] = (await http.get("/api/tags")).json()["models"]
    assert (elsewhere["size"], listed["size"]) == (0, 730)


@pytest.mark.parametrize(
    ("config", "details", "parameters"),
    [
        ({"model_type": "llama", "dtype": "bfloat16"}, ("llama", "1K", "BF16"), 1200),
        ({"model_type": "qwen2", "torch_dtype": "float32"}, ("qwen2", "1K", "F32"), 1200),
        ({"model_type": "llama", "quantization_config": {"quant_method": "awq"}}, ("llama", "", "AWQ"), None),
    ],
)
async def test_details_are_those_of_the_files(
    tmp_path: Path, config: dict[str, Any], details: tuple[str, ...], parameters: int | None
) -> None:
    tensors = {"a": torch.zeros(30, 20), "b": torch.zeros(600)}
    served = byte_tokenizer(tmp_path)
    async with http_client(FakePool(), served) as http:
        before = (await http.get("/api/tags")).json()["models"][0]["details"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        [listed] = (await http.get("/api/tags")).json()["models"]
        [loaded] = (await http.get("/api/ps")).json()["models"]
        shown = (await http.post("/api/show", json={"model": MODEL})).json()
    assert before["format"] == before["family"] == ""
    family, size, kind = details
    assert listed["details"] == loaded["details"] == shown["details"] == {
        "parent_model": "", "format": "safetensors", "family": family, "families": [family], "parameter_size": size,
        "quantization_level": kind,
    }  # fmt: skip
    assert shown["model_info"].get("general.parameter_count") == parameters
    assert loaded["size"] == listed["size"] > 0


async def test_details_of_a_translated_file_are_those_of_its_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache_folder() / "gguf" / "model-1"
    folder.mkdir(parents=True)
    served = byte_tokenizer(folder)
    tensor = Entry(0, "Q4_K", (1000, 2000), 0, 8)
    index = Index("qwen2", 64, 2, ("model.gguf",), {"a": tensor, "b": tensor})
    (folder / INDEX).write_bytes(msgspec.json.encode(index))
    quantization = {"quant_method": "gguf", "kind": "Q4_K_M"}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "quantization_config": quantization}))
    async with http_client(FakePool(), served) as http:
        details = (await http.get("/api/tags")).json()["models"][0]["details"]
    assert [details[name] for name in ("format", "family", "parameter_size", "quantization_level")] == [
        "gguf", "qwen2", "4M", "Q4_K_M",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("count", "written"),
    [(0, ""), (999, "999"), (1500, "2K"), (134_515_008, "134.52M"), (7_615_616_512, "7.6B"), (8 * 10**9, "8B")],
)
def test_numbers_of_parameters_are_written_as_ollama_does(count: int, written: str) -> None:
    assert parameter_size(count) == written


async def test_model_that_fills_in_the_middle_can_insert(folder: Path) -> None:
    coder = Model(tokenizer_with(folder / "inserts", QWEN3, ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]))
    async with http_client(coder.pool, coder.tokenizer) as http:
        shown = (await http.post("/api/show", json={"model": MODEL})).json()
        listed = (await http.get("/v1/models")).json()["data"]
    assert shown["capabilities"] == listed[0]["capabilities"] == ["completion", "insert", "tools", "thinking"]


@pytest.mark.parametrize("body", [{"model": MODEL}, {"name": MODEL}, {"model": f"{MODEL}:latest", "verbose": True}])
async def test_show_takes_the_name_in_either_field(tokenizer: Tokenizer, body: dict[str, object]) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        assert (await http.post("/api/show", json=body)).status_code == 200
        assert (await http.post("/api/show", json={})).status_code == 400


async def test_version_is_one_that_clients_can_compare(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        version = (await http.get("/api/version")).json()["version"]
        heads = [(await http.head(path)).status_code for path in ("/", "/api/version", "/api/tags")]
        gone = await http.post("/api/push", json={"model": MODEL})
    assert tuple(map(int, version.split("."))) > (0, 6, 4) and heads == [200] * 3
    assert gone.status_code == 404 and list(gone.json()) == ["error"]


async def test_model_that_no_worker_has_is_listed_and_not_running(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(readiness=not_ready("loading 42%"), welcome=None), tokenizer) as http:
        assert len((await http.get("/api/tags")).json()["models"]) == 1
        assert (await http.get("/api/ps")).json() == {"models": []}
