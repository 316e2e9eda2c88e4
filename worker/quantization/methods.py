"""Chooses the reader of a quantized checkpoint by `quant_method` in its quantization_config."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

from worker.model.checkpoint.checkpoint import CheckpointError
from worker.model.checkpoint.stored_weight import Shape, StoredTensors, StoredWeight
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
    "compressed-tensors": "worker.model.quantization.compressed_tensors",
    "fp8": "worker.model.quantization.fp8",
    "gptq": "worker.model.quantization.gptq",
    "awq": "worker.model.quantization.awq",
    "mxfp4": "worker.model.quantization.mxfp4",
    "bitsandbytes": "worker.model.quantization.bitsandbytes",
    "gguf": "worker.model.gguf.method",
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
    except (AttributeError, KeyError, TypeError) as error:  # for example, a list where a number belongs
        raise CheckpointError(f"quant_method {name!r}: a setting has a wrong type ({error})") from error
