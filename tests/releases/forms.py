"""The forms in which weights are fetched, with the quantization_config that the hub's files have."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.worker.models.quantized_checkpoints import (
    Format,
    State,
    auto_round,
    awq,
    bitsandbytes,
    blocks,
    compressed,
    gptq,
    mxfp4,
    nvfp4,
)

Config = dict[str, Any]
# modules that forms of few bits leave as they are: no linears, and linears that decide or draft
ALWAYS_PLAIN = re.compile(
    r"(^|\.)(mtp|visual|vision_tower|multi_modal_projector|lm_head|embed_tokens\w*|\w*norm\w*|conv1d|ln_pre|router"
    r"|shared_expert_gate|gate(?=\.weight)|sinks|conv\.conv|per_layer_model_projection|eh_proj|shared_head)(\.|$)"
)
EXPERT = re.compile(r"(?P<module>.*\.experts)\.(?P<name>gate_up_proj|down_proj)")


@dataclass(frozen=True)
class Form:
    """A form of weights.

    label: as the page names it
    format: returns the format of a module's weight; None: it stays as it is
    config: returns the quantization_config. Its arguments are the quantized modules and the plain linears, by name.
    each: whether each expert has tensors of its own, also where the release in full precision has stacked ones
    rename: the name of a tensor in this form
    """

    label: str
    format: Callable[[str], Format | None]
    config: Callable[[Sequence[str], Sequence[str]], Config]
    each: bool = True
    rename: Callable[[str], str] = str


def alike(label: str, format: Format, ignored: str = "", **more: Any) -> Form:
    """Returns a form with one format. ignored: the setting that lists the plain linears"""

    def config(quantized: Sequence[str], plain: Sequence[str]) -> Config:
        return {**format.config, **({ignored: [*plain]} if ignored else {})}

    return Form(label, lambda module: format, config, **more)


def _auto_round(quantized: Sequence[str], plain: Sequence[str]) -> Config:
    """AutoRound lists plain linears by their names."""
    form = auto_round(gptq(4, 128), "auto_round:auto_gptq", group_size=128)
    return {**form.config, "extra_config": {name: {"bits": 16, "data_type": "fp"} for name in plain}}


def _gptq(quantized: Sequence[str], plain: Sequence[str]) -> Config:
    """GPTQModel excludes plain linears by patterns."""
    patterns = {f"-:.*{re.escape(name.rpartition('.')[2])}$": {} for name in plain}
    return {**gptq(4, 128).config, "dynamic": {"lm_head": {}, **patterns}, "meta": {"quantizer": ["gptqmodel:5.0.0"]}}


def _dynamic(quantized: Sequence[str], plain: Sequence[str]) -> Config:
    config = compressed("float-quantized", type="float", bits=8, strategy="channel").config
    group = {**config["config_groups"]["group_0"], "input_activations": {
        "dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "float",
    }}  # fmt: skip
    return {**config, "config_groups": {"group_0": group}, "ignore": [*plain], "quantization_status": "compressed"}


MODELOPT_FP8 = blocks({}, "fp8", 0, 0, flat=True)
OF_CACHE = {"k_proj": "k_scale", "v_proj": "v_scale"}  # modelopt's scales of K/V in eight bits, by module
IN_FP8 = re.compile(r"self_attn|linear_attn|mamba|mixer\.(in|out|[qkvo])_proj")
HEAD_TOO = re.compile(r"lm_head$")


def _modelopt(algorithm: str) -> Callable[[Sequence[str], Sequence[str]], Config]:
    def config(quantized: Sequence[str], plain: Sequence[str]) -> Config:
        return {
            "quant_method": "modelopt", "quant_algo": algorithm, "ignore": [*plain], "producer": {"name": "modelopt"},
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        }  # fmt: skip

    return config


def _mixed(quantized: Sequence[str], plain: Sequence[str]) -> Config:
    """Attention has FP8, feed-forward networks and the head have NVFP4. Each layer's algorithm is stated."""
    four = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    layers = {name: {"quant_algo": "FP8"} if IN_FP8.search(name) else four for name in quantized}
    return {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers,
        "producer": {"name": "modelopt"}, "kv_cache_quant_algo": "FP8", "exclude_modules": [*plain],
    }  # fmt: skip


def _mixed_format(module: str) -> Format:
    return MODELOPT_FP8 if IN_FP8.search(module) else nvfp4("modelopt")


def _under_moe(name: str) -> str:
    """Some exports of Gemma 4 have the experts one module deeper."""
    return re.sub(r"(layers\.\d+)\.experts\.", r"\1.moe.experts.", name)


BLOCK_CONFIG = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
STATIC_CONFIG = {
    "quant_method": "fp8", "activation_scheme": "static", "dequantize": False, "weight_block_size": None,
}  # fmt: skip
IN_BLOCKS = blocks(BLOCK_CONFIG, "fp8", 128, 128, scale="weight_scale_inv")
IN_TENSORS = blocks(STATIC_CONFIG, "fp8", 0, 0, scale="weight_scale_inv", activations="activation_scale", flat=True)
INT4 = compressed(size=128)
FORMS: Mapping[str, Form] = {
    "bf16": Form("bf16", lambda module: None, lambda quantized, plain: {}, each=False),
    "fp8-block": alike("FP8 in blocks", IN_BLOCKS, "modules_to_not_convert"),
    "fp8-block-fused": alike("FP8 in blocks with stacked experts", IN_BLOCKS, "modules_to_not_convert", each=False),
    "fp8-static": alike("FP8 by tensor", IN_TENSORS, "modules_to_not_convert"),
    "fp8-static-fused": alike("FP8 by tensor with stacked experts", IN_TENSORS, "modules_to_not_convert", each=False),
    "fp8-dynamic": Form(
        "compressed-tensors FP8",
        lambda module: compressed("float-quantized", type="float", bits=8, strategy="channel"), _dynamic,
    ),
    "gptq": Form("GPTQ", lambda module: gptq(4, 128), _gptq),
    "awq": alike("AWQ", awq(128), "modules_to_not_convert"),
    "auto-round": Form("AutoRound", lambda module: gptq(4, 128), _auto_round),
    "ct-int4": alike("compressed-tensors INT4", INT4, "ignore"),
    "ct-awq": alike("compressed-tensors AWQ", compressed(size=32, symmetric=False), "ignore"),
    "ct-nvfp4": alike("compressed-tensors NVFP4", nvfp4(), "ignore"),
    "modelopt-nvfp4": Form("modelopt NVFP4", lambda module: nvfp4("modelopt"), _modelopt("NVFP4")),
    "modelopt-nvfp4-moe": Form(
        "modelopt NVFP4 with experts in `moe`", lambda module: nvfp4("modelopt"), _modelopt("NVFP4"), rename=_under_moe
    ),
    "modelopt-fp8": Form("modelopt FP8", lambda module: MODELOPT_FP8, _modelopt("FP8")),
    "modelopt-mixed": Form("modelopt FP8 and NVFP4", _mixed_format, _mixed),
    "mxfp4": alike("MXFP4", mxfp4(), "modules_to_not_convert", each=False),
    "bnb-nf4": alike("bitsandbytes NF4", bitsandbytes(), "llm_int8_skip_modules"),
}  # fmt: skip


def is_plain(module: str, pattern: str, form: str) -> bool:
    """Returns whether a form leaves a linear as it is. pattern: of the release"""
    if form == "modelopt-mixed" and HEAD_TOO.search(module):
        return False
    if form == "fp8-block" and module.startswith("mtp.layers."):  # heads for drafts have FP8, too
        module = module.removeprefix("mtp.")
    if form == "mxfp4" and ".experts." not in module:
        return True
    return bool(ALWAYS_PLAIN.search(f"{module}.weight") or (pattern and re.search(pattern, module)))


def each_expert(state: State, transposed: bool) -> State:
    """Cuts the tensors of all experts of a layer into a gate, an up and a down projection for each expert.

    transposed: whether they are stored as [E, inputs, outputs]
    """
    found: State = {}
    for name, tensor in state.items():
        match = EXPERT.fullmatch(name)
        if not match:
            found[name] = tensor
            continue
        for expert, weight in enumerate(tensor.mT if transposed else tensor):
            parts = weight.chunk(2) if match["name"] == "gate_up_proj" else [weight]
            names = ("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",)
            found |= {f"{match['module']}.{expert}.{one}.weight": part for one, part in zip(names, parts, strict=True)}
    return found


def in_form(state: State, form: str, pattern: str, *, transposed: bool) -> tuple[State, State, Config]:
    """Returns a release's tensors in a form, the tensors with the numbers that these stand for, and the config.

    pattern: of linears that the release leaves as they are; transposed: see each_expert
    """
    own = FORMS[form]
    whole: State = each_expert(state, transposed) if own.each else dict(state)
    stored: State = {}
    quantized, plain = [], []
    for name, weight in list(whole.items()):
        module = name.removesuffix(".weight")
        fused = EXPERT.fullmatch(name) is not None
        format = own.format(module)
        if format is None or (weight.dim() != 2 and not fused) or not (name.endswith(".weight") or fused):
            stored[name] = weight
        elif is_plain(module, pattern, form):
            plain.append(module)
            stored[name] = weight
        else:
            tensors, numbers = _stacked(weight, format, form, name) if fused else format.quantize(weight.float())
            joint = "_" if fused else "."
            if form.startswith("modelopt") and (scale := OF_CACHE.get(module.rpartition(".")[2])):
                tensors = {**tensors, scale: torch.ones(())}
            quantized.append(module)
            stored |= {_named(module, kind, joint): tensor for kind, tensor in tensors.items()}
            whole[name] = numbers
    config = own.config(quantized, plain)
    return {own.rename(name): tensor for name, tensor in stored.items()}, whole, config


def _named(module: str, kind: str, joint: str) -> str:
    """Returns the name of a stored tensor. Those of stacked experts have no `.weight`."""
    if joint == ".":
        return f"{module}.{kind}"
    return module + (kind.removeprefix("weight") if kind.startswith("weight") else f"_{kind}")


def _stacked(weight: Tensor, format: Format, form: str, name: str) -> tuple[State, Tensor]:
    """Quantizes each expert of a stacked tensor. In MXFP4 [E, inputs, outputs] becomes [E, outputs, …].

    Gate and up have a scale each, also where an expert's tensor has no blocks.
    """
    turned, halves = form == "mxfp4", form == "fp8-static-fused" and name.endswith("gate_up_proj")
    quantize = _in_halves(format) if halves else format.quantize
    parts = [quantize(one.float().mT.contiguous() if turned else one.float()) for one in weight]
    tensors = {kind: torch.stack([stored[kind] for stored, _ in parts]) for kind in parts[0][0]}
    scale = tensors.get("weight_scale_inv")
    if scale is not None and scale.dim() < 3:  # one number for an expert is a block of all its rows and columns
        tensors["weight_scale_inv"] = scale.view(len(weight), -1, 1)
    numbers = torch.stack([number for _, number in parts])
    return tensors, numbers.mT.contiguous() if turned else numbers


def _in_halves(format: Format) -> Callable[[Tensor], tuple[State, Tensor]]:
    """Returns a function that quantizes both halves of a weight's rows on their own."""

    def quantize(weight: Tensor) -> tuple[State, Tensor]:
        (first, upper), (second, lower) = (format.quantize(half) for half in weight.chunk(2))
        tensors = {**first, "weight": torch.cat((first["weight"], second["weight"]))}
        tensors["weight_scale_inv"] = torch.stack((first["weight_scale_inv"], second["weight_scale_inv"]))
        return tensors, torch.cat((upper, lower))

    return quantize
