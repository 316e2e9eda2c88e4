"""Translates the pooling that a GGUF file states for embeddings into the files of sentence-transformers."""

from typing import Any

from gguf import PoolingType

from shared.gguf.container import Container
from shared.gguf.errors import GgufError

MODES = {PoolingType.MEAN: "mean", PoolingType.CLS: "cls", PoolingType.LAST: "lasttoken"}
PREFIX = "sentence_transformers.models."


def pooling_files(container: Container) -> dict[str, Any]:
    """Returns the contents of modules.json and of the files named there; nothing for a model that generates text.

    llama.cpp normalizes every vector. Raises GgufError for a pooling that is not supported.
    """
    key = f"{container.text('general.architecture')}.pooling_type"
    pooling = container.integer(key, PoolingType.NONE)
    if pooling == PoolingType.NONE:
        return {}
    if pooling not in MODES:
        shown = ", ".join(f"{int(kind)} ({mode})" for kind, mode in MODES.items())
        raise GgufError(f"{container.name}: {key} is {pooling}; supported are {shown}")
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    return {
        "modules.json": [{"path": path, "type": PREFIX + name} for name, path in paths.items()],
        "1_Pooling/config.json": {"pooling_mode": MODES[PoolingType(pooling)]},
    }
