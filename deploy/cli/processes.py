"""`sluice serve`, `sluice worker` and `sluice frontend`. Each process imports only the modules that it needs."""

import argparse
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.cli.installation import allow_interrupts, require_worker_packages
from deploy.supervisor.child_command import (
    SERVE_FLAGS,
    CliError,
    with_default_model,
    with_local_model,
    with_tokenizer_files,
)
from shared.config import ConfigError, Settings
from shared.flags import given_values
from shared.logs.log_lines import set_up
from shared.machine import visible_gpus
from shared.processes.heartbeat import Heartbeat
from shared.wire.address import check_socket_path

if TYPE_CHECKING:
    from socket import socket

    from worker.ranks.hosts.rendezvous import Hosts


def serve(settings: Settings, namespace: argparse.Namespace) -> int:
    if settings.launch.workers:
        require_worker_packages()
    _check_instruction_set()
    if settings.launch.workers:
        _begin_kernels(settings)
    from deploy.cli.start_checks import check_before_start
    from deploy.supervisor import serve as launch
    from deploy.supervisor.listen_sockets import ListenError
    from deploy.supervisor.run_dir import RunDirError

    given = given_values(namespace, os.environ, SERVE_FLAGS).keys()
    if not settings.many:
        settings = with_local_model(settings if "model" in given else with_default_model(settings))
    check_before_start(settings)
    if settings.worker.rank_group != "local":
        from worker.ranks.hosts.group import read_group

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
    from worker.kernels.cpu.openmp import spin_briefly

    spin_briefly()
    hosts = _hosts(settings)
    if hosts is not None and hosts.group.rank:
        return _follow(settings, hosts)
    settings = _prepare(settings, namespace)
    _share_metrics(namespace)
    from worker.__main__ import run
    from worker.model.checkpoint.checkpoint import CheckpointError
    from worker.run.runner import DeviceBroken

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
    from shared.wire.curve import keys_for
    from worker.ranks.hosts.group import read_group
    from worker.ranks.hosts.rendezvous import Hosts

    group = read_group(settings.worker, os.environ)
    keys = keys_for(f"tcp://{group.leader}:{group.port}", settings.wire, worker=True)
    return Hosts(group, b"" if keys is None else keys.secret)


def _follow(settings: Settings, hosts: "Hosts") -> int:
    set_up(settings.frontend.log_level, as_json=settings.frontend.log_format == "json")
    from worker.host_follower import follow
    from worker.kernels.cpu.ranks_c import RankLost
    from worker.model.checkpoint.checkpoint import CheckpointError
    from worker.ranks.hosts.rendezvous import Refused

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
    _share_metrics(namespace)
    from frontend.__main__ import serve
    from frontend.text.tokenizer_files import TokenizerError

    try:
        serve(settings, [_listener(settings, namespace.fd)], heartbeat=_heartbeat(namespace), hold=namespace.hold)
    except TokenizerError as error:
        raise CliError(error, 3) from error
    return 0


def _check_instruction_set() -> None:
    from worker.kernels.cpu.instruction_set import highest_allowed

    try:
        highest_allowed(os.environ)
    except ValueError as error:
        raise ConfigError(error) from error


def _begin_kernels(settings: Settings) -> None:
    """Begins to compile the C library if it is missing: the model is fetched and packages are imported meanwhile."""
    on_gpu = settings.worker.device == "cuda" or (settings.worker.device == "auto" and visible_gpus())
    if not on_gpu and os.environ.get("SLUICE_NATIVE", "1") != "0":
        from worker.kernels.cpu.build import begin

        begin()


def _share_metrics(namespace: argparse.Namespace) -> None:
    """Makes prometheus-client write metrics to shared files. This must happen before anything is counted.

    A process continues the files of its predecessor, so that files do not pile up.
    """
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not folder:
        return
    from deploy.supervisor.run_dir import reserve_metrics

    name = Path(namespace.heartbeat).stem or str(os.getpid())
    if reserve_metrics(Path(folder), name):
        from shared.logs.prometheus_adapter import name_process

        name_process(name)
    else:
        del os.environ["PROMETHEUS_MULTIPROC_DIR"]
        logging.warning("no space in %s: other processes will not report this one's metrics", folder)


def _prepare(settings: Settings, namespace: argparse.Namespace) -> Settings:
    """Ties the process to its launcher, checks its addresses and sets up logging."""
    if namespace.parent > 0:
        from deploy.supervisor.parent_death import die_with

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

    from deploy.supervisor.listen_sockets import ListenError, listen

    if fd >= 0:
        return socket.socket(fileno=fd)
    try:
        return listen(settings.frontend.host, settings.frontend.port)[0]
    except ListenError as error:
        raise CliError(error, 1) from error
