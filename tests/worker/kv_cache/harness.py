"""A small model's spec for tests of the K/V cache."""

from worker.spec import LayerSpec, ModelSpec, RopeSpec

SPEC = ModelSpec(
    model_type="llama", vocab_size=8, hidden_size=64, intermediate_size=64, heads=4, kv_heads=2, head_dim=16,
    layers=(LayerSpec(0, 0),) * 3, ropes=(RopeSpec("default", 1e4),), max_positions=64, norm_eps=1e-6,
    attention_scale=0.25, activation="silu", tied=True, eos_ids=(), dtype="float32",
)  # fmt: skip
