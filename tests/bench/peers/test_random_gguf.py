import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from bench.peers.random_gguf import BLOCKS, DEVIATION, tensors


@pytest.mark.parametrize("kind", BLOCKS, ids=str)
def test_blocks_are_weights_of_mean_zero_and_the_usual_deviation(kind: Type) -> None:
    blocks = BLOCKS[kind](np.random.default_rng(0), 64)
    weights = gguf.dequantize(blocks.reshape(64, -1), kind)
    assert weights.shape == (64, 256)
    assert abs(weights.mean()) < 0.15 * DEVIATION  # the numbers of Q4_0 are -8 to 7
    assert weights.std() == pytest.approx(DEVIATION, rel=0.1)


def test_tensors_of_q4_k_m_are_mixed_as_llama_cpp_does() -> None:
    config = {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 32, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 100,
    }  # fmt: skip
    kinds = {name: kind for name, _, kind in tensors(config, "q4_k_m")}
    finer = [i for i in range(32) if kinds[f"blk.{i}.ffn_down.weight"] == Type.Q6_K]
    assert len(finer) == 16 and finer[:5] == [0, 1, 2, 3, 6] and finer[-1] == 31
    assert (
        kinds["output.weight"] == Type.Q6_K and kinds["token_embd.weight"] == kinds["blk.0.attn_q.weight"] == Type.Q4_K
    )
