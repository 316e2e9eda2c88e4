"""Reads the low-rank products of a GGUF adapter, and renames them to the module names of PEFT.

Where llama.cpp's converter reorders the rows of a weight, the rows of the adapter's matrix B are in the same order
(worker/model/gguf/layout.py).
"""

from collections.abc import Mapping

from shared.adapters.files import AdapterError, AdapterFiles
from shared.adapters.gguf import read_gguf
from shared.gguf.config.architectures import ARCHITECTURES
from shared.gguf.index import Index
from worker.adapters.stored import StoredProduct
from worker.model.gguf.layout import AS_STORED, PAIRED, layout_of
from worker.model.gguf.names import hugging_face_name
from worker.spec import ModelSpec

# model family → architectures of other families that its GGUF files may state
CONVERTED_AS = {"mistral": ("llama",), "mixtral": ("llama",), "ministral3": ("mistral3",)}
TILED = ("qwen35", "qwen35moe")  # architectures whose recurrent layers the converter reorders by heads


def products_of_gguf(files: AdapterFiles, spec: ModelSpec, max_rank: int) -> Mapping[str, StoredProduct]:
    """Returns the products of a GGUF adapter by module name. Raises AdapterError."""
    adapter = read_gguf(files, max_rank)
    architecture = adapter.architecture
    row = ARCHITECTURES.get(architecture)
    if (row is None or row.model_type != spec.model_type) and architecture not in CONVERTED_AS.get(spec.model_type, ()):
        raise AdapterError(
            f"the adapter is for a model of the architecture {architecture[:80]!r}, the base model is {spec.model_type}"
        )
    index, found = Index(architecture, spec.head_dim, spec.kv_heads, (), {}), dict[str, StoredProduct]()
    for stored, low in adapter.products.items():
        name = hugging_face_name(f"{stored}.weight", architecture)
        if architecture in TILED and ".linear_attn." in name:
            raise AdapterError(f"{stored}: GGUF adapters of recurrent layers of {architecture} are not supported")
        rows = low.b.shape[0]
        if PAIRED.fullmatch(name) and rows % spec.head_dim:
            raise AdapterError(f"{stored}: the adapter has {rows} outputs, not whole heads of {spec.head_dim}")
        order = layout_of(name, rows, index) if PAIRED.fullmatch(name) else AS_STORED
        found[name.removesuffix(".weight")] = StoredProduct(low, order)
    return found
