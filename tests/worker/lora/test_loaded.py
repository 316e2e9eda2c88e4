"""Adapters are packed for the linears that they change, or refused with the name of the part that does not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.lora import AdapterError
from tests.adapters import draw_adapter
from tests.checkpoints import Checkpoints
from tests.worker.lora.harness import Asked, added, answers, decoder_of, loaded

PROMPT = list(range(30, 50))


def rewritten(folder: Path, change: Any) -> Path:
    """Returns a copy of an adapter with other tensors."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update({k.replace("layers.0", "layers.7"): v for k, v in t.items()}), "layers.7.*lacks"),
        (lambda t: t.update({k.replace("q_proj", "x_proj"): v for k, v in t.items()}), "x_proj.*lacks"),
        (lambda t: t.update({k.replace("model.layers", "vision.layers"): v for k, v in t.items()}), "vision.*lacks"),
        (lambda t: t.update({f"base_model.model.lm_head.lora_{x}.weight": torch.ones(8, 8) for x in "AB"}), "lm_head"),
        (lambda t: t.update({k: v[:-2].clone() for k, v in t.items() if "q_proj.lora_B" in k}), r"126 x 64.*128 x 64"),
        (lambda t: t.update({k: v[:, :-2].clone() for k, v in t.items() if "q_proj.lora_A" in k}), r"128 x 62"),
        (lambda t: t.update({k.replace("model.layers", "x.layers"): v for k, v in t.items()}), "same module twice"),
        (lambda t: next(iter(t.values())).fill_(torch.nan), "not finite"),
    ],
)
def test_adapters_that_do_not_fit_the_base_are_refused_by_name(
    change: Any, words: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints("llama")
    folder = rewritten(draw_adapter(base, tmp_path / "a", 0), change)
    with pytest.raises(AdapterError, match=words):
        loaded(base, decoder_of(base), folder)


def test_routers_and_other_numbers_of_experts_are_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    base = checkpoints("qwen3-moe")
    decoder = decoder_of(base)
    lacks = "which the base model lacks or which"
    reasons = {"mlp.gate": f", {lacks}", "mlp.experts": ".down_proj: .*of 1 experts, the base model has 8"}
    for module, reason in reasons.items():
        names = {f"base_model.model.model.layers.0.{module}.lora_{x}.weight": torch.ones(8, 8) for x in "AB"}
        folder = draw_adapter(base, tmp_path / module, 0, targets=("q_proj",), target_parameters=["experts.down_proj"])
        with pytest.raises(AdapterError, match=f"{module}{reason}"):
            loaded(base, decoder, rewritten(folder, lambda t, names=names: t.update(names)))


def test_one_product_for_queries_keys_and_values_is_that_of_each(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """An adapter of a fused projection fits a base with separate projections, which then share its matrix A."""
    base = checkpoints("llama")
    decoder = decoder_of(base)
    apart = draw_adapter(base, tmp_path / "a", 1, targets=("q_proj", "k_proj", "v_proj"))
    tensors = load_file(apart / "adapter_model.safetensors")
    for name in list(tensors):
        if "k_proj.lora_A" in name or "v_proj.lora_A" in name:
            tensors[name] = tensors[name.replace("k_proj", "q_proj").replace("v_proj", "q_proj")].clone()
    save_file(tensors, apart / "adapter_model.safetensors")
    joined = {}
    for name in tensors:
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
            joined[name.replace("q_proj", "qkv_proj")] = parts[0].clone() if "lora_A" in name else torch.cat(parts)
    fused = draw_adapter(base, tmp_path / "b", 1, targets=("q_proj",))
    save_file(joined, fused / "adapter_model.safetensors")
    one, other = (loaded(base, decoder, folder) for folder in (apart, fused))
    x = torch.randn(5, decoder.spec.hidden_size)
    site = id(decoder.weights.layers[1].mixer.qkv)  # type: ignore[attr-defined]
    torch.testing.assert_close(added(one.products[site], x), added(other.products[site], x))
    assert answers(decoder, [Asked(PROMPT, one)]) == answers(decoder, [Asked(PROMPT, other)])
