"""Checks settings and files before `sluice serve` starts any process, so that a mistake is reported early and once.

Workers and frontends repeat these checks, because they can also be started alone. Modules are imported only if a flag
needs them.
"""

from pathlib import Path

from deploy.supervisor.child_command import CliError
from shared.config import Settings
from shared.weight_formats import folder_problem
from shared.wire.curve import keys_for


def check_before_start(settings: Settings) -> None:
    """Raises ConfigError, or CliError for a model that cannot be served.

    settings: the settings of all processes; their `model` is a folder or a hub id.
    """
    folder, frontend = Path(settings.model.model), settings.frontend
    if settings.launch.workers and folder.is_dir() and (problem := folder_problem(folder)):
        raise CliError(f"--model: {problem}", 3)
    for address in (settings.wire.requests, *frontend.worker_addresses.split(",")):
        keys_for(address.strip(), settings.wire, worker=False)
    if frontend.ssl_certfile or frontend.ssl_keyfile:
        from frontend.server.tls import check_tls

        check_tls(frontend)
    if frontend.api_keys or frontend.admin_keys:
        from frontend.server.auth import ApiKeys

        ApiKeys(frontend.api_keys, admin_path=frontend.admin_keys)
    if frontend.receipt_key:
        from shared.signing import Signer

        Signer.load(frontend.receipt_key)
    if settings.model.lora_modules:
        from frontend.api.adapters.registry import AdapterRegistry

        AdapterRegistry(settings.model, max_rank=settings.worker.max_lora_rank)
    if frontend.chat_template:
        from frontend.text.chat_template import given_template

        given_template(Path(frontend.chat_template))
