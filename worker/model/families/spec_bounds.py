"""Refuses a model whose sizes contradict each other or are too large for the kernels, before any weight is read."""

from worker.kernels.cpu.limits import MAX_CHOSEN
from worker.model.checkpoint.checkpoint import UnsupportedModel
from worker.model.mixers.kinds import mixer
from worker.spec import ModelSpec, RopeSpec

MAX_THETA = 1e18  # the powers of theta must be finite in float32


def check_spec(spec: ModelSpec, layers: int) -> None:
    """Raises UnsupportedModel if a size is not supported. layers: num_hidden_layers in the config"""
    if len(spec.layers) != layers:
        raise UnsupportedModel(
            f"num_hidden_layers {layers} is not supported: the lists of layers, such as layer_types, end after "
            f"{len(spec.layers)}"
        )
    for layer in dict.fromkeys(spec.layers):
        mixer(layer.mixer).check(spec, layer)
        if not spec.intermediate_size and (not layer.sparse or (spec.experts and spec.experts.beside_mlp)):
            raise UnsupportedModel(f"intermediate_size {spec.intermediate_size} is not supported: layers have MLPs")
    for rope in spec.ropes:
        _check_rope(rope, rope.head_dim or spec.head_dim)
    if spec.experts is not None and spec.experts.chosen > MAX_CHOSEN:
        raise UnsupportedModel(f"num_experts_per_tok {spec.experts.chosen} is not supported: at most {MAX_CHOSEN} are")


def _check_rope(rope: RopeSpec, head_dim: int) -> None:
    if rope.kind == "none":
        return
    rotated = rope.rotated or head_dim
    if not 2 <= rotated <= head_dim or rotated % 2:
        raise UnsupportedModel(
            f"partial_rotary_factor is not supported: it rotates {rotated} dimensions of head_dim {head_dim}, and "
            "supported are even numbers from 2 on"
        )
    if not 1 < rope.theta <= MAX_THETA:
        raise UnsupportedModel(
            f"rope_theta {rope.theta:g} is not supported: it must be more than 1, at most {MAX_THETA:g}"
        )
    if rope.kind == "llama3" and not rope.low_freq_factor < rope.high_freq_factor:
        raise UnsupportedModel(
            f"high_freq_factor {rope.high_freq_factor:g} is not supported: it must be more than low_freq_factor "
            f"{rope.low_freq_factor:g}"
        )
    if rope.kind == "longrope" and len(rope.factors) != rotated // 2:
        raise UnsupportedModel(
            f"short_factor of {len(rope.factors)} numbers is not supported: {rotated // 2} pairs of dimensions rotate"
        )
