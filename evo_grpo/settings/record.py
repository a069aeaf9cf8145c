"""The group `record`: what is kept of a run, and who reads it beside the run."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, model_validator

from evo_grpo.schema.group import Group, setting
from evo_grpo.schema.problems import Problem, Problems
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
    """What a run keeps."""

    completions: int = setting(2, "Sample completions kept for each agent and round.", ge=0)
    metrics: bool = setting(
        True, "Keep what each GRPO step measured of each agent; else only the means of rounds stay."
    )
    checkpoints: AnnotatedRetention = setting(
        "all",
        "`all` keeps every round's checkpoints, `last` those of the last round, a number those of "
        "so many last rounds, `best` those of the last round and of each earlier one's best "
        "agent. Unless all stay, the best agent ever has a copy in checkpoints/best.",
    )
    optuna: bool = setting(True, "Record one Optuna trial per agent and round.")
    storage: AnnotatedStorage = setting(
        None,
        "Where the trials are kept. null: Optuna's journal in the run folder. `sqlite`: a SQLite "
        "file there. `postgresql+psycopg://user@host:port/database`: a server, on which each run "
        "has a study of its own; its password comes from PGPASSWORD or ~/.pgpass. "
        "`sqlite:///path`: a SQLite file of yours for several runs.",
    )

    trackers: Trackers = setting(
        factory=list[TrackerConfig],
        meaning="Trackers that follow the run, each a kind or a mapping: `[tensorboard, wandb]`. "
        "With `metrics: false` they get the rounds and no steps.",
    )

    @model_validator(mode="after")
    def _trials_to_keep(self) -> Self:
        if self.storage is not None and not self.optuna:
            text = "expected null, for optuna is false and no trial is recorded; remove one of them"
            raise Problems(Problem(("storage",), text))
        if found := list(problems_of(self.trackers)):
            raise Problems(*(p._replace(path=("trackers", *p.path)) for p in found))
        return self

    @property
    def readers(self) -> list[str]:
        """Names of the readers that follow the run: its trackers, and a database of its trials."""
        trials = ["optuna"] if self.optuna and is_url(self.storage) else []
        return [*(tracker.kind for tracker in self.trackers), *trials]

    def keeps_best_apart(self, *, archive: bool) -> bool:
        """Return whether the best agent ever has a copy in checkpoints/best."""
        return archive or self.checkpoints != "all"
