"""Reading tensors of GGUF files: their places in split files, staging, and files that lie about their tensors."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from shared.gguf.index import read_index
from shared.gguf.translated import translated
from tests.gguf_files import add_metadata, finish, mixed, write
from tests.worker.model.harness import CPU, decoder_of
from worker.model.checkpoint import CheckpointError, resolve, stored_bytes
from worker.model.gguf.tensors import GgufTensors
from worker.model.staging import Staging
from worker.model.stored_weight import PLAIN

Arrays = dict[str, tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]]


def rewrite(path: Path, change: Callable[[Arrays], None], *, parts: int = 1) -> list[Path]:
    """Writes the file again with other tensors, in several files if `parts` says so."""
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
    """All tensors that are not in a block format, as float32."""
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
    assert torch.equal(decoder.weights.embed, expected.weights.embed)


def lie(change: Callable[[Arrays], Any]) -> Callable[[Arrays], None]:
    return lambda arrays: change(arrays) and None


def typed(name: str, type: str) -> Callable[[Arrays], None]:
    """Makes a tensor one of another type, with bytes of zeros."""
    numbers, nbytes = gguf.GGML_QUANT_SIZES[kind := gguf.GGMLQuantizationType[type]]
    return lambda arrays: arrays.update({name: (np.zeros((256, 256 // numbers * nbytes), np.uint8), kind)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (typed("blk.1.attn_q.weight", "IQ2_XS"),
         r"layers.1.self_attn.q_proj.weight is stored as IQ2_XS; supported are F32, BF16, F16, Q8_0, .*IQ4_XS"),
        (typed("token_embd.weight", "TQ1_0"), r"the tokenizer has 512 tokens, but token_embd.weight has 256 rows"),
        (typed("blk.0.attn_k.weight", "Q4_0"), r"k_proj.weight has shape \[256, 256\]; by the model's config it is"),
        (lambda arrays: arrays.pop("blk.0.ffn_norm.weight"), r"layers.0.post_attention_layernorm.weight is missing"),
        (lambda arrays: arrays.pop("blk.1.ffn_up.weight"), r"model.gguf: tensor model.layers.1.mlp.up_proj.weight is"),
        (lambda arrays: arrays.update({"blk.0.ffn_gate_inp.weight": arrays["output_norm.weight"]}),
         r"tensor model.blk.0.ffn_gate_inp.weight does not belong to this model"),
        (lambda arrays: arrays["blk.0.attn_v.weight"][0].__setitem__((0, slice(208, 210)), 0xFF),
         r"v_proj.weight contains a number that is not finite"),
    ],
)  # fmt: skip
def test_lying_file_is_refused_in_one_sentence(change: Callable[[Arrays], Any], words: str, tmp_path: Path) -> None:
    path = write("qwen3", tmp_path, mixed).file
    rewrite(path, lie(change))
    with pytest.raises(ValueError, match=words) as caught:  # GgufError and CheckpointError
        decoder_of(translated([path], tmp_path / "cache"))
    assert "\n" not in str(caught.value)


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
