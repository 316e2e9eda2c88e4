"""Reads the values under the name of an architecture in the metadata of a GGUF file.

A value that no code reads might change what the model computes, so a file with such a value is refused.
"""

from dataclasses import dataclass, field
from typing import Any

from shared.gguf.container import Container
from shared.gguf.naming import GgufError

Config = dict[str, Any]
HARMLESS = (
    "vocab_size",
    "pooling_type",
    "rope.scaling.finetuned",
    "attention.layer_norm_epsilon",
    "tensor_data_layout",
)
OF_VISION = ("vision.", "mm.")  # prefixes of values of vision parts, which the text model does not need


@dataclass
class Hyperparameters:
    """The values under the name of the architecture, and which of them have been read."""

    container: Container
    architecture: str
    seen: set[str] = field(default_factory=set)

    def key(self, name: str) -> str:
        self.seen.add(name)
        return f"{self.architecture}.{name}"

    def integer(self, name: str, default: int | None = None) -> int:
        return self.container.integer(self.key(name), default)

    def number(self, name: str, default: float | None = None) -> float:
        return self.container.number(self.key(name), default)

    def text(self, name: str, default: str | None = None) -> str:
        return self.container.text(self.key(name), default)

    def entries(self, name: str, kind: Any, default: list[Any] | None = None) -> list[Any]:
        return self.container.entries(self.key(name), kind, default)

    def expect(self, name: str, value: float | bool) -> None:
        """Raises GgufError if the file states another value than `value`, the only supported one."""
        found = self.container.metadata.get(self.key(name), value)
        if found != value:
            raise GgufError(f"{self.container.name}: {self.key(name)} is {found}; supported is {value}")

    def check_all_seen(self) -> None:
        prefix = f"{self.architecture}."
        for key, value in self.container.metadata.items():
            name = key.removeprefix(prefix)
            known = name in self.seen or name in HARMLESS or name.startswith(OF_VISION)
            if key.startswith(prefix) and value and not known:
                raise GgufError(f"{self.container.name}: {key} is {str(value)[:40]}; this value is not supported")


# Rotary scaling in config.json, from the metadata and the tensors of a GGUF file.

ROPE_FREQS, SHORT_FACTORS, LONG_FACTORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"


def rope_scaling(values: Hyperparameters, head_dim: int) -> Config | None:
    """Returns the rotary scaling that a file states. Knows all kinds except longrope, which only Phi-3 has."""
    factors = values.container.tensors.get(ROPE_FREQS)
    kind = values.text("rope.scaling.type", "linear" if values.number("rope.scale_linear", 0.0) else "none")
    if factors is not None:
        if kind != "none" or factors.type != "F32" or factors.shape != (head_dim // 2,):
            raise GgufError(f"{values.container.name}: {ROPE_FREQS} does not fit the rest of the file")
        return pair_factors(values.container, factors.floats(), factors.floats(), values.integer("context_length"))
    factor = values.number("rope.scaling.factor", values.number("rope.scale_linear", 0.0) or 1.0)
    match kind:
        case "none":
            return None
        case "longrope" if SHORT_FACTORS in values.container.tensors:  # see _phi3
            return None
        case "linear":
            return {"rope_type": "linear", "factor": factor}
        case "yarn":
            return _yarn(values, factor)
    raise GgufError(f"{values.container.name}: rotary scaling {kind!r} is not supported")


def _yarn(values: Hyperparameters, factor: float) -> Config:
    values.expect("rope.scaling.attn_factor", 1)
    values.expect("rope.scaling.yarn_ext_factor", 1)
    magnitude = values.number("rope.scaling.yarn_attn_factor", 1.0)  # 1 also stands for "not set"
    return ({} if magnitude == 1 else {"attention_factor": magnitude}) | {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": values.integer(
            "rope.scaling.original_context_length", values.integer("context_length")
        ),
        "beta_fast": values.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": values.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def pair_factors(container: Container, short: list[float], long: list[float], original: int) -> Config:
    """Returns rotary settings with one factor for each pair of dimensions, which only `longrope` can express.

    Converters also turn the rotary settings of Llama 3 into factors for each pair.
    """
    if not all(0 < factor < float("inf") for factor in (*short, *long)):
        raise GgufError(f"{container.name}: the factors of its rotary embeddings are not positive numbers")
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "attention_factor": 1.0,
    }


# Finds the layers with a sliding window, and their rotary settings.

SLIDING, FULL = "sliding_attention", "full_attention"


def windows(values: Hyperparameters, config: Config, nth: int, window: int = 0) -> Config:
    """Returns the size of the window, and the layers that have a window.

    nth, window: the default where the file states nothing: all layers except every nth one have this window.
    """
    window, layers = values.integer("attention.sliding_window", window), config["num_hidden_layers"]
    every = values.integer("block_count")  # includes the layers for multi-token prediction
    pattern = values.container.metadata.get(values.key("attention.sliding_window_pattern"), nth)
    slides = (
        list(map(bool, pattern))
        if isinstance(pattern, list)
        else [not pattern or (i + 1) % pattern for i in range(every)]
    )
    if len(slides) not in (layers, every):
        raise GgufError(
            f"{values.container.name}: its pattern of windows has {len(slides)} entries for {layers} layers"
        )
    types = [SLIDING if window and slides[i] else FULL for i in range(layers)]
    return {"sliding_window": window, "layer_types": types}


def unscaled_in_windows(values: Hyperparameters, config: Config) -> Config:
    """Returns rotary settings by kind of layer: layers with a window have no rotary scaling (OLMo 3)."""
    theta = config["rope_theta"]
    local = values.number("rope.freq_base_swa", theta)
    scaled = {"rope_type": "default", "rope_theta": theta, **(config["rope_scaling"] or {})}
    return {
        "rope_parameters": {FULL: scaled, SLIDING: {"rope_type": "default", "rope_theta": local}},
        "rope_scaling": None,
    }
