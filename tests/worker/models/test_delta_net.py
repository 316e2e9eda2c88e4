"""Recurrent layers and output gates in checkpoints: interleaved, quantized, and beside tensors that are not read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import GATED_DELTA, Checkpoints
from tests.worker.models.harness import CPU, Oracle, all_logits, cache_for, decoder_of, prompts_of
from tests.worker.models.quantized_checkpoints import Format, gptq, is_linear, rewrite, save
from tests.worker.models.test_quantization_formats import FORMATS
from worker.checkpoint.checkpoint import CheckpointError, read_config
from worker.models.config import spec_from_config
from worker.models.load import load
from worker.quantization.methods import GROUPS, InMemory

State = dict[str, Tensor]
STACKED = ("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight")
GATES = ("in_proj_b.weight", "in_proj_a.weight", "in_proj_ba.weight")


def logits(folder: Path) -> Tensor:
    decoder = decoder_of(folder)
    (prompt,) = prompts_of([70])
    return all_logits(decoder, cache_for(decoder, tokens=128), [prompt], chunk=40)[0]


@pytest.fixture
def copy(checkpoints: Checkpoints, tmp_path: Path) -> Callable[..., Path]:
    return lambda kind, name="copy": Path(shutil.copytree(checkpoints(kind), tmp_path / name))


def edit(folder: Path, change: Callable[[State], State]) -> Path:
    save(folder, change(load_file(folder / "model.safetensors")))
    return folder


def _heads_together(state: State) -> State:
    """Converts the input projections of recurrent layers from Qwen3-Next's layout to Qwen3.5's."""
    split: State = {}
    for name, tensor in state.items():
        prefix, _, kind = name.partition("in_proj_")
        # two key heads of size 16; four value heads of size 24
        heads = tensor.unflatten(0, (2, -1)) if kind else tensor
        if kind == "qkvz.weight":
            q, k, v, z = (part.flatten(0, 1) for part in heads.split_with_sizes([16, 16, 48, 48], 1))
            split |= {f"{prefix}in_proj_qkv.weight": torch.cat((q, k, v)), f"{prefix}in_proj_z.weight": z}
        elif kind == "ba.weight":
            b, a = (part.flatten(0, 1) for part in heads.split_with_sizes([2, 2], 1))
            split |= {f"{prefix}in_proj_b.weight": b, f"{prefix}in_proj_a.weight": a}
        else:
            split[name] = tensor
    return split


def test_rows_of_key_heads_are_sorted_by_kind(copy: Callable[..., Path], checkpoints: Checkpoints) -> None:
    whole = logits(checkpoints("qwen3-next"))
    assert torch.equal(logits(edit(copy("qwen3-next"), _heads_together)), whole)


def _linears(name: str) -> bool:
    return (is_linear(name) and "experts" not in name) or name.endswith((*STACKED, *GATES))


@pytest.mark.parametrize("form", [gptq(act_order=True), FORMATS["int8 a row"]], ids=["gptq", "int8"])
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3-next"])
def test_quantized_linears_are_those_of_their_numbers(copy: Callable[..., Path], kind: str, form: Format) -> None:
    """Includes weights with reordered rows, and a tensor with both queries and gates."""
    folder, full = copy(kind), rewrite(copy(kind, "full"), form, widened=True, which=_linears)
    rewrite(folder, form, which=_linears)
    (prompt,) = prompts_of([70])
    torch.testing.assert_close(logits(folder), Oracle(full).logits(prompt), atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", GATED_DELTA)
def test_gates_of_recurrent_layers_stay_in_full_precision(checkpoints: Checkpoints, kind: str) -> None:
    folder = checkpoints(kind)
    spec, eight = spec_from_config(read_config(folder)), InMemory("int8", plain=GROUPS["int8"])
    plain = load(folder, spec, torch.float32, CPU, invariant=False).layers
    kept = load(folder, spec, torch.float32, CPU, invariant=False, memory=eight).layers
    for layer, before, after in zip(spec.layers, plain, kept, strict=True):
        (qkv, gates, o), (small_qkv, small_gates, small_o) = before.mixer.linears, after.mixer.linears
        assert small_qkv.nbytes < qkv.nbytes / 2 and small_o.nbytes < o.nbytes / 2
        assert (small_gates.nbytes == gates.nbytes) == layer.recurrent


def _around(state: State) -> State:
    """Returns a multimodal checkpoint: adds tensors of a vision model, and of layers for multi-token prediction."""
    around = {"model.visual.blocks.0.attn.qkv.weight": torch.ones(4, 4), "mtp.embed_tokens.weight": torch.ones(4, 4),
              "mtp.layers.0.self_attn.q_proj.weight": torch.ones(4, 4), "mtp.norm.weight": torch.ones(4),
              "mtp.lm_head.weight": torch.ones(4, 4)}  # fmt: skip
    text = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in state.items()}
    return text | around


@pytest.mark.parametrize(("kind", "model_type"), [("qwen3_5", "qwen3_5"), ("qwen3_5-moe", "qwen3_5_moe")])
def test_multimodal_checkpoint_serves_its_text_model(
    copy: Callable[..., Path], checkpoints: Checkpoints, kind: str, model_type: str
) -> None:
    folder = edit(copy(kind), _around)
    text = json.loads((folder / "config.json").read_text())
    whole = {"model_type": model_type, "text_config": text, "vision_config": {"hidden_size": 8}, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(whole))
    assert torch.equal(logits(folder), logits(checkpoints(kind)))


@pytest.mark.parametrize(
    ("lost", "words"),
    [("linear_attn.A_log", "A_log is missing"), ("linear_attn.conv1d.weight", "conv1d.weight is missing"),
     ("linear_attn.in_proj_a.weight", "in_proj_a.weight is missing")],
)  # fmt: skip
def test_missing_tensor_is_named(copy: Callable[..., Path], lost: str, words: str) -> None:
    folder = edit(copy("qwen3_5"), lambda state: {name: x for name, x in state.items() if not name.endswith(lost)})
    with pytest.raises(CheckpointError, match=words):
        decoder_of(folder)


def test_wrong_shape_is_named(copy: Callable[..., Path]) -> None:
    folder = copy("qwen3_5")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"linear_num_value_heads": 6}))
    with pytest.raises(CheckpointError, match=r"in_proj_qkv.weight has shape \[160, 64\]; .* \[208, 64\]"):
        decoder_of(folder)
