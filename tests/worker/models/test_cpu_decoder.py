"""The CPU decoder has the bits of the plain loop in logits, cache and recurrent states."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoints import GEMMA4, HYBRID, KINDS, Checkpoints
from tests.pairs import in_pairs
from tests.worker.models.harness import advance, all_logits, cache_for, decoder_of, pack, prompts_of, rows_for
from tests.worker.models.quantized_checkpoints import gptq, rewrite, rewrite_as_mixture
from tests.worker.models.sparse import CHOSEN, MIXES, sparse
from tests.worker.ops.harness.cpu_tiers import DTYPES, HERE, MOST, dtypes, needs_library, tier  # noqa: F401
from worker.kv_cache.tensors import KVCache
from worker.models.cpu_decoder import CpuDecoder, fastest_decoder
from worker.models.decoder import Decoder
from worker.ops.native_build import TIERS
from worker.spec import QueryScaling

pytestmark = [needs_library, pytest.mark.usefixtures("tier")]
LENGTHS = [1, 5, 16, 17, 40, 70]
EVERYWHERE = (  # checkpoints that are tested on every instruction set
    "llama-biased", "gemma3", "phi3", "olmo2", "qwen2-moe", "gpt-oss", "cohere2", "starcoder2", "hunyuan", "apertus",
    *GEMMA4, *HYBRID, "deepseek-v2-groups", "mistral4",
)  # fmt: skip


@dtypes
@pytest.mark.parametrize("tier", [TIERS[MOST]], indirect=True)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in EVERYWHERE])
def test_cpu_decoder_gives_the_bits_of_the_plain_loop_for_other_families(
    checkpoints: Checkpoints, kind: str, dtype: torch.dtype
) -> None:
    assert_same_bits(decoder_of(checkpoints(kind), dtype=dtype), "auto")


@dtypes
@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        *((kind, "auto") for kind in EVERYWHERE),
        ("gemma3", "int8"),
        ("gemma4", "int8"),
        ("gemma4", "int4"),
        ("llama-biased", "int8"),
        ("llama", "fp8"),
        ("deepseek-v3", "int8"),
        ("deepseek-v2", "fp8"),
    ],
)
def test_cpu_decoder_gives_the_bits_of_the_plain_loop(
    checkpoints: Checkpoints, kind: str, kept: str, dtype: torch.dtype
) -> None:
    decoder = decoder_of(checkpoints(kind), dtype=dtype)
    assert_same_bits(decoder, kept)


@in_pairs({"tier": HERE, "dtype": DTYPES, "mixture": [False, True]}, indirect=["tier"])
def test_cpu_decoder_gives_the_bits_of_the_plain_loop_with_projections_in_several_formats(
    checkpoints: Checkpoints, tmp_path: Path, dtype: torch.dtype, mixture: bool
) -> None:
    """In memory, a linear has a part for each format, and for each order of its inputs."""
    folder = Path(shutil.copytree(checkpoints("llama-biased"), tmp_path / "quantized"))
    decoder = decoder_of(rewrite_as_mixture(folder) if mixture else rewrite(folder, gptq(act_order=True)), dtype=dtype)
    for layer in decoder.weights.layers:
        for linear, parts in ((layer.mixer.qkv, 3), (layer.feed_forward.gate_up, 2)):
            assert linear is not None and linear.cpu is not None and len(linear.cpu.parts) == parts
    assert_same_bits(decoder, "auto")


@in_pairs({"tier": HERE, "dtype": DTYPES, "kind": ["qwen2-moe", "granite-hybrid-moe"]}, indirect=["tier"])
def test_cpu_decoder_gives_the_bits_of_the_plain_loop_with_experts_that_order_inputs_by_themselves(
    checkpoints: Checkpoints, tmp_path: Path, dtype: torch.dtype, kind: str
) -> None:
    """The shared expert has reordered inputs, too."""
    folder = rewrite(Path(shutil.copytree(checkpoints(kind), tmp_path / "quantized")), gptq(act_order=True))
    assert_same_bits(decoder_of(folder, dtype=dtype), "auto")


@dtypes
def test_cpu_decoder_gives_the_bits_of_the_plain_loop_with_sinks_and_softcap(
    checkpoints: Checkpoints, dtype: torch.dtype
) -> None:
    decoder = decoder_of(checkpoints("gemma3"), dtype=dtype)
    made = torch.Generator().manual_seed(0)
    layers = [
        replace(layer, mixer=replace(layer.mixer, sinks=torch.randn(decoder.spec.heads, generator=made)))
        for layer in decoder.weights.layers
    ]
    decoder.weights = replace(decoder.weights, layers=layers)
    decoder.spec = replace(decoder.spec, attention_softcap=2.0)
    assert_same_bits(decoder, "auto")


@in_pairs({"tier": HERE, "dtype": DTYPES, "kind": MIXES}, indirect=["tier"])
def test_cpu_decoder_gives_the_bits_of_the_plain_loop_with_experts(
    checkpoints: Checkpoints, kind: str, dtype: torch.dtype
) -> None:
    assert_same_bits(sparse(decoder_of(checkpoints("llama"), dtype=dtype), *MIXES[kind]), "auto")


def test_loads_of_experts_are_counted_by_both_decoders(checkpoints: Checkpoints) -> None:
    decoder = sparse(decoder_of(checkpoints("llama")), *MIXES["after a dense layer"])
    loads = decoder.count_loads()
    sparse_layers = [index for index, layer in enumerate(decoder.spec.layers) if layer.sparse]
    counted = []
    with torch.inference_mode():
        for fast in (False, True):
            cache = cache_for(decoder, tokens=512)
            (row,) = rows_for(cache, prompts_of([40]), 0)
            model = fastest_decoder(decoder, cache) if fast else decoder
            assert isinstance(model, CpuDecoder) == fast
            model.forward(pack([(row, 40)], cache.page_size, all_rows=True), cache)
            counted.append(loads.clone())
            loads.zero_()
    assert torch.equal(*counted)
    assert [bool(layer.any()) for layer in counted[0]] == [layer.sparse for layer in decoder.spec.layers]
    assert counted[0].sum(1)[sparse_layers].tolist() == [40 * CHOSEN] * len(sparse_layers)


@dtypes
def test_cpu_decoder_gives_the_bits_of_the_plain_loop_without_pre_norms(
    checkpoints: Checkpoints, dtype: torch.dtype
) -> None:
    """The model normalizes all heads of queries and keys together, scales residuals, and scales queries by position."""
    plain = decoder_of(checkpoints("gemma3"), dtype=dtype)
    spec, made = plain.spec, torch.Generator().manual_seed(0)
    sizes = {"q_norm": spec.heads * spec.head_dim, "k_norm": spec.kv_heads * spec.head_dim}
    whole = {name: torch.rand(size, generator=made).to(dtype) for name, size in sizes.items()}
    layers = [
        replace(layer, before_attention=None, before_mlp=None, mixer=replace(layer.mixer, **whole))
        for layer in plain.weights.layers
    ]
    changed = replace(spec, residual_scale=0.3, query_scaling=QueryScaling(0.5, 7), logit_scale=0.25)
    decoder = Decoder(changed, replace(plain.weights, layers=layers), plain.max_positions)
    assert decoder.query_scales is not None and len(decoder.query_scales.unique()) > 3
    assert_same_bits(decoder, "auto")
    assert_same_bits(decoder, "int8")


@in_pairs({"tier": HERE, "dtype": DTYPES, "kind": HYBRID}, indirect=["tier"])
def test_any_cut_of_a_hybrid_models_prompt_and_any_company_give_the_same_bits(
    checkpoints: Checkpoints, kind: str, dtype: torch.dtype
) -> None:
    plain = decoder_of(checkpoints(kind), dtype=dtype)
    prompts = prompts_of([1, 63, 64, 65, 127, 129, 30, 2, 8, 16, 31, 33, 48, 100, 5, 70])

    def logits(prompts: list[list[int]], chunk: int) -> list[Tensor]:
        cache = cache_for(plain, tokens=1024)
        decoder = fastest_decoder(plain, cache)
        assert isinstance(decoder, CpuDecoder)
        return all_logits(decoder, cache, prompts, chunk)

    with torch.inference_mode():
        alone = [logits([prompt], 512)[0] for prompt in prompts]
        for chunk in (1, 3, 50, 64, 512):
            assert all(map(torch.equal, logits(prompts, chunk), alone))


@dtypes
@pytest.mark.parametrize("fast", [False, True])
def test_layers_that_keep_nothing_compute_only_rows_with_logits_with_the_same_bits(
    checkpoints: Checkpoints, dtype: torch.dtype, fast: bool
) -> None:
    plain = decoder_of(checkpoints("gemma4"), dtype=dtype)
    # rows with logits: one sequence has three, another has none
    prompts, wanted = prompts_of([40, 1, 70, 1, 1]), [7, 40, 60, 61, 110, 112]
    found, counted = [], []
    with torch.inference_mode():
        for rows in (None, wanted, []):
            cache = cache_for(plain, tokens=512)
            decoder, before = fastest_decoder(plain, cache) if fast else plain, plain.layers_started.value
            packed = pack([(row, len(row.tokens)) for row in rows_for(cache, prompts, 0)], 16, all_rows=True)
            if rows is not None:
                packed = replace(packed, logits_indices=torch.tensor(rows, dtype=torch.int64))
            found.append(decoder.forward(packed, cache))
            counted.append(plain.layers_started.value - before)
    assert torch.equal(found[0][wanted], found[1]) and found[2].shape == (0, plain.spec.vocab_size)
    assert counted == [6, 6, 3]  # the last three layers share K/V


def assert_same_bits(decoder: Decoder, kept: str) -> None:
    caches = [cache_for(decoder, tokens=512, kept=kept) for _ in range(2)]
    cpu_decoder = fastest_decoder(decoder, caches[1])
    rows = rows_for(caches[0], prompts_of(LENGTHS), 0)
    with torch.inference_mode():
        for number, chunk in enumerate([33, 1, 1, 33, 33]):  # prompts, decodes, both; some steps want no logits
            chunks = advance(rows, chunk)
            packed = pack(chunks, caches[0].page_size, all_rows=number == 3)
            assert torch.equal(cpu_decoder.forward(packed, caches[1]), decoder.forward(packed, caches[0]))
            for row, length in chunks:
                row.advance(length)
    assert isinstance(cpu_decoder, CpuDecoder)
    for plain, ours in zip(*map(_written, caches), strict=True):
        assert torch.equal(ours.view(torch.uint8), plain.view(torch.uint8))


def _written(cache: KVCache) -> list[Tensor]:
    """Returns the contents of the cache without the scratch pages."""
    states = [part for state in cache.states.values() for part in (state.tail, state.memory)]
    return [*(part[:, 1:] for part in (*cache.k, *cache.v)), *states]


def test_fastest_decoder_is_the_cpu_decoder_where_c_kernels_exist(checkpoints: Checkpoints) -> None:
    decoder = decoder_of(checkpoints("llama"))
    cache = cache_for(decoder, tokens=64)
    cpu_decoder = fastest_decoder(decoder, cache)
    assert isinstance(cpu_decoder, CpuDecoder)
    row = rows_for(cache, prompts_of([3]), 0)[0]
    packed = pack([(row, 2)], cache.page_size)
    assert cpu_decoder.forward(packed, cache).shape == (0, decoder.spec.vocab_size)
