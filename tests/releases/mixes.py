"""The mixes of types that GGUF files have: which matrix has which type."""

from collections.abc import Callable, Mapping

Types = Callable[[str], str]  # name of a matrix in GGUF → its type


def _mix(default: str, *others: tuple[str, str]) -> Types:
    """Returns a mix. others: parts of names, with the type of such matrices; the first that fits holds"""
    return lambda name: next((type for part, type in others if part in name), default)


HEAD = (("token_embd", "Q6_K"), ("output.", "Q6_K"))
MIXES: Mapping[str, str | Types] = {
    "Q8_0": "Q8_0",
    "Q4_K_M": _mix("Q4_K", ("attn_v", "Q6_K"), ("ffn_down", "Q6_K"), *HEAD),
    # Unsloth's mixes have more bits where the loss is larger, and differ by layer
    "UD-Q4_K_XL": _mix(
        "Q4_K", ("attn_v", "Q6_K"), ("attn_output", "Q5_K"), ("ssm_out", "Q5_K"), ("ssm_alpha", "Q8_0"),
        ("ssm_beta", "Q8_0"), ("attn_kv_a", "Q8_0"), ("attn_q_a", "Q8_0"), ("shexp", "Q8_0"),
        ("blk.0.ffn_down", "Q6_K"), ("ffn_down", "Q5_K"), ("ffn_gate_exps", "IQ4_XS"), ("per_layer", "Q8_0"), *HEAD,
    ),
    "UD-IQ2_XXS": _mix(
        "IQ2_XXS", ("attn_v", "Q4_K"), ("attn_output", "IQ3_XXS"), ("attn_k", "Q4_K"), ("ssm_out", "Q4_K"),
        ("ssm_alpha", "Q8_0"), ("ssm_beta", "Q8_0"), ("ffn_down", "IQ3_S"), ("shexp", "Q6_K"), ("per_layer", "Q8_0"),
        ("token_embd", "Q4_K"), ("output.", "Q5_K"),
    ),
    "MXFP4": _mix("Q8_0", ("_exps", "MXFP4")),
}  # fmt: skip
