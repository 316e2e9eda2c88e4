"""The rotary settings of a config become a RopeSpec."""

import math
from collections.abc import Iterator

import pytest

from worker.checkpoint.checkpoint import UnsupportedModel
from worker.models.config import spec_from_config
from worker.models.config_values import rope_spec
from worker.spec import ModelSpec, RopeSpec

CONFIG = {"max_position_embeddings": 4096}


def test_default_rope_has_its_theta_only() -> None:
    assert rope_spec({"rope_theta": 10_000}, CONFIG, 64, partial=False) == RopeSpec("default", 10_000.0)


def test_older_type_key_is_read() -> None:
    settings = {"rope_theta": 10_000, "type": "linear", "factor": 2}
    assert rope_spec(settings, CONFIG, 64, partial=False) == RopeSpec("linear", 10_000.0, 2.0)


def test_theta_grows_by_alpha() -> None:
    settings = {"rope_theta": 10_000, "type": "dynamic", "factor": 1.0}
    assert rope_spec(settings, CONFIG, 64, partial=False) == RopeSpec("default", 10_000.0)
    grown = rope_spec(settings | {"alpha": 1000.0}, CONFIG, 128, partial=False)
    assert grown == RopeSpec("default", pytest.approx(10_000 * 1000 ** (128 / 126)))


def test_yarn_magnitude_grows_with_the_factor_unless_the_config_names_it() -> None:
    settings = {"rope_theta": 10_000, "rope_type": "yarn", "factor": 8.0}
    assert rope_spec(settings, CONFIG, 64, partial=False).magnitude == pytest.approx(0.1 * math.log(8) + 1)
    assert rope_spec(settings | {"attention_factor": 1.5}, CONFIG, 64, partial=False).magnitude == 1.5


def test_short_factors_mean_longrope_whatever_the_type() -> None:
    settings = {"rope_theta": 10_000, "type": "su", "short_factor": [1.0, 2.0], "factor": 1.0}
    spec = rope_spec(settings, CONFIG, 4, partial=False)
    assert (spec.kind, spec.factors, spec.original_positions) == ("longrope", (1.0, 2.0), 4096)


def test_partial_rotation_needs_a_family_that_has_it() -> None:
    settings = {"rope_theta": 10_000, "partial_rotary_factor": 0.5}
    assert rope_spec(settings, CONFIG, 64, partial=True).rotated == 32
    with pytest.raises(UnsupportedModel, match="partial_rotary_factor is not supported"):
        rope_spec(settings, CONFIG, 64, partial=False)


def test_unknown_kind_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="rotary scaling 'other' is not supported; supported are default"):
        rope_spec({"rope_theta": 1, "rope_type": "other"}, CONFIG, 64, partial=False)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_scaling_of_olmo_3_is_not_for_layers_with_a_window(spelling: str) -> None:
    """The published config states YaRN for all layers, as the name of the setting says; it is for every fourth one."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2}
    config = {"model_type": "olmo3", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    layers = [*config_layers(spec_from_config({**config, "rope_theta": 500_000, spelling: yarn}))]
    assert [(layer.kind, layer.theta) for layer in layers] == [("default", 500_000.0)] * 3 + [("yarn", 500_000.0)]


def config_layers(spec: ModelSpec) -> Iterator[RopeSpec]:
    return (spec.ropes[layer.rope] for layer in spec.layers)
