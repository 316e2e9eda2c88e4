"""Packed weights from the disk give the same bits as freshly packed weights; broken files are made again."""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from shared.gguf.translated import translated
from tests.checkpoints import Checkpoints
from tests.gguf_files import mixed, write
from tests.worker.models.harness import CPU, all_logits, cache_for, decoder_of, prompts_of
from tests.worker.models.quantized_checkpoints import gptq, rewrite
from tests.worker.models.sparse import MIXES, sparse
from tests.worker.ops.harness.cpu_tiers import needs_library, tier  # noqa: F401
from worker.checkpoint.checkpoint import read_config
from worker.engine import load_model as engine_load
from worker.engine.build import load_engine
from worker.models import weights_cache
from worker.models.config import spec_from_config
from worker.models.decoder import Decoder, Weights
from worker.models.load import load
from worker.models.weights_cache import WeightsCache
from worker.quantization.methods import AS_STORED, GROUPS, InMemory

pytestmark = needs_library
F32, BF16 = torch.float32, torch.bfloat16
INT4 = InMemory("int4", plain=GROUPS["int4"])


def loaded(folder: Path, dtype: torch.dtype = F32, memory: InMemory = AS_STORED) -> Weights:
    return load(folder, spec_from_config(read_config(folder)), dtype, CPU, invariant=True, memory=memory)


def kept(folder: Path, directory: Path, dtype: torch.dtype = F32, memory: InMemory = AS_STORED) -> WeightsCache:
    return WeightsCache.of(directory, folder, dtype, memory)


def logits(folder: Path, weights: Weights) -> list[Tensor]:
    decoder = Decoder(spec_from_config(read_config(folder)), weights, 512)
    return all_logits(decoder, cache_for(decoder, tokens=256), prompts_of([5, 40]), chunk=16)


@pytest.fixture
def checkpoint(checkpoints: Checkpoints, tmp_path: Path) -> Callable[[str], Path]:
    def make(kind: str) -> Path:
        if kind.startswith("gguf"):
            return translated([write(kind.split()[1], tmp_path, mixed).file], tmp_path / "translated")
        if kind == "gptq":
            return rewrite(Path(shutil.copytree(checkpoints("qwen3"), tmp_path / kind)), gptq(act_order=True))
        return checkpoints(kind)

    return make


PLACES = {
    "float32": ("llama-biased", F32, AS_STORED),
    "bfloat16, Gemma's norms": ("gemma3", BF16, AS_STORED),
    "bfloat16, tied head": ("qwen3-tied", BF16, AS_STORED),
    "quantized while loading": ("llama", BF16, INT4),
    "GPTQ with act-order": ("gptq", BF16, AS_STORED),
    "recurrent layers, quantized": ("qwen3_5-moe", BF16, INT4),
    "recurrent layers, bfloat16": ("qwen3-next", BF16, AS_STORED),
    "short convolutions": ("lfm2", BF16, AS_STORED),
    "layer norms": ("starcoder2", BF16, AS_STORED),
    "parameters of activations, quantized": ("apertus", BF16, INT4),
    "per-layer embeddings": ("gemma4", BF16, AS_STORED),
    "experts beside an MLP, quantized": ("gemma4-moe", BF16, INT4),
    "layers without a feed-forward, experts without a gate": ("nemotron-h-moe", BF16, AS_STORED),
    "experts of which the shared one counts as half": ("cohere2-moe", F32, AS_STORED),
    "gates of attention of their own, quantized": ("afmoe", BF16, INT4),
    "latent attention, quantized": ("deepseek-v3", BF16, INT4),
    "GGUF in several formats": ("gguf llama", F32, AS_STORED),
    "GGUF, bfloat16": ("gguf llama", BF16, AS_STORED),
    "GGUF, both embeddings in blocks": ("gguf gemma4", BF16, AS_STORED),
}


@pytest.mark.parametrize("place", PLACES)
def test_weights_from_the_cache_give_the_same_bits(
    place: str,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    tier: str,  # noqa: F811
) -> None:
    kind, dtype, memory = PLACES[place]
    folder = checkpoint(kind)
    fresh, cache = loaded(folder, dtype, memory), kept(folder, tmp_path / "cache", dtype, memory)
    assert cache.read() is None
    cache.write(fresh)
    read = cache.read()
    assert read is not None and read.nbytes == fresh.nbytes and read.embed.blocks is fresh.embed.blocks
    assert (fresh.embed.blocks is None) == ("gguf" not in kind)
    pairs = zip(logits(folder, read), logits(folder, fresh), strict=True)
    assert all(torch.equal(ours, expected) and ours.any() for ours, expected in pairs)
    assert [file.name for file in (tmp_path / "cache").iterdir()] == [cache.path.name]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", MIXES)
def test_experts_from_the_cache_give_the_same_bits(
    kind: str,
    dtype: torch.dtype,
    checkpoints: Checkpoints,
    tmp_path: Path,
    tier: str,  # noqa: F811
) -> None:
    folder = checkpoints("llama")
    decoder, cache = sparse(decoder_of(folder, dtype=dtype), *MIXES[kind]), kept(folder, tmp_path, dtype)
    cache.write(decoder.weights)
    read = cache.read()
    assert read is not None and read.nbytes == decoder.weights.nbytes
    for before, after in zip(decoder.weights.layers, read.layers, strict=True):
        assert before.feed_forward.kind == after.feed_forward.kind
    ours = all_logits(Decoder(decoder.spec, read, 512), cache_for(decoder, tokens=256), prompts_of([5, 40]), chunk=16)
    expected = all_logits(decoder, cache_for(decoder, tokens=256), prompts_of([5, 40]), chunk=16)
    assert all(torch.equal(a, b) and a.any() for a, b in zip(ours, expected, strict=True))


def test_file_is_safetensors(checkpoints: Checkpoints, tmp_path: Path) -> None:
    cache, weights = kept(checkpoints("llama"), tmp_path), loaded(checkpoints("llama"))
    cache.write(weights)
    stored = load_file(cache.path)
    assert torch.equal(stored["embed"], weights.embed.stored) and torch.equal(stored["norm"], weights.norm)
    assert weights.head.cpu is not None and torch.equal(stored["head.0.panels"], weights.head.cpu.parts[0].panels)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def swap_digit(path: Path) -> None:
    """Changes one digit of the header, which stays JSON of the same length."""
    content = path.read_bytes()
    (digit,) = re.findall(rb'\\"kind\\": (\d)', content)[:1]  # the digit depends on the processor
    other = b"%d" % ((int(digit) + 1) % 10)
    path.write_bytes(content.replace(b'\\"kind\\": ' + digit, b'\\"kind\\": ' + other, 1))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 1), "bytes instead of"),
        (lambda path: os.truncate(path, 100), "no complete header"),
        (lambda path: os.truncate(path, 0), "no complete header"),
        (lambda path: path.write_bytes(b"\xff" * 10_000), "no complete header"),
        (lambda path: path.write_bytes((100).to_bytes(8, "little") + b"x" * 100), "header is damaged"),
        (lambda path: save_file({"embed": torch.zeros(3)}, path), "header is damaged"),
        (lambda path: flip(path, path.stat().st_size - 1), "checksum is wrong"),
        (lambda path: flip(path, path.stat().st_size // 2), "checksum is wrong"),
        (swap_digit, "checksum is wrong"),
    ],
)
def test_broken_file_is_told_in_one_sentence_and_written_again(
    damage: Callable[[Path], Any], words: str, checkpoints: Checkpoints, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    folder = checkpoints("llama")
    cache, weights = kept(folder, tmp_path, BF16, INT4), loaded(folder, BF16, INT4)
    cache.write(weights)
    whole = cache.path.read_bytes()
    damage(cache.path)
    assert cache.read() is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and words in record.message and str(cache.path) in record.message
    cache.write(weights)
    assert cache.path.read_bytes() == whole and cache.read() is not None


def test_changed_checkpoint_replaces_the_file(
    checkpoints: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(checkpoints("llama"), tmp_path / "model"))
    first = kept(folder, tmp_path / "cache")
    first.write(loaded(folder))
    os.utime(folder / "model.safetensors", ns=(0, 0))
    touched = kept(folder, tmp_path / "cache")
    assert touched.path == first.path and touched.read() is None and "has changed since" in caplog.text
    config = read_config(folder)
    touched.write(loaded(folder))
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    assert touched.read() is not None and kept(folder, tmp_path / "cache").read() is None


def test_other_formats_and_layouts_have_files_of_their_own(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints("llama")
    of = [kept(folder, tmp_path), kept(folder, tmp_path, BF16), kept(folder, tmp_path, BF16, INT4)]
    of.append(kept(checkpoints("llama", seed=1), tmp_path))
    monkeypatch.setattr(weights_cache, "layout", lambda dtype: "another")
    of.append(kept(folder, tmp_path))
    assert len({cache.path for cache in of}) == len(of)
    monkeypatch.undo()
    monkeypatch.setattr(weights_cache, "LAYOUT", -1)
    again = kept(folder, tmp_path)
    assert again.path == of[0].path and again.key != of[0].key


def test_folder_that_cannot_be_written_is_a_warning(
    checkpoints: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = kept(checkpoints("llama"), tmp_path / "file")
    assert cache.read() is None
    cache.write(loaded(checkpoints("llama")))
    assert "packed weights cannot be written" in caplog.text and len(list(tmp_path.iterdir())) == 1


def test_workers_that_write_at_once_leave_one_whole_file(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoints("llama")
    cache, weights = kept(folder, tmp_path), loaded(folder)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: cache.write(weights), range(8)))
    assert list(tmp_path.iterdir()) == [cache.path] and cache.read() is not None


def test_engine_reads_what_the_last_one_wrote(
    checkpoints: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    model = ModelConfig(model=str(checkpoints("llama")))
    worker = WorkerConfig(device="cpu", weights_cache=str(tmp_path / "cache"), kv_cache_gb=0.01)
    load_engine(model, worker)
    assert "were written to" in caplog.text and "were read from" not in caplog.text
    monkeypatch.setattr(engine_load, "load", lambda *args, **how: pytest.fail("read the checkpoint"))
    load_engine(model, worker)
    assert "were read from" in caplog.text and caplog.text.count("resident memory") == 2
