"""Starts the worker of an `LLM`, and loads its tokenizer meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any

from deploy.supervisor.child_command import CliError, with_local_model, with_tokenizer_files
from deploy.supervisor.embedded_worker import EmbeddedWorker, embedded_worker
from deploy.supervisor.run_dir import RunDirError
from frontend.api.model_context import ModelContext
from frontend.errors import SluiceError
from frontend.generation.service import Service
from frontend.offline.batch import BatchRunner
from frontend.offline.contexts import Contexts, adapters_of
from frontend.text.tokenizer import Tokenizer, TokenizerError
from frontend.workers.pool import WorkerPool
from shared.config import ConfigError, Settings, with_values
from shared.default_sizes import with_default_sizes
from shared.flags import Flag, select
from shared.machine import visible_gpus
from shared.messages import Adapter
from shared.settings_check import check

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
