import sys
from pathlib import Path

import pytest

from evo_grpo.envs.loading import load_function
from evo_grpo.errors import ConfigError

SOURCE = """
import functools
import textwrap

def reward(completion):
    return len(completion)

class Judge:
    clean = staticmethod(textwrap.dedent)

    def score(self, completion):
        return 1.0

judge = Judge()
half = functools.partial(lambda completion, by: len(completion) / by, by=2)
LIMIT = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("my_rewards", "my_broken", "my_needy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "my_rewards.py").write_text(SOURCE)
    return tmp_path


def test_a_function_of_the_current_folder_is_found(folder):
    assert load_function("my_rewards:reward")("abc") == 3
    assert load_function("my_rewards:judge.score")("abc") == 1.0
    assert load_function("my_rewards:half")("abc") == 1.5


def test_an_installed_function_is_found():
    assert load_function("yaml:safe_load")("4") == 4


def test_a_file_of_the_folder_hides_no_installed_module(folder):
    (folder / "yaml.py").write_text("safe_load = None")
    assert load_function("yaml:safe_load")("4") == 4


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_rewards", "env.reward: expected \"module:function\", got 'my_rewards'"),
        ("./my_rewards.py:reward", 'expected "module:function"'),
        ("os.path:join", "got one of 'os', a module of Python's standard library"),
        ("test.support:gc_collect", "got one of 'test', a module of Python's standard library"),
        (
            "my_rewards:textwrap.dedent",
            "got one of 'textwrap', a module of Python's standard library",
        ),
        ("my_rewards:Judge.clean", "got one of 'textwrap', a module of Python's standard library"),
    ],
)
def test_a_name_without_a_function_is_named(folder, path, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_function(path)
    assert caught.value.exit_code == 2
    assert repr(path) in str(caught.value)


def test_a_module_that_fails_to_import_is_named(folder):
    (folder / "my_broken.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match="importing 'my_broken' raised ZeroDivisionError"):
        load_function("my_broken:reward")
    (folder / "my_needy.py").write_text("import not_installed_at_all")
    with pytest.raises(ConfigError, match=r"importing 'my_needy' failed: No module.*install what"):
        load_function("my_needy:reward")


def test_a_module_that_changes_the_working_folder_is_named_and_it_is_put_back(folder):
    (folder / "my_wandering.py").write_text("import os\nos.chdir('/')\ndef reward(): ...\n")
    before = Path.cwd()
    with pytest.raises(
        ConfigError, match=r"importing 'my_wandering' left the working folder at / instead of"
    ):
        load_function("my_wandering:reward")
    assert Path.cwd() == before
