"""The names and shapes of the tensors of layers, as checkpoints on the hub have them.

A shape is a text of sizes: `h` is the hidden size, `q` the rows of the queries, and so on; see `sizes_of`. `{}` in a
name stands for the number of an expert.
"""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
Tensors = Mapping[str, str]  # name → shape


def linear(name: str, shape: str, *, bias: bool = False) -> dict[str, str]:
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape.split()[0]} if bias else {})


def swiglu(
    module: str, inner: str = "i", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Tensors:
    gate, up, down = (f"{module}.{name}" for name in names)
    return linear(gate, f"{inner} h") | linear(up, f"{inner} h") | linear(down, f"h {inner}")


def attention(*, bias: bool = False, output: str = "o_proj") -> dict[str, str]:
    """bias: whether queries, keys and values have biases; output: the name of the last linear"""
    found = linear("self_attn.q_proj", "q h", bias=bias) | linear("self_attn.k_proj", "k h", bias=bias)
    return found | linear("self_attn.v_proj", "k h", bias=bias) | linear(f"self_attn.{output}", "h q")


NORMS = {"input_layernorm.weight": "h", "post_attention_layernorm.weight": "h"}
QK_NORMS = {"self_attn.q_norm.weight": "d", "self_attn.k_norm.weight": "d"}
MLP = swiglu("mlp")
LLAMA = {**NORMS, **attention(), **MLP}
QWEN2 = {**NORMS, **attention(bias=True), **MLP}
QWEN3 = {**LLAMA, **QK_NORMS}
PHI3 = {
    **NORMS, **linear("self_attn.qkv_proj", "q+2k h"), **linear("self_attn.o_proj", "h q"),
    **linear("mlp.gate_up_proj", "2i h"), **linear("mlp.down_proj", "h i"),
}  # fmt: skip
OLMO3 = {
    **attention(), **MLP, "self_attn.q_norm.weight": "q", "self_attn.k_norm.weight": "k",
    "post_attention_layernorm.weight": "h", "post_feedforward_layernorm.weight": "h",
}  # fmt: skip
GEMMA3 = {**QWEN3, "pre_feedforward_layernorm.weight": "h", "post_feedforward_layernorm.weight": "h"}

ROUTER = {"mlp.gate.weight": "e h"}
CHOICE = {"mlp.gate.e_score_correction_bias": "e"}
EACH = {**ROUTER, **swiglu("mlp.experts.{}", "m")}  # each expert has tensors of its own
FUSED = {**ROUTER, "mlp.experts.gate_up_proj": "e 2m h", "mlp.experts.down_proj": "e h m"}
TRANSPOSED = {**ROUTER, "mlp.experts.gate_up_proj": "e h 2m", "mlp.experts.down_proj": "e m h"}
GATED_SHARED = {**swiglu("mlp.shared_expert", "s"), **linear("mlp.shared_expert_gate", "1 h")}
SHARED = swiglu("mlp.shared_experts", "s")
QWEN3_MOE = {**NORMS, **attention(), **QK_NORMS, **EACH}
QWEN3_VL_MOE = {**NORMS, **attention(), **QK_NORMS, **TRANSPOSED}
GLM4_MOE = {**NORMS, **attention(bias=True), **QK_NORMS, **EACH, **CHOICE, **SHARED}
MIXTRAL = "block_sparse_moe"
MINIMAX_M2 = {
    **NORMS, **attention(), "self_attn.q_norm.weight": "q", "self_attn.k_norm.weight": "k",
    f"{MIXTRAL}.gate.weight": "e h", f"{MIXTRAL}.e_score_correction_bias": "e",
    **swiglu(f"{MIXTRAL}.experts.{{}}", "i", ("w1", "w3", "w2")),
}  # fmt: skip
GPT_OSS = {
    **NORMS, **attention(bias=True), "self_attn.o_proj.bias": "h", "self_attn.sinks": "n",
    **linear("mlp.router", "e h", bias=True), "mlp.experts.gate_up_proj": "e h 2i", "mlp.experts.down_proj": "e i h",
    "mlp.experts.gate_up_proj_bias": "e 2i", "mlp.experts.down_proj_bias": "e h",
}  # fmt: skip

# Gated DeltaNet: Qwen3.5 to 3.8 have four projections, Qwen3-Next has two
DELTA = {
    **NORMS, **linear("linear_attn.in_proj_qkv", "dqkv h"), **linear("linear_attn.in_proj_z", "dv h"),
    **linear("linear_attn.in_proj_b", "dn h"), **linear("linear_attn.in_proj_a", "dn h"),
    "linear_attn.conv1d.weight": "dqkv 1 4", "linear_attn.A_log": "dn", "linear_attn.dt_bias": "dn",
    "linear_attn.norm.weight": "dd", **linear("linear_attn.out_proj", "h dv"),
}  # fmt: skip
NEXT_DELTA = {
    **{name: shape for name, shape in DELTA.items() if ".in_proj_" not in name},
    **linear("linear_attn.in_proj_qkvz", "dqkv+dv h"), **linear("linear_attn.in_proj_ba", "2dn h"),
}  # fmt: skip
GATED = {**NORMS, **attention(), **QK_NORMS, "self_attn.q_proj.weight": "2q h"}

# multi-head latent attention
LATENT = {
    **NORMS, **linear("self_attn.q_a_proj", "lq h"), "self_attn.q_a_layernorm.weight": "lq",
    **linear("self_attn.q_b_proj", "lqr lq"), **linear("self_attn.kv_a_proj_with_mqa", "lkr h"),
    "self_attn.kv_a_layernorm.weight": "lk", **linear("self_attn.kv_b_proj", "lkv lk"),
    **linear("self_attn.o_proj", "h lo"),
}  # fmt: skip
LATENT_MLP = {**LATENT, **MLP}
LATENT_MOE = {**LATENT, **EACH, **CHOICE, **SHARED}
MISTRAL4 = {**LATENT, **FUSED, **SHARED}

# Gemma 4: layers with a window, and layers with all positions, whose keys are also the values in the larger models
GEMMA4 = {**GEMMA3, "layer_scalar": "1"}
GEMMA4_FULL = {
    **GEMMA4, **linear("self_attn.q_proj", "fq h"), **linear("self_attn.k_proj", "fk h"),
    **linear("self_attn.o_proj", "h fq"), "self_attn.q_norm.weight": "fd", "self_attn.k_norm.weight": "fd",
}  # fmt: skip
GEMMA4_KEYS = {name: shape for name, shape in GEMMA4_FULL.items() if "v_proj" not in name}
GEMMA4_VALUES = {**GEMMA4_FULL, **linear("self_attn.v_proj", "fk h")}
GEMMA4_EXPERTS = {
    **linear("router.proj", "e h"), "router.scale": "h", "router.per_expert_scale": "e",
    "experts.gate_up_proj": "e 2m h", "experts.down_proj": "e h m",
    **{f"{name}.weight": "h" for name in ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2",
                                          "post_feedforward_layernorm_2")},
}  # fmt: skip
PER_LAYER = {
    **linear("per_layer_input_gate", "p h"), **linear("per_layer_projection", "h p"),
    "post_per_layer_input_norm.weight": "h",
}  # fmt: skip
PER_LAYER_TABLE = {
    "embed_tokens_per_layer.weight": "v lp", "per_layer_model_projection.weight": "lp h",
    "per_layer_projection_norm.weight": "p",
}  # fmt: skip

# Liquid's short convolutions and attention
LFM2_NORMS = {"operator_norm.weight": "h", "ffn_norm.weight": "h"}
LFM2_MLP = swiglu("feed_forward", "i", ("w1", "w3", "w2"))
LFM2_CONV = {
    **LFM2_NORMS, **linear("conv.in_proj", "3h h"), "conv.conv.weight": "h 1 3", **linear("conv.out_proj", "h h"),
}  # fmt: skip
LFM2_FULL = {
    **LFM2_NORMS, **attention(output="out_proj"),
    "self_attn.q_layernorm.weight": "d", "self_attn.k_layernorm.weight": "d",
}  # fmt: skip
LFM2_EXPERTS = {
    "feed_forward.gate.weight": "e h", "feed_forward.expert_bias": "e",
    **swiglu("feed_forward.experts.{}", "m", ("w1", "w3", "w2")),
}  # fmt: skip

# Mamba-2: in Granite 4 beside an MLP, in Nemotron-H as a block of its own
MAMBA = {
    "in_proj.weight": "mp h", "conv1d.weight": "mc 1 4", "conv1d.bias": "mc", "A_log": "mn", "D": "mn",
    "dt_bias": "mn", "norm.weight": "mi", "out_proj.weight": "h mi",
}  # fmt: skip
GRANITE_MLP = {**linear("shared_mlp.input_linear", "2s h"), **linear("shared_mlp.output_linear", "h s")}
GRANITE_EXPERTS = {
    f"{MIXTRAL}.input_linear.weight": "e 2i h", f"{MIXTRAL}.output_linear.weight": "e h i",
    f"{MIXTRAL}.router.layer.weight": "e h",
}  # fmt: skip
GRANITE_MAMBA = {**NORMS, **{f"mamba.{name}": shape for name, shape in MAMBA.items()}, **GRANITE_MLP}
GRANITE_FULL = {**NORMS, **attention(), **GRANITE_MLP}
OF_BLOCK = {"norm.weight": "h"}
NEMOTRON_MAMBA = {**OF_BLOCK, **{f"mixer.{name}": shape for name, shape in MAMBA.items()}}
NEMOTRON_FULL = {**OF_BLOCK, **{name.replace("self_attn", "mixer"): shape for name, shape in attention().items()}}
NEMOTRON_MOE = {
    **OF_BLOCK, "mixer.gate.weight": "e h", "mixer.gate.e_score_correction_bias": "e",
    **linear("mixer.experts.{}.up_proj", "m h"), **linear("mixer.experts.{}.down_proj", "h m"),
    **linear("mixer.shared_experts.up_proj", "s h"), **linear("mixer.shared_experts.down_proj", "h s"),
}  # fmt: skip
# Cohere's experts: one norm, attention and experts beside each other
COHERE_MOE = {"input_layernorm.weight": "h", **attention(), **EACH}
COHERE_MLP = {"input_layernorm.weight": "h", **attention(), **swiglu("mlp", "pi")}

# Layers that draft tokens. They belong to a release, but the language model alone does not need them.
QWEN_MTP = {
    **{f"mtp.layers.0.{name}": shape for name, shape in {**GATED, **MLP}.items()}, "mtp.fc.weight": "h 2h",
    "mtp.norm.weight": "h", "mtp.pre_fc_norm_embedding.weight": "h", "mtp.pre_fc_norm_hidden.weight": "h",
}  # fmt: skip
QWEN_MOE_MTP = {  # its experts have tensors of their own, also where those of the other layers are stacked
    **{name: shape for name, shape in QWEN_MTP.items() if ".mlp." not in name},
    **{f"mtp.layers.0.{name}": shape for name, shape in {**EACH, **GATED_SHARED}.items()},
}  # fmt: skip
NEXTN = {  # what the layer for drafts of DeepSeek-V3 and GLM has besides those of a layer
    "eh_proj.weight": "h 2h", "enorm.weight": "h", "hnorm.weight": "h", "embed_tokens.weight": "v h",
    "shared_head.norm.weight": "h", "shared_head.head.weight": "v h",
}  # fmt: skip


def sizes_of(config: Config, head_dim: int) -> dict[str, int]:
    """Returns what the letters in shapes mean. config: of the text model"""

    def of(*names: str, default: int = 0) -> int:
        return next((config[name] for name in names if config.get(name) is not None), default)

    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    full, layers = of("global_head_dim", default=head_dim), config["num_hidden_layers"]
    kv = of("num_key_value_heads", default=heads)
    m = of("moe_intermediate_size", default=of("intermediate_size"))
    shared = of("n_shared_experts", "num_shared_experts") * m
    dk = of("linear_num_key_heads") * of("linear_key_head_dim")
    dv = of("linear_num_value_heads") * of("linear_value_head_dim")
    mn, groups = of("mamba_n_heads", "mamba_num_heads"), of("mamba_n_groups", "n_groups")
    mi, mc = mn * of("mamba_d_head", "mamba_head_dim"), 2 * groups * of("mamba_d_state", "ssm_state_size")
    rope, plain, value = of("qk_rope_head_dim"), of("qk_nope_head_dim"), of("v_head_dim")
    return {
        "h": hidden, "v": config["vocab_size"], "i": of("intermediate_size"), "n": heads, "d": head_dim,
        "q": heads * head_dim, "k": kv * head_dim, "m": m,
        "e": of("num_experts", "num_local_experts", "n_routed_experts"),
        "s": of("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
                default=shared),
        "pi": of("prefix_dense_intermediate_size"), "dqkv": 2 * dk + dv, "dv": dv,
        "dn": of("linear_num_value_heads"), "dd": of("linear_value_head_dim"), "fd": full, "fq": heads * full,
        "fk": of("num_global_key_value_heads", default=kv) * full, "p": of("hidden_size_per_layer_input"),
        "lp": layers * of("hidden_size_per_layer_input"), "lq": of("q_lora_rank"), "lk": of("kv_lora_rank"),
        "lqr": heads * (plain + rope), "lkr": of("kv_lora_rank") + rope, "lkv": heads * (plain + value),
        "lo": heads * value, "mn": mn, "mi": mi, "mc": mi + mc, "mp": 2 * mi + mc + mn,
    }  # fmt: skip


def shape_of(text: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the numbers of a shape. A size is a number or a letter, with a number before it, or a sum of such."""
    return tuple(sum(_term(term, sizes) for term in size.split("+")) for size in text.split())


def _term(term: str, sizes: Mapping[str, int]) -> int:
    letters = term.lstrip("0123456789")
    factor = term.removesuffix(letters)
    return int(factor or 1) * (sizes[letters] if letters else 1)
