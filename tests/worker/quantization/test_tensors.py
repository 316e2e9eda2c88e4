"""Reading tensors of GGUF files: places in split files, staging, and files with false entries about tensors."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from bench.peers.gguf_file import add_metadata, finish
from shared.gguf.index import TiledHeads, read_index
from shared.gguf.translated import translated
from tests.gguf_files import mixed, mxfp4, write
from tests.worker.models.harness import CPU, decoder_of
from worker.checkpoint.checkpoint import CheckpointError, resolve, stored_bytes
from worker.checkpoint.staging import Staging
from worker.checkpoint.stored_weight import PLAIN
from worker.ops.quantized_weight import QuantizedWeight
from worker.quantization.gguf import GgufMethod
from worker.quantization.gguf_tensors import GgufTensors
from worker.spec import StoredQuantization

Arrays = dict[str, tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]]


def rewrite(path: Path, change: Callable[[Arrays], None], *, parts: int = 1) -> list[Path]:
    """Writes the file again with changed tensors. parts: the number of files"""
    reader = gguf.GGUFReader(path)
    metadata = {
        key: field.contents() for key, field in reader.fields.items()
        if not key.startswith("GGUF.") and key != "general.architecture"
    }  # fmt: skip
    arrays = {tensor.name: (np.array(tensor.data), tensor.tensor_type) for tensor in reader.tensors}
    change(arrays)
    architecture = reader.fields["general.architecture"].contents()
    paths = [path] if parts == 1 else [path.with_name(f"m-{n + 1:05}-of-{parts:05}.gguf") for n in range(parts)]
    for n, out in enumerate(paths):
        writer = gguf.GGUFWriter(str(out), architecture)
        if n == 0:
            add_metadata(writer, {key: value for key, value in metadata.items() if not isinstance(value, float)})
            for key, value in metadata.items():
                if isinstance(value, float):
                    writer.add_float32(key, value)
        if parts > 1:
            writer.add_uint16("split.count", parts)
        for name, (data, type) in list(arrays.items())[n::parts]:
            writer.add_tensor(name, data, raw_dtype=type)
        finish(writer)
    return paths


def plain(tensors: GgufTensors) -> dict[str, torch.Tensor]:
    """Returns all tensors that are not in a block format, as float32."""
    found = {}
    for name in tensors.names():
        if tensors.format(name) in PLAIN:
            found[name] = torch.empty(tensors.shape(name))
            tensors.copy(name, found[name])
    return found


def test_split_files_hold_the_same_weights(tmp_path: Path) -> None:
    written = write("llama-biased", tmp_path, "BF16")
    with closing(GgufTensors(translated([written.file], tmp_path / "cache"))) as whole:
        expected = plain(whole)
        assert whole.folder == written.file == whole.where("model.norm.weight")
    parts = rewrite(written.file, lambda arrays: None, parts=3)
    folder = translated(parts, tmp_path / "cache")
    assert stored_bytes(folder) == sum(part.stat().st_size for part in parts)
    with closing(GgufTensors(folder)) as split:
        found = plain(split)
        assert {split.where(name) for name in found} == set(parts)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_staging_reads_the_same_bytes(tmp_path: Path) -> None:
    folder = translated([write("gemma3", tmp_path, "F16").file], tmp_path / "cache")
    with closing(GgufTensors(folder)) as mapped, closing(GgufTensors(folder, Staging(CPU))) as staged:
        staged.expect(staged.names())
        expected, found = plain(mapped), plain(staged)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_vision_tensors_of_a_multimodal_model_are_not_read(tmp_path: Path) -> None:
    path = write("gemma3", tmp_path, "F16").file
    expected = decoder_of(translated([path], tmp_path / "cache"))

    def add(arrays: Arrays) -> None:
        arrays["v.blk.0.attn_q.weight"] = arrays["mm.input_projection.weight"] = arrays["output_norm.weight"]

    rewrite(path, add)
    decoder = decoder_of(translated([path], tmp_path / "cache"))
    assert torch.equal(decoder.weights.embed.table(), expected.weights.embed.table())


def lie(change: Callable[[Arrays], Any]) -> Callable[[Arrays], None]:
    return lambda arrays: change(arrays) and None


def typed(name: str, type: str) -> Callable[[Arrays], None]:
    """Returns a change that gives a tensor another type and sets all its bytes to zero."""
    numbers, nbytes = gguf.GGML_QUANT_SIZES[kind := gguf.GGMLQuantizationType[type]]
    return lambda arrays: arrays.update({name: (np.zeros((256, 256 // numbers * nbytes), np.uint8), kind)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (typed("blk.1.attn_q.weight", "Q1_0"),
         r"layers.1.self_attn.q_proj.weight is stored as Q1_0; supported are F32, BF16, F16, Q8_0, .*IQ2_XS"),
        (typed("token_embd.weight", "TQ1_0"), r"the tokenizer has 512 tokens, but token_embd.weight has 256 rows"),
        (typed("blk.0.attn_k.weight", "Q4_0"), r"k_proj.weight has shape \[256, 256\]; by the model's config it is"),
        (lambda arrays: arrays.pop("blk.0.ffn_norm.weight"), r"layers.0.post_attention_layernorm.weight is missing"),
        (lambda arrays: arrays.pop("blk.1.ffn_up.weight"), r"model.gguf: tensor model.layers.1.mlp.up_proj.weight is"),
        (lambda arrays: arrays.update({"blk.0.ffn_gate_inp.weight": arrays["output_norm.weight"]}),
         r"tensor model.layers.0.mlp.gate.weight does not belong to this model"),
        (lambda arrays: arrays["blk.0.attn_v.weight"][0].__setitem__((0, slice(208, 210)), 0xFF),
         r"v_proj.weight contains a number that is not finite"),
        (lambda arrays: arrays["token_embd.weight"][0].__setitem__((3, slice(208, 210)), 0xFF),
         r"embed_tokens.weight contains a number that is not finite"),
    ],
)  # fmt: skip
def test_lying_file_is_refused_in_one_sentence(change: Callable[[Arrays], Any], words: str, tmp_path: Path) -> None:
    path = write("qwen3", tmp_path, mixed).file
    rewrite(path, lie(change))
    with pytest.raises(ValueError, match=words) as caught:  # GgufError and CheckpointError
        decoder_of(translated([path], tmp_path / "cache"))
    assert "\n" not in str(caught.value)


EXPERTS = ("blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight", "blk.1.ffn_down_exps.weight")


def test_experts_are_the_same_in_one_tensor_or_in_one_each_or_with_gate_and_up_together(tmp_path: Path) -> None:
    path = write("mixtral", tmp_path, "BF16").file

    def one_each(arrays: Arrays) -> None:  # one tensor for each expert, as in old files
        for name in EXPERTS:
            data, type = arrays.pop(name)
            arrays |= {name.replace("_exps", f".{expert}"): (part, type) for expert, part in enumerate(data)}

    def together(arrays: Arrays) -> None:
        (gate, type), (up, _) = arrays.pop(EXPERTS[0]), arrays.pop(EXPERTS[1])
        arrays["blk.1.ffn_gate_up_exps.weight"] = (np.concatenate((gate, up), 1), type)

    original, found = path.read_bytes(), []
    for change in (lambda arrays: None, one_each, together):
        path.write_bytes(original)
        rewrite(path, change)
        with closing(GgufTensors(translated([path], tmp_path / "cache"))) as tensors:
            parts = plain(tensors)
        names = [f"model.layers.1.mlp.experts.{expert}." for expert in range(4)]
        found.append([
            parts[f"{name}gate_up_proj.weight"] if change is together
            else torch.cat((parts[f"{name}gate_proj.weight"], parts[f"{name}up_proj.weight"]))
            for name in names
        ])  # fmt: skip
        assert all(parts[f"{name}down_proj.weight"].shape == (256, 512) for name in names)
    for experts in zip(*found, strict=True):
        assert all(torch.equal(one, experts[0]) for one in experts)
    assert not torch.equal(found[0][0], found[0][1])


def cut(name: str, index: Any) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.update({name: (np.ascontiguousarray(arrays[name][0][index]), arrays[name][1])})


def factors(count: int, number: float = 0.5) -> tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]:
    """Returns a tensor `.scale`: a factor for a weight, or one for each expert."""
    return number * np.arange(1, count + 1, dtype=np.float32), gguf.GGMLQuantizationType.F32


def test_weights_are_multiplied_by_the_factors_beside_them(tmp_path: Path) -> None:
    """NVFP4 files have a factor for each weight or expert, and scales of activations, which are not read."""
    path = write("mixtral", tmp_path, lambda name: "NVFP4" if "exps" in name else "Q4_K").file
    without = weights_of(path, tmp_path)

    def add(arrays: Arrays) -> None:
        arrays["blk.0.ffn_up_exps.scale"], arrays["blk.1.attn_q.scale"] = factors(4), factors(1, 3.0)
        arrays["blk.0.ffn_up_exps.input_scale"] = arrays["blk.1.attn_q.input_scale"] = factors(4)

    rewrite(path, add)
    found = weights_of(path, tmp_path)
    for expert in range(4):
        name = f"model.layers.0.mlp.experts.{expert}.up_proj.weight"
        assert torch.equal(found[name], without[name] * 0.5 * (expert + 1))
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.allclose(found[name], without[name] * 3, rtol=1e-6, atol=1e-9)
    name = "model.layers.1.self_attn.k_proj.weight"
    assert torch.equal(found[name], without[name])
    decoder_of(translated([path], tmp_path / "cache"))


def weights_of(path: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Returns some weights of a file of Mixtral's architecture, dequantized."""
    method = GgufMethod(StoredQuantization("NVFP4"))
    with closing(GgufTensors(translated([path], tmp_path / "cache"))) as tensors:
        shapes = {name: (512, 256) for name in tensors.names() if name.endswith("up_proj.weight")}
        shapes |= {f"model.layers.1.self_attn.{one}_proj.weight": (n, 256) for one, n in (("q", 256), ("k", 128))}

        def read(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            tensors.copy(name, into := torch.empty(shape, dtype=dtype))
            return into

        found = {}
        for name, shape in shapes.items():
            stored = method.weight(name, shape, tensors)
            assert stored is not None
            weight = stored.read(read, torch.float32)
            assert isinstance(weight, QuantizedWeight)
            found[name] = weight.dequantize(torch.float32)
        return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda arrays: arrays.pop(EXPERTS[0]), r"experts.0.gate_proj.weight is missing"),
        (lambda arrays: arrays.pop("blk.0.ffn_up_exps.bias"), r"layers.0.mlp.experts.0.up_proj.bias is missing"),
        (lambda arrays: arrays.pop("blk.0.ffn_gate_inp.bias"), r"layers.0.mlp.gate.bias is missing"),
        (lambda arrays: arrays.pop("blk.1.attn_sinks.weight"), r"layers.1.self_attn.sinks is missing"),
        (cut(EXPERTS[1], slice(3)), r"layers.1.mlp.experts.3.up_proj.weight is missing"),
        (cut(EXPERTS[2], (slice(None), slice(128))), r"experts.0.down_proj.weight has shape \[128, 512\]; by the"),
        (cut(EXPERTS[2], 0), r"layers.1.mlp.experts.0.down_proj.weight has shape \[512\]; by the model's"),
        (cut(EXPERTS[0], [0, 1, 2, 3, 0]), r"layers.1.mlp.experts.4.gate_proj.weight does not belong to this model"),
        (cut("blk.0.ffn_gate_inp.weight", slice(3)), r"layers.0.mlp.gate.weight has shape \[3, 256\]; by the model's"),
        (lambda arrays: arrays["blk.1.ffn_up_exps.weight"][0].__setitem__((3, 0, 0), 255),
         r"layers.1.mlp.experts.3.up_proj.weight contains a number that is not finite"),
        (lambda arrays: arrays.update({"blk.0.ffn_up_exps.scale": arrays["blk.0.attn_norm.weight"]}),
         r"layers.0.mlp.experts.10.up_proj.scale does not belong to this model"),
        (lambda arrays: arrays.update({"blk.0.ffn_up_exps.scale": factors(3)}),
         r"layers.0.mlp.experts.3.up_proj.scale is missing"),
        (lambda arrays: arrays.update({"blk.0.ffn_up_exps.scale": factors(4, float("inf"))}),
         r"layers.0.mlp.experts.0.up_proj.scale contains a number that is not finite"),
        (lambda arrays: arrays.update({"blk.0.attn_norm.scale": factors(1)}),
         r"layers.0.input_layernorm.scale does not belong to this model"),
    ],
)  # fmt: skip
def test_lying_experts_are_refused_in_one_sentence(change: Callable[[Arrays], Any], words: str, tmp_path: Path) -> None:
    path = write("gpt-oss", tmp_path, mxfp4).file
    rewrite(path, lie(change))
    with pytest.raises(CheckpointError, match=words) as caught:
        decoder_of(translated([path], tmp_path / "cache"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda arrays: arrays.pop("blk.0.ssm_a"), r"layers.0.linear_attn.A_log is missing"),
        (lambda arrays: arrays.pop("blk.2.ssm_beta.weight"), r"layers.2.linear_attn.in_proj_b.weight is missing"),
        (lambda arrays: arrays["blk.0.ssm_a"][0].__setitem__(1, 0.5), r"A_log is stored as 0.5; supported are numbers"),
        (cut("blk.0.ssm_conv1d.weight", (slice(None), slice(3))), r"conv1d.weight has shape \[512, 1, 3\]; by the"),
        (cut("blk.0.ssm_conv1d.weight", slice(511)), r"conv1d.weight has shape \[511, 1, 4\]; by the"),
        (cut("blk.2.attn_gate.weight", slice(192)), r"in_proj_z.weight has shape \[192, 256\]; by the"),
        (cut("blk.1.attn_q.weight", slice(256)), r"q_proj.weight has shape \[256, 256\]; by the model's config it is"),
        (lambda arrays: arrays.update({"blk.1.ssm_a": arrays["blk.0.ssm_a"]}),
         r"layers.1.linear_attn.A_log does not belong to this model"),
        (lambda arrays: arrays.update({"blk.3.attn_norm.weight": arrays["blk.0.attn_norm.weight"]}),
         r"layers.3.input_layernorm.weight does not belong to this model"),
    ],
)  # fmt: skip
def test_lying_recurrent_layers_are_refused_in_one_sentence(
    change: Callable[[Arrays], Any], words: str, tmp_path: Path
) -> None:
    path = write("qwen3_5", tmp_path, mixed).file
    rewrite(path, lie(change))
    with pytest.raises(CheckpointError, match=words) as caught:
        decoder_of(translated([path], tmp_path / "cache"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "architecture", "found"), [("glm4", "glm4", {"0"}), ("qwen3_5", "qwen35", {"0", "1", "2"})]
)
def test_mtp_heads_are_left_out_unless_they_can_draft(
    kind: str, architecture: str, found: set[str], tmp_path: Path
) -> None:
    path = write(kind, tmp_path, "F16", more={f"{architecture}.nextn_predict_layers": 1}).file

    def add(arrays: Arrays) -> None:
        last = max(name.split(".")[1] for name in arrays if name.startswith("blk."))
        arrays[f"blk.{last}.nextn.eh_proj.weight"] = arrays["blk.0.attn_norm.weight"]

    rewrite(path, add)
    with closing(GgufTensors(translated([path], tmp_path / "cache"))) as tensors:
        layers = {name.split(".")[2] for name in tensors.names() if name.startswith("model.layers.")}
    assert layers == found


def test_value_heads_of_part_of_a_group_are_refused(tmp_path: Path) -> None:
    """Columns move together with their scales, so a group of columns must not belong to several heads."""
    heads = TiledHeads(2, 16, 8)
    method = GgufMethod(StoredQuantization("Q8_0"), heads)
    written = write("qwen3_5", tmp_path, "Q8_0").file
    name = "model.layers.0.linear_attn.out_proj.weight"
    with closing(GgufTensors(translated([written], tmp_path / "cache"))) as tensors:
        weight = method.weight(name, (256, 256), tensors)
        assert weight is not None
        with pytest.raises(CheckpointError, match=r"out_proj.weight is stored as Q8_0, whose groups of 32 columns"):
            weight.read(lambda name, shape, dtype: torch.zeros(shape, dtype=dtype), torch.float32)


def test_file_that_became_shorter_or_went_away_is_refused(tmp_path: Path) -> None:
    path = write("qwen3", tmp_path).file
    folder = translated([path], tmp_path / "cache")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model.gguf has become shorter"):
        GgufTensors(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model.gguf cannot be read: No such file"):
        GgufTensors(folder)


def test_resolve_of_a_file_or_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write("qwen3", tmp_path / "model").file
    folder = resolve(str(path))
    assert folder == resolve(str(path.parent)) and read_index(folder).files == (str(path),)
    (path.parent / "other.gguf").touch()
    with pytest.raises(CheckpointError, match=r"several GGUF models, so name one of the files: model.gguf, other.gguf"):
        resolve(str(path.parent))
    with pytest.raises(CheckpointError, match=r"other.gguf is not a GGUF file"):
        resolve(str(path.parent / "other.gguf"))
