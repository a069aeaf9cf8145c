"""Environments for TRL's `environment_factory`: classes whose methods are tools.

As in TRL 1.16, `reset(**row)` returns a string for the end of the prompt, or None; every other
public method is a tool; `get_reward()` scores the episode. TRL relies on the chat template for tool
calls; this module parses them from text in the format of Qwen and Hermes models.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from evo_grpo.envs import finding, loading, packages
from evo_grpo.envs.conversations import is_conversation, messages_of, text_of
from evo_grpo.envs.data.tables import DatasetRow, read_rows
from evo_grpo.envs.episodes.multi_turn import check_reward
from evo_grpo.envs.family import Family, check_call
from evo_grpo.envs.rewards.watch import await_result
from evo_grpo.errors import ConfigError, DataError
from evo_grpo.schema.validation import whole
from evo_grpo.settings import EnvConfig

FAMILY = Family("code", multi_turn=True, reads=("train",))

MAX_TURNS = 8
_METHODS = ("reset", "get_reward")

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_TOOLS = """# Tools

You may call one or more functions. Their signatures are between <tools> and </tools>:
<tools>
{tools}
</tools>
For each call, write a JSON object with its name and arguments between <tool_call> and </tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>
"""


def build(name: str, env: EnvConfig, seed: int) -> Callable[[], TrlStyleEnv]:
    """Return a factory of environments that play with an object of the user's TRL-style class.

    `name` is "module:Class", or a function that returns an object of such a class. Of `env.args`,
    `max_turns` limits the completions of an episode (default 8); all other arguments are for the
    class. `reset` gets one row of `train` per episode.
    """
    kind = env.kind
    rows = _rows(env)
    factory = loading.load_function(name, "env.kind")
    max_turns, settings = _arguments(env.args)
    check_call(kind, settings, factory)

    make_object = partial(factory, **settings)
    make = partial(TrlStyleEnv, make_object, rows, kind=kind, max_turns=max_turns, seed=seed)
    return packages.try_out(kind, make, seed)


def check(name: str, env: EnvConfig, seed: int) -> None:
    """Check the user's class in the source of its module, without importing it."""
    del seed
    _rows(env)
    definition = finding.find_name(name, "env.kind")
    check_call(env.kind, _arguments(env.args)[1], definition.stand_in())
    _check(
        env.kind,
        name.rpartition(":")[2],
        [method for method in _METHODS if definition.lacks(method)],
    )


class TrlStyleEnv:
    """Plays episodes of tool calls; a completion without a call is the answer and ends the episode.

    As in TRL, one object is reset for each episode, and a call that fails is answered with its
    error. `get_reward` is called once, at the end. While the object runs, generators seeded with
    the episode's seed replace the global ones.

    Args:
        make: Returns the object.
        rows: Rows of which the episode's seed chooses one as the arguments of `reset`.
        kind: Name in messages.
        max_turns: Completions after which the episode is truncated and scored.
        seed: Seed of the episodes that are begun without a seed.
    """

    draws_globally = True

    def __init__(
        self,
        make: Callable[[], Any],
        rows: Sequence[DatasetRow] = (),
        *,
        kind: str = "trl",
        max_turns: int = MAX_TURNS,
        seed: int = 0,
    ) -> None:
        self._kind = kind
        self._rows = rows
        self._max_turns = max_turns
        self._turns = 0
        self._generators = packages.PrivateGenerators(seed)
        with self._generators.swapped_in():
            self._env = make()
        self._tools = _tools(kind, self._env)
        self._described = _describe(kind, self._tools)

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode with the row that the seed chooses."""
        episode_seed = self._generators.start(seed)
        self._turns = 0
        row = dict(self._rows[episode_seed % len(self._rows)]) if self._rows else {}
        with self._generators.swapped_in():
            observation = await_result(self._env.reset(**row))
        question = f"{_text(row.get('prompt'))}{_text(observation)}"
        return "\n".join(part for part in (self._described, question) if part), {"row": row}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run the calls in a completion; without one, or after `max_turns`, score the episode."""
        self._turns += 1
        calls = _CALL.findall(action)
        with self._generators.swapped_in():
            results = [self._called(call) for call in calls]
            truncated = bool(calls) and self._turns >= self._max_turns
            ended = not calls or truncated
            raw_reward = await_result(self._env.get_reward()) if ended else 0.0
        text = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
        reward = check_reward(f'environment "{self._kind}"', raw_reward)
        return text, reward, not calls, truncated, {"calls": len(calls)}

    def close(self) -> None:
        """Do nothing: `close` of a TRL-style object is a tool like any other method."""

    def _called(self, written: str) -> str:
        try:
            call = json.loads(written)
            tool = self._tools.get(call["name"])
            if tool is None:
                raise ValueError(f"Tool {call['name']} not found.")
            return str(await_result(tool(**call.get("arguments", {}))))
        except Exception as error:  # TRL answers the model with whatever a call raises
            return str({"error": str(error)})


def _rows(env: EnvConfig) -> Sequence[DatasetRow]:
    """Return the rows of `env.train`, from which episodes begin; refuse unreadable prompts."""
    rows = [] if env.train is None else read_rows(env.train, "train", env.max_data_gb)
    for row in rows:
        try:
            _text(row.get("prompt"))
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error
    return rows


def _arguments(args: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    max_turns = args.get("max_turns", MAX_TURNS)
    whole(1).check("env.args.max_turns", max_turns)
    return max_turns, {key: value for key, value in args.items() if key != "max_turns"}


def _check(kind: str, got: str, missing: Sequence[str]) -> None:
    if missing:
        raise ConfigError(
            f'env.kind: "{kind}": expected a TRL-style class with reset(**row) and '
            f"get_reward(), got {got} without {' and '.join(missing)}"
        )


def _tools(kind: str, env: object) -> dict[str, Callable[..., Any]]:
    # Looked up in the class, as in TRL: on the object this would evaluate properties.
    names = [name for name, _ in inspect.getmembers(type(env), predicate=inspect.isfunction)]
    _check(kind, type(env).__name__, [name for name in _METHODS if name not in names])
    tools = [name for name in names if name not in _METHODS and not name.startswith("_")]
    return {name: getattr(env, name) for name in tools}


def _describe(kind: str, tools: Mapping[str, Callable[..., Any]]) -> str:
    if not tools:
        return ""
    # Imported here because it loads torch.
    from transformers.utils import chat_template_utils as utils

    try:
        schemas = [utils.get_json_schema(tool) for tool in tools.values()]
    except (utils.DocstringParsingException, utils.TypeHintParsingException) as error:
        raise ConfigError(
            f'env.kind: "{kind}": a tool cannot be described to the model: {error}; every public '
            "method needs type hints and a docstring in Google style, or a name that begins with _"
        ) from error
    return _TOOLS.format(tools="\n".join(json.dumps(schema) for schema in schemas))


def _text(content: object) -> str:
    if not isinstance(content, str | list) or not content:
        return ""
    if isinstance(content, list) and is_conversation(content):
        return "\n\n".join(message["content"] for message in messages_of(content, "the prompt"))
    return text_of(content, "what reset returned")
