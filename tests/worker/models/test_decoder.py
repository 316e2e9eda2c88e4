"""The decoder agrees with transformers in float32 on the CPU, across page, window and chunk boundaries."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import GEMMA4, HYBRID, KINDS, WINDOW, Checkpoints
from tests.worker.models.harness import (
    Oracle,
    all_logits,
    cache_for,
    decoder_of,
    pack,
    prompts_of,
    rows_for,
    run_greedy,
)
from tests.worker.ops.harness.cpu_tiers import tier  # noqa: F401

# families with layer norms, feed-forward networks without a gate, or norms of heads after the rotation
SWITCHED = ("cohere2", "starcoder2", "hunyuan", "apertus", "nemotron")
DENSE_LATENT = ("deepseek-v2", "minicpm3")
PAGE = 16
# one token; around a page and a window (both 16 here); around the next page; several chunks of 24
LENGTHS = [1, 2, PAGE - 1, PAGE, PAGE + 1, WINDOW + 2, 24, 25, 31, 33, 47, 48, 49, 64, 70, 100]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Uses one thread: models this small are slower with several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers_alone_and_in_a_batch(checkpoints: Checkpoints, kind: str) -> None:
    folder = checkpoints(kind)
    decoder, oracle = decoder_of(folder), Oracle(folder)
    prompts = prompts_of(LENGTHS)
    expected = [oracle.logits(prompt) for prompt in prompts]
    company = all_logits(decoder, cache_for(decoder, tokens=1024), prompts, chunk=24)
    alone = [all_logits(decoder, cache_for(decoder, tokens=128), [prompt], chunk=512)[0] for prompt in prompts]
    for one, many, true in zip(alone, company, expected, strict=True):
        torch.testing.assert_close(one, true, atol=1e-4, rtol=0)
        torch.testing.assert_close(many, true, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [*HYBRID, *SWITCHED])
def test_logits_equal_transformers_around_multiples_of_64(checkpoints: Checkpoints, kind: str) -> None:
    folder = checkpoints(kind)
    decoder, oracle = decoder_of(folder), Oracle(folder)
    prompts = prompts_of([1, 63, 64, 65, 127, 128, 129, 250])
    expected = [oracle.logits(prompt) for prompt in prompts]
    for chunk in (1, 7, 64, 100, 512):
        company = all_logits(decoder, cache_for(decoder, tokens=1024), prompts, chunk)
        for got, true in zip(company, expected, strict=True):
            torch.testing.assert_close(got, true, atol=1e-4, rtol=0)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_page_size_changes_no_logits(checkpoints: Checkpoints, kind: str, page_size: int) -> None:
    folder = checkpoints(kind)
    decoder, oracle = decoder_of(folder), Oracle(folder)
    prompts = prompts_of([1, 15, 63, 64, 65, 90])
    for got, prompt in zip(all_logits(decoder, cache_for(decoder, tokens=640, page_size=page_size), prompts, 40),
                           prompts, strict=True):  # fmt: skip
        torch.testing.assert_close(got, oracle.logits(prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_equals_transformers(checkpoints: Checkpoints, kind: str) -> None:
    """One pass over prompt and answer checks all ids: a text is greedy if each id is greedy after the ids before."""
    folder, n = checkpoints(kind), 200
    decoder, oracle = decoder_of(folder, positions=512), Oracle(folder)
    prompts = prompts_of([WINDOW - 1, 1, 17, 50, 75, 130], seed=1)
    answers = run_greedy(decoder, cache_for(decoder, tokens=2048), prompts, n, chunk=32)
    assert answers[0][: n // 3] == oracle.greedy(prompts[0], n // 3)
    assert len(set(answers[0])) > 20, "a degenerate answer proves little"
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == oracle.choices(prompt, answer)


State = dict[str, torch.Tensor]


def _nothing(state: State) -> None:
    pass


def _twins(state: State) -> None:
    """Makes every second expert equal to the expert before it, so that the router logits of both are equal, too."""
    for name, tensor in state.items():
        if ".experts." in name and "_proj" in name:
            state[name] = tensor.clone()
            state[name][1::2] = tensor[::2]
        elif "router" in name:
            state[name] = tensor[::2].repeat_interleave(2, 0)


def _bias_of(expert: int, value: float) -> Callable[[State], None]:
    def change(state: State) -> None:
        for name in state:
            if name.endswith("router.bias"):
                state[name][expert] = value

    return change


ROUTES: dict[str, tuple[str, dict[str, Any], Callable[[State], None]]] = {
    "all experts": ("qwen3-moe", {"num_experts_per_tok": 8}, _nothing),
    "all experts, whose weights do not add up to 1": ("qwen2-moe", {"num_experts_per_tok": 8}, _nothing),
    "one expert": ("qwen3-moe", {"num_experts_per_tok": 1}, _nothing),
    "equal logits": ("gpt-oss", {"num_experts_per_tok": 3}, _twins),
    "the same expert for all rows": ("gpt-oss", {"num_experts_per_tok": 1}, _bias_of(5, 100.0)),
    "an expert for no row": ("gpt-oss", {}, _bias_of(0, -100.0)),
}


@pytest.mark.parametrize("case", ROUTES)
def test_routes_at_the_edge_equal_transformers(checkpoints: Checkpoints, tmp_path: Path, case: str) -> None:
    kind, settings, change = ROUTES[case]
    folder = Path(shutil.copytree(checkpoints(kind), tmp_path / kind))
    config, state = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(state)
    (folder / "config.json").write_text(json.dumps(config | settings))
    save_file(state, folder / "model.safetensors")
    decoder, oracle = decoder_of(folder), Oracle(folder)
    prompts = prompts_of(LENGTHS)
    company = all_logits(decoder, cache_for(decoder, tokens=1024), prompts, chunk=24)
    for prompt, got in zip(prompts, company, strict=True):
        torch.testing.assert_close(got, oracle.logits(prompt), atol=1e-4, rtol=0)


def test_step_without_logits_still_writes_keys(checkpoints: Checkpoints) -> None:
    decoder = decoder_of(checkpoints("qwen3"))
    cache = cache_for(decoder, tokens=64)
    (row,) = rows_for(cache, prompts_of([20]), 0)
    logits = decoder.forward(pack([(row, 12)], cache.page_size), cache)
    assert logits.shape == (0, decoder.spec.vocab_size)
    assert logits.dtype == torch.float32
    for tensor in (*cache.k, *cache.v):
        written = tensor[:, row.pages[0], :12]
        assert written.isfinite().all()
        assert tensor[:, row.pages[0], 12:].isnan().all()


def test_logits_are_those_of_logits_indices_in_order(checkpoints: Checkpoints) -> None:
    decoder = decoder_of(checkpoints("llama"))
    cache = cache_for(decoder, tokens=256)
    rows = rows_for(cache, prompts_of([5, 9, 20]), 0)
    chunks = [(rows[0], 5), (rows[1], 4), (rows[2], 20)]
    every = decoder.forward(pack(chunks, cache.page_size, all_rows=True), cache)
    ends = decoder.forward(pack(chunks, cache.page_size), cache)
    torch.testing.assert_close(ends, every[[4, 28]], atol=1e-5, rtol=0)


@pytest.mark.usefixtures("tier")
@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "gemma3", "qwen3-moe", "gpt-oss", *GEMMA4[:2], *SWITCHED, *HYBRID, *DENSE_LATENT]
)
def test_bfloat16_is_as_close_as_transformers(checkpoints: Checkpoints, kind: str) -> None:
    folder = checkpoints(kind, dtype=torch.bfloat16)
    decoder = decoder_of(folder, dtype=torch.bfloat16)
    exact, rounded = Oracle(folder), Oracle(folder, torch.bfloat16)
    (prompt,) = prompts_of([60])
    true = exact.logits(prompt)
    (got,) = all_logits(decoder, cache_for(decoder, tokens=128), [prompt], chunk=20)
    theirs = (rounded.logits(prompt) - true).abs().mean()
    assert (got - true).abs().mean() < 1.25 * theirs


def test_bfloat16_is_as_close_as_transformers_where_rounding_exchanges_experts(checkpoints: Checkpoints) -> None:
    """With one prompt, ours or transformers' logits may by chance be worse, so the test compares means over many."""
    folder = checkpoints("gemma4-moe", dtype=torch.bfloat16)
    decoder = decoder_of(folder, dtype=torch.bfloat16)
    exact, rounded = Oracle(folder), Oracle(folder, torch.bfloat16)
    ours, theirs = [], []
    for (prompt,) in (prompts_of([60], seed=seed) for seed in range(12)):
        true = exact.logits(prompt)
        (got,) = all_logits(decoder, cache_for(decoder, tokens=128), [prompt], chunk=20)
        ours.append((got - true).abs().mean())
        theirs.append((rounded.logits(prompt) - true).abs().mean())
    assert sum(ours) < 1.25 * sum(theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemma_embedding_scale_is_rounded_to_the_weights_dtype(checkpoints: Checkpoints, dtype: torch.dtype) -> None:
    folder = checkpoints("gemma3")
    (embed,) = (part for name, part in Oracle(folder, dtype).model.named_modules() if name.endswith("embed_tokens"))
    decoder = decoder_of(folder, dtype=dtype)
    assert decoder.embed_scale == embed.embed_scale.to(dtype).item()


def test_softcap_bounds_the_logits(checkpoints: Checkpoints) -> None:
    decoder = decoder_of(checkpoints("gemma3"))
    (prompt,) = prompts_of([30])
    (plain,) = all_logits(decoder, cache_for(decoder, tokens=64), [prompt], chunk=30)
    decoder.spec = replace(decoder.spec, logit_softcap=2.0)
    (capped,) = all_logits(decoder, cache_for(decoder, tokens=64), [prompt], chunk=30)
    torch.testing.assert_close(capped, 2.0 * (plain / 2.0).tanh(), atol=1e-4, rtol=0)
    assert plain.abs().max() > 2.0 > capped.abs().max() - 1e-6
