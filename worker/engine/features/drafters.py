"""Finds the model that drafts (--speculative-config), and gives it to an engine once the served model is loaded."""

from collections.abc import Callable

from shared.config import ConfigError, ModelConfig, WorkerConfig
from shared.config.speculation import read_speculative_config
from worker.engine.load_model import ModelFiles, find_model, load_model
from worker.model.layer import Weights
from worker.model.quantization.in_memory import in_memory
from worker.run.runner import Runner
from worker.schedule.features.speculation import Speculation

# Gives the drafter to an engine: its runner, its scheduler's part, the served model's weights, the longest sequence.
AddDrafter = Callable[[Runner, Speculation, Weights, int], None]


def find_drafter(files: ModelFiles, model: ModelConfig, worker: WorkerConfig) -> AddDrafter | None:
    """Returns what loads the model that drafts and gives it to an engine; None if --speculative-config names none.

    Raises ConfigError and CheckpointError.
    """
    config = read_speculative_config(worker.speculative_config, worker.max_draft_tokens)
    if not config.runs_a_model:
        return None
    if files.device.type != "cpu":
        raise ConfigError(f"--speculative-config with {config.method} works on the CPU only: leave it out, or --device")
    return FINDERS[config.method](files, model, worker)


def _find_mtp(files: ModelFiles, model: ModelConfig, worker: WorkerConfig) -> AddDrafter:
    from worker.run.drafters.draft_model import drafters_budget
    from worker.run.drafters.head_drafter import HeadDrafter
    from worker.run.drafters.mtp_head import check_head, load_head

    check_head(files.folder, files.spec, files.formats.dtype, files.formats.memory)

    def add_to(runner: Runner, speculation: Speculation, weights: Weights, longest: int) -> None:
        head = load_head(files.folder, files.spec, weights, files.formats.memory, longest)
        runner.hidden_reader = speculation.proposer = HeadDrafter(head, files.spec, drafters_budget(worker))

    return add_to


def _find_eagle(files: ModelFiles, model: ModelConfig, worker: WorkerConfig) -> AddDrafter:
    from worker.run.drafters.draft_model import draft_folder, drafters_budget, explain_draft_model
    from worker.run.drafters.eagle_config import read_eagle_config
    from worker.run.drafters.eagle_head import check_eagle, load_eagle
    from worker.run.drafters.head_drafter import HeadDrafter

    with explain_draft_model():
        folder = draft_folder(worker)
        config = read_eagle_config(folder, files.spec)
        memory = in_memory(config.spec.stored, worker.quantization, files.device)
        check_eagle(folder, config, files.spec, files.formats.dtype, memory)

    def add_to(runner: Runner, speculation: Speculation, weights: Weights, longest: int) -> None:
        with explain_draft_model():
            head = load_eagle(folder, config, files.spec, weights, memory, longest)
        runner.hidden_reader = speculation.proposer = HeadDrafter(head, files.spec, drafters_budget(worker))

    return add_to


def _find_draft_model(files: ModelFiles, model: ModelConfig, worker: WorkerConfig) -> AddDrafter:
    from worker.run.drafters.draft_model import check_fits, draft_settings, drafters_budget, explain_draft_model
    from worker.run.drafters.model_drafter import ModelDrafter

    settings = draft_settings(model, worker)
    with explain_draft_model():
        draft = find_model(*settings, files.device)
        check_fits(draft.spec, draft.folder, files.spec, files.folder)

    def add_to(runner: Runner, speculation: Speculation, weights: Weights, longest: int) -> None:
        with explain_draft_model():
            decoder = load_model(draft, *settings, lambda done, total: None).decoder(draft.spec.max_positions)
        speculation.proposer = ModelDrafter(decoder, longest, drafters_budget(worker))

    return add_to


FINDERS = {"mtp": _find_mtp, "eagle3": _find_eagle, "draft_model": _find_draft_model}  # by the method
