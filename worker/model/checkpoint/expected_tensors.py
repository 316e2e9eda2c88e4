"""Checks that a checkpoint has the tensors that its model needs, before any tensor is read."""

from collections.abc import Sequence

from worker.model.checkpoint.checkpoint import CheckpointError
from worker.model.checkpoint.stored_weight import StoredWeight, WeightSource


def check_tensors(source: WeightSource, weights: Sequence[StoredWeight], prefix: str, unread: tuple[str, ...]) -> int:
    """Checks the names, shapes and formats of the tensors, and returns how many bytes will be read.

    weights: all weights that the model needs; a weight that is read twice is listed twice
    prefix: the prefix of the model's tensor names
    unread: prefixes of tensors that the checkpoint may have although the model does not need them

    Raises CheckpointError when a tensor is missing, superfluous, misshaped or stored in another format.
    """
    tensors = source.tensors
    read = [tensor for weight in weights for tensor in weight.tensors()]
    expected = {tensor.name: tensor for tensor in read}
    for name, tensor in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{tensors.folder}: tensor {name} is missing")
        if tensors.shape(name) != tensor.shape:
            raise CheckpointError(
                f"{tensors.where(name)}: tensor {name} has shape {list(tensors.shape(name))}; "
                f"by the model's config it is {list(tensor.shape)}"
            )
        if (stored := tensors.format(name)) not in tensor.formats:
            raise CheckpointError(
                f"{tensors.where(name)}: tensor {name} is stored as {stored}; supported are {', '.join(tensor.formats)}"
            )
    for name in sorted(set(tensors.names()) - expected.keys()):
        if name.startswith(prefix) and not name.endswith(source.ignored) and not name.startswith(unread):
            raise CheckpointError(f"{tensors.where(name)}: tensor {name} does not belong to this model")
    return sum(tensors.nbytes(tensor.name) for tensor in read)
