"""Opens a checkpoint of any file format as a WeightSource (see stored_weight.py)."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shared.gguf.naming import INDEX as GGUF_INDEX
from worker.model.checkpoint.checkpoint import Checkpoint, read_config
from worker.model.checkpoint.staging import Staging
from worker.model.checkpoint.stored_weight import PlainWeight, Shape, StoredWeight, WeightSource
from worker.model.quantization.methods import Method, method_of

if TYPE_CHECKING:
    from worker.model.gguf.tensors import GgufTensors

# Tensors whose names end like this are not read: rotary tables in old checkpoints, and scales of quantized activations.
IGNORED = ("rotary_emb.inv_freq",)
OF_ACTIVATIONS = (".input_scale", ".activation_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")


def open_source(folder: Path, staging: Staging | None) -> WeightSource:
    """Opens the checkpoint. staging: reads the tensors; closed by the returned source's close(); None: no staging

    Raises CheckpointError when a file is broken or the quantization is not supported.
    """
    method = method_of(read_config(folder))
    if (folder / GGUF_INDEX).exists():
        from worker.model.gguf.tensors import GgufTensors

        return FileSource(GgufTensors(folder, staging), method)
    return FileSource(Checkpoint(folder, staging), method)


@dataclass(frozen=True, slots=True)
class FileSource:
    """A checkpoint in safetensors or GGUF files. method: how config.json says that weights are quantized; None: they
    are not quantized
    """

    tensors: "Checkpoint | GgufTensors"
    method: Method | None

    @property
    def ignored(self) -> tuple[str, ...]:
        return IGNORED if self.method is None else (*IGNORED, *OF_ACTIVATIONS, *self.method.ignored)

    def weight(self, name: str, shape: Shape, transposed: bool | None = False) -> StoredWeight:
        few_bits = None if self.method is None else self.method.weight(name, shape, self.tensors)
        if few_bits is not None:
            return few_bits
        if transposed is None:
            transposed = shape == shape[::-1] or name not in self.tensors or self.tensors.shape(name) != shape
        return PlainWeight(name, shape, transposed)

    def close(self) -> None:
        self.tensors.close()
