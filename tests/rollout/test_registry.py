import subprocess
import sys
from typing import get_args

import pytest
from engine_contract import prompts_of

from evo_grpo.errors import PromptTooLongError
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native.engine import NativeEngine
from evo_grpo.rollout.registry import ENGINES
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.settings import AgentSettings
from evo_grpo.settings.engine import EngineConfig


def test_the_native_engine_takes_every_setting(pair):
    settings = AgentSettings(
        engine={"max_decode_rows": 5, "max_decode_prompts": 2}, algorithm={"max_model_len": 7}
    )
    engine = ENGINES["native"](pair, settings)
    assert isinstance(engine, NativeEngine)
    assert (engine.max_rows, engine.max_prompts) == (5, 2)
    request = RolloutRequest(0, "a0", prompts_of(7), 1, Sampling(), 0)
    with pytest.raises(PromptTooLongError, match="context of 7 tokens"):
        engine.rollout([request])


def test_the_settings_name_every_engine():
    assert set(get_args(EngineConfig.model_fields["rollout"].annotation)) == set(ENGINES)


@pytest.mark.slow
def test_naming_the_engines_loads_none():
    code = (
        "import sys; from evo_grpo.rollout.registry import ENGINES; "
        "print(len(ENGINES), [m for m in sys.modules if m.startswith('evo_grpo.rollout.native')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1) == [str(len(ENGINES)), "[]\n"]
