"""Chooses the reader of a quantized checkpoint by `quant_method` in its quantization_config."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from worker.model.checkpoint import CheckpointError
from worker.model.gguf import method as gguf
from worker.model.quantization import awq, bitsandbytes, compressed_tensors, fp8, gptq, mxfp4
from worker.model.spec import StoredQuantization
from worker.model.stored_weight import Shape, StoredTensors, StoredWeight

Config = Mapping[str, Any]


class Method(Protocol):
    """Knows how a checkpoint stores quantized weights, from its quantization_config."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Endings of the names of tensors that belong to such checkpoints, but are not read."""

    @property
    def stored(self) -> StoredQuantization: ...

    def weight(self, name: str, shape: Shape, tensors: StoredTensors) -> StoredWeight | None:
        """Returns how the weight is stored in few bits; None if the tensors do not include the scales of one."""


METHODS: Mapping[Any, Callable[[Config], Method]] = {
    "compressed-tensors": compressed_tensors.read, "fp8": fp8.read, "gptq": gptq.read, "awq": awq.read,
    "mxfp4": mxfp4.read, "bitsandbytes": bitsandbytes.read, "gguf": gguf.read,
}  # fmt: skip


def method_of(config: Config) -> Method | None:
    """Reads how a checkpoint is quantized from its config.json. Returns None if it is not quantized.

    Raises CheckpointError, which names `quant_method`, if the quantization is not supported.
    """
    settings = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not settings:
        return None
    name = settings.get("quant_method") if isinstance(settings, dict) else None
    read = METHODS.get(str(name))
    if read is None:
        raise CheckpointError(
            f"quantization_config: quant_method {name!r} is not supported; supported are {', '.join(METHODS)}"
        )
    try:
        return read(settings)
    except (AttributeError, KeyError, TypeError) as error:  # for example, a list where a number belongs
        raise CheckpointError(f"quant_method {name!r}: a setting has a wrong type ({error})") from error
