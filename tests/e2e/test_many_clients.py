"""Ollama's and OpenAI's clients, and Open WebUI's requests, on a server with two models on its command line."""

import time
from pathlib import Path

import httpx
import ollama
import openai
import pytest

from tests.e2e.server import serving
from tests.patience import PATIENCE_S

KEY = {"Authorization": "Bearer k"}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_clients_choose_list_and_load_models_and_the_server_sleeps(tmp_path: Path) -> None:
    flags = ("--model", "demo", "demo", "--served-model-name", "toy", "twin", "--max-loaded-models", "1")
    flags += ("--kv-cache-gb", "0.05", "--device", "cpu", "--api-key", "k", "--load-wait", str(PATIENCE_S))
    with (
        serving(None, tmp_path / "log", *flags, name="") as server,
        httpx.Client(base_url=server.url, headers=KEY, timeout=PATIENCE_S) as http,
        ollama.Client(server.url, headers=KEY, timeout=PATIENCE_S) as theirs,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0, timeout=PATIENCE_S) as sdk,
    ):

        def until_running(*names: str) -> None:
            deadline = time.monotonic() + PATIENCE_S
            while [one["name"] for one in http.get("/api/ps").json()["models"]] != [f"{name}:latest" for name in names]:
                assert time.monotonic() < deadline
                time.sleep(0.05)

        # When Open WebUI starts, it asks which models there are, and which are loaded.
        assert http.get("/api/version").json()["version"]
        assert [one["model"] for one in http.get("/api/tags").json()["models"]] == ["toy:latest", "twin:latest"]
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["toy", "twin"]
        until_running()
        assert [one.id for one in sdk.models.list()] == ["toy", "twin"]

        # A chat loads its model. For the next chat, this model has to be unloaded.
        answer = sdk.chat.completions.create(model="toy", messages=QUESTION, temperature=0, max_tokens=8)  # type: ignore[arg-type]
        text = answer.choices[0].message.content
        assert (answer.model, bool(text)) == ("toy", True)
        until_running("toy")
        streamed = theirs.chat("twin", QUESTION, stream=True, options={"temperature": 0, "num_predict": 8})
        assert "".join(part.message.content or "" for part in streamed) == text, "the same weights"
        until_running("twin")
        assert theirs.show("twin").capabilities
        with pytest.raises(openai.NotFoundError):
            sdk.chat.completions.create(model="absent", messages=QUESTION)  # type: ignore[arg-type]
        with pytest.raises(ollama.ResponseError) as absent:
            theirs.chat("absent", QUESTION)
        assert absent.value.status_code == 404

        # Sleep frees the memory, and the routes say so. After the wake-up, the same model is loaded again.
        assert http.post("/models?reload=1").json() == http.get("/v1/models").json()
        assert http.post("/sleep?level=1").json() == {"is_sleeping": True}
        until_running()
        with pytest.raises(openai.InternalServerError) as asleep:
            sdk.chat.completions.create(model="twin", messages=QUESTION)  # type: ignore[arg-type]
        assert (asleep.value.status_code, asleep.value.code) == (503, "asleep")
        assert http.post("/wake_up").json() == {"is_sleeping": False}
        until_running("twin")
        again = sdk.chat.completions.create(model="twin", messages=QUESTION, temperature=0, max_tokens=8)  # type: ignore[arg-type]
        assert again.choices[0].message.content == text
        page = http.get("/metrics").text
        assert 'sluice_model_loaded{model_name="twin"} 1.0' in page
        assert 'sluice_num_requests_waiting{model_name="twin"} 0.0' in page
