"""Rotary scaling in config.json, from the metadata and the tensors of a GGUF file."""

from shared.gguf.config.hyperparameters import Config, Hyperparameters
from shared.gguf.container import Container
from shared.gguf.errors import GgufError

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
