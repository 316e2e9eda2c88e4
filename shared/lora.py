"""Reads the files of a PEFT adapter: for each module two matrices A and B, and the scale of their product.

The output of a module with the weight W becomes W x + scale * B (A x), where scale is lora_alpha / r, or
lora_alpha / sqrt(r) with use_rslora. rank_pattern and alpha_pattern give some modules other values. An option that
changes the formula is refused by name (https://huggingface.co/docs/peft/package_reference/lora).
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.adapters.files import CONFIG, WEIGHTS, AdapterError, AdapterFiles
from shared.adapters.patterns import first_matches

MAX_HEADER_BYTES = 16 << 20
DTYPES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of a value of this dtype
# names of tensors: module, matrix, and the name of the adapter, which PEFT sometimes leaves in the name
FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")
# options that can change the formula → their values that do not change it
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (None, False), "modules_to_save": (None, []), "bias": (None, "none"), "lora_bias": (None, False),
    "fan_in_fan_out": (None, False), "use_qalora": (None, False), "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}), "alora_invocation_tokens": (None, []),
    "megatron_config": (None,), "arrow_config": (None,), "use_bdlora": (None, False),
}  # fmt: skip
# endings of the names of modules with the weights of all experts
EXPERTS, INNER = ".experts", ".base_layer"
STACKED = ("gate_up_proj", "down_proj")  # parameters with all experts' weights, in the order in which PEFT wraps them


@dataclass(frozen=True, slots=True)
class StoredFactor:
    """Where and how the weights file stores a matrix. dtype: a key of DTYPES, or Q8_0 in a GGUF file."""

    dtype: str
    shape: tuple[int, int]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class LowRank:
    """The low-rank product of a module. a: [rank, inputs]; b: [outputs, rank].

    experts: the number of experts whose products are stored together, with a: [experts * rank, inputs] and
        b: [outputs, rank * experts]; 0: the module is a single linear
    """

    a: StoredFactor
    b: StoredFactor
    scale: float
    experts: int = 0

    @property
    def rank(self) -> int:
        return self.a.shape[0] // max(self.experts, 1)


def low_rank_modules(files: AdapterFiles, max_rank: int = 0) -> dict[str, LowRank]:
    """Returns the products by module, named as in the base model. Raises AdapterError.

    The product for all experts of a layer is listed under the parameter that holds the weights of all experts.
    max_rank: the highest rank that is accepted; 0: any
    """
    config, header = _config(files.config or b""), _header(files.weights)
    factors: dict[str, dict[str, StoredFactor]] = {}
    for name, factor in header.items():
        matched = FACTOR.fullmatch(name)
        if matched is None:
            raise AdapterError(f"{WEIGHTS} has the tensor {name!r}, which is not the A or B of a LoRA on a linear")
        module = _with_parameter(matched["module"], config["target_parameters"])
        factors.setdefault(module, {})[matched["which"]] = factor
    if not factors:
        raise AdapterError(f"{WEIGHTS} has no tensors")
    ranks = _values(config, "rank_pattern", "r", [*factors])
    alphas = _values(config, "alpha_pattern", "lora_alpha", [*factors])
    rooted = bool(config.get("use_rslora"))
    return {name: _low_rank(name, pair, ranks[name], alphas[name], rooted, max_rank) for name, pair in factors.items()}


def _low_rank(
    module: str, pair: dict[str, StoredFactor], rank: float, alpha: float, rooted: bool, max_rank: int
) -> LowRank:
    if len(pair) < 2:
        raise AdapterError(f"{WEIGHTS} has only one of lora_A and lora_B of {module}")
    a, b = pair["A"], pair["B"]
    experts = a.shape[0] // rank if module.endswith(tuple(f"{EXPERTS}.{name}" for name in STACKED)) else 0
    if not a.shape[0] == b.shape[1] == max(experts, 1) * rank:
        raise AdapterError(
            f"{module}: lora_A is {[*a.shape]} and lora_B {[*b.shape]}, but {CONFIG} gives it the rank {rank:g}"
        )
    if max_rank and rank > max_rank:
        raise AdapterError(f"{module} has the rank {rank:g}, above --max-lora-rank {max_rank}")
    return LowRank(a, b, alpha / (math.sqrt(rank) if rooted else rank), int(experts))


def _with_parameter(module: str, parameters: list[str]) -> str:
    """Returns the parameter's name for a product of all experts of a layer; returns other names unchanged."""
    experts = module.removesuffix(INNER)
    if not parameters or not experts.endswith(EXPERTS):
        return module
    inner = experts != module
    return f"{experts}.{parameters[0 if inner else -1]}"


def _values(config: dict[str, Any], pattern: str, default: str, modules: list[str]) -> dict[str, float]:
    """Returns module → value: of the first pattern that matches the end of the module's name, else the default."""
    given = config[pattern]
    values = [*(_number(value, pattern) for value in given.values()), config[default]]
    return {module: values[i] for module, i in zip(modules, first_matches(pattern, [*given], modules), strict=True)}


def _config(content: bytes) -> dict[str, Any]:
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{CONFIG} is not an object")
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{CONFIG}: peft_type {str(config.get('peft_type'))[:80]!r} is not supported, only LORA")
    for key, harmless in UNSUPPORTED.items():
        if config.get(key) not in harmless:
            raise AdapterError(f"{CONFIG}: {key} {str(config[key])[:80]} is not supported")
    config["target_parameters"] = _parameters(config.get("target_parameters") or [])
    for key in ("rank_pattern", "alpha_pattern"):
        config[key] = config.get(key) or {}
        if not isinstance(config[key], dict) or len(config[key]) > 10_000:
            raise AdapterError(f"{CONFIG}: {key} is not an object of at most 10000 entries")
    for key in ("r", "lora_alpha"):
        config[key] = _number(config.get(key), key)
    return config


def _parameters(names: Any) -> list[str]:
    """Returns the parameters of STACKED that an adapter changes."""
    ends = {str(name).rpartition(".")[2] for name in names} if isinstance(names, list) else {str(names)}
    if ends - {*STACKED}:
        raise AdapterError(
            f"{CONFIG}: target_parameters {str(names)[:80]} is not supported, only experts' {' and '.join(STACKED)}"
        )
    return [name for name in STACKED if name in ends]


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise AdapterError(f"{CONFIG}: {key} must be a positive number, not {str(value)[:80]}")
    return value


def _header(content: bytes) -> dict[str, StoredFactor]:
    """Returns the tensors of a safetensors file. Checks that the file holds all their bytes."""
    size = 8 + int.from_bytes(content[:8], "little")
    if size > min(len(content), MAX_HEADER_BYTES) or len(content) < 8:
        raise AdapterError(f"{WEIGHTS} is not a complete safetensors file")
    try:
        entries = json.loads(content[8:size])
        entries.pop("__metadata__", None)
        return {name: _factor(name, entry, size, len(content)) for name, entry in entries.items()}
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        if isinstance(error, AdapterError):
            raise
        raise AdapterError(f"{WEIGHTS} is not a complete safetensors file") from None


def _factor(name: str, entry: dict[str, Any], begin: int, end: int) -> StoredFactor:
    dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in DTYPES:
        raise AdapterError(f"{WEIGHTS}: {name} is in {str(dtype)[:20]}; supported are {', '.join(DTYPES)}")
    if len(shape) != 2 or not all(isinstance(n, int) and n > 0 for n in shape):
        raise AdapterError(f"{WEIGHTS}: {name} has the shape {[*shape]}, which is not that of a LoRA on a linear")
    whole = isinstance(first, int) and isinstance(last, int)
    if not whole or not 0 <= first <= last <= end - begin or last - first != math.prod(shape) * DTYPES[dtype]:
        raise AdapterError(f"{WEIGHTS} is not a complete safetensors file")
    return StoredFactor(dtype, (shape[0], shape[1]), begin + first, begin + last)
