"""Chooses the reader of a quantized checkpoint by `quant_method` in its quantization_config."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from shared.config.declaration import ConfigError
from worker.checkpoint.checkpoint import CheckpointError
from worker.checkpoint.stored_weight import BY_ROW, Layout, Shape, StoredTensors, StoredWeight
from worker.ops.block_rows import BlockFormat, BlockRows
from worker.ops.quantized_weight import E4M3, FORMATS, INT4, INT8, QuantizedWeight, Scheme, stack
from worker.spec import StoredQuantization

Config = Mapping[str, Any]


class Method(Protocol):
    """Knows how a checkpoint stores quantized weights, from its quantization_config."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Name endings of tensors that checkpoints of this method have but that are not read."""

    @property
    def stored(self) -> StoredQuantization: ...

    def weight(self, name: str, shape: Shape, tensors: StoredTensors) -> StoredWeight | None:
        """Returns how the weight is stored; None if the checkpoint does not store it quantized."""


METHODS = {  # quant_method → the module that reads such checkpoints; it is imported when needed
    "compressed-tensors": "worker.quantization.compressed_tensors",
    "fp8": "worker.quantization.fp8",
    "gptq": "worker.quantization.gptq",
    "awq": "worker.quantization.awq",
    "mxfp4": "worker.quantization.mxfp4",
    "bitsandbytes": "worker.quantization.bitsandbytes",
    "modelopt": "worker.quantization.modelopt",
    "auto-round": "worker.quantization.auto_round",
    "gguf": "worker.quantization.gguf",
}


def method_of(config: Config) -> Method | None:
    """Reads how a checkpoint is quantized from its config.json. Returns None if it is not quantized.

    Raises CheckpointError, which names `quant_method`, if the quantization is not supported.
    """
    settings = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not settings:
        return None
    name = settings.get("quant_method") if isinstance(settings, dict) else None
    module = METHODS.get(str(name))
    if module is None:
        raise CheckpointError(
            f"quantization_config: quant_method {name!r} is not supported; supported are {', '.join(METHODS)}"
        )
    read: Callable[[Config], Method] = import_module(module).read
    try:
        return read(settings)
    except (AttributeError, KeyError, TypeError, msgspec.ValidationError) as error:  # a list where a number belongs
        raise CheckpointError(f"quant_method {name!r}: a setting has a wrong type ({error})") from error


def block_format(name: str) -> BlockFormat:
    """Returns a block format of GGUF by its name."""
    formats: Mapping[str, BlockFormat] = import_module(METHODS["gguf"]).FORMATS
    return formats[name]


# Decides how the linears of the layers are kept in memory, from --quantization and the checkpoint.
#
# On a GPU, weights of eight bits with one scale per row have kernels of their own, which can also quantize inputs.
# All other quantized weights are kept as a QuantizedWeight.

GROUPS = {"int4": Layout(INT4, 128), "int4-g32": Layout(INT4, 32), "int8": Layout(INT8, 128), "fp8": Layout(E4M3)}
# the layouts with one scale per row, for which GPUs have kernels of their own
ROWS = {"int8": Layout(INT8), "fp8": Layout(E4M3)}


@dataclass(frozen=True, slots=True)
class InMemory:
    """How stored weights of linears are converted for memory.

    kind: the format of quantized weights; "" if no weight is quantized
    widen: if true, stored quantized weights are dequantized to full precision
    plain: the layout to which weights stored in full precision are quantized; None: they stay in full precision
    finer: the layout for stored quantized weights that have several scales per row; None: they keep their own
    by_row: how the kernels for weights with one scale per row multiply; None: these kernels are not used
    activations: "float": inputs of weights in few bits keep their format, up to the rounding that worker/ops/linear
        documents; "int8": the C library rounds those of the layers to 8 bits, in blocks of 32 with a scale each
    """

    kind: str = ""
    widen: bool = False
    plain: Layout | None = None
    finer: Layout | None = None
    by_row: Scheme | None = None
    activations: str = "float"

    @property
    def name(self) -> str:
        """The format of the weights, as Status shows it; "" if all are in full precision."""
        return str(self.by_row or self.kind)

    @property
    def int8_inputs(self) -> bool:
        return self.activations == "int8"

    def layout(self, weight: StoredWeight) -> Layout | None:
        """Returns the weight's layout in memory; None if it is kept in full precision."""
        if weight.layout is None:
            return self.plain
        return None if self.widen else self.finer or weight.layout

    def convert(self, weight: Tensor | QuantizedWeight, dtype: torch.dtype) -> Tensor | QuantizedWeight:
        """Converts a weight that has been read from the checkpoint to its layout in memory."""
        if isinstance(weight, Tensor):
            return weight if self.plain is None else self.plain.quantize(weight)
        if self.widen:
            return weight.dequantize(dtype)
        if self.finer is None or _has_rows(weight):
            return weight
        return self.finer.quantize(weight.dequantize(dtype))

    def have_rows(self, layouts: Set[Layout | None]) -> bool:
        """Returns whether all these layouts are the same one, with one scale per row, and its kernels are used."""
        return self.by_row is not None and layouts <= {Layout(code_map) for code_map in BY_ROW} and len(layouts) == 1

    def rows(self, parts: Sequence[Tensor | QuantizedWeight | BlockRows]) -> tuple[Tensor, Tensor] | None:
        """Stacks weights for the kernels that need one scale per row. Returns values [N, K] and scales [N].

        Returns None if these kernels are not used, or if the parts do not all have the same format for these kernels.
        """
        quantized = [part for part in parts if isinstance(part, QuantizedWeight) and _has_rows(part)]
        if self.by_row is None or len(quantized) < len(parts) or len(stacked := stack(quantized)) > 1:
            return None
        (whole,) = stacked
        return whole.codes.view(FORMATS[BY_ROW[whole.code_map]]), whole.scale[:, 0]


AS_STORED = InMemory()


def _has_rows(weight: QuantizedWeight) -> bool:
    one_scale = weight.group_size >= weight.shape[1] and weight.minimum is None and weight.input_order is None
    return weight.code_map in BY_ROW and one_scale


def in_memory(stored: StoredQuantization | None, flag: str, device: torch.device) -> InMemory:
    """Returns how linears are kept in memory.

    stored: how the checkpoint's linears are quantized; None: they are not quantized
    flag: the value of --quantization

    Raises ConfigError when the checkpoint and the flag name different formats.
    """
    if flag == "none":
        return InMemory(widen=True)
    on_gpu, kind = device.type == "cuda", flag.removesuffix("-dynamic")
    if flag == "auto":
        return _as_stored(stored, on_gpu)
    if stored is not None and stored.kind != kind.partition("-")[0]:
        raise ConfigError(f"--quantization {flag} does not fit this checkpoint, which is quantized to {stored.kind}")
    if on_gpu and kind in ROWS:
        again = stored is not None and not stored.by_row
        return InMemory(
            kind, plain=ROWS[kind] if stored is None else None, finer=ROWS[kind] if again else None,
            by_row=Scheme.of(flag),
        )  # fmt: skip
    return InMemory(kind, plain=GROUPS[kind]) if stored is None else InMemory(stored.kind)


def _as_stored(stored: StoredQuantization | None, on_gpu: bool) -> InMemory:
    if stored is None:
        return AS_STORED
    if not (on_gpu and stored.by_row):
        return InMemory(stored.kind)
    return InMemory(stored.kind, by_row=replace(Scheme.of(stored.kind), dynamic=stored.activations == "dynamic"))


def describe(stored: StoredQuantization | None, memory: InMemory, dtype: torch.dtype, flag: str) -> str:
    """Returns a sentence for the log about the quantization, or "" if nothing is quantized."""
    if stored is None and memory.plain is None:
        return ""
    origin = "linears" if stored is None else f"the checkpoint's linears ({stored})"
    target = memory.plain or memory.finer
    if memory.widen:
        text = f"{origin} are dequantized to {str(dtype).removeprefix('torch.')}"
    elif target is not None:
        text = f"{origin} are quantized{' again' if stored else ''} to {memory.kind}, one scale per {target.shared}"
    else:
        text = f"{origin} are kept in few bits"
    if memory.by_row is not None and memory.by_row.dynamic:
        return f"{text}; so are their inputs, one scale per token"
    expected = flag.endswith("-dynamic") or (stored is not None and stored.activations in ("dynamic", "other"))
    if memory.int8_inputs:
        return f"{text}; so are their inputs, to int8 with one scale per 32"
    return text + ("; activations, which would be quantized as well, are not" if expected else "")
