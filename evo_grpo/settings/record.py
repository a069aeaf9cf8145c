"""The group `record`: what the run folder keeps, and which readers follow the run."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, model_validator

from evo_grpo.schema.group import Group, contradictions, setting
from evo_grpo.schema.problems import below, refuse
from evo_grpo.settings.storage import check_storage, is_url
from evo_grpo.settings.trackers import TrackerConfig, Trackers, problems_of


def _retention(value: object) -> object:
    """Accept a name or a number; one message instead of one per branch of the union."""
    if (isinstance(value, str) and value in RETAINED) or (type(value) is int and value >= 1):
        return value
    raise ValueError("'all', 'last', 'best', or a number of rounds, at least 1")


RETAINED = ("all", "last", "best")
AnnotatedRetention = Annotated[Literal["all", "last", "best"] | int, BeforeValidator(_retention)]
AnnotatedStorage = Annotated[str | None, BeforeValidator(check_storage)]


class RecordConfig(Group):
    """What the run folder keeps, and which readers follow the run."""

    completions: int = setting(2, "Sample completions kept for each agent and round.", ge=0)
    columns: list[str] = setting(
        factory=list[str],
        meaning="Columns of the rows that are kept beside sample completions, for instance "
        "`[level, source]`. Reports and exports do not show them.",
    )
    metrics: bool = setting(
        True, "Keep the metrics of each GRPO step and agent; false keeps only the means of rounds."
    )
    checkpoints: AnnotatedRetention = setting(
        "all",
        "`all` keeps the checkpoints of every round, `last` those of the last round, a number "
        "those of that many last rounds, `best` those of the last round and of the best agent of "
        "each earlier round. Unless all are kept, checkpoints/best has a copy of the best agent.",
    )
    optuna: bool = setting(True, "Record one Optuna trial per agent and round.")
    storage: AnnotatedStorage = setting(
        None,
        "Where the trials are kept. null: Optuna's journal in the run folder. `sqlite`: a SQLite "
        "file in the run folder. `postgresql+psycopg://user@host:port/database`: a server, with "
        "one study per run; the password comes from PGPASSWORD or ~/.pgpass. `sqlite:///path`: a "
        "SQLite file that several runs may share.",
    )

    trackers: Trackers = setting(
        factory=list[TrackerConfig],
        meaning="Trackers that follow the run, each a kind or a mapping: `[tensorboard, wandb]`. "
        "With `metrics: false` they receive rounds but no steps.",
    )

    @model_validator(mode="after")
    def _trials_to_keep(self) -> Self:
        useless = self.storage is not None and not self.optuna
        row = ("storage", useless, "null with optuna: false, which records no trials", "remove it")
        refuse([*contradictions(self, row), *below(problems_of(self.trackers), "trackers")])
        return self

    @property
    def readers(self) -> list[str]:
        """Names of the readers that follow the run: trackers, and beside them that of the trials.

        Without readers, the run itself writes the trials into its folder at its end.
        """
        trials = ["optuna"] if self.optuna and (self.trackers or is_url(self.storage)) else []
        return [*(tracker.kind for tracker in self.trackers), *trials]

    def keeps_best_apart(self, *, archive: bool) -> bool:
        """Return whether checkpoints/best has a copy of the best agent of all rounds."""
        return archive or self.checkpoints != "all"
