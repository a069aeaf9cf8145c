"""The page docs/multi_turn.md, run from top to bottom."""

import re
from pathlib import Path

import yaml

from evo_grpo.envs.registry import is_multi_turn
from evo_grpo.settings import EnvConfig

PAGE = Path(__file__).resolve().parents[3] / "docs" / "multi_turn.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def test_the_programs_run_one_after_the_other(capsys):
    space = {"__name__": "page"}
    for language, text in BLOCKS:
        if language == "python":
            exec(compile(text, str(PAGE), "exec"), space)
    out = capsys.readouterr().out
    assert re.search(r"agent +fitness", out)
    assert re.search(r"^(terminated|max_turns|context) \d\.\d ", out, re.M)


def test_the_setting_is_one_of_several_turns():
    (text,) = (text for language, text in BLOCKS if language == "yaml")
    env = EnvConfig.model_validate(yaml.safe_load(text)["env"])
    assert is_multi_turn(env.kind)
    assert env.max_turns == 4
