"""docs/reference.md: every keyword of the classes, from the declarations."""

from __future__ import annotations

from signature import TOKENIZER, field_of, parameter

from evo_grpo.schema.group import Group
from evo_grpo.schema.hparams import MUTABLE
from evo_grpo.settings import AgentSettings, RunConfig
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
    parts = [INTRO, *_table("GRPO(...)", AgentSettings, AGENT_KEYWORDS)]
    parts += _table(
        "GRPO.population(...)", RunConfig, POPULATION_KEYWORDS, "It also takes all keywords above."
    )
    parts += _table("Population.train(env, ...)", RunConfig, TRAIN_KEYWORDS, TRAIN)
    return "\n".join([*parts, ""])


TRAIN = "It also takes `out` (a run folder for records), `force`, `observer` and `progress`."


def _table(
    title: str, root: type[Group], keywords: dict[str, tuple[str | int, ...]], note: str = ""
) -> list[str]:
    lines = [f"## `{title}`", "", *([note, ""] if note else [])]
    lines += ["| name | type and default | meaning |", "|---|---|---|"]
    for name, path in keywords.items():
        shown = parameter(name, root, path)[0].rstrip(",").partition(": ")[2]
        where = ".".join(map(str, path))
        where = "evolve.hyperparameters" if name == "hyperparameters" else where
        # GitHub and Python-Markdown disagree about an escaped pipe in code.
        shown = shown.replace(" | ", " or ").replace("MappingProxyType({})", "{}")
        meaning = (field_of(root, path).description or "").replace("|", "\\|")
        mutates = "; may mutate" if name in MUTABLE else ""
        lines.append(f"| `{name}` | `{shown}` | {meaning} (`{where}`{mutates}) |")
        if name == "model":
            lines.append(f"| `tokenizer` | `Any = None` | {TOKENIZER} |")
    return [*lines, ""]
