"""K/V that comes from the store gives the same bits as K/V that is computed: plain, windowed and hybrid models."""

from pathlib import Path

import pytest

from tests.checkpoints import Checkpoints
from tests.worker.kv_cache.store_harness import BLOCK, PAGE, Process, files, prompt_of

KINDS = {  # kind of model → settings
    "llama": {},
    "gemma3": {},
    "mistral": {},
    "qwen3_5": {},
    "granite-hybrid": {},
    "deepseek-v2": {},
    "llama in eight bits": {"kv_cache_dtype": "int8"},
    "llama in fp8": {"kv_cache_dtype": "fp8"},
    "llama in four bits": {"kv_cache_dtype": "int4"},
    "qwen2 in eight bits": {"kv_cache_dtype": "int8"},  # keys without their centre
    "gemma3 in four bits": {"kv_cache_dtype": "int4"},
    "qwen3_5 in eight bits": {"kv_cache_dtype": "int8"},
    "deepseek-v3 in eight bits": {"kv_cache_dtype": "int8"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_spilled_restarted_and_other_worker_have_the_same_bits(
    checkpoints: Checkpoints, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, settings = checkpoints(kind.partition(" ")[0]), dict(KINDS[kind])
    prompt = prompt_of()
    alone = Process(model, monkeypatch, settings=settings).answer(prompt)
    assert alone.cached == 0
    first = Process(model, monkeypatch, (tmp_path,), settings)
    assert first.answer(prompt).equals(alone)
    assert files(tmp_path)
    first.forget()
    spilled = first.answer(prompt)
    other = Process(model, monkeypatch, (tmp_path,), settings).answer(prompt)
    first.close()
    restarted = Process(model, monkeypatch, (tmp_path,), settings).answer(prompt)
    for name, found in (("spilled", spilled), ("other worker", other), ("restarted", restarted)):
        assert found.equals(alone), name
        assert found.cached >= (len(prompt) - 1) // (PAGE * BLOCK) * PAGE * BLOCK, name
