from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer, models

from bench import checkpoints
from bench.peers import random_gguf
from bench.peers.random_gguf import BLOCKS, DEVIATION, tensors
from shared.gguf.translated import translated
from tests.worker.models.harness import all_logits, cache_for, decoder_of

VOCABULARY = {"a": 0, "b": 1, "<|im_end|>": 2, "ab": 3}
CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 32, "head_dim": 32,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip


@pytest.mark.parametrize("kind", BLOCKS, ids=str)
def test_blocks_are_weights_of_mean_zero_and_the_usual_deviation(kind: Type) -> None:
    numbers, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = BLOCKS[kind](np.random.default_rng(0), 64 * 256 // numbers, DEVIATION)
    assert blocks.shape[1] == nbytes
    weights = gguf.dequantize(blocks, kind)
    assert weights.size == 64 * 256
    assert abs(weights.mean()) < 0.15 * DEVIATION  # codes of Q4_0 are -8 to 7, so the mean is not exactly 0
    assert weights.std() == pytest.approx(DEVIATION, rel=0.1)


def test_tensors_of_q4_k_m_are_mixed_as_llama_cpp_does() -> None:
    kinds = {name: kind for name, _, kind in tensors(CONFIG, "q4_k_m")}
    finer = [i for i in range(32) if kinds[f"blk.{i}.ffn_down.weight"] == Type.Q6_K]
    assert len(finer) == 16 and finer[:5] == [0, 1, 2, 3, 6] and finer[-1] == 31
    assert kinds["output.weight"] == Type.Q6_K
    assert kinds["token_embd.weight"] == kinds["blk.0.attn_q.weight"] == Type.Q4_K


def test_gpt_oss_has_experts_in_mxfp4_and_the_rest_in_eight_bits() -> None:
    config = CONFIG | {
        "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True,
        "num_hidden_layers": 1,
    }  # fmt: skip
    found = {name: (shape, kind) for name, shape, kind in tensors(config, "mxfp4")}
    assert found["blk.0.ffn_down_exps.weight"] == ((4, 256, 512), Type.MXFP4)
    assert found["blk.0.ffn_down_exps.bias"] == ((4, 256), Type.F32)
    assert found["blk.0.ffn_gate_inp.weight"] == ((4, 256), Type.F32)
    assert found["blk.0.attn_q.weight"] == ((256, 256), Type.Q8_0) and found["output.weight"][1] == Type.Q8_0
    assert found["blk.0.attn_sinks.weight"] == ((8,), Type.F32) and "blk.0.ffn_norm.weight" not in found


@pytest.mark.parametrize(
    ("shape", "weights", "sizes"),
    [
        ("llama-8b", "q4_0", {}),
        ("qwen3-30b-a3b", "q4_k_m", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}),
        ("gpt-oss-20b-8l", "mxfp4", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        (
            "deepseek-v2-lite",
            "q4_k_m",
            {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 352, "kv_lora_rank": 256},
        ),
    ],
)
def test_written_model_of_each_large_shape_is_served(
    shape: str, weights: str, sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has smaller sizes than the large shape, but the same tensors."""
    small = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 32_000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    monkeypatch.setitem(checkpoints.LARGE, shape, checkpoints.LARGE[shape] | small | heads | sizes)
    monkeypatch.setattr(checkpoints, "_tokenizer", lambda root: Tokenizer(models.BPE(VOCABULARY, [("a", "b")])))
    folder, out = checkpoints.checkpoint(shape, tmp_path), tmp_path / "out.gguf"
    monkeypatch.setattr("sys.argv", ["random_gguf", "--weights", weights, str(folder), str(out)])
    random_gguf.main()
    decoder = decoder_of(translated([out], tmp_path / "cache"), positions=64)
    (logits,) = all_logits(decoder, cache_for(decoder, tokens=64), [[5, 900, 31, 7]], chunk=4)
    assert bool(logits.isfinite().all()) and logits.std() > 0.1
