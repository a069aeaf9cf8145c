"""The group `record`: what the run folder keeps, the database of trials, and the readers."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

import re
from importlib.util import find_spec
from typing import Annotated, Literal, Self
from urllib.parse import parse_qsl

from pydantic import BeforeValidator, model_validator

from evo_grpo.errors import EngineUnavailable
from evo_grpo.schema.group import Group, contradictions, only, setting
from evo_grpo.schema.messages import shown
from evo_grpo.schema.problems import Problems, below, refuse
from evo_grpo.settings.trackers import TrackerConfig, Trackers, problems_of

FILE = "sqlite"
"""The value of `record.storage` for a SQLite file in the run folder."""
EXPECTED = (
    "null, sqlite, sqlite:///PATH, or postgresql+psycopg://USER@HOST:PORT/DATABASE without a "
    "password, which PGPASSWORD in the environment or ~/.pgpass has"
)

# Stricter than SQLAlchemy's parser, so that no part can hold a password: with one more character,
# such as an @ after the path, SQLAlchemy would read another part as the password.
_SERVER = re.compile(
    r"postgresql\+psycopg://"
    r"(?:[^:/@?#\s{}]+@)?"
    r"(?:[^:/@?#\s{}\[\]]+|\[[0-9A-Fa-f:.]+\])?(?::[0-9]{1,5})?"
    r"/[^:/@?#\s{}]+"
    r"(?:\?(?P<query>[^@#\s{}]*))?"
)
_SQLITE = re.compile(r"sqlite:///(?!:|file:)[^?#{}]+")


def check_storage(value: object) -> object:
    """Validate a value of `record.storage`; errors do not show a URL that may have a password."""
    text = value if isinstance(value, str) else ""
    server, sqlite = _SERVER.fullmatch(text), _SQLITE.fullmatch(text)
    query = parse_qsl((server and server["query"]) or "", keep_blank_values=True)
    # passfile is libpq's path of a file of passwords.
    secret = any("pass" in name.lower() and name.lower() != "passfile" for name, _ in query)
    if value is None or value == FILE or sqlite or (server and not secret):
        return value
    plain = isinstance(value, str | int | float) and not set("@=:/?") & set(str(value))
    got = shown(value) if plain else "what may hold a password, so it is not shown"
    raise Problems.one(f"expected {EXPECTED}, got {got}")


def is_url(storage: str | None) -> bool:
    """Return whether trials are kept in a database outside the run folder."""
    return storage is not None and storage != FILE


def check_driver(storage: str | None) -> None:
    """Refuse a PostgreSQL server if its driver is not installed; import nothing."""
    if storage is not None and _SERVER.fullmatch(storage) and find_spec("psycopg") is None:
        raise missing_driver("No module named 'psycopg'")


def missing_driver(reason: str) -> EngineUnavailable:
    """Return the error for a PostgreSQL driver that cannot be imported."""
    return EngineUnavailable(
        f"record.storage: a PostgreSQL server needs the package psycopg ({reason}): pip install "
        '"evo-grpo[postgres]"'
    )


Retention = Annotated[
    Literal["all", "last", "best"] | int,
    only(
        lambda value: value in ("all", "last", "best") or (type(value) is int and value >= 1),
        "'all', 'last', 'best', or a number of rounds, at least 1",
    ),
]
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
    checkpoints: Retention = setting(
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
        """Names of the readers that follow the run: its trackers, and maybe optuna.

        With the setting `optuna`, optuna follows the run if there are trackers or `storage` is a
        URL. Without readers, the run itself writes the trials into its folder at its end.
        """
        trials = ["optuna"] if self.optuna and (self.trackers or is_url(self.storage)) else []
        return [*(tracker.kind for tracker in self.trackers), *trials]

    def keeps_best_apart(self, *, archive: bool) -> bool:
        """Return whether checkpoints/best has a copy of the best agent of all rounds."""
        return archive or self.checkpoints != "all"
