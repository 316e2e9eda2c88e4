"""Cost models: the linear formula, fitting it to measurements, and files of cost models."""

import json
import random
from pathlib import Path

import pytest

from bench.simulate.cost import PRESETS, CostModel, Observation, fit, load, save, worst_error
from shared.config.declaration import ConfigError
from shared.messages import Sampling
from worker.scheduler.sequence import Chunk, Plan, Sequence

TRUE = CostModel(overhead=0.03, token=5e-4, kv_token=4e-6, sequence=2e-4)


def observed(cost: CostModel, noise: float = 0.0) -> list[Observation]:
    rng, steps = random.Random(1), []
    for tokens, kv_tokens, sequences in [(1, 64, 1), (8, 4096, 8), (32, 2048, 32), (256, 700, 3), (512, 512, 1)] * 4:
        seconds = cost.seconds(tokens, kv_tokens, sequences) * (1 + rng.uniform(-noise, noise))
        steps.append(Observation(tokens, kv_tokens, sequences, seconds))
    return steps


def test_cost_of_a_step_is_the_sum_of_its_chunks() -> None:
    sequence = Sequence((b"a", 1), [1] * 50, 50, Sampling(8), 0)
    plan = Plan([Chunk(sequence, 9, 1, True), Chunk(sequence, 16, 4, False)])
    assert CostModel(1000.0, 100.0, 1.0, 10.0).of(plan) == 1000 + 5 * 100 + (10 + 20) * 1 + 2 * 10


def test_fit_recovers_the_coefficients() -> None:
    found = fit(observed(TRUE))
    assert (found.overhead, found.token) == (pytest.approx(TRUE.overhead), pytest.approx(TRUE.token))
    assert (found.kv_token, found.sequence) == (pytest.approx(TRUE.kv_token), pytest.approx(TRUE.sequence))
    assert worst_error(found, observed(TRUE)) < 1e-6


def test_fit_of_noisy_steps_is_close() -> None:
    found = fit(observed(TRUE, noise=0.02))
    assert found.overhead == pytest.approx(TRUE.overhead, rel=0.1)
    assert found.token == pytest.approx(TRUE.token, rel=0.1)


def test_fit_has_no_negative_coefficients() -> None:
    backwards = CostModel(overhead=0.03, token=5e-4, kv_token=4e-6, sequence=-4e-4)
    found = fit(observed(backwards))
    assert found.sequence == 0 and min(found.overhead, found.token, found.kv_token) >= 0


@pytest.mark.parametrize("steps", [[], observed(TRUE)[:3], [Observation(1, 1, 1, 0.0)] * 5])
def test_fit_of_too_few_steps_raises(steps: list[Observation]) -> None:
    with pytest.raises(ValueError, match="four steps"):
        fit(steps)


def test_load_reads_what_save_wrote(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    save(path, TRUE, observed(TRUE), model="demo")
    assert load(str(path)) == TRUE
    content = json.loads(path.read_text())
    path.write_text(json.dumps({"steps": content["steps"]}))
    assert load(str(path)).token == pytest.approx(TRUE.token)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"steps": []}',
        '{"cost": {"overhead": 1}}',
        '{"cost": {"overhead": -1, "token": 1, "kv_token": 0}}',
        '{"cost": {"overhead": 0, "token": 0, "kv_token": 0}}',
        '{"cost": {"overhead": 1, "token": 1, "kv_token": NaN}}',
        '{"cost": {"overhead": Infinity, "token": 1, "kv_token": 0}}',
    ],
)
def test_load_of_an_invalid_file_names_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"--cost .*cost\.json cannot be read"):
        load(str(path))


def test_load_of_a_preset_is_by_name() -> None:
    assert load("h200-3b") is PRESETS["h200-3b"]
    with pytest.raises(ConfigError, match="h200-3b"):
        load("h300")


def test_gpu_preset_follows_its_arithmetic() -> None:
    cost = PRESETS["h200-3b"]
    assert cost.overhead == pytest.approx(1.87e-3, rel=0.01)
    assert cost.token == pytest.approx(13.5e-6, rel=0.01)
    assert cost.kv_token == pytest.approx(33e-9, rel=0.02)
