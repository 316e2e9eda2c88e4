"""The names of tensors agree with the names that the library `gguf` gives to tensors of Hugging Face checkpoints."""

import gguf
import pytest
from transformers import PreTrainedModel

from bench.peers.gguf_file import stored_name
from tests.gguf_kinds import KINDS, MIXTURES
from worker.quantization.gguf_tensors import hugging_face_name


def model_of(kind: str) -> PreTrainedModel:
    return KINDS[kind].model()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in MIXTURES])
def test_names_are_the_inverse_of_ggufs(kind: str) -> None:
    architecture = KINDS[kind].architecture
    arch = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    names = gguf.get_tensor_name_map(arch, 10)
    model = model_of(kind)
    for name in model.state_dict():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if any(part in name for part in (".experts.", ".act_fn.", ".shared_mlp.")):
            continue
        assert hugging_face_name(stored_name(names, name), architecture) == name


@pytest.mark.parametrize("kind", MIXTURES)
def test_every_tensor_of_a_mixture_of_experts_has_a_name(kind: str) -> None:
    architecture = KINDS[kind].architecture
    arch = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    unused = (gguf.MODEL_TENSOR.ROPE_FREQS, gguf.MODEL_TENSOR.ATTN_ROT_EMBD)
    names = [gguf.TENSOR_NAMES[tensor].format(bid=3) for tensor in gguf.MODEL_TENSORS[arch] if tensor not in unused]
    kinds = {"ssm_a": "", "ssm_d": "", "ssm_dt": ".bias", "exp_probs_b": ".bias"}
    found = [hugging_face_name(name + kinds.get(name.split(".")[-1], ".weight"), architecture) for name in names]
    assert len(set(found)) == len(names) > 10 and not [name for name in found if name.startswith("model.blk")]


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("ffn_gate_exps.weight", "mlp.experts.gate_proj"),
        ("ffn_down_exps.bias", "mlp.experts.down_proj_bias"),
        ("ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj"),
        ("ffn_up.7.weight", "mlp.experts.7.up_proj.weight"),
        ("ffn_gate_inp.bias", "mlp.gate.bias"),
        ("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight"),
        ("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
        ("attn_sinks.weight", "self_attn.sinks"),
        ("post_attention_norm.weight", "post_attention_layernorm.weight"),
        ("ssm_a", "linear_attn.A_log"),
        ("xielu.beta", "mlp.act_fn.beta"),
        ("ssm_dt.bias", "linear_attn.dt_bias"),
    ],
)
def test_names_of_experts_sinks_and_decays(stored: str, name: str) -> None:
    assert hugging_face_name(f"blk.3.{stored}", "gpt-oss") == f"model.layers.3.{name}"


@pytest.mark.parametrize("name", ["blk.0.ffn_norm_exps.weight", "blk.x.attn_q.weight", "strange"])
def test_unknown_name_is_no_name_of_the_model_but_within_it(name: str) -> None:
    assert hugging_face_name(name, "llama") == f"model.{name}"


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("attn_qkv.weight", "in_proj_qkv.weight"),
        ("attn_gate.weight", "in_proj_z.weight"),
        ("ssm_ba.weight", "in_proj_ba.weight"),
        ("ssm_in.weight", "in_proj_qkvz.weight"),
        ("ssm_alpha.weight", "in_proj_a.weight"),
        ("ssm_beta.weight", "in_proj_b.weight"),
        ("ssm_norm.weight", "norm.weight"),
        ("ssm_out.weight", "out_proj.weight"),
    ],
)
def test_names_in_recurrent_layers(stored: str, name: str) -> None:
    assert hugging_face_name(f"blk.3.{stored}", "qwen3next") == f"model.layers.3.linear_attn.{name}"


@pytest.mark.parametrize(
    ("stored", "name"),
    [("ssm_a", "A_log"), ("ssm_d", "D"), ("ssm_dt.bias", "dt_bias"), ("ssm_in.weight", "in_proj.weight")],
)
def test_names_in_layers_of_granite(stored: str, name: str) -> None:
    assert hugging_face_name(f"blk.3.{stored}", "granitehybrid") == f"model.layers.3.mamba.{name}"
