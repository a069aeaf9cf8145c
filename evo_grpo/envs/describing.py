"""Describes an environment that is a Python object, so that a later call can recognise it."""

import hashlib
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast

from evo_grpo.envs.builtin.dataset import DatasetEnv
from evo_grpo.envs.data.tables import SPLITS
from evo_grpo.envs.episodes.gym import MultiTurnGym
from evo_grpo.envs.episodes.multi_turn import TokenObservationWrapper
from evo_grpo.envs.prompts import Template
from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.envs.task import Task
from evo_grpo.settings import EnvConfig
from evo_grpo.settings.env import Message, NamedPrompt
from evo_grpo.settings.objects import OBJECT

DIGEST = "sha256:"
"""Prefix of a part (see `environment_parts`) that is a digest."""
ENVIRONMENT = "env"
"""Name of the part that holds the class of an environment."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def environment_parts(env: object, seed: int) -> dict[str, str]:
    """Return the parts that identify an environment: name -> text or digest.

    Rows are compared by content. Functions and classes are compared by their own source; the
    functions that they call are not compared. Of the settings for calls of reward functions, only
    TRL's style is a part, because the others do not affect results. `seed` decides which rows a
    `DatasetEnv` holds out.
    """
    parts = {ENVIRONMENT: type(env).__name__}
    if isinstance(env, DatasetEnv):
        return parts | _of_task(env.task(seed))
    names = ("batch_size", "seed", "max_turns", "max_output_tokens")
    parts |= {f"env.{name}": repr(getattr(env, name)) for name in names if hasattr(env, name)}
    if isinstance(env, ReasoningGym):
        return parts | _of_task(env.given)
    if isinstance(env, MultiTurnGym):
        return parts | source_part("env.env_factory", env.factory)
    if isinstance(env, TokenObservationWrapper):
        return parts | source_part("env.env", type(env.env))
    return parts | source_part("env.class", type(env))


def recorded_task(env: object, name: str) -> EnvConfig:
    """Return the settings that population.yaml has for an environment that is a Python object.

    They contain its prompt templates, but no rows or code; `name` becomes part of `kind`.
    """
    kind = f"{OBJECT}{name}"
    if isinstance(env, DatasetEnv):
        return env.settings.replace(kind=kind, reward_weights=None)
    task = env.given if isinstance(env, ReasoningGym) else None
    if task is None:
        return EnvConfig(kind=kind)
    prompts = {name: NamedPrompt(**_raw(task.templates[name])) for name in task.prompt_names}
    return EnvConfig(kind=kind, **_raw(task.template), prompts=prompts or None)


def _raw(template: Template) -> dict[str, Any]:
    """Return a template as a setting: `prompt` for raw text, or `conversation`."""
    if template.conversation is None:
        return {"prompt": template.text}
    return {"conversation": [Message(**dict(message)) for message in template.conversation]}


def source_part(name: str, code: object) -> dict[str, str]:
    """Return `name` -> digest of the source of `code`, or {} if there is no source.

    `code` is a function, a class, or an object, whose class is taken. Code of this package is
    digested by its dotted name instead, because the package's version is recorded.
    """
    bound = ""
    if isinstance(code, partial):
        call = cast("partial[Any]", code)
        bound, code = _stable([call.args, call.keywords]), call.func
    target: Any = code if inspect.isroutine(code) or inspect.isclass(code) else type(code)
    text = f"{target.__module__}.{target.__qualname__}"
    if not text.startswith("evo_grpo."):  # for those, the version of the package is recorded
        try:
            text = inspect.cleandoc(inspect.getsource(target))
        except (OSError, TypeError):
            return {}
    return {name: _digest(f"{text}{bound}")}


def reward_parts(rewards: Iterable[object]) -> dict[str, str]:
    """Return `env.reward: <name>` -> digest of the source, for each reward function.

    `rewards` are functions or `RewardFunction`s.
    """
    parts: dict[str, str] = {}
    for reward in rewards:
        fn = getattr(reward, "fn", reward)
        name = getattr(reward, "name", None) or getattr(fn, "__name__", type(fn).__name__)
        parts |= source_part(f"env.reward: {name}", fn)
    return parts


def _of_task(task: Task) -> dict[str, str]:
    parts = {f"env.{split}": _digest(_stable(list(task.splits[split]))) for split in SPLITS}
    template = task.template
    named = {name: task.templates[name] for name in task.prompt_names}
    prompts = {name: named[name].text or named[name].conversation or "" for name in named}
    options = (
        *(("prompt", template.text, repr), ("conversation", template.conversation, _stable)),
        *(("prompts", prompts or None, _stable), ("thinking", task.thinking, str)),
    )
    parts |= {f"env.{name}": write(value) for name, value, write in options if value is not None}
    parts |= reward_parts(task.rewards)
    parts["env.reward"] = ", ".join(reward.name for reward in task.rewards)
    parts["env.reward_weights"] = _stable([reward.weight for reward in task.rewards])
    if any(reward.style is not None for reward in task.rewards):
        parts["env.reward_style"] = "trl"
    if task.too_long != "error":
        parts["env.too_long"] = task.too_long
    return {**parts, "env.max_output_tokens": str(task.max_output_tokens)}


def _digest(text: str) -> str:
    return DIGEST + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _stable(value: object) -> str:
    """Return a value as JSON text that is the same in every process."""
    return json.dumps(value, ensure_ascii=False, default=_text_of)


def _text_of(value: object) -> Any:  # noqa: ANN401 -- any JSON value
    if isinstance(value, Mapping):
        return dict(cast("Mapping[Any, Any]", value))
    if hasattr(value, "tolist"):  # of NumPy
        return cast("Any", value).tolist()
    return f"{type(value).__name__} {_ADDRESS.sub('', repr(value))}"
