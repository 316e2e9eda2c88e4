"""The models to measure, with the values of their config.json, and the sizes of the measurements.

The shapes are real, so that a computed lower bound of a step's time holds for a real model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]

LLAMA_3_2: Config = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": 128, "num_key_value_heads": 8,
    "intermediate_size": 8192, "vocab_size": 128_256, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0, "tie_word_embeddings": True, "bos_token_id": 128_000, "eos_token_id": 128_001,
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
    "rope_scaling": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
QWEN_3: Config = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0, "tie_word_embeddings": True, "bos_token_id": 151_643, "eos_token_id": 151_645,
    "hidden_act": "silu", "attention_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip
CONFIGS: Mapping[str, Config] = {
    "llama-3.2-3b": {**LLAMA_3_2, "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24},
    "llama-3.2-1b": {
        **LLAMA_3_2, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64,
    },
    "llama-3.1-8b": {
        **LLAMA_3_2, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "tie_word_embeddings": False,
        "rope_scaling": {**LLAMA_3_2["rope_scaling"], "factor": 8.0},
    },
    "qwen3-4b": {**QWEN_3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
    "qwen3-0.6b": {
        **QWEN_3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_size": 1152,
        "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "vocab_size": 262_144, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "query_pre_attn_scalar": 256,
        "sliding_window": 512, "sliding_window_pattern": 6, "tie_word_embeddings": True, "bos_token_id": 2,
        "eos_token_id": 1, "pad_token_id": 0, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
        "torch_dtype": "bfloat16",
    },
    "qwen3-30b-a3b": {
        **QWEN_3, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_key_value_heads": 4, "tie_word_embeddings": False,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 201_088, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
        "sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4, "attention_bias": True,
        "tie_word_embeddings": False, "bos_token_id": 199_998, "eos_token_id": 200_002, "pad_token_id": 199_999,
        "hidden_act": "silu", "swiglu_limit": 7.0, "torch_dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096,
        },
    },
    "tiny": {
        **LLAMA_3_2, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 16_384,
        "bos_token_id": 0, "eos_token_id": 2,
    },
}  # fmt: skip
DEFAULT_MODELS = ("llama-3.2-3b", "qwen3-4b", "gemma-3-1b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of all measurements: FULL on a GPU, SMALL to test the benchmark itself."""

    copy_bytes: int
    gemm: int  # rows, columns and depth of a square matrix product
    batches: tuple[int, ...]
    context: int
    steps: int  # steps of a timed round
    rounds: int  # timed rounds; the first round is not counted
    prompt: int
    attention: tuple[int, int]  # (number of sequences, number of keys of each sequence)
    turn: tuple[int, int]  # (tokens of a prompt chunk, tokens of the prefix before the chunk)
    uneven: tuple[int, int, int]  # (short sequences, keys of each short sequence, keys of the long one)
    rows: tuple[int, ...]  # numbers of rows with which single kernels are measured
    sweep: tuple[int, ...]  # numbers of rows for which tiles are measured
    idle_batch: int
    host_batches: tuple[int, int]
    layers: int  # layers of a real model that the checks use
    check: int  # prompt tokens in the checks
    new: int  # output tokens in the checks
    length_scale: float
    rate_scale: float
    workloads: str


FULL = Sizes(
    copy_bytes=4 << 30, gemm=8192, batches=(1, 8, 32, 64, 128, 256), context=1024, steps=32, rounds=4, prompt=8192,
    attention=(64, 4096), turn=(64, 100_000), uneven=(63, 500, 32_768),
    rows=(1, 32, 256, 8192), sweep=(1, 8, 16, 32, 64, 96, 128, 192, 256, 512, 2048, 8192),
    idle_batch=32, host_batches=(32, 256), layers=6, check=700, new=24,
    length_scale=1.0, rate_scale=1.0, workloads="all",
)  # fmt: skip
SMALL = Sizes(
    copy_bytes=4 << 20, gemm=128, batches=(1, 4), context=40, steps=2, rounds=2, prompt=96,
    attention=(4, 64), turn=(8, 200), uneven=(3, 20, 200),
    rows=(1, 16), sweep=(1, 16), idle_batch=4, host_batches=(2, 4), layers=2, check=70, new=6,
    length_scale=0.02, rate_scale=100.0, workloads="paged_attention,offline",
)  # fmt: skip
