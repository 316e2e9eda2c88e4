"""llama.cpp's routes about the server: its properties, slots and adapters.

This server has no fixed slots. It lists as many slots as the workers can run sequences at once, and shows each request
as a busy slot, those that already have output first. A client sees only the requests of its own API key, without their
prompts. All other slots look idle to that client.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from frontend.api.llama_cpp import response_types as types
from frontend.api.llama_cpp.options import Options, Wanted
from frontend.api.llama_cpp.output import settings
from frontend.api.model_context import ModelContext
from frontend.api.sampling import sampling
from frontend.workers.stream import Stream
from shared import build
from shared.messages import Adapter
from shared.wire.codec import unpack_u32


def props(context: ModelContext, slots: int) -> types.LlamaCppProps:
    """Returns the properties of the server. slots: how many slots the server lists"""
    named = context.tokenizer.named_tokens
    return types.LlamaCppProps(
        default_generation_settings=types.LlamaCppDefaults(n_ctx=context.max_seq_len, params=_defaults(context)),
        total_slots=slots,
        model_alias=context.model,
        model_path=context.model,
        modalities={"vision": context.tokenizer.pictures is not None, "audio": False},
        chat_template=context.tokenizer.templates.get("default", ""),
        bos_token=named.get("bos_token") or "",
        eos_token=named.get("eos_token") or "",
        build_info=f"sluice-{build.version()}",
    )


def _defaults(context: ModelContext) -> types.LlamaCppSettings:
    options = Options()
    chosen = sampling(options.fields(), 0, context)
    return settings(chosen, Wanted(options, (), "", (), True, context.max_seq_len), None, ())


def slots(context: ModelContext, total: int, streams: Sequence[Stream]) -> list[types.LlamaCppSlot]:
    """Lists the slots. streams: the requests that the client may see, as busy slots; other slots look idle"""
    busy = [
        types.LlamaCppSlot(
            id=id,
            n_ctx=context.max_seq_len,
            is_processing=True,
            n_prompt_tokens=len(unpack_u32(stream.submit.prompt)),
            next_token=types.LlamaCppNextToken(n_decoded=len(stream.output)),
        )
        for id, stream in enumerate(sorted(streams, key=lambda one: not one.output)[:total])
    ]
    idle = range(len(busy), total)
    return busy + [types.LlamaCppSlot(id=id, n_ctx=context.max_seq_len, is_processing=False) for id in idle]


def adapters(known: Iterable[Adapter], default: Adapter | None) -> list[types.LlamaCppAdapter]:
    """Lists adapters with their scales for requests that name none. Only the default adapter's scale is not 0.

    `path` has the last part of an adapter's path, because clients need not know the server's folders.
    """
    return [
        types.LlamaCppAdapter(
            id=id, path=Path(one.path).name, scale=default.scale if default and default.name == one.name else 0.0
        )
        for id, one in enumerate(known)
    ]
