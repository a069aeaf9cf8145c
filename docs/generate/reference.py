"""docs/reference.md: every keyword of the classes, from the declarations."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic.fields import FieldInfo
from signature import parameter

from evo_grpo.api.by_keyword import AGENT_FIELDS, POPULATION_FIELDS, TRAIN_FIELDS
from evo_grpo.schema.hparams import MUTABLE
from evo_grpo.schema.problems import Path
from evo_grpo.settings.keywords import AGENT_KEYWORDS, POPULATION_KEYWORDS, TRAIN_KEYWORDS

INTRO = """# Reference: the classes

<!-- Written by docs/generate from the declarations in evo_grpo/schema, settings and evolve. -->

`GRPO`, `GSPO` and `CISPO` take the same keywords; they differ in their loss. Each keyword is the
last part of a path of [population.yaml](configuration.md) and has the same default. An unknown
name, a value of the wrong type or out of range, and settings that contradict each other are errors.
Each meaning is followed by the path in YAML and by whether evolution may change the value.

For AgileRL's names, positions, defaults and extra parameters, use
`from evo_grpo.agilerl import GRPO`.
"""


def page() -> str:
    """Return the whole page."""
    own = {name: field for name, field in POPULATION_FIELDS.items() if name not in AGENT_FIELDS}
    parts = [INTRO, *_table("GRPO(...)", AGENT_FIELDS, AGENT_KEYWORDS)]
    also = "It also takes all keywords above."
    parts += _table("GRPO.population(...)", own, POPULATION_KEYWORDS, also)
    parts += _table("Population.train(env, ...)", TRAIN_FIELDS, TRAIN_KEYWORDS, TRAIN)
    return "\n".join([*parts, ""])


TRAIN = "It also takes `out` (a run folder for records), `force`, `observer` and `progress`."


def _table(
    title: str, fields: Mapping[str, FieldInfo], paths: Mapping[str, Path], note: str = ""
) -> list[str]:
    lines = [f"## `{title}`", "", *([note, ""] if note else [])]
    lines += ["| name | type and default | meaning |", "|---|---|---|"]
    for name, field in fields.items():
        where = ".".join(map(str, paths.get(name, ())))
        where = "evolve.hyperparameters" if name == "hyperparameters" else where
        mutates = "; may mutate" if name in MUTABLE else ""
        place = f" (`{where}`{mutates})" if where else ""
        # GitHub and Python-Markdown disagree about an escaped pipe in code.
        shown = " = ".join(parameter(name, field)).replace(" | ", " or ")
        meaning = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{name}` | `{shown}` | {meaning}{place} |")
    return [*lines, ""]
