"""Makes config.json of a Hugging Face checkpoint from the metadata of a GGUF file, for the families that are served.

Values that GGUF files do not store are those that llama.cpp builds into an architecture. A value under the name of the
architecture that nothing here reads may change what the model computes, so such a file is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.gguf.container import Container
from shared.gguf.errors import GgufError

Config = dict[str, Any]

HARMLESS = ("vocab_size", "rope.scaling.finetuned", "attention.layer_norm_epsilon", "tensor_data_layout")
OF_VISION = ("vision.", "mm.")  # values of a multimodal model's other part; the text model is served
ROPE_FREQS, SHORT_FACTORS, LONG_FACTORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
GEMMA3_27B_LAYERS = 62  # the only Gemma 3 whose attention is not scaled by the size of a head
GEMMA3_PATTERN, SMOLLM3_NO_ROPE = 6, 4


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

    def expect(self, name: str, value: float | bool) -> None:
        """Raises GgufError if a value is there and not this one, which is all that is supported."""
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


@dataclass(frozen=True, slots=True)
class Architecture:
    """model_type: of the Hugging Face family. extra: the values that only this family has."""

    model_type: str
    generator: str
    extra: Callable[[Hyperparameters, Config], Config]


def config_of(container: Container) -> Config:
    """Returns config.json. Raises GgufError when the architecture or one of its values is not supported."""
    if (kind := container.text("general.type", "model")) != "model":
        raise GgufError(f"{container.name} is of type {kind!r}, not a model")
    name = container.text("general.architecture")
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        supported = ", ".join(ARCHITECTURES)
        raise GgufError(f"{container.name}: architecture {name!r} is not supported; supported are {supported}")
    values = Hyperparameters(container, name)
    config = _common(values)
    config |= {"model_type": architecture.model_type, "architectures": [architecture.generator]}
    config |= architecture.extra(values, config)
    values.check_all_seen()
    return config


def _common(values: Hyperparameters) -> Config:
    container = values.container
    values.expect("attention.causal", True)
    hidden, heads = values.integer("embedding_length"), values.integer("attention.head_count")
    if hidden < 1 or heads < 1 or values.integer("block_count") < 1:
        raise GgufError(f"{container.name} describes a model without layers, heads or hidden size")
    head_dim = values.integer("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        values.expect(name, head_dim)
    return {
        "vocab_size": _vocabulary_size(container),
        "hidden_size": hidden,
        "intermediate_size": values.integer("feed_forward_length"),
        "num_hidden_layers": values.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": values.integer("context_length"),
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in container.tensors,
        "dtype": _dtype(container),
        "rope_theta": values.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(values, head_dim),
    }


def _vocabulary_size(container: Container) -> int:
    """Returns how many tokens the embedding has. Raises GgufError when the tokenizer has another number."""
    embedding = container.tensors.get("token_embd.weight")
    if embedding is None:
        raise GgufError(f"{container.name}: tensor token_embd.weight is missing")
    tokens = len(container.entries("tokenizer.ggml.tokens", str))
    if embedding.shape[0] != tokens:
        raise GgufError(
            f"{container.name}: the tokenizer has {tokens} tokens, but token_embd.weight has {embedding.shape[0]} rows"
        )
    return tokens


def _dtype(container: Container) -> str:
    """Returns the format for computing: that of the matrices, or bfloat16 if they are quantized or mixed."""
    types = {tensor.type for tensor in container.tensors.values() if len(tensor.shape) > 1}
    if types == {"F32"}:
        return "float32"
    return "float16" if "F16" in types and types <= {"F16", "F32"} else "bfloat16"


def _rope_scaling(values: Hyperparameters, head_dim: int) -> Config | None:
    """Returns the rotary scaling that any architecture may have. longrope is Phi-3's own."""
    factors = values.container.tensors.get(ROPE_FREQS)
    kind = values.text("rope.scaling.type", "linear" if values.number("rope.scale_linear", 0.0) else "none")
    if factors is not None:
        if kind != "none" or factors.type != "F32" or factors.shape != (head_dim // 2,):
            raise GgufError(f"{values.container.name}: {ROPE_FREQS} does not fit the rest of the file")
        return _pair_factors(values.container, factors.floats(), factors.floats(), values.integer("context_length"))
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
    values.expect("rope.scaling.yarn_attn_factor", 1)
    values.expect("rope.scaling.attn_factor", 1)
    values.expect("rope.scaling.yarn_ext_factor", 1)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": values.integer(
            "rope.scaling.original_context_length", values.integer("context_length")
        ),
        "beta_fast": values.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": values.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _pair_factors(container: Container, short: list[float], long: list[float], original: int) -> Config:
    """Returns rotary settings with one factor for each pair of dimensions, which only `longrope` can express.

    The converter has computed such factors from Llama 3's settings, too.
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


def _whole_heads(values: Hyperparameters, config: Config) -> Config:
    values.expect("rope.dimension_count", config["head_dim"])
    return {}


def _llama(values: Hyperparameters, config: Config) -> Config:
    """Llama and the Mistral models that llama.cpp converts to it. A window makes it a Mistral."""
    tensors, window = values.container.tensors, values.integer("attention.sliding_window", 0)
    mistral = {"model_type": "mistral", "sliding_window": window} if window else {}
    bias = {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_down.bias" in tensors}
    return _whole_heads(values, config) | bias | mistral


def _smollm3(values: Hyperparameters, config: Config) -> Config:
    return _whole_heads(values, config) | {"no_rope_layer_interval": SMOLLM3_NO_ROPE}


def _gemma3(values: Hyperparameters, config: Config) -> Config:
    hidden, heads, layers = (config[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    values.expect("rope.dimension_count_swa", config["head_dim"])
    window = values.integer("attention.sliding_window", 0)
    pattern = values.container.metadata.get(values.key("attention.sliding_window_pattern"), GEMMA3_PATTERN)
    slides = list(map(bool, pattern)) if isinstance(pattern, list) else [bool((i + 1) % pattern) for i in range(layers)]
    return _whole_heads(values, config) | {
        "sliding_window": window,
        "layer_types": [f"{'sliding' if window and slides[i] else 'full'}_attention" for i in range(layers)],
        "rope_local_base_freq": values.number("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": hidden // heads if layers == GEMMA3_27B_LAYERS else config["head_dim"],
        "final_logit_softcapping": values.number("final_logit_softcapping", 0.0),
    }


def _phi3(values: Hyperparameters, config: Config) -> Config:
    container, head_dim = values.container, config["head_dim"]
    rotated = values.integer("rope.dimension_count", head_dim)
    original = values.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    extra = {
        "sliding_window": values.integer("attention.sliding_window", 0) or None,
        "partial_rotary_factor": rotated / head_dim,
        "original_max_position_embeddings": original,
    }
    short, long = container.tensors.get(SHORT_FACTORS), container.tensors.get(LONG_FACTORS)
    magnitude = values.number("rope.scaling.attn_factor", 1.0)
    if short is None or long is None:
        return extra
    if any(factors.type != "F32" or factors.shape != (rotated // 2,) for factors in (short, long)):
        raise GgufError(f"{container.name}: {SHORT_FACTORS} does not fit the rest of the file")
    scaling = _pair_factors(container, short.floats(), long.floats(), original)
    return extra | {"rope_scaling": scaling | {"attention_factor": magnitude}}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _llama),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _whole_heads),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _whole_heads),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma3),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _phi3),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _smollm3),
}
