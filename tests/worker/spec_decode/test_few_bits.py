"""Drafters use a four-bit copy of a large LM head, which changes no answer."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import VOCAB, Checkpoints
from tests.worker.model_runner.harness import MAX_SEQ_LEN, batch_invariant_decoder
from tests.worker.spec_decode.eagle_heads import EAGLES, Eagle
from tests.worker.spec_decode.harness import served
from tests.worker.spec_decode.heads import with_head
from worker.checkpoint.stored_weight import Layout
from worker.ops.linear import linear
from worker.ops.quantized_weight import INT4, INT8
from worker.quantization.methods import AS_STORED
from worker.spec_decode import head_drafter
from worker.spec_decode.eagle import check_eagle, load_eagle, read_eagle_config
from worker.spec_decode.head_drafter import Head, HeadDrafter
from worker.spec_decode.mtp import check_head, load_head

FLOAT = torch.float32


def made(method: str, folder: Path, to: Path) -> tuple[Path, Head, int]:
    """Returns the served model's folder, the head, and the head's size in bytes as the memory check predicts it."""
    if method == "mtp":
        with_head("qwen3_5", folder, to)
        target = batch_invariant_decoder(to, FLOAT)
        head: Head = load_head(to, target.spec, target.weights, AS_STORED, MAX_SEQ_LEN)
        return to, head, check_head(to, target.spec, FLOAT, AS_STORED)[1]
    target = batch_invariant_decoder(folder, FLOAT)
    config = read_eagle_config(Eagle(EAGLES["recurrent"], folder).save(to), target.spec)
    head = load_eagle(to, config, target.spec, target.weights, AS_STORED, MAX_SEQ_LEN)
    return folder, head, check_eagle(to, config, target.spec, FLOAT, AS_STORED)


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_large_head_drafts_in_four_bits_and_changes_no_token(
    method: str, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = made(method, checkpoints("qwen3_5"), tmp_path / "plain")
    monkeypatch.setattr(head_drafter, "SMALL", 0)
    four = made(method, checkpoints("qwen3_5"), tmp_path / "four")
    rows = EAGLES["recurrent"].draft_vocab if method == "eagle3" else VOCAB
    in_full, in_four = rows * 64 * 4, head_drafter.LAYOUT.nbytes((rows, 64))
    assert four[2] - plain[2] == (in_four - in_full if method == "eagle3" else in_four)
    h, heads = torch.randn(5, 64), [one[1].decoder.weights.head for one in (plain, four)]
    assert heads[1].nbytes < heads[0].nbytes / 4
    logits = [linear(h, head, fp32_out=True) for head in heads]
    assert 0 < float((logits[0] - logits[1]).std() / logits[0].std()) < 0.3
    folder, head, _ = four
    drafter = HeadDrafter(head, batch_invariant_decoder(folder, FLOAT).spec, 1 << 30)
    assert served(folder, drafter, drafter)[0] == served(folder, None)[0]


@pytest.mark.parametrize(
    ("shape", "layout", "dtype", "expected"),
    [
        ((151_936, 1024), None, torch.bfloat16, True),
        ((8192, 1024), None, torch.bfloat16, False),
        ((8193, 1024), None, torch.bfloat16, True),
        ((151_936, 1024), Layout(INT8), torch.bfloat16, True),
        ((151_936, 1024), Layout(INT4, 32), torch.bfloat16, False),
        ((151_936, 1024), None, torch.float16, False),
    ],
)
def test_only_heads_that_are_large_and_in_more_bits_are_copied(
    shape: tuple[int, int], layout: Layout | None, dtype: torch.dtype, expected: bool
) -> None:
    assert head_drafter.pays(shape, layout, dtype) == expected
