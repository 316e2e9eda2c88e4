"""The model as a Python object: `LLM(model).generate("Once upon a time")`, with a worker of its own and no HTTP.

    with LLM("demo", max_batch_size=8) as llm:
        llm.generate("Hello")                                                   # str
        llm.generate(["A", "B"])                                                # list[str]
        for text in llm.generate("Hello", stream=True): ...
        for index, text in llm.generate(["A", "B"], stream=True): ...
        async for text in llm.generate_async("Hello"): ...
        llm.chat([{"role": "user", "content": "Hi"}])                           # the same forms
        llm.generate_with_request({"messages": [...], "temperature": 0})        # the same as `chat`
        llm.complete(["A", "B"])                                                # list[Answer]: ids, finish, usage, seed

Requests are read, checked and run by the same code as the server's, so that equal requests get equal answers. The
worker is another process (see deploy/supervisor/embedded_worker.py); this one loads no torch. All methods may be
called from any thread.
"""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from deploy.supervisor.child_command import CliError, with_local_model, with_tokenizer_files
from deploy.supervisor.embedded_worker import EmbeddedWorker, embedded_worker
from deploy.supervisor.run_dir import RunDirError
from frontend.api.common import ModelContext
from frontend.errors import SluiceError
from frontend.generation.service import Service
from frontend.offline.batch import Answer, BatchRunner
from frontend.offline.inputs import (
    ChatOptions,
    Chats,
    Messages,
    Options,
    Prompt,
    Prompts,
    Read,
    of_chats,
    of_prompts,
    several_chats,
    several_prompts,
)
from frontend.offline.loop_thread import Closed, LoopThread
from frontend.offline.text_stream import Piece, TextStream, only_text, progress_bar
from frontend.request import Finish, Usage
from frontend.text.tokenizer import Tokenizer, TokenizerError
from frontend.workers.pool import WorkerPool
from shared.config import ConfigError, Settings, with_values
from shared.default_sizes import with_default_sizes
from shared.flags import Flag, select
from shared.machine import visible_gpus
from shared.settings_check import check

__all__ = ["LLM", "Answer", "CannotStart", "ChatOptions", "Closed", "ConfigError", "Finish", "Options", "SluiceError",
           "Usage"]  # fmt: skip

POLL_S = 0.02
SETTINGS = {
    flag.name: flag
    for flag in select(("model", "worker"), ("run_dir", "stall_timeout", "recovery_timeout", "log_level"))
}
DEFAULTS = {"worker_metrics_port": 0}  # nobody scrapes it


class CannotStart(SluiceError):
    """The worker, or the model's tokenizer, could not be loaded; says why."""


Opening = Callable[[], AbstractAsyncContextManager[BatchRunner]]


class LLM:
    """A model in a worker process of its own.

    Ends with `close`, with the `with` that it heads, when it is no longer referenced, or with this process. A worker
    that crashes is started again, and what was running goes on where it was.
    """

    def __init__(self, model: str | Path = "demo", **settings: Any) -> None:
        """Returns when the model is loaded.

        `settings` are those of `sluice worker` by their names in shared/config.py (`max_batch_size=8`,
        `dtype="float32"`, `threads=1`, ...); SLUICE_ variables are not read.

        Raises:
            ConfigError: a setting is unknown, of the wrong type or out of range, or two do not fit.
            CannotStart: the model cannot be served; the worker's last words.
        """
        self._begin(_prepared(str(model), settings))

    @classmethod
    def over(cls, opening: Opening) -> Self:
        """The same on what `opening` opens, instead of a worker of its own."""
        llm = cls.__new__(cls)
        llm._begin(opening)
        return llm

    def _begin(self, opening: Opening) -> None:
        self._background = LoopThread(opening)
        self._served = self._background.held
        self._end = weakref.finalize(self, self._background.close)

    def close(self) -> None:
        """Ends the worker; what runs raises `Closed`, and so does what is asked afterwards. Idempotent."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._served.context.tokenizer

    @property
    def max_seq_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._served.context.max_seq_len

    # what is asked

    # fmt: off
    @overload
    def generate(
        self, prompt: Prompt, *, stream: Literal[False] = ..., progress: bool | None = ..., **options: Unpack[Options]
    ) -> str: ...
    @overload
    def generate(
        self, prompt: Prompts, *, stream: Literal[False] = ..., progress: bool | None = ..., **options: Unpack[Options]
    ) -> list[str]: ...
    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[True], **options: Unpack[Options]) -> Generator[str]: ...
    @overload
    def generate(self, prompt: Prompts, *, stream: Literal[True], **options: Unpack[Options]) -> Generator[Piece]: ...
    # fmt: on
    def generate(self, prompt: Any, *, stream: bool = False, progress: bool | None = None, **options: Any) -> Any:
        """Continues a prompt (a text, or token ids) or each of a list of them.

        Whole: the text, or the list of texts. With `stream` a generator of pieces of text, or of (index of the
        prompt, piece) as they come; to close it aborts what still runs. `progress`: a bar on stderr for many prompts
        (None: on a terminal, for more than 8). Options and their defaults are those of `/v1/completions`.

        Raises:
            TypeError: an option is unknown.
            SluiceError: the HTTP API's own refusals and failures; when one prompt fails the others are aborted.
        """
        prompts, one = several_prompts(prompt)
        return self._text(of_prompts(prompts, options), len(prompts), one, stream, progress)

    # fmt: off
    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[False] = ..., progress: bool | None = ...,
        **options: Unpack[ChatOptions],
    ) -> str: ...
    @overload
    def chat(
        self, messages: Chats, *, stream: Literal[False] = ..., progress: bool | None = ...,
        **options: Unpack[ChatOptions],
    ) -> list[str]: ...
    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]) -> Generator[str]: ...
    @overload
    def chat(self, messages: Chats, *, stream: Literal[True], **options: Unpack[ChatOptions]) -> Generator[Piece]: ...
    # fmt: on
    def chat(self, messages: Any, *, stream: bool = False, progress: bool | None = None, **options: Any) -> Any:
        """As `generate`, for one conversation (dicts with `role` and `content`) or a list of them, put into words by
        the model's chat template. Options and their defaults are those of `/v1/chat/completions`."""
        return self._chat(messages, stream, progress, options)

    def generate_with_request(self, request: Mapping[str, Any], *, progress: bool | None = None) -> Any:
        """As `chat`, with all of it in one mapping: `messages`, `stream` and options."""
        options = {name: value for name, value in request.items() if name not in ("messages", "stream")}
        return self._chat(request["messages"], bool(request.get("stream")), progress, options)

    def complete(
        self, prompts: Prompt | Prompts, *, progress: bool | None = None, **options: Unpack[Options]
    ) -> list[Answer]:
        """As `generate`, with all that is known of each answer; a single prompt gives a list of one."""
        several, _ = several_prompts(prompts)
        return self._whole(of_prompts(several, options), len(several), progress)

    def complete_chat(
        self, messages: Messages | Chats, *, progress: bool | None = None, **options: Unpack[ChatOptions]
    ) -> list[Answer]:
        """As `chat`, with all that is known of each answer."""
        several, _ = several_chats(messages)
        return self._whole(of_chats(several, options), len(several), progress)

    def generate_async(self, prompt: Prompt, **options: Unpack[Options]) -> "TextStream":
        """As `generate` with `stream`, for a caller in an event loop: `async for text in llm.generate_async("Hi")`."""
        return TextStream(self._background.pieces_async(self._served.texts(of_prompts([prompt], options))))

    def chat_async(self, messages: Messages, **options: Unpack[ChatOptions]) -> "TextStream":
        """As `chat` with `stream`, for a caller in an event loop."""
        return TextStream(self._background.pieces_async(self._served.texts(of_chats([messages], options))))

    # how it is answered

    def _chat(self, messages: Any, stream: bool, progress: bool | None, options: Mapping[str, Any]) -> Any:
        chats, one = several_chats(messages)
        return self._text(of_chats(chats, options), len(chats), one, stream, progress)

    def _text(self, read: Read, total: int, one: bool, stream: bool, progress: bool | None) -> Any:
        if stream:
            pieces = self._background.pieces(self._served.texts(read))
            return only_text(pieces) if one else pieces
        texts = [answer.text for answer in self._whole(read, total, progress)]
        return texts[0] if one else texts

    def _whole(self, read: Read, total: int, progress: bool | None) -> list[Answer]:
        answers: dict[int, Answer] = {}
        with (
            progress_bar(total, progress) as tick,
            closing(self._background.pieces(self._served.answers(read))) as finished,
        ):
            for index, answer in finished:
                answers[index] = answer
                tick()
        return [answers[index] for index in range(total)]


# how it is opened


def _prepared(model: str, given: dict[str, Any]) -> Opening:
    if unknown := given.keys() - SETTINGS.keys():
        raise ConfigError(f"there is no setting {', '.join(sorted(unknown))}")
    values = {name: _typed(SETTINGS[name], value) for name, value in given.items()}
    settings = check(with_values(Settings(), {"model": model, **DEFAULTS, **values}), {"model", *values})
    try:
        placed = with_local_model(settings)
    except CliError as error:
        raise CannotStart(str(error)) from error
    return lambda: _open(placed)


def _typed(flag: Flag, value: Any) -> Any:
    """Read as on the command line: the right type, or a ConfigError that names the setting."""
    return flag.value(str(value), flag.name)


@asynccontextmanager
async def _open(settings: Settings) -> AsyncIterator[BatchRunner]:
    try:
        async with embedded_worker(settings) as worker:
            config = settings.frontend
            fleet = WorkerPool(
                worker.wire, stall_timeout=config.stall_timeout, recovery_timeout=config.recovery_timeout
            )
            await fleet.start()
            try:
                tokenizer = await _tokenizer(settings)
                with closing(tokenizer):
                    yield await _ready(worker, fleet, tokenizer, settings)
            finally:
                await fleet.close()
    except (CliError, RunDirError, TokenizerError) as error:
        raise CannotStart(str(error)) from error


async def _tokenizer(settings: Settings) -> Tokenizer:
    """Loaded while the worker starts. The thread is our own: asyncio's cannot be ended while Python exits."""
    template = settings.frontend.chat_template
    with ThreadPoolExecutor(1) as thread:
        return await asyncio.get_running_loop().run_in_executor(
            thread, lambda: Tokenizer.load(Path(with_tokenizer_files(settings).model.model), template)
        )


async def _ready(worker: EmbeddedWorker, fleet: WorkerPool, tokenizer: Tokenizer, settings: Settings) -> BatchRunner:
    loaded: asyncio.Future[Tokenizer] = asyncio.get_running_loop().create_future()
    loaded.set_result(tokenizer)
    service = Service(fleet, loaded)
    while fleet.membership.welcome is None or not service.readiness.ready:
        worker.raise_if_ended()
        await asyncio.sleep(POLL_S)
    worker.mark_ready()
    sizes = with_default_sizes(settings.worker, on_gpu=settings.worker.device != "cpu" and bool(visible_gpus()))
    context = ModelContext.of(settings.model.name, tokenizer, settings.frontend).within(fleet.membership.welcome.limits)
    width = sizes.max_batch_size + min(sizes.max_batch_size, sizes.max_waiting_requests)
    return BatchRunner(service, context, width, settings.frontend.recovery_timeout)
