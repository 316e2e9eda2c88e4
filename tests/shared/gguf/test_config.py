"""config.json from the metadata of each architecture, and refusal of unknown values, which could change the model.

tests/worker/quantization/test_method.py compares whole models with transformers.
"""

from pathlib import Path
from typing import Any

import pytest

from shared.gguf.config import ARCHITECTURES, config_of
from shared.gguf.container import Container, StoredTensor
from shared.gguf.naming import GgufError

HERE = Path("model.gguf")
OF_EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 12}
MIXTURES = ("qwen2moe", "qwen3moe", "qwen3vlmoe", "gpt-oss", "qwen3next", "qwen35moe", "glm4moe", "ernie4_5-moe")
SMALL_MIXTURES = ("olmoe", "granitemoe")  # architectures whose experts have the size of a dense model's feed-forward
RECURRENT = ("qwen3next", "qwen35", "qwen35moe")
OF_MAMBA = {
    "ssm.conv_kernel": 4, "ssm.state_size": 6, "ssm.group_count": 1, "ssm.time_step_rank": 4, "ssm.inner_size": 16,
    "attention.head_count_kv": [0, 2], "rope.scaling.finetuned": False,
}  # fmt: skip
LAYER_NORMS = ("command-r", "cohere2", "starcoder2", "nemotron")
OF_STATES = {
    "ssm.conv_kernel": 4, "ssm.state_size": 6, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 20,
    "full_attention_interval": 2,
}  # fmt: skip
TOKENS = {"tokenizer.ggml.tokens": ["a", "b", "c"]}


def container(architecture: str, change: dict[str, Any] | None = None, **types: str) -> Container:
    """Returns a file of this architecture with two layers.

    types: name of a further tensor, with __ for a dot → its type
    """
    values = {
        "block_count": 2, "context_length": 512, "embedding_length": 8, "feed_forward_length": 16,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 4, "attention.value_length": 4,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 5e5, "rope.dimension_count": 4,
    }  # fmt: skip
    values |= OF_EXPERTS if architecture in MIXTURES else {}
    values |= {"expert_count": 8, "expert_used_count": 2} if architecture in SMALL_MIXTURES else {}
    values |= OF_STATES if architecture in RECURRENT else {}
    values |= {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2]} if architecture == "lfm2" else {}
    values |= OF_MAMBA if architecture == "granitehybrid" else {}
    if architecture in LAYER_NORMS:
        values["attention.layer_norm_epsilon"] = values.pop("attention.layer_norm_rms_epsilon")
    metadata = {f"{architecture}.{name}": value for name, value in values.items()}
    metadata |= {"general.architecture": architecture, **TOKENS, **(change or {})}
    tensors = {"token_embd.weight": StoredTensor(HERE, "Q4_K", (3, 8), 0, 0)}
    tensors |= {name.replace("__", "."): StoredTensor(HERE, type, (8,), 0, 0) for name, type in types.items()}
    return Container("model.gguf", {key: value for key, value in metadata.items() if value is not None}, tensors)


# gemma4: see test_gemma4.py; deepseek2: below; encoders: tests/worker/encoder/test_encoder.py
@pytest.mark.parametrize(
    "architecture",
    [name for name in ARCHITECTURES if name not in ("gemma4", "deepseek2", "bert", "nomic-bert", "modern-bert")],
)
def test_common_values(architecture: str) -> None:
    config = config_of(container(architecture))
    expected = {
        "vocab_size": 3, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 512, ARCHITECTURES[architecture].eps: 1e-6,
        "rope_theta": 5e5, "tie_word_embeddings": True, "dtype": "bfloat16",
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected
    assert config["intermediate_size"] == (12 if architecture == "gpt-oss" else 16)
    assert config["model_type"] == ARCHITECTURES[architecture].model_type


def test_defaults_of_missing_values() -> None:
    missing = dict.fromkeys(("llama.attention.head_count_kv", "llama.attention.key_length", "llama.rope.freq_base",
                             "llama.attention.value_length", "llama.rope.dimension_count"))  # fmt: skip
    config = config_of(container("llama", missing))
    assert (config["num_key_value_heads"], config["head_dim"], config["rope_theta"]) == (4, 2, 10_000.0)


def test_tensors_tell_heads_biases_and_number_formats() -> None:
    found = config_of(
        container("llama", output__weight="Q6_K", blk__0__attn_q__bias="F32", blk__0__ffn_down__bias="F32")
    )
    assert not found["tie_word_embeddings"] and found["attention_bias"] and found["mlp_bias"]
    whole = container("llama")
    for types, dtype in ((("F32",), "float32"), (("F16", "F32"), "float16"), (("F16", "Q8_0"), "bfloat16")):
        tensors = {f"{i}": StoredTensor(HERE, type, (3, 8), 0, 0) for i, type in enumerate(types)}
        tensors["token_embd.weight"] = tensors["0"]
        assert config_of(Container(whole.name, whole.metadata, tensors))["dtype"] == dtype


@pytest.mark.parametrize(
    ("architecture", "change", "expected"),
    [
        ("llama", {"llama.attention.sliding_window": 64}, {"model_type": "mistral", "sliding_window": 64}),
        ("llama", {"llama.rope.scale_linear": 4.0}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ("qwen2", {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0,
                   "qwen2.rope.scaling.original_context_length": 128},
         {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
                           "beta_fast": 32.0, "beta_slow": 1.0}}),
        ("gemma3", {"gemma3.attention.sliding_window": 64, "gemma3.attention.sliding_window_pattern": 2},
         {"layer_types": ["sliding_attention", "full_attention"], "rope_local_base_freq": 1e4}),
        ("gemma3", {"gemma3.attention.sliding_window": 64, "gemma3.attention.sliding_window_pattern": [False, True]},
         {"layer_types": ["full_attention", "sliding_attention"]}),
        ("gemma3", {"gemma3.block_count": 62, "gemma3.embedding_length": 8}, {"query_pre_attn_scalar": 2}),
        ("gemma3", {"gemma3.final_logit_softcapping": 30.0}, {"final_logit_softcapping": 30.0}),
        ("phi3", {"phi3.attention.sliding_window": 0, "phi3.rope.dimension_count": 3},
         {"sliding_window": None, "partial_rotary_factor": 0.75}),
        ("qwen3moe", {}, {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                          "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}),
        ("qwen3moe", {"qwen3moe.expert_feed_forward_length": None}, {"moe_intermediate_size": 8}),
        ("qwen2moe", {}, {"norm_topk_prob": False, "shared_expert_intermediate_size": 16}),
        ("qwen2moe", {"qwen2moe.expert_shared_feed_forward_length": 20}, {"shared_expert_intermediate_size": 20}),
        ("granitemoe", {"granitemoe.expert_shared_feed_forward_length": 8},
         {"model_type": "granitemoeshared", "architectures": ["GraniteMoeSharedForCausalLM"],
          "shared_intermediate_size": 8, "num_local_experts": 8}),
        ("ernie4_5-moe", {"ernie4_5-moe.expert_shared_count": 0, "ernie4_5-moe.expert_shared_feed_forward_length": 9,
                          "ernie4_5-moe.leading_dense_block_count": 1, "ernie4_5-moe.interleave_moe_layer_step": 2},
         {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 12, "moe_num_shared_experts": 0,
          "moe_layer_start_index": 1, "moe_layer_interval": 2, "moe_layer_end_index": -1}),
        ("llama", {"llama.expert_count": 4, "llama.expert_used_count": 3},
         {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4,
          "num_experts_per_tok": 3, "sliding_window": None}),
        ("gpt-oss", {"gpt-oss.attention.sliding_window": 128, "gpt-oss.rope.scaling.type": "yarn",
                     "gpt-oss.rope.scaling.factor": 32.0, "gpt-oss.rope.scaling.original_context_length": 16},
         {"num_local_experts": 8, "num_experts_per_tok": 2, "attention_bias": True, "sliding_window": 128,
          "layer_types": ["sliding_attention", "full_attention"],
          "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16,
                           "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}}),
        ("gpt-oss", {"gpt-oss.attention.sliding_window": 9, "gpt-oss.attention.sliding_window_pattern": 0},
         {"layer_types": ["sliding_attention"] * 2}),
        ("smollm3", {}, {"no_rope_layer_interval": 4}),
        ("gemma2", {}, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4096,
                        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 4}),
        ("gemma2", {"gemma2.block_count": 46, "gemma2.attn_logit_softcapping": 7.0},
         {"query_pre_attn_scalar": 2, "attn_logit_softcapping": 7.0}),
        ("olmo2", {}, {"model_type": "olmo2", "rope_scaling": None}),
        ("olmo2", {"olmo2.attention.sliding_window": 8, "olmo2.rope.scaling.type": "yarn",
                   "olmo2.rope.scaling.factor": 8.0, "olmo2.rope.scaling.original_context_length": 64,
                   "olmo2.rope.scaling.yarn_attn_factor": 1.25},
         {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "layer_types": ["sliding_attention"] * 2,
          "rope_parameters": {
              "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "attention_factor": 1.25,
                                 "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0},
              "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}}),
        ("glm4", {"glm4.rope.dimension_count": 2}, {"partial_rotary_factor": 0.5, "attention_bias": False}),
        ("glm4moe", {"glm4moe.expert_weights_scale": 2.5, "glm4moe.expert_weights_norm": False,
            "glm4moe.expert_gating_func": 2, "glm4moe.leading_dense_block_count": 3, "glm4moe.expert_shared_count": 2},
            {"routed_scaling_factor": 2.5, "norm_topk_prob": False, "first_k_dense_replace": 3, "n_shared_experts": 2,
             "n_routed_experts": 8, "moe_intermediate_size": 12, "use_qk_norm": False, "attention_bias": False}),
        ("glm4", {"glm4.block_count": 3, "glm4.nextn_predict_layers": 1}, {"num_hidden_layers": 2}),
        ("granite", {"granite.attention.scale": 0.25, "granite.embedding_scale": 12.0, "granite.logit_scale": 8.0,
                     "granite.residual_scale": 0.5},
         {"attention_multiplier": 0.25, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
          "residual_multiplier": 0.5}),
        ("granitemoe", {}, {"attention_multiplier": 0.5, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
                            "num_local_experts": 8, "num_experts_per_tok": 2}),
        ("olmoe", {}, {"norm_topk_prob": False, "num_experts": 8}),
        ("mistral3", {}, {"model_type": "mistral", "rope_scaling": None, "sliding_window": None}),
        ("mistral3", {"mistral3.rope.scaling.type": "yarn", "mistral3.rope.scaling.factor": 16.0,
                      "mistral3.rope.scaling.original_context_length": 64, "mistral3.attention.temperature_scale": 0.5,
                      "mistral3.rope.scaling.yarn_log_multiplier": 1.0},
         {"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"],
          "rope_scaling": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64,
                           "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                           "llama_4_scaling_beta": 0.5}}),
        ("command-r", {"command-r.logit_scale": 0.25}, {"logit_scale": 0.25, "attention_bias": False}),
        ("cohere2", {"cohere2.attention.sliding_window": 8, "cohere2.block_count": 4},
         {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
        ("starcoder2", {}, {"use_bias": False, "sliding_window": None}),
        ("hunyuan-dense", {"hunyuan-dense.rope.scaling.type": "none", "hunyuan-dense.rope.scaling.factor": 1.0,
                           "hunyuan-dense.rope.scaling.original_context_length": 512}, {"rope_scaling": None}),
        ("apertus", {}, {"rope_scaling": {"rope_type": "default"}, "hidden_act": "xielu"}),
        ("nemotron", {"nemotron.rope.dimension_count": 2}, {"partial_rotary_factor": 0.5, "mlp_bias": False}),
        ("granitehybrid", {}, {
            "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 0, "mamba_n_heads": 4,
            "mamba_d_head": 4, "mamba_n_groups": 1, "mamba_d_state": 6, "mamba_d_conv": 4, "mamba_expand": 2,
            "position_embedding_type": None, "shared_intermediate_size": 16, "logits_scaling": 1.0}),
        ("granitehybrid", {"granitehybrid.expert_count": 8, "granitehybrid.expert_used_count": 2,
                           "granitehybrid.expert_shared_feed_forward_length": 24,
                           "granitehybrid.rope.scaling.finetuned": True},
         {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 24,
          "position_embedding_type": "rope"}),
        ("granite", {"granite.expert_shared_feed_forward_length": 16}, {"intermediate_size": 16}),
        ("lfm2", {}, {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "num_key_value_heads": 2,
                      "block_auto_adjust_ff_dim": False}),
        ("exaone4", {}, {"sliding_window": 0, "layer_types": ["full_attention"] * 2}),
        ("exaone4", {"exaone4.attention.sliding_window": 8, "exaone4.attention.sliding_window_pattern": [True, False]},
         {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
        ("qwen35", {"qwen35.rope.dimension_count": 2, "qwen35.rope.dimension_sections": [1, 0, 0, 0]},
         {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
          "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
          "partial_rotary_factor": 0.5, "attention_bias": False}),
        ("qwen35", {"qwen35.block_count": 3, "qwen35.nextn_predict_layers": 1,
                    "qwen35.attention.recurrent_layers": [False, True, False]},
         {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}),
        ("qwen35moe", {"qwen35moe.feed_forward_length": None, "qwen35moe.expert_shared_feed_forward_length": 9},
         {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 9, "intermediate_size": 0}),
        ("qwen3next", {}, {"norm_topk_prob": True, "num_experts": 8}),
    ],
)  # fmt: skip
def test_values_of_an_architecture(architecture: str, change: dict[str, Any], expected: dict[str, Any]) -> None:
    config = config_of(container(architecture, change))
    assert {name: config[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"general.architecture": "mamba"},
            r"architecture 'mamba' is not supported; supported are llama, qwen2",
        ),
        ({"general.architecture": None}, r"has no general.architecture"),
        ({"general.type": "mmproj"}, r"is of type 'mmproj', not a model"),
        ({"llama.block_count": None}, r"has no llama.block_count"),
        ({"llama.block_count": 0}, r"describes a model without layers"),
        ({"llama.block_count": "two"}, r"llama.block_count must be a whole number, not 'two'"),
        ({"llama.feed_forward_length": [16, 8]}, r"llama.feed_forward_length must be a whole number"),
        ({"llama.expert_count": 8}, r"has no llama.expert_used_count"),
        ({"llama.expert_count": 2, "llama.expert_used_count": 3}, r"describes rows that choose 3 of 2 experts"),
        ({"llama.expert_used_count": 3}, r"llama.expert_used_count is 3; this value is not supported"),
        (
            {"llama.expert_count": 2, "llama.expert_used_count": 1, "llama.expert_shared_count": 1},
            r"llama.expert_shared_count is 1; this value is not supported",
        ),
        (
            {"llama.expert_count": 2, "llama.expert_used_count": 1, "llama.expert_weights_norm": False},
            r"llama.expert_weights_norm is False; supported is True",
        ),
        ({"llama.attention.scale": 0.5}, r"llama.attention.scale is 0.5; this value is not supported"),
        ({"llama.attention.causal": False}, r"llama.attention.causal is False; supported is True"),
        ({"llama.attention.value_length": 8}, r"llama.attention.value_length is 8; supported is 4"),
        ({"llama.rope.dimension_count": 2}, r"llama.rope.dimension_count is 2; supported is 4"),
        ({"llama.rope.scaling.type": "ntk"}, r"rotary scaling 'ntk' is not supported"),
        ({"llama.rope.scaling.type": "longrope"}, r"rotary scaling 'longrope' is not supported"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 2.0},
            r"llama.rope.scaling.attn_factor is 2.0; supported is 1",
        ),
        ({"tokenizer.ggml.tokens": ["a"]}, r"the tokenizer has 1 tokens, but token_embd.weight has 3 rows"),
        ({"tokenizer.ggml.tokens": None}, r"has no tokenizer.ggml.tokens"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(GgufError, match=f"^model.gguf:? ?{words}"):
        config_of(container("llama", change))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("attention.sliding_window_pattern", [True], r"its pattern of windows has 1 entries for 2 layers"),
        ("rope.freq_base_swa", 1e4, r"gpt-oss.rope.freq_base_swa is 10000.0; supported is 500000.0"),
        ("expert_gating_func", 2, r"gpt-oss.expert_gating_func is 2; supported is 3"),
        ("expert_feed_forward_length", None, r"has no gpt-oss.expert_feed_forward_length"),
    ],
)
def test_what_gpt_oss_does_not_support_is_named(name: str, value: object, words: str) -> None:
    with pytest.raises(GgufError, match=f"^model.gguf:? ?{words}"):
        config_of(container("gpt-oss", {f"gpt-oss.{name}": value}))


@pytest.mark.parametrize(
    ("architecture", "change", "words"),
    [
        ("granite", {"rope.scaling.finetuned": False}, r"granite.rope.scaling.finetuned is False; supported is True"),
        ("granitemoe", {"expert_gating_func": 2}, r"granitemoe.expert_gating_func is 2; supported is 1"),
        ("ernie4_5-moe", {"expert_shared_count": 2, "expert_shared_feed_forward_length": 8},
         r"expert_shared_feed_forward_length is 8; supported is 24"),
        ("olmoe", {"expert_feed_forward_length": 8}, r"olmoe.expert_feed_forward_length is 8; supported is 16"),
        ("olmoe", {"attention.clamp_kqv": 8.0}, r"olmoe.attention.clamp_kqv is 8.0; this value is not supported"),
        ("mistral3", {"attention.temperature_scale": 0.1}, r"attention.temperature_scale is 0.1; supported is 0"),
        ("glm4", {"rope.dimension_count": 3}, r"glm4.rope.dimension_count is 3; supported are even numbers up to 4"),
        ("glm4", {"rope.dimension_sections": [1, 1, 0]}, r"rope.dimension_sections is \[1, 1, 0\]; this value is not"),
        ("glm4moe", {"expert_group_count": 4}, r"glm4moe.expert_group_count is 4; supported is 1"),
        ("glm4moe", {"expert_gating_func": 1}, r"glm4moe.expert_gating_func is 1; supported is 2"),
        ("glm4", {"nextn_predict_layers": 2}, r"describes a model without layers"),
        ("exaone4", {"rope.freq_base_swa": 1e4}, r"exaone4.rope.freq_base_swa is 10000.0; supported is 500000.0"),
        ("qwen35", {"ssm.state_size": None}, r"has no qwen35.ssm.state_size"),
        ("qwen35", {"ssm.inner_size": 21}, r"qwen35.ssm.inner_size 21 cannot be divided by 4 heads"),
        ("qwen35", {"ssm.time_step_rank": 0}, r"qwen35.ssm.inner_size 20 cannot be divided by 0 heads"),
        ("qwen35", {"full_attention_interval": 0}, r"full_attention_interval is 0, not a number from 1 on"),
        ("qwen35", {"attention.recurrent_layers": [True]}, r"1 of its 2 layers say whether they are recurrent"),
        ("qwen35", {"expert_count": 4}, r"qwen35.expert_count is 4; this value is not supported"),
        ("qwen35moe", {"expert_feed_forward_length": None, "feed_forward_length": None},
         r"has no qwen35moe.expert_feed_forward_length"),
        ("gemma2", {"feed_forward_length": None}, r"has no gemma2.feed_forward_length"),
    ],
)  # fmt: skip
def test_what_newer_architectures_do_not_support_is_named(
    architecture: str, change: dict[str, Any], words: str
) -> None:
    named = {f"{architecture}.{name}": value for name, value in change.items()}
    with pytest.raises(GgufError, match=f"^model.gguf.*{words}"):
        config_of(container(architecture, named))


def test_neutral_and_harmless_values_are_accepted() -> None:
    neutral = {
        "llama.vision.block_count": 27,
        "llama.mm.tokens_per_image": 256,
        "llama.expert_count": 0,
        "llama.use_parallel_residual": False,
        "llama.vocab_size": 3,
    }
    assert config_of(container("llama", neutral)) == config_of(container("llama"))


def test_rotary_factors_of_a_wrong_shape_are_refused() -> None:
    with pytest.raises(GgufError, match=r"rope_freqs.weight does not fit the rest of the file"):
        config_of(container("llama", rope_freqs__weight="F32"))


def test_missing_embedding_is_named() -> None:
    with pytest.raises(GgufError, match=r"model.gguf: tensor token_embd.weight is missing"):
        config_of(Container("model.gguf", container("llama").metadata, {}))


LATENT = {
    "attention.kv_lora_rank": 6, "rope.dimension_count": 2, "expert_feed_forward_length": 12, "expert_count": 8,
    "expert_used_count": 2, "expert_shared_count": 1, "leading_dense_block_count": 1, "expert_weights_scale": 2.5,
}  # fmt: skip
CACHED = {  # newer files describe what is cached
    "attention.head_count_kv": 1, "attention.key_length": 8, "attention.value_length": 6,
    "attention.key_length_mla": 5, "attention.value_length_mla": 3,
}  # fmt: skip
OF_HEADS = {"attention.head_count_kv": 4, "attention.key_length": 5, "attention.value_length": 3}


def latent(**change: Any) -> Container:
    values = {**LATENT, **CACHED, **{name.replace("__", "."): value for name, value in change.items()}}
    return container("deepseek2", {f"deepseek2.{name}": value for name, value in values.items()})


@pytest.mark.parametrize("lengths", [CACHED, {**dict.fromkeys(CACHED), **OF_HEADS}], ids=["cached", "of heads"])
def test_latent_attention(lengths: dict[str, Any]) -> None:
    config = config_of(latent(**{name.replace(".", "__"): value for name, value in lengths.items()}))
    expected = {
        "model_type": "deepseek_v2", "kv_lora_rank": 6, "q_lora_rank": None, "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 2, "v_head_dim": 3, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": False,
        "topk_method": "greedy", "rope_scaling": None, "intermediate_size": 16, "attention_bias": False,
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected


def test_latent_attention_with_sigmoids_and_groups() -> None:
    config = config_of(latent(expert_gating_func=2, expert_group_count=4, expert_group_used_count=2,
                              expert_weights_norm=True, attention__q_lora_rank=7))  # fmt: skip
    assert config["model_type"] == "deepseek_v3" and config["topk_method"] == "noaux_tc" and config["norm_topk_prob"]
    assert (config["n_group"], config["topk_group"], config["q_lora_rank"]) == (4, 2, 7)
    groups = config_of(latent(expert_group_count=4, expert_group_used_count=2))
    assert groups["model_type"] == "deepseek_v2" and groups["topk_method"] == "group_limited_greedy"


def test_growth_of_queries_and_keys_with_yarn() -> None:
    yarn: dict[str, Any] = {"rope__scaling__type": "yarn", "rope__scaling__factor": 40.0}
    scaling = config_of(latent(**yarn, rope__scaling__yarn_log_multiplier=0.07070000171661377))["rope_scaling"]
    assert scaling["mscale_all_dim"] == 0.707 and scaling["attention_factor"] == 1.0 and scaling["factor"] == 40.0
    assert "mscale_all_dim" not in config_of(latent(**yarn))["rope_scaling"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention__key_length": 9}, "attention.key_length is 9; supported is 8"),
        ({"attention__value_length": 5}, "attention.value_length is 5; supported is 6"),
        ({"attention__head_count_kv": 2}, "head_count_kv is 2; supported is 4"),
        ({"rope__dimension_count": 5, "attention__key_length": 11}, "rotates 5 of 5 dimensions"),
        ({"attention__kv_lora_rank": None}, "kv_lora_rank"),
        ({"expert_gating_func": 3}, "expert_gating_func 3 is not supported"),
        ({"attention__temperature_scale": 0.1}, "temperature_scale is 0.1"),
    ],
)
def test_latent_attention_that_is_not_supported(change: dict[str, Any], words: str) -> None:
    with pytest.raises(GgufError, match=words):
        config_of(latent(**change))
