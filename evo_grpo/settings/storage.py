"""`record.storage`: where trials are kept. Checks a URL, which must not hold a password."""

from __future__ import annotations

import re
from importlib.util import find_spec
from urllib.parse import parse_qsl

from evo_grpo.errors import EngineUnavailable
from evo_grpo.schema.messages import shown
from evo_grpo.schema.problems import Problems

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
