"""`sluice serve`, `sluice worker` and `sluice frontend`. Each process imports only the modules that it needs."""

import argparse
import logging
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.cli.main import allow_interrupts, require_worker_packages
from deploy.launcher.child_command import (
    SERVE_FLAGS,
    CliError,
    die_with,
    with_default_model,
    with_local_model,
    with_tokenizer_files,
)
from deploy.launcher.run_dir import running_servers
from shared.address import check_socket_path
from shared.config.declaration import ConfigError
from shared.config.flags import Parser, given_values
from shared.config.settings import Settings
from shared.heartbeat import Heartbeat
from shared.log import set_up
from shared.machine import visible_gpus
from shared.weight_formats import folder_problem
from shared.wire import keys_for

if TYPE_CHECKING:
    from socket import socket

    from worker.distributed.rendezvous import Hosts


def serve(settings: Settings, namespace: argparse.Namespace) -> int:
    if namespace.parent > 0:
        die_with(namespace.parent)
    if settings.launch.processes:
        require_worker_packages()
    _check_instruction_set()
    if settings.launch.processes:
        _begin_kernels(settings)
    from deploy.launcher import serve as launch
    from deploy.launcher.run_dir import ListenError, RunDirError

    given = given_values(namespace, os.environ, SERVE_FLAGS).keys()
    if not settings.many:
        settings = with_local_model(settings if "model" in given else with_default_model(settings))
    check_before_start(settings)
    if settings.worker.rank_group != "local":
        from worker.distributed.rendezvous import read_group

        if rank := read_group(settings.worker, os.environ).rank:
            raise ConfigError(f"this is rank {rank}, which serves nobody: start it with `sluice worker`")
    allow_interrupts()
    try:
        return launch.serve(settings, given)
    except (ListenError, RunDirError) as error:
        raise CliError(error, 1) from error


def worker(settings: Settings, namespace: argparse.Namespace) -> int:
    require_worker_packages()
    _check_instruction_set()
    _begin_kernels(settings)
    from worker.ops.openmp import spin_briefly

    spin_briefly()
    hosts = _hosts(settings)
    if hosts is not None and hosts.group.rank:
        return _follow(settings, hosts)
    settings = _prepare(settings, namespace)
    _share_metrics(namespace)
    from worker.__main__ import run
    from worker.checkpoint.checkpoint import CheckpointError
    from worker.model_runner.runner import DeviceBroken

    try:
        epoch = os.environ.get("SLUICE_EPOCH", "")  # set by the launcher, if there is one
        run(settings, int(epoch or time.time()), _heartbeat(namespace), again=epoch not in ("", "1"), hosts=hosts)
    except CheckpointError as error:
        raise CliError(error, 3) from error
    except DeviceBroken as error:
        raise CliError(error, 1) from error
    return 0


def _hosts(settings: Settings) -> "Hosts | None":
    """Returns the hosts of --rank-group and their meeting point; None if all ranks run on this machine."""
    if settings.worker.rank_group == "local":
        return None
    from shared.wire import keys_for
    from worker.distributed.rendezvous import Hosts, read_group

    group = read_group(settings.worker, os.environ)
    keys = keys_for(f"tcp://{group.leader}:{group.port}", settings.wire, worker=True)
    return Hosts(group, b"" if keys is None else keys.secret)


def _follow(settings: Settings, hosts: "Hosts") -> int:
    set_up(settings.frontend.log_level, as_json=settings.frontend.log_format == "json")
    from worker.checkpoint.checkpoint import CheckpointError
    from worker.distributed.rendezvous import Refused
    from worker.follower import follow
    from worker.ops.exchange import RankLost

    try:
        follow(with_local_model(settings), hosts)
    except CheckpointError as error:
        raise CliError(error, 3) from error
    except (RankLost, Refused) as error:  # a restart may succeed when the other hosts work again
        raise CliError(error, 1) from error
    return 0


def frontend(settings: Settings, namespace: argparse.Namespace) -> int:
    settings = _prepare(settings, namespace)
    settings = settings if settings.many else with_tokenizer_files(settings)
    if namespace.parent < 0:  # a restarted process serves even if its store cannot be used
        _check_store(settings)
    _share_metrics(namespace)
    from frontend.__main__ import serve
    from frontend.text.tokenizer_files import TokenizerError

    try:
        serve(settings, [_listener(settings, namespace.fd)], heartbeat=_heartbeat(namespace), hold=namespace.hold)
    except TokenizerError as error:
        raise CliError(error, 3) from error
    return 0


def _check_instruction_set() -> None:
    from worker.ops.native_build import highest_allowed

    try:
        highest_allowed(os.environ)
    except ValueError as error:
        raise ConfigError(error) from error


def _begin_kernels(settings: Settings) -> None:
    """Begins to compile the C library if it is missing: the model is fetched and packages are imported meanwhile."""
    on_gpu = settings.worker.device == "cuda" or (settings.worker.device == "auto" and visible_gpus())
    if not on_gpu and os.environ.get("SLUICE_NATIVE", "1") != "0":
        from worker.ops.native_build import begin

        begin()


def _share_metrics(namespace: argparse.Namespace) -> None:
    """Makes prometheus-client write metrics to shared files. This must happen before anything is counted.

    A process continues the files of its predecessor, so that files do not pile up.
    """
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not folder:
        return
    from deploy.launcher.run_dir import reserve_metrics

    name = Path(namespace.heartbeat).stem or str(os.getpid())
    if reserve_metrics(Path(folder), name):
        from shared.metrics_page import name_process

        name_process(name)
    else:
        del os.environ["PROMETHEUS_MULTIPROC_DIR"]
        logging.warning("no space in %s: other processes will not report this one's metrics", folder)


def _prepare(settings: Settings, namespace: argparse.Namespace) -> Settings:
    """Ties the process to its launcher, checks its addresses and sets up logging."""
    if namespace.parent > 0:
        from deploy.launcher.child_command import die_with

        die_with(namespace.parent)
    wire, has_external = settings.wire, settings.frontend.worker_addresses or settings.frontend.workers_file
    if not wire.run_dir and not (wire.request_address and wire.event_address) and not has_external:
        raise ConfigError(
            "set --run-dir, or --request-address and --event-address, to the same values for worker and frontend "
            "(or, for a frontend, --worker-addresses or --workers-file)"
        )
    try:
        check_socket_path(wire.requests)
    except ValueError as error:
        raise ConfigError(f"--run-dir: {error}") from None
    set_up(settings.frontend.log_level, as_json=settings.frontend.log_format == "json")
    return settings if settings.many else with_local_model(settings)


def _heartbeat(namespace: argparse.Namespace) -> Heartbeat:
    return Heartbeat(Path(namespace.heartbeat) if namespace.heartbeat else None)


def _listener(settings: Settings, fd: int) -> "socket":
    import socket

    from deploy.launcher.run_dir import ListenError, listen

    if fd >= 0:
        return socket.socket(fileno=fd)
    try:
        return listen(settings.frontend.host, settings.frontend.port)[0]
    except ListenError as error:
        raise CliError(error, 1) from error


# Checks settings and files before `sluice serve` starts any process, so that a mistake is reported early and once.
#
# Workers and frontends repeat these checks, because they can also be started alone. Modules are imported only if a
# flag needs them.


def check_before_start(settings: Settings) -> None:
    """Raises ConfigError, or CliError for a model that cannot be served.

    settings: the settings of all processes; their `model` is a folder or a hub id.
    """
    folder, frontend = Path(settings.model.model), settings.frontend
    if settings.launch.processes and folder.is_dir() and (problem := folder_problem(folder)):
        raise CliError(f"--model: {problem}", 3)
    for address in (settings.wire.requests, *frontend.worker_addresses.split(",")):
        keys_for(address.strip(), settings.wire, worker=False)
    if frontend.ssl_certfile or frontend.ssl_keyfile:
        from frontend.server.access import check_tls

        check_tls(frontend)
    if frontend.api_keys or frontend.admin_keys:
        from frontend.server.access import ApiKeys

        ApiKeys(frontend.api_keys, admin_path=frontend.admin_keys)
    _check_store(settings)
    if frontend.receipt_key:
        from shared.signing import Signer

        Signer.load(frontend.receipt_key)
    if (folder_of_adapters := settings.model.allow_runtime_lora) and not Path(folder_of_adapters).expanduser().is_dir():
        raise ConfigError(f"--allow-runtime-lora {folder_of_adapters}: there is no such folder")
    if settings.model.lora_modules:
        from frontend.lora import AdapterRegistry

        AdapterRegistry(settings.model, max_rank=settings.worker.max_lora_rank)
    if frontend.chat_template:
        from frontend.text.chat_template import given_template

        given_template(Path(frontend.chat_template))


def _check_store(settings: Settings) -> None:
    if settings.frontend.keeps:
        from frontend.kept.store import check_store

        check_store(settings.frontend.store)


# `sluice reload`: tells a server on this machine to replace its frontends without refusing a request.


def parser() -> Parser:
    parser = Parser(prog="sluice reload", description="Replace the frontends of a running server, one after another.")
    parser.add_argument(
        "--run-dir", default="", metavar="TEXT", help="the server's --run-dir, if it has one [SLUICE_RUN_DIR]"
    )
    return parser


def reload(words: list[str]) -> int:
    """Signals the running server to replace its frontends. Raises CliError unless exactly one server runs."""
    folder = parser().read(words).run_dir or os.environ.get("SLUICE_RUN_DIR", "")
    pids = running_servers(folder)
    if not pids:
        raise CliError(f"no server runs in {folder}" if folder else "no server runs here; see --run-dir", 1)
    if len(pids) > 1:
        processes = ", ".join(map(str, pids))
        raise CliError(f"{len(pids)} servers run here; send SIGHUP to one of the processes {processes}", 1)
    os.kill(pids[0], signal.SIGHUP)
    print(f"the server (process {pids[0]}) replaces its frontends; its log shows when each one is replaced")
    return 0


# `sluice fetch MODEL`: downloads a checkpoint into the cache, for servers that start later or have no network.


def fetch(settings: Settings, namespace: argparse.Namespace) -> int:
    """Downloads the checkpoint, then prints its folder and the size of its weights. Raises CliError."""
    if namespace.parent > 0:
        die_with(namespace.parent)
    model = with_local_model(settings).model
    from worker.checkpoint.checkpoint import CheckpointError, resolve, stored_bytes

    try:
        folder = resolve(model.model, model.revision, mmproj=model.mmproj)
        size = stored_bytes(folder) / 2**30
    except CheckpointError as error:
        raise CliError(error, 3) from error
    print(f"{model.name} is in {folder}\nits files of weights have {size:.2f} GiB")
    return 0
