"""Tiny random checkpoints of every family, made by transformers itself, with tokenizers to match.

Weights have a large standard deviation, so that logits are far apart and greedy text depends on the whole context.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers  # imports the code of a family when that is first used
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCAB, EOS, WINDOW = 512, 2, 16
TEXT = (
    "The river runs past the mill and the old stone bridge. A small boat waits there for the evening light.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))  # 5",
    "Größe, naïve, façade, señor, Ærø: letters of two bytes. Привет, мир! Καλημέρα κόσμε.",
    "日本語の文章と、中文句子。한국어 문장도 있다. 🙂🚀👩‍👩‍👧 and back to plain words again.",
)
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_tokenizer(vocab: int = VOCAB) -> "PreTrainedTokenizerFast":
    """BPE over bytes, like the tokenizers of Llama 3 and Qwen: a token may be part of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXT, trainer)
    return _wrap(tokenizer, vocab)


def byte_fallback_tokenizer(vocab: int = VOCAB) -> "PreTrainedTokenizerFast":
    """BPE over characters with "▁" for spaces and <0xNN> for bytes of unknown characters, like Gemma's tokenizer.

    It puts a beginning-of-text token before plain text, and its chat template adds one, too, as Gemma's do.
    """
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(
        TEXT[:2], trainers.BpeTrainer(vocab_size=vocab - 256, special_tokens=[*SPECIAL, "<unk>"], show_progress=False)
    )
    state = json.loads(trained.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    vocabulary = {token: i for i, token in enumerate([*tokens[:4], *fallback, *tokens[4:]])}
    merges = [tuple(pair) for pair in state["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 0)]
    )  # fmt: skip
    return _wrap(tokenizer, vocab, chat="{{ bos_token }}" + CHAT)


def _wrap(tokenizer: Tokenizer, vocab: int, chat: str = CHAT) -> "PreTrainedTokenizerFast":
    """Fills the vocabulary up to `vocab` with words, so that every id that a model can sample has a text."""
    tokenizer.add_tokens([f" word{i}" for i in range(vocab - tokenizer.get_vocab_size())])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[2], bos_token=SPECIAL[0], pad_token=SPECIAL[0],
        additional_special_tokens=[SPECIAL[1]], chat_template=chat, clean_up_tokenization_spaces=False,
    )  # fmt: skip


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
    "initializer_range": 0.2, "eos_token_id": EOS, "bos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5], "long_factor": [4.0] * 6,
    "original_max_position_embeddings": 512,
}  # fmt: skip
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def _llama(tied: bool) -> "PreTrainedModel":
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied, rope_parameters=LLAMA3_ROPE)
    )


def _llama_biased() -> "PreTrainedModel":
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))


def _mistral() -> "PreTrainedModel":
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=WINDOW))


def _qwen2() -> "PreTrainedModel":
    sizes = {**SIZES, "head_dim": 16}  # hidden / heads, because this family has no setting head_dim
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**sizes, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    )


def _qwen3(tied: bool) -> "PreTrainedModel":
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, tie_word_embeddings=tied))


def _gemma2() -> "PreTrainedModel":
    caps = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 20.0}
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, **caps, sliding_window=WINDOW, query_pre_attn_scalar=24)
    )


def _gemma3() -> "PreTrainedModel":
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {**SIZES, "hidden_size": 96}  # the scale of the embedding, its square root, is no round number
    config = transformers.Gemma3TextConfig(
        **sizes, sliding_window=WINDOW, layer_types=types, rope_parameters=GEMMA_ROPE, query_pre_attn_scalar=24
    )
    return transformers.Gemma3ForCausalLM(config)


GEMMA4_SIZES: dict[str, Any] = {
    **{name: size for name, size in SIZES.items() if name not in ("num_hidden_layers", "initializer_range")},
    "hidden_size": 96, "sliding_window": WINDOW, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "global_head_dim": 32, "hidden_size_per_layer_input": 0, "initializer_range": 0.2,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"


def _gemma4(**more: Any) -> "PreTrainedModel":
    """A model whose attention scores are not scaled, but small enough that rounding errors are not amplified."""
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**{**GEMMA4_SIZES, **more}))
    for name, weight in model.named_parameters():
        if name.endswith("q_norm.weight"):
            weight.data.uniform_(0.2, 0.4)
    for name, scale in model.named_buffers():
        if name.endswith("layer_scalar"):
            scale.fill_(0.5 + 0.25 * (int(name.split(".")[2]) % 3))
    return model


def _gemma4_small() -> "PreTrainedModel":
    """A model like Gemma 4 E2B: per-layer embeddings, and three last layers with shared K/V and wider MLPs."""
    return _gemma4(
        num_hidden_layers=6, layer_types=[SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL], num_kv_shared_layers=3,
        use_double_wide_mlp=True, hidden_size_per_layer_input=24, vocab_size_per_layer_input=VOCAB,
        final_logit_softcapping=30.0,
    )  # fmt: skip


def _gemma4_inputs() -> "PreTrainedModel":
    """Per-layer embeddings, and no layer that shares the K/V of others, so that it can be cut between any layers."""
    return _gemma4(
        num_hidden_layers=4, layer_types=[SLIDING, FULL, SLIDING, FULL], num_kv_shared_layers=0,
        hidden_size_per_layer_input=24, vocab_size_per_layer_input=VOCAB,
    )  # fmt: skip


def _gemma4_dense() -> "PreTrainedModel":
    """A model like Gemma 4 31B: full layers have one K/V head for all query heads, and use projected keys as values."""
    return _gemma4(
        num_hidden_layers=4, layer_types=[SLIDING, FULL, SLIDING, FULL], attention_k_eq_v=True,
        num_global_key_value_heads=1, final_logit_softcapping=30.0,
    )  # fmt: skip


def _gemma4_moe() -> "PreTrainedModel":
    experts = {"num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 48, "enable_moe_block": True}
    model = _gemma4(
        num_hidden_layers=3, layer_types=[SLIDING, SLIDING, FULL], attention_k_eq_v=True,
        num_global_key_value_heads=1, **experts,
    )  # fmt: skip
    for name, weight in model.named_parameters():
        if name.endswith(("router.scale", "per_expert_scale")):
            weight.data.uniform_(0.5, 2.0)
    return model


def _phi3(**more: Any) -> "PreTrainedModel":
    """A model that rotates three quarters of each head."""
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}  # hidden / heads
    part = {"partial_rotary_factor": 0.75}
    rope = {"rope_theta": 10_000.0, **part, **more}  # transformers 5.0 reads the factor only from rope_parameters
    return transformers.Phi3ForCausalLM(
        transformers.Phi3Config(
            **sizes, **part, sliding_window=WINDOW, original_max_position_embeddings=512, rope_parameters=rope
        )
    )


def _smollm3() -> "PreTrainedModel":
    return transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**SIZES, no_rope_layer_interval=2))


def _qwen2_moe() -> "PreTrainedModel":
    """A model with a shared expert, windows in its first and third layers, and router weights whose sum is not 1."""
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96}
    config = transformers.Qwen2MoeConfig(
        **{**SIZES, **experts, "head_dim": 16}, shared_expert_intermediate_size=128, use_sliding_window=True,
        sliding_window=WINDOW, norm_topk_prob=False,
    )  # fmt: skip
    return transformers.Qwen2MoeForCausalLM(config)


def _qwen3_moe(**more: Any) -> "PreTrainedModel":
    """A model whose second layer has no experts."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "mlp_only_layers": [1]}
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**{**SIZES, **experts, "norm_topk_prob": True, **more})
    )


SIGMOID_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 2,
    "routed_scaling_factor": 1.7, "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip


def _glm4_moe() -> "PreTrainedModel":
    """A model without experts in the first layer; router scores are sigmoids, and half of each head is rotated."""
    return transformers.Glm4MoeForCausalLM(
        transformers.Glm4MoeConfig(**SIZES, **SIGMOID_EXPERTS, attention_bias=True, use_qk_norm=True)
    )


LATENT: dict[str, Any] = {
    **{name: size for name, size in SIZES.items() if name != "head_dim"}, "num_key_value_heads": 4,
    "kv_lora_rank": 48, "q_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20,
}  # fmt: skip
LATENT_YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.5,
}  # fmt: skip


def _deepseek_v2(**more: Any) -> "PreTrainedModel":
    """A model of DeepSeek-V2-Lite's kind: queries are made of the hidden state, and the first layer has no experts."""
    experts = {**SIGMOID_EXPERTS, "norm_topk_prob": False}
    settings = {**LATENT, **experts, "q_lora_rank": None, "rope_parameters": LATENT_YARN, **more}
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**settings))


def _deepseek_v2_groups() -> "PreTrainedModel":
    """A model that chooses groups of experts by their best expert, and whose projections have biases."""
    groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": 40}
    return _deepseek_v2(**groups, attention_bias=True)


def _deepseek_v3() -> "PreTrainedModel":
    groups = {"n_group": 4, "topk_group": 2}
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**LATENT, **SIGMOID_EXPERTS, **groups, rope_parameters=LATENT_YARN)
    )


def _glm4_moe_lite() -> "PreTrainedModel":
    """A model whose second layer has no experts, and whose values are wider than its keys."""
    types = ["sparse", "dense", "sparse"]
    sizes = {**LATENT, **SIGMOID_EXPERTS, "rms_norm_eps": 1e-2, "v_head_dim": 56}
    del sizes["first_k_dense_replace"]
    return transformers.Glm4MoeLiteForCausalLM(transformers.Glm4MoeLiteConfig(**sizes, mlp_layer_types=types))


def _mistral4() -> "PreTrainedModel":
    """A model whose queries are scaled up from position 32 on, and whose router adds up two scores of each group."""
    rope = {**LATENT_YARN, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.3}
    groups = {"n_group": 2, "topk_group": 1}
    return transformers.Mistral4ForCausalLM(
        transformers.Mistral4Config(**LATENT, **SIGMOID_EXPERTS, **groups, rope_parameters=rope)
    )


def _minicpm3() -> "PreTrainedModel":
    """A model that rotates dimensions half of the rotated part apart, with factors of sums and logits."""
    return transformers.MiniCPM3ForCausalLM(
        transformers.MiniCPM3Config(**{**LATENT, "tie_word_embeddings": False}, scale_emb=3, dim_model_base=40)
    )


def _youtu() -> "PreTrainedModel":
    return transformers.YoutuForCausalLM(transformers.YoutuConfig(**{**LATENT, "q_lora_rank": None}))


def _dots1() -> "PreTrainedModel":
    """A model whose last layer has a window."""
    return transformers.Dots1ForCausalLM(
        transformers.Dots1Config(**SIZES, **SIGMOID_EXPERTS, sliding_window=WINDOW, max_window_layers=2)
    )


def _minimax_m2() -> "PreTrainedModel":
    """A model that rotates half of each head and normalizes all heads together."""
    sizes = {**SIZES, "intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 3}
    return transformers.MiniMaxM2ForCausalLM(transformers.MiniMaxM2Config(**sizes, rotary_dim=SIZES["head_dim"] // 2))


def _lfm2_moe() -> "PreTrainedModel":
    """A model whose first layer has no experts."""
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "num_dense_layers": 1}
    types = {"layer_types": ["conv", "full_attention", "conv"]}
    return transformers.Lfm2MoeForCausalLM(
        transformers.Lfm2MoeConfig(**OF_HIDDEN, **experts, **types, routed_scaling_factor=1.3)
    )


def _mixtral() -> "PreTrainedModel":
    sizes = {**SIZES, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, sliding_window=WINDOW))


def _gpt_oss() -> "PreTrainedModel":
    """A model whose positions were extended from 64 by YaRN."""
    sizes = {**SIZES, "intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 4}
    yarn = {"factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "original_max_position_embeddings": 64, **yarn}
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**sizes, sliding_window=WINDOW, rope_parameters=rope)
    )


def _olmoe() -> "PreTrainedModel":
    sizes = {**SIZES, "head_dim": 16, "intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 3}
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**sizes))


def _granite_moe() -> "PreTrainedModel":
    sizes = {**SIZES, "head_dim": 16, "intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 3}
    factors = {"embedding_multiplier": 6.0, "logits_scaling": 0.5, "residual_multiplier": 0.7}
    return transformers.GraniteMoeForCausalLM(
        transformers.GraniteMoeConfig(**sizes, **factors, attention_multiplier=0.2)
    )


MAMBA: dict[str, Any] = {
    **SIZES, "head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_expand": 2,
    "shared_intermediate_size": 80, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}  # fmt: skip


def _granite_hybrid(**more: Any) -> "PreTrainedModel":
    return transformers.GraniteMoeHybridForCausalLM(
        transformers.GraniteMoeHybridConfig(**{**MAMBA, "num_local_experts": 0, **more})
    )


def _granite_hybrid_moe() -> "PreTrainedModel":
    """A model that rotates queries and keys, and has a shared expert beside the routed experts."""
    experts = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 96}
    return _granite_hybrid(**experts, position_embedding_type="rope")


def _olmo2() -> "PreTrainedModel":
    return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**{**SIZES, "hidden_size": 96}))


def _olmo3() -> "PreTrainedModel":
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    rope = {
        kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in zip(types[1:], (1e4, 1e5), strict=True)
    }
    sizes = {**SIZES, "hidden_size": 128}
    return transformers.Olmo3ForCausalLM(
        transformers.Olmo3Config(**sizes, sliding_window=WINDOW, layer_types=types, rope_parameters=rope)
    )


def _glm4() -> "PreTrainedModel":
    """A model that rotates pairs of neighbouring dimensions in half of each head."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    return transformers.Glm4ForCausalLM(transformers.Glm4Config(**SIZES, attention_bias=True, rope_parameters=rope))


def _granite() -> "PreTrainedModel":
    factors = {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.4}
    return transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**{**SIZES, "hidden_size": 128}, **factors, attention_multiplier=0.3)
    )


def _ministral3() -> "PreTrainedModel":
    """A model whose queries are scaled up from position 32 on."""
    yarn = {"factor": 16.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 1.0}
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.3}
    sizes = {**SIZES, "max_position_embeddings": 512}
    return transformers.Ministral3ForCausalLM(transformers.Ministral3Config(**sizes, rope_parameters={**yarn, **rope}))


def _seed_oss() -> "PreTrainedModel":
    return transformers.SeedOssForCausalLM(
        transformers.SeedOssConfig(**SIZES, attention_bias=True, attention_out_bias=True)
    )


def _ernie() -> "PreTrainedModel":
    return transformers.Ernie4_5ForCausalLM(transformers.Ernie4_5Config(**SIZES, use_bias=True))


def _exaone4() -> "PreTrainedModel":
    sizes = {**SIZES, "head_dim": 16}  # hidden size / heads
    return transformers.Exaone4ForCausalLM(
        transformers.Exaone4Config(**sizes, sliding_window=WINDOW, sliding_window_pattern=2)
    )


OF_HIDDEN = {**SIZES, "head_dim": 16}  # hidden size / heads: these families have no head_dim of their own


def _cohere() -> "PreTrainedModel":
    return transformers.CohereForCausalLM(transformers.CohereConfig(**OF_HIDDEN, attention_bias=True, logit_scale=0.5))


def _cohere2() -> "PreTrainedModel":
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return transformers.Cohere2ForCausalLM(
        transformers.Cohere2Config(**OF_HIDDEN, sliding_window=WINDOW, layer_types=types, logit_scale=0.5)
    )


def _starcoder2() -> "PreTrainedModel":
    return transformers.Starcoder2ForCausalLM(transformers.Starcoder2Config(**OF_HIDDEN, sliding_window=WINDOW))


def _hunyuan() -> "PreTrainedModel":
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0}
    return transformers.HunYuanDenseV1ForCausalLM(transformers.HunYuanDenseV1Config(**SIZES, rope_parameters=rope))


def _apertus() -> "PreTrainedModel":
    rope = {**LLAMA3_ROPE, "rope_theta": 100_000.0}
    return transformers.ApertusForCausalLM(
        transformers.ApertusConfig(**OF_HIDDEN, rope_parameters=rope, dtype="float32")
    )


def _nemotron() -> "PreTrainedModel":
    """A model that rotates half of each head."""
    return transformers.NemotronForCausalLM(
        transformers.NemotronConfig(**{**SIZES, "initializer_range": 0.15}, mlp_bias=True)
    )


def _lfm2() -> "PreTrainedModel":
    """A model of short convolutions and one attention. Its feed-forward is 176 wide: 2 / 3 * 200 * 1.3, rounded up."""
    width = {"intermediate_size": 200, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 8}
    types = {"layer_types": ["conv", "full_attention", "conv"]}
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**{**OF_HIDDEN, **width}, **types))


def _arcee() -> "PreTrainedModel":
    return transformers.ArceeForCausalLM(transformers.ArceeConfig(**SIZES))


def _ernie_moe() -> "PreTrainedModel":
    """A model with experts in its second layer only, which are chosen by their softmax plus a bias."""
    experts = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 48, "moe_num_shared_experts": 2}
    layers = {"moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_layer_interval": 2}
    return transformers.Ernie4_5_MoeForCausalLM(transformers.Ernie4_5_MoeConfig(**OF_HIDDEN, **experts, **layers))


def _hunyuan_moe() -> "PreTrainedModel":
    sizes = {**SIZES, "intermediate_size": 96, "num_experts": 6, "moe_topk": 3}
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0}
    return transformers.HunYuanMoEV1ForCausalLM(transformers.HunYuanMoEV1Config(**sizes, rope_parameters=rope))


NAMED_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "num_shared_experts": 2}


def _exaone_moe() -> "PreTrainedModel":
    """A model whose second layer has a window, and rotary embeddings, which the others lack."""
    types = {"layer_types": [FULL, SLIDING, FULL], "sliding_window": WINDOW, "first_k_dense_replace": 2}
    return transformers.ExaoneMoeForCausalLM(
        transformers.ExaoneMoeConfig(**OF_HIDDEN, **NAMED_EXPERTS, **types, routed_scaling_factor=1.7)
    )


def _granite_moe_shared() -> "PreTrainedModel":
    sizes = {**OF_HIDDEN, "intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 3}
    factors = {"embedding_multiplier": 6.0, "logits_scaling": 0.5, "residual_multiplier": 0.7}
    return transformers.GraniteMoeSharedForCausalLM(
        transformers.GraniteMoeSharedConfig(**sizes, **factors, attention_multiplier=0.2, shared_intermediate_size=80)
    )


def _cohere2_moe(**more: Any) -> "PreTrainedModel":
    """A model whose first layer has no experts and no window, but rotary embeddings."""
    sizes = {**SIZES, "intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 2}
    first = {"prefix_dense_intermediate_size": 96, "first_k_dense_replace": 1, "prefix_dense_sliding_window_pattern": 1}
    return transformers.Cohere2MoeForCausalLM(
        transformers.Cohere2MoeConfig(
            **sizes, **first, **{"sliding_window": WINDOW, "sliding_window_pattern": 2, "logit_scale": 0.5, **more}
        )
    )


def _flex_olmo() -> "PreTrainedModel":
    sizes = {**OF_HIDDEN, "intermediate_size": 96, "num_experts": 6, "num_experts_per_tok": 3}
    return transformers.FlexOlmoForCausalLM(transformers.FlexOlmoConfig(**sizes))


def _afmoe() -> "PreTrainedModel":
    """A model with gates of attention that have a linear of their own. Only layers with a window are rotated."""
    types = {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": WINDOW, "num_dense_layers": 1}
    model = transformers.AfmoeForCausalLM(
        transformers.AfmoeConfig(**SIZES, **NAMED_EXPERTS, **types, route_scale=1.7, mup_enabled=True)
    )
    for name, weight in model.named_parameters():
        if name.endswith("router.gate.weight"):
            weight.data.normal_(0, 0.2)
    return model


def _mellum() -> "PreTrainedModel":
    """A model with other rotary settings in layers with a window, and a layer without experts between others."""
    rope = {FULL: {"rope_type": "default", "rope_theta": 1e5}, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}
    types = {"layer_types": [SLIDING, FULL, SLIDING], "mlp_layer_types": ["sparse", "dense", "sparse"]}
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "sliding_window": WINDOW}
    return transformers.MellumForCausalLM(transformers.MellumConfig(**SIZES, **types, **experts, rope_parameters=rope))


def _hy3() -> "PreTrainedModel":
    return transformers.HYV3ForCausalLM(transformers.HYV3Config(**SIZES, **NAMED_EXPERTS, router_scaling_factor=1.7))


def _solar_open() -> "PreTrainedModel":
    experts = {name: value for name, value in SIGMOID_EXPERTS.items() if name != "first_k_dense_replace"}
    sizes = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
    return transformers.SolarOpenForCausalLM(transformers.SolarOpenConfig(**sizes, **experts))


def _vaultgemma() -> "PreTrainedModel":
    caps = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 20.0}
    return transformers.VaultGemmaForCausalLM(
        transformers.VaultGemmaConfig(**SIZES, **caps, sliding_window=WINDOW, query_pre_attn_scalar=24)
    )


def _glm() -> "PreTrainedModel":
    """A model that rotates pairs of neighbouring dimensions in half of each head."""
    return transformers.GlmForCausalLM(transformers.GlmConfig(**SIZES))


def _helium() -> "PreTrainedModel":
    return transformers.HeliumForCausalLM(transformers.HeliumConfig(**OF_HIDDEN, attention_bias=True))


def _cwm() -> "PreTrainedModel":
    return transformers.CwmForCausalLM(
        transformers.CwmConfig(**SIZES, sliding_window=WINDOW, rope_parameters=LLAMA3_ROPE)
    )


def _ministral() -> "PreTrainedModel":
    types = {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": WINDOW}
    return transformers.MinistralForCausalLM(transformers.MinistralConfig(**SIZES, **types))


def _clova() -> "PreTrainedModel":
    factors = {"embedding_multiplier": 3.0, "logits_scaling": 0.25, "residual_multiplier": 0.4}
    return transformers.HyperCLOVAXForCausalLM(transformers.HyperCLOVAXConfig(**SIZES, **factors))


def _stablelm(**more: Any) -> "PreTrainedModel":
    """A model that rotates a quarter of each head."""
    return transformers.StableLmForCausalLM(transformers.StableLmConfig(**OF_HIDDEN, use_qkv_bias=True, **more))


def _as_llama(config: Any) -> "PreTrainedModel":
    """A model of a family that transformers computes with the classes of Llama."""
    return cast("PreTrainedModel", transformers.AutoModelForCausalLM.from_config(config))


def _nemotron_h(pattern: str) -> "PreTrainedModel":
    """A model whose layers are one block each: M is Mamba-2, * attention, - an MLP, and E a mixture of experts.

    transformers clamps the steps of Mamba-2 from below by `time_step_min`, which is therefore almost zero here.
    """
    sizes = {name: size for name, size in SIZES.items() if name != "num_hidden_layers"}
    mamba = {"mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 24, "time_step_min": 1e-9}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    model = transformers.NemotronHForCausalLM(
        transformers.NemotronHConfig(
            **sizes, **mamba, **experts, moe_shared_expert_intermediate_size=80, routed_scaling_factor=1.7,
            hybrid_override_pattern=pattern,
        )
    )  # fmt: skip
    for name, weight in model.named_parameters():
        if name.endswith(".dt_bias"):
            weight.data.zero_()
    return model


DELTA: dict[str, Any] = {
    **SIZES, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    "initializer_range": 0.1,  # with larger weights, norms of small outputs would amplify rounding errors
}  # fmt: skip
DELTA_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96}


def _qwen3_5() -> "PreTrainedModel":
    """A model whose last layer is recurrent, with rotary settings that have sections for images."""
    rope = {**DELTA["rope_parameters"], "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    return transformers.Qwen3_5ForCausalLM(
        transformers.Qwen3_5TextConfig(**{**DELTA, "rope_parameters": rope, "attention_bias": True})
    )


def _qwen3_5_moe() -> "PreTrainedModel":
    sizes = {name: size for name, size in DELTA.items() if name not in ("layer_types", "intermediate_size")}
    experts = {**DELTA_EXPERTS, "shared_expert_intermediate_size": 128, "full_attention_interval": 2}
    rope = {**sizes["rope_parameters"], "mrope_section": [2, 1, 1]}
    return transformers.Qwen3_5MoeForCausalLM(
        transformers.Qwen3_5MoeTextConfig(**{**sizes, **experts, "rope_parameters": rope})
    )


def _qwen3_next() -> "PreTrainedModel":
    """A model whose second layer has no experts."""
    experts = {**DELTA_EXPERTS, "shared_expert_intermediate_size": 128, "mlp_only_layers": [1]}
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**{**DELTA, **experts}))


@dataclass(frozen=True)
class Kind:
    model: Callable[[], "PreTrainedModel"]
    tokenizer: Callable[[], "PreTrainedTokenizerFast"] = byte_level_tokenizer


KINDS = {
    "llama": Kind(lambda: _llama(tied=False)),
    "llama-tied": Kind(lambda: _llama(tied=True)),
    "llama-biased": Kind(_llama_biased),
    "mistral": Kind(_mistral),
    "qwen2": Kind(_qwen2),
    "qwen3": Kind(lambda: _qwen3(tied=False)),
    "qwen3-tied": Kind(lambda: _qwen3(tied=True)),
    "gemma2": Kind(_gemma2, byte_fallback_tokenizer),
    "gemma3": Kind(_gemma3, byte_fallback_tokenizer),
    "gemma4": Kind(_gemma4_small, byte_fallback_tokenizer),
    "gemma4-inputs": Kind(_gemma4_inputs, byte_fallback_tokenizer),
    "gemma4-dense": Kind(_gemma4_dense, byte_fallback_tokenizer),
    "gemma4-moe": Kind(_gemma4_moe, byte_fallback_tokenizer),
    "phi3": Kind(lambda: _phi3(rope_type="default")),
    "phi3-longrope": Kind(lambda: _phi3(**LONG_ROPE)),
    "smollm3": Kind(_smollm3),
    "qwen2-moe": Kind(_qwen2_moe),
    "qwen3-moe": Kind(_qwen3_moe),
    "mixtral": Kind(_mixtral),
    "gpt-oss": Kind(_gpt_oss),
    "olmo2": Kind(_olmo2),
    "olmo3": Kind(_olmo3),
    "glm4": Kind(_glm4),
    "granite": Kind(_granite),
    "ministral3": Kind(_ministral3),
    "seed-oss": Kind(_seed_oss),
    "ernie4_5": Kind(_ernie),
    "exaone4": Kind(_exaone4),
    "cohere": Kind(_cohere),
    "cohere2": Kind(_cohere2),
    "starcoder2": Kind(_starcoder2),
    "hunyuan": Kind(_hunyuan),
    "apertus": Kind(_apertus),
    "nemotron": Kind(_nemotron),
    "arcee": Kind(_arcee),
    "lfm2": Kind(_lfm2),
    "lfm2-moe": Kind(_lfm2_moe),
    "glm4-moe": Kind(_glm4_moe),
    "dots1": Kind(_dots1),
    "deepseek-v2": Kind(_deepseek_v2),
    "deepseek-v2-groups": Kind(_deepseek_v2_groups),
    "deepseek-v3": Kind(_deepseek_v3),
    "glm4-moe-lite": Kind(_glm4_moe_lite),
    "mistral4": Kind(_mistral4),
    "minicpm3": Kind(_minicpm3),
    "youtu": Kind(_youtu),
    "minimax-m2": Kind(_minimax_m2),
    "olmoe": Kind(_olmoe),
    "granite-moe": Kind(_granite_moe),
    "granite-hybrid": Kind(_granite_hybrid),
    "granite-hybrid-moe": Kind(_granite_hybrid_moe),
    "ernie4_5-moe": Kind(_ernie_moe),
    "hunyuan-moe": Kind(_hunyuan_moe),
    "exaone-moe": Kind(_exaone_moe),
    "granite-moe-shared": Kind(_granite_moe_shared),
    "cohere2-moe": Kind(_cohere2_moe),
    "cohere2-moe-sigmoid": Kind(
        lambda: _cohere2_moe(expert_selection_fn="sigmoid", shared_expert_combination_strategy="sum", rms_norm_eps=1e-5)
    ),
    "flex-olmo": Kind(_flex_olmo),
    "afmoe": Kind(_afmoe),
    "mellum": Kind(_mellum),
    "hy3": Kind(_hy3),
    "solar-open": Kind(_solar_open),
    "gemma": Kind(lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**SIZES)), byte_fallback_tokenizer),
    "vaultgemma": Kind(_vaultgemma, byte_fallback_tokenizer),
    "glm": Kind(_glm),
    "helium": Kind(_helium),
    "internlm3": Kind(lambda: _as_llama(transformers.InternLM3Config(**SIZES, attention_bias=True, mlp_bias=True))),
    "iquestcoder": Kind(lambda: _as_llama(transformers.IQuestCoderConfig(**SIZES))),
    "cwm": Kind(_cwm),
    "ministral": Kind(_ministral),
    "hyperclovax": Kind(_clova),
    "stablelm": Kind(_stablelm),
    "stablelm-parallel": Kind(lambda: _stablelm(use_parallel_residual=True)),
    "jais2": Kind(lambda: transformers.Jais2ForCausalLM(transformers.Jais2Config(**SIZES))),
    "nemotron-h": Kind(lambda: _nemotron_h("M-MM*-M")),
    "nemotron-h-moe": Kind(lambda: _nemotron_h("ME*EM*")),
    "qwen3_5": Kind(_qwen3_5),
    "qwen3_5-moe": Kind(_qwen3_5_moe),
    "qwen3-next": Kind(_qwen3_next),
}


SPARSE = ("qwen2-moe", "qwen3-moe", "mixtral", "gpt-oss", "olmoe", "granite-moe")  # kinds with experts
GATED_DELTA = ("qwen3_5", "qwen3_5-moe", "qwen3-next")
HYBRID = (
    *GATED_DELTA,
    "lfm2",
    "nemotron-h",
    "nemotron-h-moe",
    "granite-hybrid",
    "granite-hybrid-moe",
)  # kinds with recurrent layers
GEMMA4 = ("gemma4", "gemma4-dense", "gemma4-moe")


def build(kind: str, seed: int = 0) -> "PreTrainedModel":
    """Returns a float32 model of that kind, with norms and biases that differ from their initial values."""
    torch.manual_seed(seed)
    model = KINDS[kind].model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("bias", ".D", ".A_log")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if "alpha_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.5)
            if name.endswith("sinks"):
                parameter.add_(torch.randn_like(parameter))
            # with small norms, the scaled embedding outweighs the layers, and a tied head predicts the input token
            if "post_" in name and kind.startswith("gemma"):
                parameter.add_(8.0)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    return cast("PreTrainedModel", model.eval())


def save(kind: str, folder: Path, *, dtype: torch.dtype = torch.float32, shard: str = "50GB", seed: int = 0) -> Path:
    """Writes a checkpoint folder of that kind. `shard`: maximum size of a file ("200KB" gives several files)."""
    model = torch.nn.Module.to(build(kind, seed), dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    KINDS[kind].tokenizer().save_pretrained(folder)
    return folder


class Checkpoints:
    """Makes each checkpoint once, on first use."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, kind: str, **options: Any) -> Path:
        folder = self.root / "-".join([kind, *(f"{name}={value}" for name, value in sorted(options.items()))])
        return folder if folder.exists() else save(kind, folder, **options)

    def __iter__(self) -> Iterator[str]:
        return iter(KINDS)
