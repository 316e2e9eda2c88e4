"""The model as a Python object: `LLM(model).generate("Once upon a time")`, with a worker of its own and no HTTP.

    with LLM("smollm2", max_batch_size=8) as llm:
        llm.generate("Hello")                                                   # str
        llm.generate(["A", "B"])                                                # list[str]
        for text in llm.generate("Hello", stream=True): ...
        for index, text in llm.generate(["A", "B"], stream=True): ...
        async for text in llm.generate_async("Hello"): ...
        llm.chat("Hi")                                                          # in the same forms
        llm.chat([{"role": "user", "content": "Hi"}])
        llm.generate_with_request({"messages": [...], "temperature": 0})        # the same as `chat`
        llm.complete(["A", "B"])                                                # list[Answer]: ids, finish, usage, seed
        llm.verify(receipt, request)                                            # dict: identical, position, ...
    with LLM("Qwen/Qwen3-8B", lora_modules="sql=/adapters/sql") as llm:
        llm.chat("All users older than 30", adapter="sql")
    with LLM("Qwen/Qwen3-Embedding-0.6B") as llm:
        llm.embed(["A", "B"])                                                   # list[list[float]]
        llm.score("A", ["B", "C"])                                              # list[float]

The server's own code parses, validates and runs the requests, so that equal requests get equal outputs. The worker is
another process (deploy/launcher/embedded_worker.py); this process does not load torch. Any thread may call any
method.
"""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from deploy.launcher.child_command import CliError, with_local_model, with_tokenizer_files
from deploy.launcher.embedded_worker import EmbeddedWorker, embedded_worker
from deploy.launcher.run_dir import RunDirError
from deploy.offline.batch import Answer, BatchRunner, ReadRequest, embedding_reader, score_reader, scores
from deploy.offline.inputs import (
    Chat,
    ChatOptions,
    Chats,
    Contexts,
    Options,
    Prompt,
    Prompts,
    ReadRequests,
    adapters_of,
    as_chats,
    as_prompts,
    chat_requests,
    prompt_requests,
)
from deploy.offline.loop_thread import Closed, LoopThread, TextPiece, TextStream, only_text, progress_bar
from frontend.errors import SluiceError
from frontend.generation.service import Service
from frontend.model_context import ModelContext
from frontend.request import Finish, GenerationRequest, Usage
from frontend.text.tokenizer import Tokenizer
from frontend.text.tokenizer_files import TokenizerError
from frontend.workers.pool import WorkerPool
from shared.config.check import check
from shared.config.declaration import ConfigError
from shared.config.flags import Flag, select
from shared.config.settings import Settings, with_values
from shared.config.worker import with_default_sizes
from shared.machine import visible_gpus
from shared.messages import Adapter
from shared.wire import unpack_f32

# Starts the worker of an `LLM`, and loads its tokenizer meanwhile.

POLL_S = 0.02
SETTINGS = {
    flag.name: flag
    for flag in select(("model", "worker"), ("run_dir", "stall_timeout", "recovery_timeout", "log_level"))
}
DEFAULTS = {"worker_metrics_port": 0}  # no Prometheus scrapes an embedded worker


class CannotStart(SluiceError):
    """The worker or the model's tokenizer could not be loaded; the message says why."""


OpenRunner = Callable[[], AbstractAsyncContextManager[BatchRunner]]


def runner_of(model: str, settings_by_name: Mapping[str, Any]) -> OpenRunner:
    """Checks the settings. Returns a function that starts and later ends a worker. Raises ConfigError, CannotStart."""
    if unknown := settings_by_name.keys() - SETTINGS.keys():
        raise ConfigError(f"there is no setting {', '.join(sorted(unknown))}")
    values = {name: _typed(SETTINGS[name], value) for name, value in settings_by_name.items()}
    settings = check(with_values(Settings(), {"model": model, **DEFAULTS, **values}), {"model", *values})
    try:
        local_settings = with_local_model(settings)
    except CliError as error:
        raise CannotStart(str(error)) from error
    adapters = adapters_of(local_settings.model, local_settings.worker)
    return lambda: _open(local_settings, adapters)


def _typed(flag: Flag, value: Any) -> Any:
    """Returns the value as the command line reads it; raises ConfigError, which names the setting, for a wrong type."""
    return flag.value(str(value), flag.name)


@asynccontextmanager
async def _open(settings: Settings, adapters: Mapping[str, Adapter]) -> AsyncIterator[BatchRunner]:
    try:
        async with embedded_worker(settings) as worker:
            config = settings.frontend
            pool = WorkerPool(worker.wire, stall_timeout=config.stall_timeout, recovery_timeout=config.recovery_timeout)
            await pool.start()
            try:
                tokenizer = await _tokenizer(settings)
                with closing(tokenizer):
                    yield await _ready(worker, pool, tokenizer, settings, adapters)
            finally:
                await pool.close()
    except (CliError, RunDirError, TokenizerError) as error:
        raise CannotStart(str(error)) from error


async def _tokenizer(settings: Settings) -> Tokenizer:
    """Loads the tokenizer while the worker starts.

    Starts a thread for it, because asyncio's threads cannot be ended while Python exits.
    """
    template, task = settings.frontend.chat_template, settings.model.task
    with ThreadPoolExecutor(1) as thread:
        return await asyncio.get_running_loop().run_in_executor(
            thread, lambda: Tokenizer.load(Path(with_tokenizer_files(settings).model.model), template, task)
        )


async def _ready(
    worker: EmbeddedWorker, pool: WorkerPool, tokenizer: Tokenizer, settings: Settings, adapters: Mapping[str, Adapter]
) -> BatchRunner:
    loaded: asyncio.Future[Tokenizer] = asyncio.get_running_loop().create_future()
    loaded.set_result(tokenizer)
    service = Service(pool, loaded)
    while pool.membership.welcome is None or not service.readiness.ready:
        worker.raise_if_ended()
        await asyncio.sleep(POLL_S)
    worker.mark_ready()
    sizes = with_default_sizes(settings.worker, on_gpu=settings.worker.device != "cpu" and bool(visible_gpus()))
    context = ModelContext.of(settings.model.names, tokenizer, settings.frontend).within(pool.membership.welcome.limits)
    concurrency = sizes.max_batch_size + min(sizes.max_batch_size, sizes.max_waiting_requests)
    return BatchRunner(service, Contexts(context, adapters), concurrency, settings.frontend.recovery_timeout)


__all__ = ["LLM", "Answer", "CannotStart", "ChatOptions", "Closed", "ConfigError", "Finish", "Options", "SluiceError",
           "Usage"]  # fmt: skip


class LLM:
    """A model in a worker process of its own.

    `close`, the end of a `with` block, the garbage collector or the end of this process ends the worker. A worker that
    crashes is restarted, and its requests continue where they were.
    """

    def __init__(self, model: str | Path = "smollm2", **settings: Any) -> None:
        """Starts the worker, and returns when the model is loaded.

        settings: the flags of `sluice worker` by their names in shared/config/worker.py (`max_batch_size=8`,
            `dtype="float32"`, `threads=1`, ...); SLUICE_ variables are not read

        Raises:
            ConfigError: a setting is unknown, of the wrong type or out of range, or contradicts another.
            CannotStart: the model cannot be served; the message is the worker's.
        """
        self._start(runner_of(str(model), settings))

    @classmethod
    def over(cls, open_runner: OpenRunner) -> Self:
        """Creates an LLM that uses the runner that `open_runner` opens, instead of a worker of its own."""
        llm = cls.__new__(cls)
        llm._start(open_runner)
        return llm

    def _start(self, open_runner: OpenRunner) -> None:
        self._loop_thread = LoopThread(open_runner)
        self._runner = self._loop_thread.resource
        self._finalize = weakref.finalize(self, self._loop_thread.close)

    def close(self) -> None:
        """Ends the worker. Running requests and later calls raise `Closed`. Idempotent."""
        self._finalize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._runner.contexts.base.tokenizer

    @property
    def max_seq_len(self) -> int:
        """How many tokens prompt and output may have together."""
        return self._runner.contexts.base.max_seq_len

    # requests

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
    def generate(
        self, prompt: Prompts, *, stream: Literal[True], **options: Unpack[Options]
    ) -> Generator[TextPiece]: ...
    # fmt: on
    def generate(self, prompt: Any, *, stream: bool = False, progress: bool | None = None, **options: Any) -> Any:
        """Continues a prompt (a text, or token ids), or each prompt of a list.

        Returns the text, or the list of texts. With `stream`, returns a generator of pieces of text, or of (index
        of the prompt, piece), as they arrive; closing the generator aborts the requests that still run.

        progress: whether to show a bar on stderr; None: only on a terminal, and only for more than 8 prompts
        options: the options of `/v1/completions`, with the same defaults

        Raises:
            TypeError: an option is unknown.
            SluiceError: an error of the HTTP API; when one prompt fails, the others are aborted.
        """
        prompts, single = as_prompts(prompt)
        return self._text(prompt_requests(prompts, options), len(prompts), single, stream, progress)

    # fmt: off
    @overload
    def chat(
        self, messages: Chat, *, stream: Literal[False] = ..., progress: bool | None = ...,
        **options: Unpack[ChatOptions],
    ) -> str: ...
    @overload
    def chat(
        self, messages: Chats, *, stream: Literal[False] = ..., progress: bool | None = ...,
        **options: Unpack[ChatOptions],
    ) -> list[str]: ...
    @overload
    def chat(self, messages: Chat, *, stream: Literal[True], **options: Unpack[ChatOptions]) -> Generator[str]: ...
    @overload
    def chat(
        self, messages: Chats, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> Generator[TextPiece]: ...
    # fmt: on
    def chat(self, messages: Any, *, stream: bool = False, progress: bool | None = None, **options: Any) -> Any:
        """Does the same as `generate` for a conversation, or for each conversation of a list.

        A conversation is a list of dicts with `role` and `content`, or the text of a single message of the user. The
        content may be a list of parts, as over HTTP. The part `{"type": "image", "image": ...}` has an image, as a
        path or as a Pillow image.

        The model's chat template renders a conversation.

        options: the options of `/v1/chat/completions`, with the same defaults
        """
        return self._chat(messages, stream, progress, options)

    def generate_with_request(self, request: Mapping[str, Any], *, progress: bool | None = None) -> Any:
        """Like `chat`, with `messages`, `stream` and the options in one mapping."""
        options = {name: value for name, value in request.items() if name not in ("messages", "stream")}
        return self._chat(request["messages"], bool(request.get("stream")), progress, options)

    def complete(
        self, prompts: Prompt | Prompts, *, progress: bool | None = None, **options: Unpack[Options]
    ) -> list[Answer]:
        """Like `generate`, but returns an Answer for each output: its text, ids, finish, usage and seed."""
        prompt_list, _ = as_prompts(prompts)
        return self._answers(prompt_requests(prompt_list, options), len(prompt_list), progress)

    def complete_chat(
        self, messages: Chat | Chats, *, progress: bool | None = None, **options: Unpack[ChatOptions]
    ) -> list[Answer]:
        """Like `chat`, but returns an Answer for each output: its text, ids, finish, usage and seed."""
        chats, _ = as_chats(messages)
        return self._answers(chat_requests(chats, options), len(chats), progress)

    def generate_async(self, prompt: Prompt, **options: Unpack[Options]) -> "TextStream":
        """Like `generate` with `stream`, for a caller in an event loop: `async for text in llm.generate_async("A")`."""
        return TextStream(self._loop_thread.iterate_async(self._runner.texts(prompt_requests([prompt], options))))

    def chat_async(self, messages: Chat, **options: Unpack[ChatOptions]) -> "TextStream":
        """Like `chat` with `stream`, for a caller in an event loop."""
        chats, _ = as_chats([messages])
        return TextStream(self._loop_thread.iterate_async(self._runner.texts(chat_requests(chats, options))))

    # vectors and scores

    # fmt: off
    @overload
    def embed(
        self, prompt: Prompt, *, dimensions: int | None = ..., prompt_name: str | None = ..., adapter: str | None = ...
    ) -> list[float]: ...
    @overload
    def embed(
        self, prompt: Prompts, *, dimensions: int | None = ..., prompt_name: str | None = ..., adapter: str | None = ...
    ) -> list[list[float]]: ...
    # fmt: on
    def embed(
        self, prompt: Any, *, dimensions: int | None = None, prompt_name: str | None = None, adapter: str | None = None
    ) -> Any:
        """Returns the vector of a prompt (a text, or token ids), or of each prompt of a list, as `/v1/embeddings` does.

        The model must be one that embeds, or be opened with `task="embed"`. Raises SluiceError.
        """
        prompts, single = as_prompts(prompt)
        _, packed = self._pooled(embedding_reader(prompts, dimensions, prompt_name, adapter))
        vectors = [unpack_f32(vector).tolist() for vector in packed]
        return vectors[0] if single else vectors

    def score(
        self, text_1: str | list[str], text_2: str | list[str], *, instruction: str | None = None,
        adapter: str | None = None,
    ) -> list[float]:  # fmt: skip
        """Returns a score for each pair of texts, as `/v1/score` does. Raises SluiceError."""
        return scores(*self._pooled(score_reader(text_1, text_2, instruction, adapter)))

    def verify(self, receipt: Mapping[str, Any], request: Mapping[str, Any], *, force: bool = False) -> dict[str, Any]:
        """Checks the receipt of an answer to a request, as `/v1/receipts/verify` does. Raises SluiceError."""
        asked = {"receipt": receipt, "request": request, "force": force}
        (result,) = self._loop_thread.iterate(self._runner.verification(asked))
        return result

    def _pooled(self, read: ReadRequest) -> tuple[GenerationRequest, list[bytes]]:
        (pooled,) = self._loop_thread.iterate(self._runner.vectors(read))
        return pooled

    # running the requests

    def _chat(self, messages: Any, stream: bool, progress: bool | None, options: Mapping[str, Any]) -> Any:
        chats, single = as_chats(messages)
        return self._text(chat_requests(chats, options), len(chats), single, stream, progress)

    def _text(self, read: ReadRequests, total: int, single: bool, stream: bool, progress: bool | None) -> Any:
        if stream:
            pieces = self._loop_thread.iterate(self._runner.texts(read))
            return only_text(pieces) if single else pieces
        texts = [answer.text for answer in self._answers(read, total, progress)]
        return texts[0] if single else texts

    def _answers(self, read: ReadRequests, total: int, progress: bool | None) -> list[Answer]:
        answers: dict[int, Answer] = {}
        with (
            progress_bar(total, progress) as tick,
            closing(self._loop_thread.iterate(self._runner.answers(read))) as indexed_answers,
        ):
            for index, answer in indexed_answers:
                answers[index] = answer
                tick()
        return [answers[index] for index in range(total)]
