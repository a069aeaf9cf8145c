"""What Python objects a run was begun with is recognised by their sources."""

import inspect

from evo_grpo.envs.describing import source_part
from evo_grpo.envs.episodes.multi_turn import TokenObservationWrapper


class Game:
    """A game of the user."""


def test_a_class_of_the_package_is_known_by_its_name_and_one_of_the_user_by_its_source(monkeypatch):
    def parts():
        return source_part("package", TokenObservationWrapper), source_part("user", Game)

    package, user = parts()
    monkeypatch.setattr(inspect, "getsource", lambda target: "class Game:\n    lives = 2\n")
    assert parts()[0] == package  # a later version of the package may have edited it
    assert parts()[1] != user
