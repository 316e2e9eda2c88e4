"""Cuts a tensor that holds all experts of a layer, as some checkpoints store them, into one tensor for each expert.

The tensors of an expert then have names of their own, whether the file stores them so or not: gpt-oss'
`mlp.experts.gate_up_proj_blocks` [E, N, K / 32, 16] is `mlp.experts.0.gate_up_proj.weight_blocks` [N, K / 32, 16], and
so on. So experts are read, counted and checked one by one.
"""

import re

STACKED = re.compile(r"(.+\.experts)\.([a-z]\w*?)(?:_(bias|blocks|scales))?")  # a number after `experts` is one expert
GRANITE = re.compile(r"(.+\.block_sparse_moe\.(?:in|out)put_linear)\.weight")
KINDS = {None: "weight", "bias": "bias", "blocks": "weight_blocks", "scales": "weight_scales"}
MOST = 4096  # experts of a layer; a tensor that claims more is refused under its own name


def names_of_experts(name: str, shape: tuple[int, ...]) -> list[str]:
    """Returns the names of the parts [...] of a tensor [E, ...], expert by expert; [] for any other tensor."""
    found, granite = STACKED.fullmatch(name), GRANITE.fullmatch(name)
    if len(shape) < 2 or not 0 < shape[0] <= MOST:
        return []
    if granite is not None:
        return [f"{granite[1]}.{expert}.weight" for expert in range(shape[0])]
    if found is None:
        return []
    return [f"{found[1]}.{expert}.{found[2]}.{KINDS[found[3]]}" for expert in range(shape[0])]
