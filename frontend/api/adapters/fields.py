"""The request types of the routes for adapters.

Requests that load or unload have vLLM's names; the request that sets scales has llama.cpp's names.
"""

from typing import Annotated

from msgspec import Meta

from frontend.api.llama_cpp.options import AdapterScale
from frontend.api.requests.request_model import RequestModel
from frontend.api.requests.request_types import Ignored, doc
from shared.adapters.named import MAX_NAME_CHARS

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]


class LoadAdapterRequest(RequestModel):
    lora_name: Annotated[Name, doc("The name that requests give as their model")]
    lora_path: Annotated[
        str, Meta(min_length=1, max_length=4096), doc("Folder or GGUF file below the folder of --allow-runtime-lora")
    ]
    load_inplace: Annotated[bool, doc("Replace the adapter of this name")] = False
    base_model_name: Ignored = None


class UnloadAdapterRequest(RequestModel):
    lora_name: Annotated[Name, doc("The name of the adapter")]
    lora_int_id: Ignored = None


class DefaultScalesRequest(RequestModel):
    """The body of POST /lora-adapters. The client sends only the list itself."""

    adapters: Annotated[list[AdapterScale], Meta(max_length=1000)]
