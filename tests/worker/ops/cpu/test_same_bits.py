"""AVX-VNNI and ARM's dot products multiply integers faster, and give the bits of the slower instruction sets."""

from types import SimpleNamespace

import pytest
import torch

from tests.worker.ops.cpu.test_integer_codes import PARTS, drawn, inputs, product
from tests.worker.ops.harness.cpu_tiers import FASTER, needs_library
from worker.ops import native as library
from worker.ops.native_build import EXTENDS, OF_X86, best_of
from worker.ops.quantized_weight import E2M1, INT4, INT8, CodeMap

CODES = [(INT4, 32), (INT4, 128), (INT4, 48), (E2M1, 32), (INT8, 32), (INT8, 64)]


@needs_library
@pytest.mark.skipif(not FASTER, reason="this processor has none of them")
@pytest.mark.parametrize("minimum", [False, True])
@pytest.mark.parametrize("code_map, group", CODES)
def test_faster_instructions_give_the_same_bits(code_map: CodeMap, group: int, minimum: bool) -> None:
    torch.manual_seed(group)
    for n, k in ((96, 256), (40, 384), (33, 128)):
        weight, x = drawn(code_map, n, k, group, minimum), inputs(k)
        for faster in FASTER:
            whole, parts, _ = product(faster, weight, x)
            assert torch.equal(whole, product(EXTENDS[faster], weight, x)[0]), (faster, n, k)
            assert all(torch.equal(part, whole[a:b]) for part, (a, b) in zip(parts, PARTS, strict=True)), (faster, n, k)


@needs_library
@pytest.mark.parametrize("which", FASTER)
def test_only_products_are_other_functions(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "tier", lambda: which)
    assert library.instruction_sets(torch.bfloat16) == (EXTENDS[which], which)
    assert library.instruction_sets(torch.float32) == (EXTENDS[which], EXTENDS[which])


def test_an_instruction_set_that_the_processor_lacks_is_passed_over() -> None:
    everything = {f"gemm_bf16_{one}": None for one in OF_X86}
    zen4 = SimpleNamespace(supports=lambda index: OF_X86[index] in ("avx2", "avx512", "avx512bf16"), **everything)
    assert [OF_X86[best_of(zen4, allowed)] for allowed in range(len(OF_X86))] == [
        "none", "avx2", "avx2", "avx512", "avx512bf16", "avx512bf16",
    ]  # fmt: skip


def test_an_instruction_set_that_the_library_lacks_is_passed_over() -> None:
    of_zen3 = SimpleNamespace(supports=lambda index: True, gemm_bf16_avx2=None)
    assert OF_X86[best_of(of_zen3)] == "avx2"
