"""Cuts a tensor that holds all experts of a layer, as some checkpoints store them, into one tensor for each expert.

So each expert's tensors have names of their own in every checkpoint, and experts are read, counted and checked one by
one. For example, `mlp.experts.gate_up_proj_blocks` [E, N, K / 32, 16] of gpt-oss is read as
`mlp.experts.0.gate_up_proj.weight_blocks` [N, K / 32, 16] for expert 0, and so on.
"""

import re

# A name with a number after `experts` does not match: it belongs to a single expert.
STACKED = re.compile(r"(.+\.experts)\.([a-z]\w*?)(?:_(bias|blocks|scales))?")
GRANITE = re.compile(r"(.+\.block_sparse_moe\.(?:in|out)put_linear)\.weight")
KINDS = {None: "weight", "bias": "bias", "blocks": "weight_blocks", "scales": "weight_scales"}
MOST = 4096  # the most experts of a layer; a tensor with more keeps its own name and is refused later


def names_of_experts(name: str, shape: tuple[int, ...]) -> list[str]:
    """Returns the names of the experts' tensors [...] inside a stored tensor [E, ...]; [] for any other tensor."""
    found, granite = STACKED.fullmatch(name), GRANITE.fullmatch(name)
    if len(shape) < 2 or not 0 < shape[0] <= MOST:
        return []
    if granite is not None:
        return [f"{granite[1]}.{expert}.weight" for expert in range(shape[0])]
    if found is None:
        return []
    return [f"{found[1]}.{expert}.{found[2]}.{KINDS[found[3]]}" for expert in range(shape[0])]
