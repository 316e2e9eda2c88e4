"""A short run of the fuzzer of configs. `python -m tests.fuzz.configs SEED SECONDS` is the long run."""

from tests.fuzz.configs import configs, run
from worker.models.config import spec_from_config


def test_configs_unchanged_are_accepted() -> None:
    for config in configs().values():
        spec_from_config(config)


def test_configs_with_one_value_replaced_are_refused_in_a_sentence_or_accepted() -> None:
    counts = run(seed=0, seconds=60, most=4000)
    assert counts.found == []
    assert counts.inputs > 500 and 0.3 < counts.refused / counts.inputs < 0.9
