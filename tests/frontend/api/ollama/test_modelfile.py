"""Modelfiles, and the parameters of names: what is kept, and what is refused by name."""

import pytest

from frontend.api.ollama.modelfile import checked_preset, read_modelfile
from frontend.errors import Unprocessable
from frontend.model_context import preset_defaults
from shared.preset import Preset


async def test_a_modelfiles_parameters_become_defaults() -> None:
    read = read_modelfile("FROM a\nPARAMETER seed 7\nPARAMETER stop x\nPARAMETER stop y z\nPARAMETER num_ctx 4096\n")
    kept = (await checked_preset(Preset(read.base, parameters=read.parameters))).parameters
    assert kept == {"seed": 7, "stop": ["x", "y z"]}
    assert preset_defaults(kept) == ({"seed": 7}, ("x", "y z"), None)
    assert preset_defaults({"seed": -1, "top_k": -1}).sampling == {"top_k": 0}


@pytest.mark.parametrize(
    ("name", "value"), [("repeat_last_n", 64), ("mirostat", 2), ("typical_p", 0.5), ("seed", 1 << 64), ("min_p", 2.0)]
)
async def test_a_parameter_that_a_name_cannot_have_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(Unprocessable, match=f"parameters.{name}|`{name}`"):
        await checked_preset(Preset("a", parameters={name: value}))
