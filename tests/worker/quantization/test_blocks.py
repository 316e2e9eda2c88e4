"""Every block format is read as gguf's own reader reads it."""

import gguf
import numpy as np
import pytest
import torch

from shared.gguf.grids import grid
from tests.gguf_blocks import HALVES, dequantized, random_rows, set_half
from worker.ops import block_rows, quantized_weight
from worker.ops import native as c_library
from worker.quantization.gguf import FORMATS

SHIFTED = ("Q4_1", "Q4_K")  # formats whose minimum includes 8 scales, which adds a rounding
GRIDS = {"IQ3_S": 512, "IQ3_XXS": 256, "IQ2_S": 1024, "IQ2_XS": 512, "IQ2_XXS": 256, "IQ1_S": 2048, "IQ1_M": 2048}
FEW_BITS = (*GRIDS, "TQ1_0", "TQ2_0", "NVFP4")
# zeros, the smallest denormal numbers, the smallest normal number, ones and the largest number of float16
SCALES = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF], np.uint16)


@pytest.mark.parametrize("type", FORMATS)
def test_format_has_the_sizes_of_gguf(type: str) -> None:
    assert (FORMATS[type].numbers, FORMATS[type].nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]


@pytest.mark.parametrize("type", FORMATS)
def test_unpacked_weight_equals_ggufs(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_weight, "CPU_NUMBERS", 5 * 512)  # makes several slices, of which the last is smaller
    monkeypatch.setattr(block_rows, "unpack_blocks", lambda *_: False)
    rows = random_rows(48, 512, type, np.random.default_rng(1), 0.05)
    expected = torch.from_numpy(dequantized(rows, type))
    weight = FORMATS[type].quantized_weight(torch.from_numpy(rows))
    assert weight.shape == (48, 512) and (weight.minimum is not None) == FORMATS[type].minimum
    assert int(weight.codes.max()) < len(weight.code_map.values) and expected.std() > 0.01
    found = weight.dequantize(torch.float32)
    if type not in SHIFTED:
        assert torch.equal(found, expected)
    else:
        largest = expected.abs().amax() + 8 * weight.scale.abs().amax()
        assert (found - expected).abs().amax() <= largest * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("type", FORMATS)
def test_any_bytes_of_codes_and_scales_are_read_as_by_gguf(type: str) -> None:
    """All bytes of the blocks are random, except float16 scales, which are finite and of all sizes and signs."""
    rng = np.random.default_rng(2)
    numbers, nbytes = FORMATS[type].numbers, FORMATS[type].nbytes
    rows = rng.integers(0, 256, (64, nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(dequantized(rows, type))
    weight = FORMATS[type].quantized_weight(torch.from_numpy(rows))
    largest = weight.scale.abs().amax(1, keepdim=True) * 256
    if weight.minimum is not None:
        largest += weight.minimum.abs().amax(1, keepdim=True)
    finite = torch.isfinite(expected).all(1) & torch.isfinite(largest[:, 0])
    found = weight.dequantize(torch.float32)
    assert int(finite.sum()) > 32 and found.shape == (64, numbers)
    assert ((found - expected).abs() <= largest * torch.finfo(torch.float32).eps)[finite].all()


@pytest.mark.parametrize("type", FEW_BITS)
def test_few_bits_are_exactly_ggufs_numbers(type: str) -> None:
    """All bits are random, so each field of a block is drawn by itself; scales of float16 include the extreme ones."""
    rng = np.random.default_rng(4)
    rows = rng.integers(0, 256, (1024, FORMATS[type].nbytes), dtype=np.uint8)
    scales = rng.choice(np.concatenate((SCALES, rng.integers(0, 0x7C00, 90, np.uint16))), (1024, 1))
    for at in HALVES.get(type, ()):
        set_half(rows, at, scales.view(np.float16))
    weight = FORMATS[type].quantized_weight(torch.from_numpy(rows))
    assert torch.equal(weight.dequantize(torch.float32), torch.from_numpy(dequantized(rows, type)).float())
    if type in GRIDS:
        entries = (weight.codes & 7).view(-1, grid(type)[0])
        assert len(torch.unique(entries, dim=0)) == GRIDS[type] and len(torch.unique(weight.codes >> 3)) == 2


@pytest.mark.parametrize("type", GRIDS)
def test_grid_is_ggufs(type: str) -> None:
    declared = getattr(gguf.quants, type)
    declared.init_grid()
    width, numbers = grid(type)
    assert np.array_equal(np.array(declared.grid_map)[list(numbers)], declared.grid.flatten())
    assert (len(numbers) // width, width) == declared.grid_shape
    assert list(declared.grid_map) == sorted(declared.grid_map)


@pytest.mark.parametrize("type", FORMATS)
def test_the_library_unpacks_every_byte_as_pytorch_does(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes of the blocks are random, so that some scales are denormal, infinite or NaN."""
    assert c_library.available(torch.float32), "needs a C compiler"
    rng, in_c = np.random.default_rng(3), block_rows.unpack_blocks
    for n, blocks in ((1, 1), (67, 3), (256, 1), (1024, 1)):
        rows = torch.from_numpy(rng.integers(0, 256, (n, blocks * FORMATS[type].nbytes), dtype=np.uint8))
        if n == 256:
            rows[:, 0] = torch.arange(256)  # every exponent of MXFP4
        monkeypatch.setattr(block_rows, "unpack_blocks", in_c)
        unpacked = FORMATS[type].quantized_weight(rows)
        monkeypatch.setattr(block_rows, "unpack_blocks", lambda *_: False)
        defined = FORMATS[type].quantized_weight(rows)
        assert torch.equal(unpacked.codes, defined.codes)
        for found, expected in ((unpacked.scale, defined.scale), (unpacked.minimum, defined.minimum)):
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                same = found.view(torch.int32) == expected.view(torch.int32)
                assert (same | (found.isnan() & expected.isnan())).all()
