"""Games of TextArena, in which the agent plays one side and fixed opponents play the others."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from evo_grpo.envs.episodes.multi_turn import check_flag, check_reward
from evo_grpo.envs.family import Family, check_arguments, check_name
from evo_grpo.envs.finding import find_name
from evo_grpo.envs.loading import Loader, load_function
from evo_grpo.envs.packages import PrivateGenerators, entry_point, load_package, quiet, try_out
from evo_grpo.errors import ConfigError
from evo_grpo.schema.validation import whole
from evo_grpo.seeding import generator
from evo_grpo.settings import EnvConfig

FAMILY = Family("name", multi_turn=True)
PACKAGE = "textarena"
REMEDY = 'pip install "evo-grpo[envs]"'

Opponent = Callable[[str, np.random.Generator], str]
"""(text that a side has seen so far, the episode's generator) -> its move."""

MAX_OPPONENT_MOVES = 100
"""Consecutive moves of the other sides, after which an episode is truncated."""
MOST_PLAYERS = 15

_LISTED = re.compile(
    r"^.*\b(?:available|valid|legal|possible|allowed)\b[^:\n]*:(.*)$", re.IGNORECASE | re.MULTILINE
)
_MOVE = re.compile(r"\[[^\[\]\n]+\]")
_ROLE = re.compile(r"\[(?:GAME|Player(?: \d+)?)\]")


def random_opponent(seen: str, draw: np.random.Generator) -> str:
    """Draw a move such as "[4]" from the last list of moves in the text `seen`.

    Without a list, any move in the text may be drawn; without a move, the result is "".
    """
    lists = [_MOVE.findall(line) for line in _LISTED.findall(seen)]
    moves = next((listed_moves for listed_moves in reversed(lists) if listed_moves), None)
    if moves is None:
        moves = [move for move in _MOVE.findall(seen) if not _ROLE.fullmatch(move)]
    return moves[int(draw.integers(len(moves)))] if moves else ""


def check(name: str, env: EnvConfig, seed: int) -> None:
    """Check the game as `build` does, but only look up the user's opponent in its source."""
    build(name, env, seed, _found_opponent)


def build(
    name: str, env: EnvConfig, seed: int, load: Loader = load_function
) -> Callable[[], TextArenaEnv]:
    """Return a factory of the TextArena game with the ID `name`.

    In `env.args`, `players` is the number of sides; the default is 2 if the game allows it, else 1,
    else the fewest that it allows. `player` is the side of the agent; the default is 0, which
    usually begins. `opponent` is "random" or the "module:function" of an `Opponent`, which `load`
    imports. All other arguments are settings of the game's class.
    """
    kind, args = env.kind, env.args
    make_game = _find(kind, name, args)
    opponent = str(args.get("opponent", "random"))
    play = random_opponent if opponent == "random" else load(opponent, "env.args.opponent")
    player, players = args.get("player", 0), args.get("players")
    whole(0).check("env.args.player", player)
    whole(1).or_none().check("env.args.players", players)

    make = partial(
        TextArenaEnv, make_game, play, kind=kind, player=player, players=players, seed=seed
    )
    return try_out(kind, make, seed)


class TextArenaEnv:
    """An agent's side of a game; an observation has the messages since the agent's last turn.

    The game gives the reward at the end. If an opponent loses by an invalid move, the episode is
    truncated with a reward of 0, so that the agent does not learn to wait for such moves.

    Args:
        make: Returns the game.
        opponent: Plays the other sides.
        kind: Name in messages.
        player: The agent's side, from 0.
        players: Number of sides; None tries 2, then 1, then more.
        seed: Seed of the episodes that are begun without a seed.
    """

    draws_globally = True

    def __init__(
        self,
        make: Callable[[], Any],
        opponent: Opponent = random_opponent,
        *,
        kind: str = "textarena",
        player: int = 0,
        players: int | None = None,
        seed: int = 0,
    ) -> None:
        self._kind, self._place = kind, f'environment "{kind}"'
        self._opponent = opponent
        self._player = player
        self._generators = PrivateGenerators(seed)
        with self._generators.swapped_in(), quiet():
            self._fresh = make()
            self._players = self._counted(players)
        self._game = self._fresh
        if player >= self._players:
            raise ConfigError(
                f'env.args.player: "{kind}" is played by {self._players}, expected a side from 0 '
                f"to {self._players - 1}, got {player}"
            )
        self._draw = generator(seed, "opponent")
        self._seen: dict[int, list[str]] = {}
        self._done = False

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode; opponents that begin the game move first."""
        episode_seed = self._generators.start(seed)
        self._draw = generator(episode_seed, "opponent")
        self._seen = {side: [] for side in range(self._players)}
        with self._generators.swapped_in(), quiet():
            # A copy, because some games keep state over a reset, such as a shuffled deck. Not a new
            # game, because some games look for a download when they are made.
            self._game = copy.deepcopy(self._fresh)
            self._game.reset(num_players=self._players, seed=episode_seed)
            self._done = False
            text, _ = self._others()
        return text, {"player": self._player, "players": self._players}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make the agent's move, then the opponents' moves until the agent's next turn."""
        text, in_time = "", True
        with self._generators.swapped_in(), quiet():
            if not self._done:
                self._move(action)
                text, in_time = self._others()
            if not self._done:
                return text, 0.0, False, not in_time, {}
            closed = self._game.close()
        rewards, sides = closed if isinstance(closed, tuple) else (closed, {})
        invalid = [side for side, side_info in sides.items() if side_info.get("invalid_move")]
        failed = [side for side in invalid if side != self._player]
        info = {**sides.get(self._player, {}), "rewards": rewards, "opponents_failed": failed}
        if failed:
            return text, 0.0, False, True, info
        reward = check_reward(self._place, (rewards or {}).get(self._player, 0.0))
        return text, reward, True, False, info

    def close(self) -> None:
        """Do nothing: the game holds no resources."""

    def _others(self) -> tuple[str, bool]:
        """Make the opponents' moves; return the new messages, and False after too many moves."""
        for _ in range(MAX_OPPONENT_MOVES):
            if self._done:
                return "", True
            side, text = self._observed()
            if side == self._player:
                return text, True
            move = self._opponent("\n".join(self._seen[side]), self._draw)
            self._move(move)
        return "", False

    def _move(self, move: str) -> None:
        done, _ = self._game.step(action=move)
        self._done = check_flag(self._place, "done", done)

    def _observed(self) -> tuple[int, str]:
        side, messages = self._game.get_observation()
        if isinstance(messages, str):
            text = messages
        else:
            roles = self._game.state.role_mapping
            text = "\n".join(
                f"[{roles.get(sender, f'Player {sender}')}] {message}"
                for sender, message, _ in messages
                if sender != side  # the prompt already holds its own moves
            )
        self._seen[side].append(text)
        return side, text

    def _counted(self, players: int | None) -> int:
        """Return the number of sides, found by trial because games do not report it."""
        counts = [2, 1, *range(3, MOST_PLAYERS + 1)] if players is None else [players]
        refused: Exception | None = None
        for count in counts:
            try:
                copy.deepcopy(self._fresh).reset(num_players=count, seed=0)
            except (AssertionError, ValueError, IndexError, KeyError) as error:
                refused = error
            else:
                return count
        raise ConfigError(
            f'env.args.players: "{self._kind}" is not played by {players or "1 to 15"}: {refused}'
        ) from refused


def _found_opponent(path: str, where: str) -> Opponent:
    find_name(path, where)
    return random_opponent


def _find(kind: str, name: str, args: Mapping[str, Any]) -> Callable[[], Any]:
    package = load_package(kind, "textarena", PACKAGE, REMEDY)
    registered = package.envs.registration.ENV_REGISTRY
    check_name(kind, "TextArena", name, registered)
    spec = registered[name]
    entry = entry_point(kind, spec, PACKAGE)
    adapter_args = ("opponent", "player", "players")
    check_arguments(kind, args, entry, adapter_args)
    settings = {**spec.kwargs, **{key: args[key] for key in args if key not in adapter_args}}
    # Without observation wrappers, which repeat the whole episode in every turn, but with those
    # that correct moves, such as missing brackets.
    wrappers: list[Callable[[Any], Any]] = [
        wrapper
        for wrapper in spec.default_wrappers or ()
        if inspect.isclass(wrapper) and issubclass(wrapper, package.ActionWrapper)
    ]

    def make() -> Any:  # noqa: ANN401 -- TextArena is untyped
        game = entry(**settings)
        for wrapper in wrappers:
            game = wrapper(game)
        return game

    return make
