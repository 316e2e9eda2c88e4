"""A GGUF file, served by the real command: streamed text, chat, and broken files, which are refused in one sentence."""

import subprocess
import sys
from pathlib import Path

import openai
import pytest
from transformers import AutoTokenizer

from tests.e2e.server import ROOT, serving
from tests.gguf_files import mixed, write
from tests.patience import PATIENCE_S
from tests.worker.models.harness import Oracle

NEW = 24


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_gguf_file_streams_what_transformers_computes(tmp_path: Path) -> None:
    written = write("llama", tmp_path, mixed)
    tokenizer = AutoTokenizer.from_pretrained(written.reference)
    prompt = tokenizer("The river runs past the old stone bridge").input_ids
    expected = Oracle(written.reference).greedy(prompt, NEW)
    with serving(written.file, tmp_path / "log", "--dtype", "float32") as server:
        events = server.events("The river runs past the old stone bridge", NEW, ignore_eos=True)
        assert events.ids == expected and events.done is not None
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
        messages = [{"role": "user", "content": "Hello"}]
        chunks = client.chat.completions.create(model="m", messages=messages, max_tokens=8, stream=True)  # type: ignore[arg-type]
        assert [chunk for chunk in chunks if chunk.choices][-1].choices[0].finish_reason in ("stop", "length")
        client.close()
        assert "Q4_K_M" in server.stats()["worker"]["dtype"]


def test_folder_with_one_gguf_is_served_under_its_own_name(tmp_path: Path) -> None:
    folder = write("qwen3", tmp_path / "tiny").file.parent
    with serving(folder, tmp_path / "log", name="") as server:
        assert [model["id"] for model in server.client.get("/v1/models").json()["data"]] == ["tiny"]
        assert all(server.events("Hello", 4, ignore_eos=True, model=name).done for name in ("tiny", str(folder)))


@pytest.mark.parametrize("case", ["cut", "several", "magic", "split"])
def test_start_that_fails_is_one_sentence_and_exit_code_3(case: str, tmp_path: Path) -> None:
    path, words = tmp_path / "model.gguf", ""
    match case:
        case "cut":
            whole = write("qwen3", tmp_path).file.read_bytes()
            path.write_bytes(whole[: len(whole) // 2])
            words = "model.gguf is not a complete GGUF file"
        case "several":
            path.touch()
            (tmp_path / "other.gguf").touch()
            path, words = tmp_path, "several GGUF models, so name one of the files: model.gguf, other.gguf"
        case "magic":
            path.write_bytes(b"PK\x03\x04 not a model")
            words = "model.gguf is not a GGUF file"
        case "split":
            path = tmp_path / "m-00002-of-00003.gguf"
            path.write_bytes(b"GGUF")
            words = "m-00001-of-00003.gguf is missing, one of the 3 files of this model"
    command = [sys.executable, "-m", "deploy.cli.main", "serve", "--port", "0", "--worker-metrics-port", "0", str(path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    said = (ended.stdout + ended.stderr).strip()
    assert ended.returncode == 3 and words in said and "\n" not in said, said


def test_tensor_that_is_missing_ends_the_start_with_exit_code_3(tmp_path: Path) -> None:
    """Only the worker finds this error; the launcher reports it and ends."""
    path = write("qwen3", tmp_path).file
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_us.weight"))
    command = [sys.executable, "-m", "deploy.cli.main", "serve", "--port", "0", "--worker-metrics-port", "0", str(path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 3 and "tensor model.layers.1.mlp.up_proj.weight is missing" in said, said
    assert "Traceback" not in said
