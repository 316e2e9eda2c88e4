"""Translates the common names of modules to a checkpoint's names, and describes the norms, which all layers have.

Common names are the most frequent names in Hugging Face checkpoints. Each kind of mixer or feed-forward network knows
the common names of its own modules.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.model.checkpoint.stacked_linear import BIAS, WEIGHT
from worker.model.checkpoint.stored_weight import PlainWeight
from worker.spec import ModelSpec

# the modules of the norms, by field of Layer
_PRE = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}
_POST = {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
_BOTH = {**_POST, "before_attention": "input_layernorm", "before_mlp": "pre_feedforward_layernorm"}
_GLM = {**_PRE, "after_attention": "post_self_attn_layernorm", "after_mlp": "post_mlp_layernorm"}
# the modules of the norms, by pre_norms and post_norms
_NORMS = {(True, False): _PRE, (False, True): _POST, (True, True): _BOTH}
OTHER_NAMES = {  # a module's name in some families → its common name
    "attention_layernorm": "input_layernorm", "feedforward_layernorm": "post_attention_layernorm",
    "self_attn.query_layernorm": "self_attn.q_norm", "self_attn.key_layernorm": "self_attn.k_norm",
    "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj", "embedding_norm": "norm",
    "operator_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "self_attn.out_proj": "self_attn.o_proj", "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "mlp.shared_experts.gate_proj": "mlp.shared_expert.gate_proj",
    "mlp.shared_experts.up_proj": "mlp.shared_expert.up_proj",
    "mlp.shared_experts.down_proj": "mlp.shared_expert.down_proj",
    "shared_mlp.input_linear": "mlp.gate_up_proj", "shared_mlp.output_linear": "mlp.down_proj",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerNames:
    """How a checkpoint names the modules of its layers. The spec alone does not tell these names.

    modules: the names of all modules inside any layer, for example `mlp` and `mlp.up_proj`, and of modules outside
    norms: the module of each norm, by field of Layer
    others: uncommon names, by common name
    """

    modules: frozenset[str]
    norms: Mapping[str, str]
    others: Mapping[str, str]

    @classmethod
    def of(cls, spec: ModelSpec, names: Iterable[str], prefix: str) -> "LayerNames":
        """Finds a checkpoint's names. names: the names of all tensors in it
        prefix: the prefix of the names of its language model's tensors

        Only the layers and the last norm of the language model are looked at. An encoder of pictures or sound, and
        layers that draft tokens, have names of their own.
        """
        own = {tuple(name.removeprefix(prefix).split(".")) for name in names if name.startswith(prefix)}
        paths = {path[2:] if path[0] == "layers" else path for path in own if path[0] == "layers" or len(path) == 2}
        modules = frozenset(".".join(path[:end]) for path in paths for end in range(1, len(path)))
        norms = _GLM if _GLM["after_attention"] in modules else _NORMS[spec.pre_norms, spec.post_norms]
        return cls(modules, norms, {common: other for other, common in OTHER_NAMES.items() if other in modules})

    def spelled(self, module: str) -> str:
        """Returns the checkpoint's name of the module whose common name is `module`."""
        return self.others.get(module, module)


def layer_norms(spec: ModelSpec, prefix: str, names: LayerNames) -> dict[str, Sequence[PlainWeight]]:
    """Returns the stored tensors of a layer's norms, by field of Layer. prefix: the prefix of its tensor names"""
    return {
        field: norm_weights(spec, prefix + names.spelled(module), spec.hidden_size)
        for field, module in names.norms.items()
        if field != "before_mlp" or not spec.parallel
    }


def norm_weights(spec: ModelSpec, module: str, size: int) -> Sequence[PlainWeight]:
    kinds = (WEIGHT, BIAS) if spec.norm_bias else (WEIGHT,)
    return [PlainWeight(module + kind, (size,)) for kind in kinds]


def norm(spec: ModelSpec, parts: Sequence[Tensor]) -> Tensor:
    """Returns a norm over the hidden size as the kernels read it: [H], or [2, H] for a layer norm (weight and bias).

    The weight of a layer norm includes the spec's norm_offset; the kernels add the offset of other norms.
    """
    if not spec.layer_norm:
        return parts[0]
    bias = parts[1] if spec.norm_bias else torch.zeros_like(parts[0])
    return torch.stack((parts[0] + float(spec.norm_offset), bias))
