"""`sluice fetch MODEL`: downloads a checkpoint into the cache, for servers that start later or have no network."""

import argparse

from deploy.supervisor.child_command import CliError, with_local_model
from deploy.supervisor.parent_death import die_with
from shared.config import Settings


def fetch(settings: Settings, namespace: argparse.Namespace) -> int:
    """Downloads the checkpoint, then prints its folder and the size of its weights. Raises CliError."""
    if namespace.parent > 0:
        die_with(namespace.parent)
    model = with_local_model(settings).model
    from worker.model.checkpoint.checkpoint import CheckpointError, resolve, stored_bytes

    try:
        folder = resolve(model.model, model.revision, mmproj=model.mmproj)
        size = stored_bytes(folder) / 2**30
    except CheckpointError as error:
        raise CliError(error, 3) from error
    print(f"{model.name} is in {folder}\nits files of weights have {size:.2f} GiB")
    return 0
