"""What the source says of a name in a config, and that it is no more than an import would say."""

import sys
from inspect import signature
from pathlib import Path

import pytest

from evo_grpo.envs.finding import defining_files, find_function, find_name, is_installed
from evo_grpo.envs.loading import as_rewards, load_function
from evo_grpo.envs.registry import build_multi_turn, check_multi_turn
from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.settings import EnvConfig

SOURCE = """
import dataclasses
import functools
import textwrap

def plain(completion, answer="x", *, level=0, **columns):
    return 1.0

async def waits(completions, prompts):
    return [1.0]

short = lambda completion: 1.0

@functools.lru_cache
def wrapped(completion):
    return 1.0

half = functools.partial(plain, level=2)

if True:
    def branch(completion):
        return 1.0

try:
    import not_there_at_all
except ImportError:
    def fallback(completion):
        return 0.0
else:
    def fallback(completion, answer):
        return 1.0

for looped in (plain,):
    pass

first, (second, *others) = plain, (plain, plain)
LIMIT = 3

class Empty:
    pass

class Judge:
    clean = staticmethod(textwrap.dedent)

    def __init__(self, strict, by=1):
        self.late = plain

    def score(self, completion):
        return 1.0

class Heir(Judge):
    pass

@dataclasses.dataclass
class Fields:
    high: int = 3

judge = Judge(True)
"""
EVERY = ["plain", "waits", "short", "wrapped", "half", "branch", "fallback", "looped", "first"]
EVERY += ["second", "others", "judge.score", "Judge", "Judge.score", "Heir", "Fields", "Empty"]
EVERY.remove("others")  # a list


@pytest.fixture(autouse=True)
def module(write_module):
    write_module("found_here", SOURCE)


@pytest.mark.parametrize("name", EVERY)
def test_what_can_be_loaded_can_be_found_and_is_called_alike(name):
    path = f"found_here:{name}"
    stand_in = find_function(path, "env.reward")
    assert "found_here" not in sys.modules
    loaded = load_function(path)
    known = find_name(path, "env.reward").signature
    if known is not None:
        theirs = signature(loaded).parameters.values()
        assert [(p.name, p.kind, p.default is p.empty) for p in known.parameters.values()] == [
            (p.name, p.kind, p.default is p.empty) for p in theirs
        ]
    if name in ("plain", "waits", "branch"):
        assert known is not None
        ours, theirs = as_rewards(stand_in)[0], as_rewards(loaded)[0]
        assert ours.name == theirs.name
        assert ours.is_batch == theirs.is_batch
        assert ours.required_columns() == theirs.required_columns()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("found_here", 'expected "module:function"'),
        ("found_her:plain", "no module 'found_her', neither installed.*mean \"found_here\""),
        ("found_here.deep:plain", "no module 'found_here.deep'"),
        ("not_there.deep:plain", "no module 'not_there'"),
        ("found_here:plane", "found_here.py\\) has no 'plane'. Did you mean \"plain\""),
        ("found_here:Judge.scor", 'Did you mean "score"'),
        ("found_here:LIMIT", "to be a function, got int 3"),
        ("found_here:functools.reduce", "got one of 'functools', a module of Python's standard"),
        ("./found_here.py:plain", 'expected "module:function"'),
        ("os.path:join", "got one of 'os', a module of Python's standard library"),
        ("test.support:gc_collect", "got one of 'test', a module of Python's standard library"),
    ],
)
def test_what_cannot_be_loaded_is_not_found_either(path, message):
    for look in (find_function, load_function):
        with pytest.raises(ConfigError, match=message) as caught:
            look(path, "env.reward")
        assert repr(path) in str(caught.value)
        assert caught.value.exit_code == 2


def test_a_function_of_the_standard_library_is_not_loaded_through_a_class():
    with pytest.raises(ConfigError, match="got one of 'textwrap', a module of Python's standard"):
        load_function("found_here:Judge.clean")


def test_a_function_is_loaded_from_the_folder_and_hides_no_installed_one(tmp_path):
    (tmp_path / "yaml.py").write_text("safe_load = None")
    assert load_function("found_here:judge.score")("abc") == 1.0
    assert load_function("found_here:half")("abc") == 1.0
    assert load_function("yaml:safe_load")("4") == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "importing 'goes_wrong' raised ZeroDivisionError"),
        ("import not_installed_at_all", "importing 'goes_wrong' failed: No module.*install what"),
        ("import os\nos.chdir('/')", "importing 'goes_wrong' left the working folder at / instead"),
    ],
)
def test_a_module_that_goes_wrong_is_named_and_the_folder_is_put_back(write_module, text, message):
    write_module("goes_wrong", text)
    before = Path.cwd()
    with pytest.raises(ConfigError, match=message):
        load_function("goes_wrong:reward")
    assert Path.cwd() == before


def test_a_class_says_what_it_lacks_unless_another_may_bring_it():
    assert find_name("found_here:Empty", "x").lacks("plan")
    assert not find_name("found_here:Judge", "x").lacks("score")
    assert not find_name("found_here:Judge", "x").lacks("late")
    assert not find_name("found_here:Heir", "x").lacks("plan")
    assert "'by2'" in find_name("found_here:Judge", "x").refuses({"strict": 1, "by2": 1})
    assert "'strict'" in find_name("found_here:Judge", "x").refuses({})
    assert find_name("found_here:Empty", "x").refuses({"a": 1})
    assert find_name("found_here:Fields", "x").refuses({"high": 1}) == ""


@pytest.mark.parametrize(
    "text",
    [
        "globals()['made'] = len",
        "from found_here import *",
        "def __getattr__(name): ...",
        "made = " + "-" * 100_000 + "1",  # nested too deep for a tree
    ],
    ids=range(4),
)
def test_names_that_only_running_would_show_are_not_objected_to(write_module, text):
    write_module("made_later", text)
    assert find_name("made_later:made", "x").signature is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def reward(completion:\n", "SyntaxError"),
        ("def reward(a, a): ...", "SyntaxError: duplicate argument"),
        ("# -*- coding: none-such -*-", "SyntaxError|ImportError|LookupError"),
    ],
)
def test_what_is_no_python_is_named_with_its_file(write_module, text, said):
    write_module("no_python", text)
    with pytest.raises(ConfigError, match=rf"no_python:reward.*no_python.py, got ({said})"):
        find_name("no_python:reward", "env.reward")


def test_packages_are_walked_without_being_imported(tmp_path, monkeypatch):
    inner = tmp_path / "spaced" / "deep" / "inner"
    inner.mkdir(parents=True)
    (inner / "__init__.py").write_text("from .leaf import reward as relayed\n1 / 0\n")
    (inner / "leaf.py").write_text("def reward(completion, answer): ...\n")
    monkeypatch.chdir(tmp_path)
    found = find_name("spaced.deep.inner.leaf:reward", "x")
    assert list(found.signature.parameters) == ["completion", "answer"]
    assert find_name("spaced.deep.inner:relayed", "x").signature is None  # a run shows it
    assert is_installed("spaced.deep")
    assert not is_installed("spaced.deep.none")
    assert not {"spaced", "spaced.deep"} & set(sys.modules)


# --- where a name is defined ---------------------------------------------------------------------


INIT, SCORES = "my_pkg/__init__.py", "my_pkg/scores.py"
CHAIN = {
    INIT: "from .deep import score",
    "my_pkg/deep/__init__.py": "from .inner import one as score",
    "my_pkg/deep/inner.py": "from ...other_pkg import no\nfrom ..two import two as one",
    "my_pkg/two.py": "from other_pkg import three as two",
    "other_pkg.py": "def three(): ...",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        *(
            ({INIT: text, SCORES: "def score(): ...\ndef exact(): ..."}, [INIT, SCORES])
            for text in (
                "from .scores import score",
                "from .scores import exact as score",
                "try:\n    from .scores import score\nexcept ImportError:\n    score = None",
            )
        ),
        *(
            ({INIT: text, SCORES: "def other(): ..."}, [INIT])
            for text in (
                "def score(): ...\nfrom .scores import other",
                "from functools import reduce as score",
                "import functools\nscore = functools.reduce",
                "from . import score",
                "from my_pkg import score as again, again as score",
                "from .. import score",
                "score = 1 +",
            )
        ),
        ({**CHAIN, "my_pkg/unused.py": ""}, [*CHAIN]),
        ({INIT: "from .scores import score", SCORES: "from my_pkg import score"}, [INIT, SCORES]),
    ],
)
def test_a_name_is_followed_to_the_files_that_it_is_imported_from(
    tmp_path, monkeypatch, files, expected
):
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\nraise SystemExit('it was run')\n")
    found = defining_files("my_pkg:score").values()
    assert [str(file.relative_to(tmp_path)) for file in found] == expected
    assert not {"my_pkg", "other_pkg"} & set(sys.modules)


def test_a_module_that_is_missing_is_named_without_a_file(write_module):
    write_module("leads_away", "from gone_away import score")
    assert defining_files("leads_away:score")["gone_away"] is None


# --- environments ---------------------------------------------------------------------------------


GAMES = """
class Game:
    def __init__(self, high=9): ...
    def reset(self, seed=None): ...
    def step(self, action): ...

class Trl:
    def reset(self, **row): ...
    def get_reward(self): ...
    def look(self): ...
"""


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        ("python:games:Gam", {}, "has no 'Gam'.*mean \"Game\""),
        ("python:games:Game", {"hihg": 1}, 'Did you mean "high"'),
        ("python:games:Trl", {}, 'got Trl without step; a class .* is "trl:games:Trl"'),
        ("trl:games:Game", {}, "got Game without get_reward"),
        ("trl:games:Trl", {"max_turns": 0}, "max_turns: expected an integer >= 1"),
        ("textarena:TicTacToe-v0", {"opponent": "games:Nobody"}, "has no 'Nobody'"),
        ("textarena:TicTacToe-v0", {"opponent": "os:system"}, "standard library"),
    ],
)
def test_an_environment_is_looked_at_without_being_imported(write_module, kind, args, message):
    write_module("games", GAMES)
    with pytest.raises(ConfigError, match=message):
        check_multi_turn(EnvConfig(kind=kind, args=args), 0)
    with pytest.raises(ConfigError, match=message):
        build_multi_turn(EnvConfig(kind=kind, args=args), 0)


def test_an_opponent_is_found(write_module):
    write_module("games", "1 / 0\ndef lowest(seen, draw): ...\n")
    env = EnvConfig(kind="textarena:TicTacToe-v0", args={"opponent": "games:lowest"})
    check_multi_turn(env, 0)
    assert "games" not in sys.modules


def test_a_taskset_is_found(tmp_path, write_module, monkeypatch):
    write_module("vf_sums", "1 / 0")
    if not is_installed("verifiers.v1"):
        with pytest.raises(EngineUnavailable, match=r"needs verifiers.v1 of the package verifiers"):
            check_multi_turn(EnvConfig(kind="verifiers:vf_sums"), 0)
        (tmp_path / "verifiers" / "v1").mkdir(parents=True)
    check_multi_turn(EnvConfig(kind="verifiers:vf-sums"), 0)
    with pytest.raises(ConfigError, match="no taskset 'vf_none', neither one of verifiers nor a"):
        check_multi_turn(EnvConfig(kind="verifiers:vf_none"), 0)
    assert "vf_sums" not in sys.modules
