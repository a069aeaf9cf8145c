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
"""The value for a SQLite file in the run folder."""
EXPECTED = (
    "null, sqlite, sqlite:///PATH, or postgresql+psycopg://USER@HOST:PORT/DATABASE without a "
    "password"
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
_SQLITE = re.compile(r"sqlite:///[^?#{}]+")
_PASSWORD = re.compile(r"//[^@]*:[^@/]*@|//[^@/]*:[^@]*@")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
#: libpq's parameter for the path of a password file, which is not a password.
_PASSFILE = "passfile"


def check_storage(value: object) -> object:
    """Validate a value of `record.storage`; no message repeats a password in a URL."""
    if value is None or value == FILE:
        return value
    if isinstance(value, str):
        if _has_password(value):
            raise Problems.one(
                "expected a URL without a password, which would be written to logs and run "
                "folders; leave it out, and set PGPASSWORD in the environment, or use ~/.pgpass"
            )
        if _SQLITE.fullmatch(value) and not value.startswith(("sqlite:///:", "sqlite:///file:")):
            return value
        if _SERVER.fullmatch(value):
            return value
    raise Problems.one(f"expected {EXPECTED}, got {_masked(value)}")


def is_url(storage: str | None) -> bool:
    """Return whether trials are kept in a database outside the run folder."""
    return storage is not None and storage != FILE


def check_driver(storage: str | None) -> None:
    """Refuse a server whose driver is not installed; import nothing."""
    if storage is not None and _SERVER.fullmatch(storage) and find_spec("psycopg") is None:
        raise missing_driver("No module named 'psycopg'")


def missing_driver(reason: str) -> EngineUnavailable:
    """Return the error for a driver that cannot be imported."""
    return EngineUnavailable(
        f"record.storage: a PostgreSQL server needs the package psycopg ({reason}): pip install "
        '"evo-grpo[postgres]"'
    )


def _has_password(url: str) -> bool:
    if _PASSWORD.search(url):
        return True
    names = [name.lower() for name, _ in parse_qsl(url.partition("?")[2], keep_blank_values=True)]
    return any("pass" in name and name != _PASSFILE for name in names)


def _masked(value: object) -> str:
    """Return the value for a message; of one that may hold a password, only the scheme."""
    if isinstance(value, str | int | float) and not any(sign in str(value) for sign in "@=:/?"):
        return shown(value)
    scheme = _SCHEME.match(value) if isinstance(value, str) else None
    return f"another URL that begins with {scheme[0]}" if scheme else "what may hold a password"


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
        """Names of the readers that follow the run: trackers, and beside them that of the trials.

        Without readers, the run itself writes the trials into its folder at its end.
        """
        trials = ["optuna"] if self.optuna and (self.trackers or is_url(self.storage)) else []
        return [*(tracker.kind for tracker in self.trackers), *trials]

    def keeps_best_apart(self, *, archive: bool) -> bool:
        """Return whether checkpoints/best has a copy of the best agent of all rounds."""
        return archive or self.checkpoints != "all"
