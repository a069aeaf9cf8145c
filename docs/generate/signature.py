"""evo_grpo/api/signature.py: the real signature of the classes, from the declarations."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from evo_grpo.schema.group import Group
from evo_grpo.settings.keywords import AGENT_KEYWORDS, POPULATION_KEYWORDS, TRAIN_KEYWORDS
from evo_grpo.settings.run import AgentSettings, RunConfig

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "evo_grpo" / "api" / "signature.py"

# What Python takes beside the schema's own type, by keyword, or by path where two have one name.
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
    "vllm": ("VLLMSettings | Mapping[str, Any]", "VLLMSettings()"),
    "trackers": ("Sequence[TrackerConfig | Mapping[str, Any] | str]", "()"),
    "fitness": ("FitnessConfig | Mapping[str, Any]", "FitnessConfig()"),
    "algorithm.stop": ("Sequence[str | int] | str | int", "()"),
    "population.stop": ("StopConfig | Mapping[str, Any]", "StopConfig()"),
}
TOKENIZER = "A transformers tokenizer, instead of the model's own."


def field_of(root: type[Group], path: tuple[str | int, ...]) -> FieldInfo:
    """Return the declaration at a path."""
    group: Any = root
    for part in path[:-1]:
        annotation = group.model_fields[part].annotation
        kinds = (annotation, *get_args(annotation))
        group = next(a for a in kinds if isinstance(a, type) and issubclass(a, Group))
    return group.model_fields[path[-1]]


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


def parameter(name: str, root: type[Group], path: tuple[str | int, ...]) -> tuple[str, str]:
    """Return a parameter as source, and its line in the docstring."""
    field = field_of(root, path)
    wider = WIDER.get(name) or WIDER.get(".".join(map(str, path)))
    if wider is not None:
        kind, default = wider
    else:
        kind = type_text(field.annotation)
        value = field.get_default(call_default_factory=True)
        if value is PydanticUndefined:
            raise SystemExit(f"{name} has no default: give it one in WIDER")
        default = "MappingProxyType({})" if value == {} else repr(value)
    return f"{name}: {kind} = {default},", f"{name}: {field.description}"


def block(lines: list[str], indent: int) -> str:
    """Indent lines."""
    return "\n".join(" " * indent + line for line in lines)


def docstring(entries: list[str], indent: int) -> str:
    """Return the Args of a docstring."""
    folded: list[str] = []
    for entry in entries:
        folded += textwrap.wrap(
            entry.replace("\\", "\\\\"),
            width=100 - indent,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
        )
    return block(folded, indent)


def agents_page() -> str:
    """Return evo_grpo/api/signature.py."""
    agent = [parameter(n, AgentSettings, p) for n, p in AGENT_KEYWORDS.items()]
    agent.insert(2, ("tokenizer: Any = None,", f"tokenizer: {TOKENIZER}"))
    population = [parameter(n, RunConfig, p) for n, p in POPULATION_KEYWORDS.items()]
    return TEMPLATE.format(
        agent=block([p for p, _ in agent], 8),
        agent_docs=docstring([d for _, d in agent], 8),
        population=block([p for p, _ in population], 8),
        population_docs=docstring([d for _, d in population], 8),
    )


def train_page() -> str:
    """Return evo_grpo/api/train_signature.py."""
    train = [parameter(n, RunConfig, p) for n, p in TRAIN_KEYWORDS.items()]
    return TRAIN_TEMPLATE.format(
        train=block([p for p, _ in train], 8), train_docs=docstring([d for _, d in train], 8)
    )


TEMPLATE = '''"""The signatures of GRPO, GSPO and CISPO, generated from the settings.

Written by docs/generate; change the declarations in evo_grpo/schema and
evo_grpo/settings instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from evo_grpo.api.by_keyword import by_keyword
from evo_grpo.settings import LoraSettings, LRSchedule, ModelConfig, VLLMSettings

if TYPE_CHECKING:
    from peft import LoraConfig

    from evo_grpo.api.population import Population
    from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter


class AgentSignature(ABC):
    """The constructors of agents and populations."""

    # Longer than 60 lines because every setting is a keyword.
    @by_keyword
    def __init__(
        self,
        *,
{agent}
    ) -> None:
        """Build one agent over a new base; see `population` for several agents over one base.

        Args:
{agent_docs}

        Raises:
            ConfigError: An unknown name, a value of a wrong type or out of range, or values that
                contradict each other.
            ModelError: The base cannot be loaded.
        """
        given = dict(locals())
        del given["self"]
        self._create(given)

    # Longer than 60 lines because every setting is a keyword.
    @classmethod
    @by_keyword
    def population(
        cls,
        *,
{population}
{agent}
    ) -> Population[Any]:
        """Build agents over one shared base. All keywords of the constructor are accepted too.

        Args:
{population_docs}

        Returns:
            The population, a sequence of agents.
        """
        given = dict(locals())
        del given["cls"]
        return cls._create_population(given)

    @abstractmethod
    def _create(self, given: dict[str, Any]) -> None: ...

    @classmethod
    @abstractmethod
    def _create_population(cls, given: dict[str, Any]) -> Population[Any]: ...
'''

TRAIN_TEMPLATE = '''"""The real signature of `Population.train`, made from the schema.

Written by docs/generate; change the declarations in evo_grpo/schema, settings and evolve instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from evo_grpo.api.by_keyword import by_keyword
from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.settings import FitnessConfig, StopConfig

if TYPE_CHECKING:
    from pathlib import Path

    from evo_grpo.evolve.explore.protocol import Explorer
    from evo_grpo.evolve.explore.registry import Exploration
    from evo_grpo.evolve.select.protocol import Selector
    from evo_grpo.evolve.select.registry import Selection
    from evo_grpo.record.observer import Observer
    from evo_grpo.record.records import RoundRecord
    from evo_grpo.settings.trackers import TrackerConfig


class PopulationSignature(ABC):
    """The signature of `Population.train`."""

    @by_keyword
    def train(
        self,
        env: Any,
        *,
{train}
        out: str | Path | None = None,
        force: bool = False,
        observer: Observer | None = None,
        progress: bool | None = None,
    ) -> list[RoundRecord]:
        """Train and evolve the agents for some rounds; another call continues after the last round.

        A call does not select after its last round. The next call makes that selection before its
        first round, with its own settings and the fitness of that round, so that several calls give
        the same result as one. If agents were changed in between (weights, moments, hyperparameters
        or their number), it warns and does not select. A call of `apply` replaces the selection.

        Args:
            env: The name of a task such as "sums", the settings of a task as under `env` in YAML,
                or an environment.
{train_docs}
            out: Run folder for records and checkpoints; None keeps only the records, in memory.
            force: Replace an existing run in `out`.
            observer: An `Observer`, called while the population trains.
            progress: Show progress and the result: None in a terminal or a notebook, True also in a
                pipe or a file, False nowhere.

        Returns:
            The records of these rounds.

        Raises:
            ConfigError: An argument is invalid, or `out` is given after the first call.
            RunFailedError: No agent is left that can be ranked.
        """
        given = dict(locals())
        del given["self"]
        return self._train(given)

    @abstractmethod
    def _train(self, given: dict[str, Any]) -> list[RoundRecord]: ...
'''


def formatted(source: str) -> str:
    """Return source as ruff leaves it."""
    for arguments in (["check", "--select", "I", "--fix", "-q", "-"], ["format", "-q", "-"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", str(TARGET)]
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        source = done.stdout or source
    return source
