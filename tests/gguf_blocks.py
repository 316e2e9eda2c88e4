"""Makes random blocks of GGUF's formats: random weights where the library gguf can quantize, else random bytes."""

import gguf
import numpy as np
import numpy.typing as npt

QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "TQ1_0", "TQ2_0")  # that the library gguf can write
HALVES = {  # formats that gguf can only read → offsets of the float16 numbers in a block
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "IQ3_S": (0,), "IQ3_XXS": (0,), "IQ2_S": (0,), "IQ2_XS": (0,), "IQ2_XXS": (0,), "IQ1_S": (0,), "IQ1_M": (48,),
    "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
SPLIT = 48  # the offset of the words of IQ1_M whose top four bits are a float16
# mean of a format's codes, subtracted so that the mean of the weights is about 0
BALANCE = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
SPREAD = {"Q2_K": 24, "Q3_K": 64, "Q4_K": 500, "Q5_K": 1000, "Q6_K": 3000, "IQ4_NL": 90, "IQ4_XS": 2000,
          "IQ3_S": 160, "IQ3_XXS": 160, "IQ2_S": 60, "IQ2_XS": 60, "IQ2_XXS": 60, "IQ1_S": 8, "IQ1_M": 7}  # fmt: skip


def random_rows(rows: int, columns: int, type: str, rng: np.random.Generator, spread: float) -> npt.NDArray[np.uint8]:
    """Returns a random weight [rows, columns] as uint8 [rows, bytes of a row]. spread: typical size of its numbers"""
    kind = gguf.GGMLQuantizationType[type]
    if type in QUANTIZED:
        weight = rng.normal(0, spread, (rows, columns)).astype(np.float32)
        quantized: npt.NDArray[np.uint8] = gguf.quants.quantize(weight, kind)
        return quantized
    numbers, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * columns // numbers, nbytes), dtype=np.uint8)
    if type == "NVFP4":  # four scales of its own for each block
        blocks[:, :4] = gguf.quants.NVFP4.fp32_to_ue4m3(rng.uniform(0.5, 1.0, (len(blocks), 4)) * spread / 3)
        return blocks.reshape(rows, -1)
    for i, at in enumerate(HALVES[type]):
        scale = rng.uniform(0.5, 1.0, (len(blocks), 1)) * spread / SPREAD[type] * (BALANCE[type] if i else 1.0)
        set_half(blocks, at, scale.astype(np.float16))
    return blocks.reshape(rows, -1)


def set_half(blocks: npt.NDArray[np.uint8], at: int, values: npt.NDArray[np.float16]) -> None:
    """Writes a float16 [blocks, 1] to the bytes `at` of each block; at SPLIT to the top four bits of four words."""
    if at != SPLIT:
        blocks[:, at : at + 2] = values.view(np.uint8)
        return
    words = blocks[:, SPLIT:].view(np.uint16)
    words &= 0x0FFF
    words |= (values.view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) & 15) << 12
    blocks[:, SPLIT:] = words.view(np.uint8)


def dequantized(rows: npt.NDArray[np.uint8], type: str) -> npt.NDArray[np.float32]:
    """Returns the weight as gguf reads it."""
    weight: npt.NDArray[np.float32] = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[type])
    return weight
