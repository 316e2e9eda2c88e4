"""Finds the language model among the tensors of a checkpoint, which may have encoders and drafters beside it."""

from worker.model.checkpoint.stored_weight import StoredTensors

EMBED = "embed_tokens"
DRAFTER = "mtp."  # what names of layers that predict several tokens begin with; they are not read


def find_embedding(tensors: StoredTensors) -> str | None:
    """Returns the full name of the embedding, `model.embed_tokens`; None if there is none."""
    found = [module for module in _modules(tensors) if f".{module}".endswith(f".{EMBED}")]
    return min((module for module in found if not module.startswith(DRAFTER)), key=len, default=None)


def find_head(tensors: StoredTensors, prefix: str, module: str) -> str | None:
    """Returns the full name of a head, `language_model.lm_head`; None if there is none.

    prefix: of the names of the text model's tensors, such as `language_model.model.`. The head is named with this
    prefix, with a shorter one (`language_model.`), or with none. Heads under other prefixes belong to other models.
    """
    modules, folders = _modules(tensors), prefix.split(".")[:-1]
    names = (".".join((*folders[:depth], module)) for depth in range(len(folders) + 1))
    return next((name for name in names if name in modules), None)


def _modules(tensors: StoredTensors) -> set[str]:
    """Returns the full names of all modules with a weight, plain or quantized."""
    paths = (name.rpartition(".") for name in tensors.names())
    return {module for module, _, kind in paths if kind.startswith(("weight", "qweight"))}
