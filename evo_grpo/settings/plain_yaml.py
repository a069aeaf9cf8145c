"""Reads and writes YAML strictly; errors name line and column."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import yaml

from evo_grpo.errors import ConfigError
from evo_grpo.printable import shorten

MAX_YAML_BYTES = 1 << 20
"""Size limit of a YAML file; put rows into a file that `env.train` names."""
_TAG = "tag:yaml.org,2002:"
# YAML 1.1 reads 1e-4 and 1.0e5 as strings, since it requires a dot and a sign.
_SCIENTIFIC = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
_SHOWN = 60


class _Refused(yaml.MarkedYAMLError):
    """A value in valid YAML that no configuration may contain; has a `problem` and a mark."""


class Loader(yaml.SafeLoader):
    """Loads plain values only; reads 1e-4 as a number and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping; refuse duplicate keys."""
        seen: dict[Any, int] = {}
        # A tag such as !!map may precede any node; the base class refuses other nodes.
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():  # pyright: ignore[reportUnnecessaryIsInstance] -- see above
            key = getattr(key_node, "value", None)
            line = key_node.start_mark.line + 1
            # "<<" merges a mapping and may occur several times.
            if isinstance(key, str) and key != "<<" and seen.setdefault(key, line) != line:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} occurs twice", key_node.start_mark
                )
        return super().construct_mapping(node, deep)


class WrittenOutLoader(Loader):
    """Refuses anchors: `Dumper` writes none, and ten lines of aliases can expand to 10^9 values."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node; refuse anchors and aliases."""
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
    """Quotes strings that `Loader` would read as numbers, and writes no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        """Return True, so that repeated values are written in full."""
        return True


def parse(text: str, source: str, loader: type[Loader] = Loader) -> object:
    """Return the plain values in YAML.

    Args:
        text: The YAML.
        source: Name of the file in messages.
        loader: `WrittenOutLoader` for files of run folders, which are untrusted data.
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
            f"{source}: expected YAML, but its lists and mappings are nested too deeply"
        ) from None


def read_text(path: Path) -> str:
    """Return the content of a YAML file of at most `MAX_YAML_BYTES`."""
    try:
        if path.is_dir():
            raise ConfigError(
                f"{path}: expected a YAML file, got a folder; name the file in it, or continue "
                f"a run with: evo-grpo resume {path}"
            )
        with path.open("rb") as file:  # read no further than needed: it may be a device
            data = file.read(MAX_YAML_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; write one with: evo-grpo init {path}") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; give permission, or name another file"
        ) from None
    except ValueError as error:  # a null character
        raise ConfigError(f"{str(path)!r}: not a valid file name: {error}") from None
    if len(data) > MAX_YAML_BYTES:
        raise ConfigError(
            f"{path}: expected at most {MAX_YAML_BYTES:,} bytes of YAML, got more; put rows into "
            "a file that env.train names"
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
    problem = shorten(str(error.problem))
    return problem if problem.startswith("but ") else f"but {problem}"


def _string(loader: Loader, node: Any) -> str:  # noqa: ANN401 -- of any kind, with a tag
    """Return a string; join the surrogate pairs with which JSON escapes characters above U+FFFF."""
    text = loader.construct_scalar(node)
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:  # a lone surrogate, which the setting refuses by its name
        return text


def _checked(construct: Callable[[Any, Any], Any], noun: str) -> Callable[[Any, Any], Any]:
    """Return a constructor whose error names the value, such as an invalid date."""

    def constructed(loader: Loader, node: Any) -> Any:  # noqa: ANN401 -- whatever it makes
        try:
            return construct(loader, node)
        except (ValueError, LookupError, ArithmeticError, AttributeError):
            given = shorten(str(node.value), _SHOWN)
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
