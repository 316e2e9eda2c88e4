"""Every format of quantized checkpoints gives the log-probabilities and the text of its dequantized weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from safetensors.torch import load_file
from torch import Tensor

from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from tests.checkpoints import Checkpoints
from tests.worker.models.harness import CPU, Oracle, all_logits, cache_for, decoder_of, prompts_of, run_greedy
from tests.worker.models.quantized_checkpoints import (
    EIGHT_BITS,
    FORMATS,
    Format,
    auto_round,
    bitsandbytes,
    gptq,
    is_linear,
    nvfp4,
    rewrite,
    rewrite_as_mixture,
    save,
    with_head,
)
from worker.checkpoint.checkpoint import CheckpointError, read_config
from worker.engine.build import load_engine
from worker.kv_cache.sizing import WeightsSize
from worker.models.config import spec_from_config
from worker.models.cpu_decoder import fastest_decoder
from worker.models.load import load
from worker.quantization.methods import InMemory

CLOSE, GREEDY = 1e-3, 100
Copy = Callable[..., Path]


@pytest.fixture
def copy(checkpoints: Checkpoints, tmp_path: Path) -> Copy:
    return lambda kind, name: Path(shutil.copytree(checkpoints(kind), tmp_path / name))


def log_probabilities(folder: Path) -> Tensor:
    """Returns the log-probabilities of the decoder that serves, after comparing its bits with the plain loop's."""
    decoder = decoder_of(folder)
    (prompt,) = prompts_of([40])
    caches = [cache_for(decoder, tokens=64) for _ in range(2)]
    fast = fastest_decoder(decoder, caches[1])
    plain, served = (
        all_logits(each, cache, [prompt], chunk=40)[0] for each, cache in zip((decoder, fast), caches, strict=True)
    )
    assert torch.equal(served, plain)
    return served.log_softmax(-1)


def assert_alike(folder: Path, full: Path) -> None:
    """Asserts that a quantized checkpoint has transformers' log-probabilities for the dequantized weights."""
    (prompt,) = prompts_of([40])
    wanted = Oracle(full).logits(prompt).log_softmax(-1)
    torch.testing.assert_close(log_probabilities(folder), wanted, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model", ["llama-biased", "phi3"])
def test_format_equals_its_dequantized_weights(copy: Copy, name: str, model: str) -> None:
    form = FORMATS[name]
    folder, full = rewrite(copy(model, "quantized"), form), rewrite(copy(model, "full"), form, widened=True)
    (prompt,) = prompts_of([40])
    assert_alike(folder, full)
    plain = decoder_of(folder)
    cache = cache_for(plain, tokens=len(prompt) + GREEDY + 16)
    decoder = fastest_decoder(plain, cache)
    (answer,) = run_greedy(decoder, cache, [prompt], GREEDY, chunk=16)
    assert answer == Oracle(full).choices(prompt, answer)


@pytest.mark.parametrize("name", ["gptq, act-order", "awq", "int4 a row, asymmetric", "nf4"])
@pytest.mark.parametrize("model", ["qwen3", "smollm3"])
def test_linears_without_scales_are_in_full_precision(copy: Copy, name: str, model: str) -> None:
    """A whole stack of linears has no scales, and neither has one linear of another stack."""
    form = FORMATS[name]

    def some(name: str) -> bool:
        return is_linear(name) and "down_proj" not in name and "layers.1.self_attn.k" not in name

    folder = rewrite(copy(model, "quantized"), form, which=some)
    assert_alike(folder, rewrite(copy(model, "full"), form, widened=True, which=some))


def test_modules_have_schemes_of_their_own(copy: Copy) -> None:
    """Modules that match a pattern have int8, all others int4. GPTQ has settings for single modules, too."""
    eight, four = FORMATS["int8 a row"], FORMATS["int4 a group, asymmetric"]
    groups = {
        "group_0": four.config["config_groups"]["group_0"] | {"format": "pack-quantized"},
        "group_1": eight.config["config_groups"]["group_0"]
        | {"targets": ["re:.*down_proj$"], "format": "int-quantized"},
    }
    both = {**four.config, "format": "mixed-precision", "config_groups": groups}
    folder, full = copy("llama", "quantized"), copy("llama", "full")
    for widened, place in ((False, folder), (True, full)):
        rewrite(place, Format(both, eight.quantize), widened=widened, which=lambda name: "down_proj" in name)
        rewrite(
            place, Format(both, four.quantize), widened=widened,
            which=lambda name: is_linear(name) and "down_proj" not in name,
        )  # fmt: skip
    assert_alike(folder, full)
    spec = spec_from_config(read_config(folder))
    assert str(spec.stored) == "int4 and int8, one scale for 32 values or a row"


@pytest.mark.parametrize("model", ["llama", "llama-biased"])
def test_projections_of_the_same_inputs_have_formats_groups_and_orders_of_their_own(copy: Copy, model: str) -> None:
    folder = rewrite_as_mixture(copy(model, "quantized"))
    assert_alike(folder, rewrite_as_mixture(copy(model, "full"), widened=True))


def test_gptq_modules_have_settings_of_their_own(copy: Copy) -> None:
    own = {"-:.*up_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": 64}}
    config = gptq().config | {"dynamic": own}
    folder, full = copy("llama", "quantized"), copy("llama", "full")
    for widened, place in ((False, folder), (True, full)):
        rewrite(place, Format(config, gptq(8, 64).quantize), widened=widened, which=lambda name: "down_proj" in name)
        rewrite(
            place, Format(config, gptq().quantize), widened=widened,
            which=lambda name: is_linear(name) and "down_proj" not in name and "up_proj" not in name,
        )  # fmt: skip
    assert_alike(folder, full)


def test_auto_round_layers_have_settings_of_their_own(copy: Copy) -> None:
    """A name, a regular expression, and layers that are not quantized, in a checkpoint in the layout of GPTQ."""
    eight, four = gptq(8, 64, symmetric=False), gptq(symmetric=False)
    own = {
        "model.layers.1.mlp.down_proj": {"bits": 8, "group_size": 64},
        r".*layers\.0.*o_proj": {"bits": 8, "group_size": 64},
        "model.layers.0.mlp.up_proj": {"bits": 16, "data_type": "float"},
    }  # fmt: skip
    config = auto_round(four, "auto_round:auto_gptq", extra_config=own).config

    def has_eight(name: str) -> bool:
        return name in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.o_proj.weight")

    def has_four(name: str) -> bool:
        return is_linear(name) and not has_eight(name) and name != "model.layers.0.mlp.up_proj.weight"

    folder, full = copy("llama", "quantized"), copy("llama", "full")
    for widened, place in ((False, folder), (True, full)):
        rewrite(place, Format(config, eight.quantize), widened=widened, which=has_eight)
        rewrite(place, Format(config, four.quantize), widened=widened, which=has_four)
    assert_alike(folder, full)
    assert str(spec_from_config(read_config(folder)).stored) == "int4 and int8, one scale for 32 values or 64 values"


def test_modelopt_settings_may_be_in_a_file_of_their_own_with_several_formats(copy: Copy) -> None:
    fp8, fp4 = EIGHT_BITS["fp8 a tensor, modelopt"], nvfp4("modelopt")
    layers = {"model.layers.0.mlp.down_proj": {"quant_algo": "FP8"}}
    layers |= {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    settings = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": layers}
    folder, full = copy("llama", "quantized"), copy("llama", "full")
    for widened, place in ((False, folder), (True, full)):
        rewrite(place, fp8, widened=widened, which=lambda name: name.endswith("down_proj.weight"))
        rewrite(place, fp4, widened=widened, which=lambda name: is_linear(name) and "down_proj" not in name)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    file = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": settings}
    (folder / "hf_quant_config.json").write_text(json.dumps(file))
    assert_alike(folder, full)
    assert str(spec_from_config(read_config(folder)).stored) == "fp8 and nvfp4, one scale for a tensor or 16 values"


def test_nvfp4_codes_are_packed_as_compressed_tensors_packs_them() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    tensors, wanted = nvfp4().quantize(weight)
    unpacked = unpack_fp4_from_uint8(tensors["weight_packed"], 8, 64, torch.float32)
    scale = tensors["weight_scale"].float() / tensors["weight_global_scale"]
    assert torch.equal(unpacked * scale.repeat_interleave(16, 1), wanted)
    assert torch.equal(pack_fp4_to_uint8(unpacked), tensors["weight_packed"])


def test_nf4_block_of_several_rows_is_a_scale_for_each(copy: Copy) -> None:
    form, q = bitsandbytes(block=128), "self_attn.q_proj.weight"
    folder = rewrite(copy("llama", "quantized"), form, which=lambda name: name.endswith(q))
    assert_alike(folder, rewrite(copy("llama", "full"), form, widened=True, which=lambda name: name.endswith(q)))


@pytest.mark.parametrize("name", ["int4 a group, asymmetric", "int8 a row"])
@pytest.mark.parametrize("model", ["llama", "qwen3-tied"])
def test_quantized_embedding_is_widened_and_a_tied_head_keeps_its_bits(copy: Copy, name: str, model: str) -> None:
    form, tied = FORMATS[name], model.endswith("tied")

    def too(name: str) -> bool:
        return is_linear(name) or name == "model.embed_tokens.weight"

    folder = rewrite(copy(model, "quantized"), form, which=too)
    assert_alike(folder, rewrite(copy(model, "full"), form, widened=True, which=too))
    spec, sizes = spec_from_config(read_config(folder)), list[WeightsSize]()
    for widen in (False, True):
        memory = InMemory(widen=widen)
        load(folder, spec, torch.float32, CPU, invariant=False, memory=memory, on_size=sizes.append)
    linears = sum(
        tensor.numel()
        for key, tensor in load_file(copy(model, "plain") / "model.safetensors").items()
        if is_linear(key)
    )
    bits = 4 if "int4" in name else 8
    linears += 512 * 64 if tied else 0  # the head is a copy of the embedding
    few = linears * bits / 8
    assert few < sizes[0].nbytes - (sizes[1].nbytes - 4 * linears) < few * 1.8  # codes, scales and minimums


def test_unset_groups_of_compressed_tensors_are_the_usual_ones(copy: Copy) -> None:
    form = FORMATS["int4 a group"]
    folder = rewrite(copy("llama", "quantized"), form)
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if name.endswith("weight_packed")]:
        index = torch.full((state[name].shape[1] * 8,), -1, dtype=torch.int32)
        state[name.replace("packed", "g_idx")] = index
    save(folder, state)
    assert_alike(folder, rewrite(copy("llama", "full"), form, widened=True))


def test_engine_of_a_four_bit_checkpoint_reports_it(copy: Copy, caplog: pytest.LogCaptureFixture) -> None:
    folder = rewrite(copy("llama", "quantized"), gptq(act_order=True))
    caplog.set_level("INFO", "sluice.load")
    engine = load_engine(ModelConfig(model=str(folder)), WorkerConfig(device="cpu", kv_cache_gb=0.01))
    engine.compiler.close()
    assert engine.dtype == "float32, int4 weights"
    assert "(int4, one scale for 32 values) are kept in few bits" in caplog.text


@pytest.mark.parametrize("form", [gptq(), gptq(act_order=True)])
def test_gptq_zeros_for_groups_in_the_usual_order_are_understood(copy: Copy, form: Format) -> None:
    """Old tools wrote zeros as g_idx for groups in the usual order. With act-order, a g_idx of zeros is refused."""
    folder = rewrite(copy("llama", "quantized"), form)
    state = load_file(folder / "model.safetensors")
    save(folder, {name: torch.zeros_like(tensor) if "g_idx" in name else tensor for name, tensor in state.items()})
    if form.config["desc_act"]:
        with pytest.raises(CheckpointError, match="g_idx"):
            decoder_of(folder)
    else:
        assert_alike(folder, rewrite(copy("llama", "full"), form, widened=True))


@pytest.mark.parametrize("name", ["gptq, act-order", "awq", "int4 a group", "mxfp4", "fp8 a row", "nvfp4, modelopt"])
def test_quantized_head_is_read(copy: Copy, name: str) -> None:
    form = FORMATS[name]
    folder = rewrite(copy("llama", "quantized"), form, which=with_head)
    stored = load_file(folder / "model.safetensors").get("lm_head.weight")
    assert stored is None or not stored.is_floating_point() or stored.itemsize == 1
    assert_alike(folder, rewrite(copy("llama", "full"), form, widened=True, which=with_head))
