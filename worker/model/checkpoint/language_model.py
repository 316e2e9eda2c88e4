"""Finds the language model among the tensors of a checkpoint that may also have encoders and drafters."""

from worker.model.checkpoint.stored_weight import StoredTensors

EMBED = "embed_tokens"
DRAFTER = "mtp."  # name prefix of layers for multi-token prediction, which are not part of the language model


def find_embedding(tensors: StoredTensors) -> str | None:
    """Returns the full name of the embedding, for example `model.embed_tokens`; None if there is none."""
    found = [module for module in _modules(tensors) if f".{module}".endswith(f".{EMBED}")]
    return min((module for module in found if not module.startswith(DRAFTER)), key=len, default=None)


def find_head(tensors: StoredTensors, prefix: str, module: str) -> str | None:
    """Returns the full name of the language model's head, for example `language_model.lm_head`; None if there is none.

    prefix: the prefix of the language model's tensor names, for example `language_model.model.`. The head's name has
        this prefix, a shorter one (`language_model.`), or none. Heads under other prefixes belong to other models.
    module: the last part of the name, for example `lm_head`
    """
    modules, folders = _modules(tensors), prefix.split(".")[:-1]
    names = (".".join((*folders[:depth], module)) for depth in range(len(folders) + 1))
    return next((name for name in names if name in modules), None)


def _modules(tensors: StoredTensors) -> set[str]:
    """Returns the full names of all modules with a weight, plain or quantized."""
    paths = (name.rpartition(".") for name in tensors.names())
    return {module for module, _, kind in paths if kind.startswith(("weight", "qweight"))}
