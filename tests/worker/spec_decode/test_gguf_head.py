"""MTP heads in GGUF files propose the same drafts as transformers' own layers."""

from contextlib import closing
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from bench.peers.gguf_file import stored_name
from shared.gguf.translated import translated
from tests.gguf_files import stacked_experts, write
from tests.gguf_kinds import KINDS
from tests.worker.model_runner.harness import MAX_SEQ_LEN, batch_invariant_decoder
from tests.worker.quantization.test_tensors import Arrays, rewrite
from tests.worker.spec_decode.heads import QWEN, WEIGHTS, Head, with_head
from tests.worker.spec_decode.made import Made, check_proposals
from worker.checkpoint.checkpoint import CheckpointError
from worker.quantization.gguf_tensors import DELTA_NET, LAYER, GgufTensors
from worker.quantization.methods import AS_STORED
from worker.spec_decode.mtp import check_head, load_head

OUTER = {"join": "eh_proj", "e": "enorm", "h": "hnorm", "last": "shared_head_norm"}
LAYERS = {hugging_face: own for own, hugging_face in (LAYER | DELTA_NET).items()}


def gguf_name(name: str) -> str:
    """Returns the name of a head's tensor in the GGUF file of a three-layer model. name: such as `mtp.fc.weight`"""
    module = name.removesuffix(".weight")
    outer = {QWEN[field]: f"nextn.{own}" for field, own in OUTER.items()}
    return f"blk.3.{outer.get(module) or LAYERS[module.removeprefix('mtp.layers.0.')]}.weight"


def gguf_name_of_glm(name: str) -> str:
    """Like gguf_name, for a tensor of GLM's head, such as `model.layers.3.eh_proj.weight`."""
    return stored_name(gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, 4), name)


def made(
    folder: Path, type: gguf.GGMLQuantizationType, leave_out: str = "", kind: str = "qwen3_5"
) -> tuple[Path, Head]:
    """Returns the folder of a translated GGUF file with a head, and the head. type: the type of the matrices"""
    architecture = KINDS[kind].architecture
    more = {f"{architecture}.nextn_predict_layers": 1, f"{architecture}.block_count": 4}
    written = write(kind, folder, "F32", more=more)
    head = with_head(kind, written.reference, folder / "with-head")
    both = load_file(folder / "with-head" / WEIGHTS)
    own = stacked_experts({name: one for name, one in both.items() if name.startswith(("mtp.", "model.layers.3."))})

    def add(arrays: Arrays) -> None:
        for name, tensor in own.items():
            stored = gguf_name_of_glm(name) if kind == "glm4-moe" else gguf_name(name)
            if tensor.dim() == 1:
                added = int(kind == "qwen3_5")  # see worker/quantization/gguf_tensors.py
                arrays[stored] = (added + tensor.numpy(), gguf.GGMLQuantizationType.F32)
            elif not leave_out or leave_out not in stored:
                arrays[stored] = (gguf.quants.quantize(tensor.numpy(), type), type)

    rewrite(written.file, add)
    return translated([written.file], folder / "cache"), head


def test_head_of_a_gguf_file_drafts_as_transformers_layers_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, head = made(tmp_path, gguf.GGMLQuantizationType.F32)
    one = Made(folder, lambda of: load_head(folder, of.spec, of.weights, AS_STORED, MAX_SEQ_LEN), head.propose)
    spec = batch_invariant_decoder(folder, torch.float32).spec
    assert (len(spec.layers), spec.draft_layers) == (3, 1)
    expected = load_file(tmp_path / "with-head" / WEIGHTS)
    with closing(GgufTensors(folder)) as tensors:
        for ours, published in (("enorm", "pre_fc_norm_embedding"), ("shared_head.norm", "norm"), ("eh_proj", "fc")):
            stored = torch.empty(tensors.shape(f"model.layers.3.{ours}.weight"))
            tensors.copy(f"model.layers.3.{ours}.weight", stored)
            torch.testing.assert_close(stored, expected[f"mtp.{published}.weight"])
    check_proposals(one, monkeypatch)


def test_head_of_glm_in_a_gguf_file_drafts_as_transformers_layers_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, head = made(tmp_path, gguf.GGMLQuantizationType.F32, kind="glm4-moe")
    check_proposals(
        Made(folder, lambda of: load_head(folder, of.spec, of.weights, AS_STORED, MAX_SEQ_LEN), head.propose),
        monkeypatch,
    )


def test_head_with_a_tensor_missing_is_refused_in_a_sentence(tmp_path: Path) -> None:
    folder, _ = made(tmp_path, gguf.GGMLQuantizationType.Q8_0, leave_out="eh_proj")
    spec = batch_invariant_decoder(folder, torch.float32).spec
    with pytest.raises(CheckpointError, match=r"tensor model.layers.3.eh_proj.weight is missing"):
        check_head(folder, spec, torch.float32, AS_STORED)
