"""The model as a Python object: `LLM(model).generate("Once upon a time")`, with a worker of its own and no HTTP.

    with LLM("demo", max_batch_size=8) as llm:
        llm.generate("Hello")                         # str
        llm.generate(["A", "B"])                      # list[str]
        for text in llm.generate("Hello", stream=True): ...
        for index, text in llm.generate(["A", "B"], stream=True): ...
        async for text in llm.generate_async("Hello"): ...
        llm.chat([{"role": "user", "content": "Hi"}]) # the same forms
        llm.complete(["A", "B"])                      # list[Answer]: ids, finish, usage, seed, log-probabilities

Requests are read, validated and run by the same code as the server's, so that equal requests get equal answers. The
worker is a process (`deploy.solo`); this one loads no torch.
"""

import weakref
from collections.abc import (
    AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence,
)  # fmt: skip
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, TypeGuard, Unpack, overload

from frontend.background import Background, Closed, Put, Work
from frontend.errors import SluiceError
from frontend.many import Answer, Answers, follow
from frontend.opening import CannotStart, chosen, opened
from frontend.progress import progress_bar
from frontend.protocols import chat, completions
from frontend.protocols.common import Context
from frontend.service import Service
from frontend.tokenizer import Tokenizer
from frontend.types import Ask, Delta, Finish, Usage

__all__ = ["LLM", "Answer", "CannotStart", "ChatOptions", "Closed", "Finish", "Options", "SluiceError", "Usage"]

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
"""E
