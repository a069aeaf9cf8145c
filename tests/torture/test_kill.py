"""A run that is killed at any instant, and again while it resumes, ends as one that is not.

Right after each kill `verify` finds no damage. The result is compared to the bit: leaderboard,
lineage, and by digest every adapter, moment and attribute of every checkpoint that stays.
`make torture` kills at every touch of the disk and at hundreds of random instants; `make test`
takes a sample of both.
"""

import random
import shutil
import time

import pytest
from small_run import outcome
from torture_table import count, shares, tried

from evo_grpo.analysis.verify import verify
from evo_grpo.record.folder import is_run

SETTINGS = {
    "all": {"record__checkpoints": "all"},
    "last": {
        "record__checkpoints": "last",
        "population__size": 4,
        "population__sizes": None,
        "evolve__archive": True,
    },
}


@pytest.fixture(scope="module", params=SETTINGS)
def whole(tmp_path_factory, runs, request):
    """A run that nobody stops: its settings, outcome, touches of the disk and seconds."""
    settings = SETTINGS[request.param]
    folder = tmp_path_factory.mktemp("whole") / "run"
    runs.ask("run", folder.with_name("first"), settings)  # loads what the others find loaded
    start = time.perf_counter()
    _, touches = runs.ask("run", folder, settings)
    assert touches > 100
    found = verify(folder)
    assert found.damage == found.notes == []
    return request.param, settings, outcome(folder), touches, time.perf_counter() - start


def go_on(runs, folder, settings, *, kill=None):
    """Start again, or resume, as far as it was; returns whether that was killed."""
    do = "resume" if is_run(folder) else "run"
    killed, _ = runs.ask(do, folder, settings, at=kill)
    return killed


def expect_no_damage(folder):
    """What a kill leaves is no damage, whenever it came."""
    if is_run(folder):
        assert verify(folder).damage == []


def check(folder, expected):
    assert outcome(folder) == expected
    found = verify(folder)
    assert found.damage == []
    assert found.notes == []
    shutil.rmtree(folder)


def kill_at(runs, folder, whole, touch, rng):
    """Kill at a touch of the disk, kill what goes on at another, and let the third end."""
    _, settings, expected, touches, _ = whole
    killed, _ = runs.ask("run", folder, settings, at=touch)
    assert killed
    expect_no_damage(folder)
    again = 0
    while go_on(runs, folder, settings, kill=rng.randrange(1, touches)) and again < 3:
        expect_no_damage(folder)
        again += 1
    go_on(runs, folder, settings)
    check(folder, expected)
    return 1 + again


@shares(4, cases=2)
def test_a_kill_at_a_touch_of_the_disk_changes_nothing(runs, whole, tmp_path, part):
    rng = random.Random(1)
    touches = part(range(1, whole[3] + 1))
    kills = sum(kill_at(runs, tmp_path / "run", whole, touch, rng) for touch in touches)
    tried("kill -9 at every write, fsync, rename and removal, and again while it resumes",
          f"checkpoints: {whole[0]}", kills)  # fmt: skip


@pytest.mark.torture
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("share", range(2))
def test_a_kill_at_a_random_instant_changes_nothing(runs, whole, tmp_path, share):
    name, settings, expected, _, seconds = whole
    rng, kills = random.Random(20 + share), 0
    while kills < count("EVO_GRPO_KILLS", 60):
        folder, do = tmp_path / "run", "run"
        for _ in range(rng.randrange(1, 4)):
            killed, _ = runs.ask(do, folder, settings, after=rng.uniform(0, seconds))
            kills += killed
            expect_no_damage(folder)
            do = "resume" if is_run(folder) else "run"
        go_on(runs, folder, settings)
        check(folder, expected)
    tried("kill -9 at a random instant, up to three times a run", f"checkpoints: {name}", kills)
