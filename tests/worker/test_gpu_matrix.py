"""On a GPU, the same request gives the same bits: mixed steps, drafts, few bits, experts, recurrent layers, graphs.

Steps that a CUDA graph replays keep no logits here. Their ids are compared instead, which depend on every bit, because
they are sampled.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import HYBRID, Checkpoints
from tests.worker.matrix import DRAFTING_MODES, MODES, NEW, Mode, run
from tests.worker.model_runner.harness import MAX_SEQ_LEN
from tests.worker.spec_decode.eagle_heads import EAGLES, Eagle
from tests.worker.spec_decode.harness import only_replays, served
from tests.worker.spec_decode.heads import HEADS, with_head
from worker.checkpoint.checkpoint import read_config
from worker.models.config import spec_from_config
from worker.models.decoder import Decoder
from worker.models.load import load
from worker.quantization.methods import AS_STORED, in_memory
from worker.spec_decode.eagle import load_eagle, read_eagle_config
from worker.spec_decode.head_drafter import Head, HeadDrafter
from worker.spec_decode.model_drafter import ModelDrafter
from worker.spec_decode.mtp import load_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
FAMILIES = (  # (family, value of --quantization)
    ("llama", "auto"), ("gemma3", "auto"), ("qwen3-moe", "auto"), ("gpt-oss", "auto"),
    *((family, "auto") for family in HYBRID[:-1]), ("llama", "int4"), ("llama", "fp8"), ("qwen3-moe", "int4"),
    ("qwen3_5", "int4"),
)  # fmt: skip


def decoder_on_gpu(folder: Path, quantization: str) -> Decoder:
    spec = spec_from_config(read_config(folder))
    memory = in_memory(spec.stored, quantization, CUDA)
    weights = load(folder, spec, torch.bfloat16, CUDA, invariant=True, memory=memory)
    return Decoder(spec, weights, MAX_SEQ_LEN)


def compare_modes(decoder: Decoder, modes: list[Mode], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares each mode, with and without CUDA graphs, with the default mode without graphs."""
    ids, logits = run(decoder, Mode(kept=modes[0].kept), monkeypatch)
    assert len(ids) == NEW and len(logits) == NEW
    for mode in modes:
        for graphs in (False, True):
            other_ids, other_logits = run(decoder, mode, monkeypatch, foretold=ids, graphs=graphs)
            assert other_ids == ids, (mode, graphs)
            assert graphs or other_logits.keys() == logits.keys()
            for position, row in other_logits.items():
                assert torch.equal(logits[position], row), (mode, graphs, position)


@pytest.mark.parametrize(("family", "quantization"), FAMILIES)
def test_bits_on_a_gpu_depend_on_the_request_alone(
    family: str, quantization: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In some modes, a draft head reads the hidden states."""
    modes = [*MODES[1::5], *DRAFTING_MODES[::2], *(replace(mode, reads=(1, 0)) for mode in DRAFTING_MODES[1::4])]
    compare_modes(decoder_on_gpu(checkpoints(family), quantization), modes, monkeypatch)


def test_bits_of_mxfp4_experts_on_a_gpu_depend_on_the_request_alone(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors", reason="which writes the checkpoint")
    from tests.worker.models.expert_checkpoints import in_mxfp4

    folder = in_mxfp4(Path(shutil.copytree(checkpoints("gpt-oss"), tmp_path / "copy")))
    compare_modes(decoder_on_gpu(folder, "auto"), [*MODES[1::9], *DRAFTING_MODES[::3]], monkeypatch)


ON_GPU: dict[str, Any] = {"ahead": True, "graphs": True}


def test_drafts_of_a_model_on_a_gpu_change_no_token(checkpoints: Checkpoints) -> None:
    folder = checkpoints("llama")
    decoder = decoder_on_gpu(folder, "auto")
    plain, _, most = served(folder, None, decoder=decoder)
    drafter = ModelDrafter(decoder_on_gpu(folder, "auto"), MAX_SEQ_LEN, 1 << 30, **ON_GPU)
    only_replays(drafter.steps.runner)
    tokens, scheduler, steps = served(folder, drafter, graphs=True, decoder=decoder)
    assert tokens == plain and not drafter.failed
    assert scheduler.status.accepted_tokens == scheduler.status.draft_tokens > 4 and steps < 0.7 * most


@pytest.mark.parametrize("kind", ["qwen3_5", "flat", "speculators-3.1"])
def test_heads_on_a_gpu_change_no_token(kind: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """An MTP head, and EAGLE-3 heads. A head of random weights is seldom right."""
    mtp = kind in HEADS
    folder = tmp_path / "served" if mtp else checkpoints(EAGLES[kind].served)
    if mtp:
        with_head(kind, checkpoints(kind), folder)
    decoder = decoder_on_gpu(folder, "auto")
    plain, _, _ = served(folder, None, decoder=decoder)
    spec, weights = decoder.spec, decoder.weights
    if mtp:
        head: Head = load_head(folder, spec, weights, AS_STORED, MAX_SEQ_LEN)
    else:
        Eagle(EAGLES[kind], folder).save(tmp_path / "eagle")
        config = read_eagle_config(tmp_path / "eagle", spec)
        head = load_eagle(tmp_path / "eagle", config, spec, weights, AS_STORED, MAX_SEQ_LEN)
    drafter = HeadDrafter(head, spec, 1 << 30, captured_tokens=512, **ON_GPU)
    only_replays(drafter.steps.runner)
    tokens, scheduler, _ = served(folder, drafter, drafter, graphs=True, decoder=decoder)
    assert tokens == plain and scheduler.status.draft_tokens > 5 and not drafter.failed
