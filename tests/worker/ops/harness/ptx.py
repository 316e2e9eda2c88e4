"""Interprets PTX programs without branches on arrays. Knows only the few instructions of triton_dequantize.py."""

import re

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint32]


def run(program: str, operands: dict[str, Words], table: NDArray[np.float32]) -> Words:
    """Runs a program and returns $0. operands: 32-bit values by name; zeros stand for the address of the table"""
    registers = dict(operands)
    for line in re.sub(r"//[^\n]*", "", program).strip(" {}\n").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *sources = (part.strip() for part in rest.split(","))
        values = [_value(source.strip("[]"), registers) for source in sources]
        registers[target] = table[values[0] // 4].view(np.uint32) if name == "ld.global.nc.f32" else _do(name, values)
    return registers["$0"]


def _value(source: str, registers: dict[str, Words]) -> Words:
    return registers[source] if source in registers else np.array(int(source, 0), np.uint32)


def _do(name: str, values: list[Words]) -> Words:
    a, b, c = (*values, *values, *values)[:3]
    match name.split("."):
        case ["mov", _]:
            return a
        case ["shr", _]:
            return a >> b
        case ["shl", _]:
            return a << b
        case ["and", _]:
            return a & b
        case ["lop3", _]:
            return _lop3(a, b, c, int(values[3]))
        case ["mad", "wide", _]:
            return a * b + c
        case ["mul", "rn", "f32"]:
            return (a.view(np.float32) * b.view(np.float32)).view(np.uint32)
        case ["add", "rn", "f32"]:
            return (a.view(np.float32) + b.view(np.float32)).view(np.uint32)
        case ["fma", "rn", "bf16x2"]:
            return _halves([x * y + z for x, y, z in zip(*map(_bf16, (a, b, c)), strict=True)], torch.bfloat16)
        case ["cvt", "rn", "bf16x2" | "f16x2" as kind, "f32"]:
            numbers = [torch.from_numpy(value.view(np.float32).copy()) for value in (b, a)]
            return _halves(numbers, torch.bfloat16 if kind == "bf16x2" else torch.float16)
    raise NotImplementedError(name)


def _lop3(a: Words, b: Words, c: Words, table: int) -> Words:
    """Computes lop3 bit by bit: `table` has the result for each combination of three bits."""
    result = np.zeros_like(a | b | c)
    for index in range(8):
        if table >> index & 1:
            one = [value if index >> shift & 1 else ~value for value, shift in ((a, 2), (b, 1), (c, 0))]
            result |= one[0] & one[1] & one[2]
    return result


def _bf16(pair: Words) -> list[torch.Tensor]:
    """Returns the lower and the upper bf16 as float64, in which their products and the sums used here are exact."""
    numbers = [(pair << np.uint32(16)), pair & np.uint32(0xFFFF0000)]
    return [torch.from_numpy(np.atleast_1d(number).view(np.float32).astype(np.float64)) for number in numbers]


def _halves(numbers: list[torch.Tensor], dtype: torch.dtype) -> Words:
    low, high = (number.to(dtype).view(torch.uint16).numpy().astype(np.uint32) for number in numbers)
    return low | high << np.uint32(16)
