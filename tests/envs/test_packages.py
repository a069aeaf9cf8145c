import random
import sys
import threading

import numpy as np
import pytest

from evo_grpo.envs.packages import PrivateGenerators, quiet
from evo_grpo.envs.registry import build_multi_turn, build_task, is_multi_turn
from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.settings import EnvConfig


@pytest.mark.parametrize(
    ("build", "kind", "message"),
    [
        (build_task, "gem:game:X", 'env.kind: "gem:game:X" is played over several turns'),
        (build_multi_turn, "sums", 'env.kind: "sums" asks one question and has rows'),
        (build_multi_turn, "reasoning_gym:x", "build it with build_task"),
        (build_multi_turn, "textarna:x", 'no task "textarna:x".*mean "textarena:<name>"'),
        (build_multi_turn, "gem:", 'env.kind: no task "gem:"'),
        (build_task, "pyton:a:b", 'no task "pyton:a:b".*python:<name>'),
    ],
)
def test_the_wrong_builder_or_name_is_named(build, kind, message):
    with pytest.raises(ConfigError, match=message):
        build(EnvConfig(kind=kind), 0)
    for setting in ("train", "validation", "test", "prompt", "reward"):
        with pytest.raises(ConfigError, match=f'env.{setting}: "python:a:b" brings its own'):
            build_multi_turn(EnvConfig(kind="python:a:b", **{setting: "x:y"}), 0)


@pytest.mark.parametrize(
    ("kind", "modules", "message"),
    [
        ("gem:game:X", ("gem", "gem.envs.registration"), "package gem-llm.*pip install gem-llm"),
        ("textarena:X", ("textarena",), r'pip install "evo-grpo\[envs\]"'),
        ("verifiers:x", ("verifiers", "verifiers.v1"), "of the package verifiers.*pip install"),
        ("reasoning_gym:x", ("reasoning_gym",), r'pip install "evo-grpo\[envs\]"'),
    ],
)
def test_a_missing_package_is_named_with_the_remedy(monkeypatch, kind, modules, message):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    build = build_multi_turn if is_multi_turn(kind) else build_task
    with pytest.raises(EngineUnavailable, match=message) as caught:
        build(EnvConfig(kind=kind), 0)
    assert caught.value.exit_code == 2


def draw():
    return random.random(), np.random.random()  # noqa: NPY002


def test_private_generators_are_the_global_ones_of_that_seed():
    private = PrivateGenerators(0)
    small = private.start(2**40 + 5)
    assert small == 5
    with private.swapped_in():
        drawn = draw()
    assert drawn == (random.Random(5).random(), np.random.RandomState(5).random())
    with private.swapped_in():
        assert draw() != drawn  # goes on where it was
    private.start(5)
    with private.swapped_in():
        assert draw() == drawn


def test_threads_do_not_draw_from_each_other():
    def drawn(seed):
        private = PrivateGenerators(seed)
        for _ in range(200):
            with private.swapped_in():
                results[seed].append(random.random())

    results = {seed: [] for seed in range(4)}
    threads = [threading.Thread(target=drawn, args=(seed,)) for seed in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = {seed: list(values) for seed, values in results.items()}
    for seed in results:
        results[seed].clear()
        drawn(seed)
    assert results == together


def test_what_another_thread_prints_while_a_package_is_quiet_is_shown(capsys):
    with quiet():
        print("the package")
        other = threading.Thread(target=print, args=("the terminal",))
        other.start()
        other.join()
    print("afterwards")
    assert capsys.readouterr().out == "the terminal\nafterwards\n"
