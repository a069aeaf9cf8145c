"""YAML source to plain values and back: strictly, and within limits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from evo_grpo.errors import ConfigError
from evo_grpo.printable import cut
from evo_grpo.schema import problems
from evo_grpo.settings.yaml_limits import MOST_BYTES, Meter, Refused, refused
from evo_grpo.validation import MOST_DIGITS, unwritable

_TAG = "tag:yaml.org,2002:"
# YAML 1.1 takes 1e-4 and 1.0e5 for strings: it wants a dot and a sign. Learning rates look so.
_SCIENTIFIC = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
#: More characters than an integer of `MOST_DIGITS` digits has in binary, with sign and prefix.
_LONGEST_INTEGER = 80
_SHOWN = 60


class Loader(yaml.SafeLoader):
    """Plain values only, 1e-4 as a number, no key twice, and no more than `yaml_limits` allows."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._meter = Meter()

    def get_event(self) -> yaml.Event:
        """Return the next event, counted."""
        event = super().get_event()
        self._meter.see(event)
        return event

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


class Dumper(yaml.SafeDumper):
    """Quotes the strings that `Loader` would take for numbers, and needs no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        """Write everything out."""
        return True


def parse(text: str, source: str) -> object:
    """Return the plain values in YAML source.

    Args:
        text: The source.
        source: What messages call it.

    Raises:
        ConfigError: It is not YAML, or holds more than a configuration may; names line and column.
    """
    _refuse_control_characters(text, source)
    try:
        if yaml.__with_libyaml__:
            _measure(text)
        return yaml.load(text, Loader=Loader)
    except Refused as error:
        raise ConfigError(f"{source}{_where(error)}: {error.problem}") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{source}{_where(error)}: expected YAML, {_reason(error)}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{source}: expected YAML, but {cut(str(error))}") from None


def read_text(path: Path) -> str:
    """Return the content of a YAML file.

    Raises:
        ConfigError: There is none, or it is not text, or longer than `MOST_BYTES`.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: expected a YAML file, got a folder")
        with path.open("rb") as file:  # read no further than needed: it may be a device
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; write one with: evo-grpo init {path}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
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


def spelling(text: str, path: problems.Path) -> str | None:
    """Return how a value is written in YAML source, `0x10` or `2026-1-1` for instance.

    Args:
        text: Source that `parse` takes.
        path: Keys and indices that lead to the value.

    Returns:
        The scalar without its quotes, None where no scalar stands there.
    """
    node: Any = yaml.compose(text, Loader=Loader)
    for part in path:
        if isinstance(node, yaml.MappingNode):
            found = [value for key, value in node.value if key.value == part]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            found = node.value[part : part + 1]
        else:
            found = []
        node = found[-1] if found else None
    return node.value if isinstance(node, yaml.ScalarNode) else None


def _refuse_control_characters(text: str, source: str) -> None:
    """Refuse what PyYAML calls unprintable: it gives no line."""
    found = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if found is None:
        return
    before = text[: found.start()]
    line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
    raise ConfigError(
        f"{source}, line {line}, column {column}: expected text, got the character "
        f"U+{ord(found.group()):04X}; remove it"
    )


def _measure(text: str) -> None:
    """Count with libyaml, which is twenty times as fast: too much is refused at once.

    It is not trusted to see what PyYAML sees: `Loader` counts again, and what is no YAML to libyaml
    is left to PyYAML's words.
    """
    meter = Meter()
    try:
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            meter.see(event)
    except Refused:
        raise
    except yaml.YAMLError:
        pass


def _where(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark
    return "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"


def _reason(error: yaml.MarkedYAMLError) -> str:
    problem = cut(str(error.problem))
    return problem if problem.startswith("but ") else f"but {problem}"


def _string(loader: Loader, node: Any) -> str:  # noqa: ANN401 -- of any kind, with a tag
    """Return a string whose characters a file can hold.

    Escapes can spell others: half of a pair of surrogates, or the null character that ends a path.
    """
    text = loader.construct_scalar(node)
    if unwritable(text) is None:
        return text
    try:
        # JSON spells a character beyond U+FFFF as two halves.
        joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        joined = text
    if expected := unwritable(joined):
        problem = f"expected {expected}, got {cut(repr(text), _SHOWN)}"
        raise refused(problem, node.start_mark)
    return joined


def _integer(loader: Loader, node: Any) -> int:  # noqa: ANN401 -- of any kind, with a tag
    text = loader.construct_scalar(node).replace("_", "")
    # By its length first: Python itself refuses to read thousands of digits.
    value = loader.construct_yaml_int(node) if len(text) <= _LONGEST_INTEGER else None
    if value is None or unwritable(value):
        problem = f"expected an integer of at most {MOST_DIGITS} digits, got {cut(text, _SHOWN)}"
        raise refused(f"{problem}; in quotes it is a string", node.start_mark)
    return value


def _checked(construct: Callable[[Any, Any], Any], noun: str) -> Callable[[Any, Any], Any]:
    """Return a constructor that names what it cannot read, such as the 45th of a month."""

    def constructed(loader: Loader, node: Any) -> Any:  # noqa: ANN401 -- whatever it makes
        try:
            return construct(loader, node)
        except (ValueError, LookupError, ArithmeticError, AttributeError):
            given = cut(str(node.value), _SHOWN)
            problem = f'expected {noun}, got {given}; for a string put it in quotes: "{given}"'
            raise refused(problem, node.start_mark) from None

    return constructed


Loader.add_implicit_resolver(f"{_TAG}float", _SCIENTIFIC, list("-+0123456789."))
Dumper.add_implicit_resolver(f"{_TAG}float", _SCIENTIFIC, list("-+0123456789."))
Loader.add_constructor(f"{_TAG}str", _string)
Loader.add_constructor(f"{_TAG}int", _checked(_integer, "an integer"))
Loader.add_constructor(f"{_TAG}float", _checked(Loader.construct_yaml_float, "a number"))
Loader.add_constructor(f"{_TAG}bool", _checked(Loader.construct_yaml_bool, "true or false"))
Loader.add_constructor(f"{_TAG}timestamp", _checked(Loader.construct_yaml_timestamp, "a date"))
for _kind in ("binary", "omap", "pairs", "set"):  # no setting takes them
    Loader.add_constructor(_TAG + _kind, Loader.construct_undefined)
