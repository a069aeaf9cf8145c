"""YAML source to plain values and back: strictly, with errors that name line and column."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import yaml

from evo_grpo.errors import ConfigError
from evo_grpo.printable import cut

MOST_BYTES = 1 << 20
"""Longest YAML file. Rows belong into a file that `env.train` names."""
_TAG = "tag:yaml.org,2002:"
# YAML 1.1 takes 1e-4 and 1.0e5 for strings: it wants a dot and a sign. Learning rates look so.
_SCIENTIFIC = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
_SHOWN = 60


class _Refused(yaml.MarkedYAMLError):
    """It is YAML, but holds what no configuration may; `problem` says what, the mark where."""


class Loader(yaml.SafeLoader):
    """Plain values only, 1e-4 as a number, no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping, each of its keys once."""
        seen: dict[Any, int] = {}
        # A tag such as !!map may stand before anything; what is no mapping is refused below.
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():  # pyright: ignore[reportUnnecessaryIsInstance] -- see above
            key = getattr(key_node, "value", None)
            line = key_node.start_mark.line + 1
            # "<<" merges a mapping and may stand there several times.
            if isinstance(key, str) and key != "<<" and seen.setdefault(key, line) != line:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands there twice", key_node.start_mark
                )
        return super().construct_mapping(node, deep)


class WrittenOutLoader(Loader):
    """Takes no anchors: `Dumper` writes none, and ten lines of aliases stand for 10^9 values."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node."""
        event = self.peek_event()
        if (anchor := getattr(event, "anchor", None)) is not None:
            mark = "*" if isinstance(event, yaml.AliasEvent) else "&"
            problem = (
                f"expected values written out, as a run writes them, got {mark}{anchor}; write the "
                "value in its place"
            )
            raise _Refused(None, None, problem, cast("Any", event.start_mark))
        return super().compose_node(parent, index)


class Dumper(yaml.SafeDumper):
    """Quotes the strings that `Loader` would take for numbers, and needs no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        """Write everything out."""
        return True


def parse(text: str, source: str, loader: type[Loader] = Loader) -> object:
    """Return the plain values in YAML; messages call it `source` and name line and column.

    What a run wrote is data of whoever sent the folder: `WrittenOutLoader` reads it.
    """
    try:
        return yaml.load(text, Loader=loader)
    except _Refused as error:
        raise ConfigError(f"{source}{_where(error)}: {error.problem}") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{source}{_where(error)}: expected YAML, {_reason(error)}") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise ConfigError(
            f"{source}, line {line}, column {column}: expected text, got the character "
            f"U+{error.character:04X}; remove it"
        ) from None
    except RecursionError:
        raise ConfigError(
            f"{source}: expected YAML, but its lists and mappings lie too deep within each other"
        ) from None


def read_text(path: Path) -> str:
    """Return the content of a YAML file of at most `MOST_BYTES`."""
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: expected a YAML file, got a folder")
        with path.open("rb") as file:  # read no further than needed: it may be a device
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; write one with: evo-grpo init {path}") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; give permission, or name another file"
        ) from None
    except ValueError as error:  # a null character
        raise ConfigError(f"{str(path)!r}: no file can be called so: {error}") from None
    if len(data) > MOST_BYTES:
        raise ConfigError(
            f"{path}: expected at most {MOST_BYTES:,} bytes of YAML, got more; rows belong into a "
            "file that env.train names"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}, line {line}: expected text in UTF-8, got the byte 0x{data[error.start]:02x} "
            f"({error.reason}); save the file as UTF-8"
        ) from None


def _where(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark
    return "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"


def _reason(error: yaml.MarkedYAMLError) -> str:
    problem = cut(str(error.problem))
    return problem if problem.startswith("but ") else f"but {problem}"


def _string(loader: Loader, node: Any) -> str:  # noqa: ANN401 -- of any kind, with a tag
    """Return a string; JSON spells a character beyond U+FFFF as two escapes, halves of it."""
    text = loader.construct_scalar(node)
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:  # half of a character, which the setting refuses by its name
        return text


def _checked(construct: Callable[[Any, Any], Any], noun: str) -> Callable[[Any, Any], Any]:
    """Return a constructor that names what it cannot read, such as the 45th of a month."""

    def constructed(loader: Loader, node: Any) -> Any:  # noqa: ANN401 -- whatever it makes
        try:
            return construct(loader, node)
        except (ValueError, LookupError, ArithmeticError, AttributeError):
            given = cut(str(node.value), _SHOWN)
            problem = f'expected {noun}, got {given}; for a string put it in quotes: "{given}"'
            raise _Refused(None, None, problem, node.start_mark) from None

    return constructed


Loader.add_implicit_resolver(f"{_TAG}float", _SCIENTIFIC, list("-+0123456789."))
Dumper.add_implicit_resolver(f"{_TAG}float", _SCIENTIFIC, list("-+0123456789."))
Loader.add_constructor(f"{_TAG}str", _string)
Loader.add_constructor(f"{_TAG}int", _checked(Loader.construct_yaml_int, "an integer"))
Loader.add_constructor(f"{_TAG}float", _checked(Loader.construct_yaml_float, "a number"))
Loader.add_constructor(f"{_TAG}bool", _checked(Loader.construct_yaml_bool, "true or false"))
Loader.add_constructor(f"{_TAG}timestamp", _checked(Loader.construct_yaml_timestamp, "a date"))
for _kind in ("binary", "omap", "pairs", "set"):  # no setting takes them
    Loader.add_constructor(_TAG + _kind, Loader.construct_undefined)
