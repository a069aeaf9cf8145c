"""docs/api.md: the public classes and functions, from their docstrings and declarations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import griffe
from pydantic.fields import FieldInfo
from signature import ROOT, parameter

from evo_grpo.api.by_keyword import AGENT_FIELDS, POPULATION_FIELDS, TRAIN_FIELDS

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Runs": (
        "api.calls.run",
        "api.calls.resume",
        "analysis.arms.compare",
        "analysis.arms.replay",
        "analysis.recipe.recipe",
    ),
    "Agents and populations": ("api.agent.Agent", "api.population.Population"),
    "Reading a run": (
        "record.leaderboard.leaderboard",
        "record.history.history",
        "record.history.read_metrics",
    ),
    "Figures": (
        "readers.report.figures.rounds.plot_fitness",
        "readers.report.figures.lineage.plot_lineage",
        "readers.report.figures.rounds.plot_schedules",
        "readers.report.figures.diagnostics.plot_diagnostics",
        "readers.report.run_page.write_report",
    ),
    "Following a run": (
        "record.observer.Observer",
        "readers.follow.follow",
        "readers.follow.Followed",
        "readers.trackers.base.Tracker",
        "readers.follow.study_of",
    ),
    "Environments": (
        "envs.builtin.dataset.DatasetEnv",
        "envs.single_turn.ReasoningGym",
        "envs.episodes.gym.MultiTurnGym",
        "envs.episodes.multi_turn.MultiTurnEnv",
        "envs.episodes.multi_turn.TokenObservationWrapper",
    ),
    "Ranges": ("schema.search_space.RLParameter", "schema.search_space.HyperparameterConfig"),
    "Strategies": (
        "evolve.protocols.Selector",
        "evolve.protocols.Offspring",
        "evolve.protocols.Explorer",
        "evolve.protocols.Candidate",
        "evolve.protocols.Trial",
    ),
}

INTRO = """# Classes and functions

<!-- Written by docs/generate from the docstrings and declarations in evo_grpo. -->

`evo_grpo` exports the names of this page, except for `Followed`, which `follow` returns, and
`Agent`, of which `GRPO`, `GSPO` and `CISPO` are the classes: they differ in their loss. Each
keyword of theirs is the last part of a key of [population.yaml](configuration.md), with the same
meaning and default. `tokenizer` takes a transformers tokenizer in place of the model's own; `model`
also takes a transformers module. For AgileRL's names, positions and defaults, use
`from evo_grpo.agilerl import GRPO`.
"""

STARS: Mapping[griffe.ParameterKind | None, str] = {
    griffe.ParameterKind.var_positional: "*",
    griffe.ParameterKind.var_keyword: "**",
}

KEYWORDS: Mapping[str, tuple[str, Mapping[str, FieldInfo]]] = {
    "Agent.__init__": ("GRPO", AGENT_FIELDS),
    "Agent.population": (
        "GRPO.population",
        {name: field for name, field in POPULATION_FIELDS.items() if name not in AGENT_FIELDS},
    ),
    "Population.train": ("Population.train", TRAIN_FIELDS),
}

# What a call takes beside its settings.
MORE: Mapping[str, list[str]] = {
    "GRPO.population": ["    **settings,  # and all keywords of GRPO"],
    "Population.train": ["    out: str | Path | None = None,  # None keeps the records in memory"],
}


def page() -> str:
    """Return the whole page."""
    options: griffe.GoogleOptions = {
        "returns_multiple_items": False,
        "returns_named_value": False,
        "warn_unknown_params": False,
    }
    package = griffe.load(
        "evo_grpo",
        search_paths=[str(ROOT)],
        docstring_parser="google",
        docstring_options=options,
    )
    parts = [INTRO]
    for title, paths in SECTIONS.items():
        parts.append(f"## {title}\n")
        for path in paths:
            parts += _described(package[path], "###")
    return "\n".join(parts)


def _described(member: griffe.Object, heading: str, owner: str = "") -> Iterator[str]:
    """Yield the entry of a class or function, and those of the public methods of a class."""
    name = f"{owner}{member.name}"
    yield f"{heading} `{name}`\n"
    if name in KEYWORDS:
        yield _code(*KEYWORDS[name])
    elif isinstance(member, griffe.Function):
        yield _signature(name, member)
    yield from _text(member.docstring)
    if isinstance(member, griffe.Class):
        for method in member.members.values():
            public = not method.name.startswith("_") or method.name == "__init__"
            shown = method.docstring is not None and not method.is_alias
            if public and shown and isinstance(method, griffe.Function | griffe.Attribute):
                yield from _described(method, f"{heading}#", f"{member.name}.")


def _signature(name: str, function: griffe.Function) -> str:
    """Return the call of a function without types, one line or one argument a line."""
    words: list[str] = []
    for one in function.parameters:
        if one.name in ("self", "cls"):
            continue
        if one.kind is griffe.ParameterKind.keyword_only and "*" not in words:
            words.append("*")
        star = STARS.get(one.kind, "")
        default = "" if one.default is None or star else f"={one.default}"
        words.append(f"{star}{one.name}{default}")
    name = name.removesuffix(".__init__")
    line = f"{name}({', '.join(words)})"
    if len(line) > 88:
        line = "\n".join([f"{name}(", *(f"    {word}," for word in words), ")"])
    return f"```text\n{line}\n```\n"


def _code(name: str, fields: Mapping[str, FieldInfo]) -> str:
    """Return a call with its keywords, their types and defaults as declared in the settings."""
    lines = [f"    {key}: {' = '.join(parameter(key, field))}," for key, field in fields.items()]
    lines += MORE.get(name, [])
    return "\n".join(["```text", f"{name}(", *lines, ")", "```", ""])


def _text(docstring: griffe.Docstring | None) -> Iterator[str]:
    """Yield a docstring as Markdown: its text, and its sections as lists."""
    for section in docstring.parsed if docstring else ():
        if section.kind is griffe.DocstringSectionKind.text:
            yield f"{section.value}\n"
        else:
            yield f"**{section.kind.value.capitalize()}**\n"
            yield "\n".join(map(_item, section.value)) + "\n"


def _item(one: griffe.DocstringElement) -> str:
    text = re.sub(r"\s*\n\s*", " ", one.description)
    raised = isinstance(one, griffe.DocstringRaise)
    name = one.annotation if raised else getattr(one, "name", "")
    return f"- `{name}`: {text}" if name else f"- {text}"
