"""evo_grpo/api/keywords.py: the types of the keywords of the classes, from the declarations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic.fields import FieldInfo

from evo_grpo.api.by_keyword import AGENT_FIELDS, POPULATION_FIELDS, TRAIN_FIELDS
from evo_grpo.schema.group import Group

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "evo_grpo" / "api" / "keywords.py"

# What Python takes beside the schema's own type.
WIDER = {
    "model": ("str | ModelConfig | Any", "None"),
    "lora": ("LoraSettings | LoraConfig | Mapping[str, Any]", "LoraSettings()"),
    "hyperparameters": (
        "HyperparameterConfig | Mapping[str, RLParameter | Mapping[str, Any]] | None",
        "None",
    ),
    "init": (
        'Literal["latin_hypercube", "sample", "same"] | Sequence[Mapping[str, Any]] '
        "| Mapping[str, Any]",
        '"latin_hypercube"',
    ),
    "lr_schedule": ("LRSchedule | Mapping[str, Any] | None", "None"),
    "selection": ("Selection | Selector | Mapping[str, Any] | str", "TournamentSelection()"),
    "exploration": ("Exploration | Explorer | Mapping[str, Any] | str", "Mutations()"),
    "tokenizer": ("Any", "None"),
    "trackers": ("Sequence[TrackerConfig | Mapping[str, Any] | str]", "()"),
}


def type_text(annotation: object) -> str:
    """Return a type as source."""
    if annotation is type(None):
        return "None"
    if get_origin(annotation) is None:
        return "Any" if annotation is Any else getattr(annotation, "__name__", str(annotation))
    text = str(annotation).replace("typing.", "").replace("NoneType", "None")
    if get_origin(annotation) is Annotated:
        return type_text(get_args(annotation)[0])
    origin = getattr(get_origin(annotation), "__name__", "")
    if origin in ("Union", "UnionType"):
        return " | ".join(type_text(a) for a in get_args(annotation))
    if origin == "dict":
        return "Mapping[str, Any]"
    return text


def parameter(name: str, field: FieldInfo) -> tuple[str, str]:
    """Return the type and the default of a parameter as source."""
    if name in WIDER:
        return WIDER[name]
    group = field.annotation
    if isinstance(group, type) and issubclass(group, Group):
        return f"{group.__name__} | Mapping[str, Any]", f"{group.__name__}()"
    return type_text(field.annotation), repr(field.get_default(call_default_factory=True))


def page() -> str:
    """Return evo_grpo/api/keywords.py."""
    own = {name: field for name, field in POPULATION_FIELDS.items() if name not in AGENT_FIELDS}
    parts = (
        ("AgentKeywords(TypedDict", "GRPO, GSPO and CISPO", AGENT_FIELDS),
        ("PopulationKeywords(AgentKeywords", "`population`", own),
        ("TrainKeywords(TypedDict", "`Population.train`", TRAIN_FIELDS),
    )
    classes: list[str] = []
    for head, what, fields in parts:
        lines = [f"    {name}: {parameter(name, field)[0]}" for name, field in fields.items()]
        title = f'    """Keywords of {what}."""\n\n'
        classes.append(f"class {head}, total=False):\n{title}" + "\n".join(lines))
    return formatted(HEAD + "\n\n\n".join(classes) + "\n")


HEAD = '''"""The types of all keywords that are settings, for editors and type checkers.

Written by docs/generate from the declarations in evo_grpo/schema, settings and evolve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from peft import LoraConfig

    from evo_grpo.evolve.protocols import Explorer
    from evo_grpo.evolve.kinds import Exploration
    from evo_grpo.evolve.protocols import Selector
    from evo_grpo.evolve.kinds import Selection
    from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
    from evo_grpo.settings import (
        FitnessConfig,
        LoraSettings,
        LRSchedule,
        ModelConfig,
        StopConfig,
        VLLMSettings,
    )
    from evo_grpo.settings.trackers import TrackerConfig


'''


def formatted(source: str) -> str:
    """Return source as ruff leaves it."""
    for arguments in (["check", "--select", "I", "--fix", "-q", "-"], ["format", "-q", "-"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", str(TARGET)]
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        source = done.stdout or source
    return source
