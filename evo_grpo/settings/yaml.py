"""population.yaml to RunConfig and back, with overrides from the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from evo_grpo.errors import ConfigError
from evo_grpo.schema.messages import group_at, shown
from evo_grpo.schema.problems import Problems
from evo_grpo.settings.run import RunConfig

# YAML 1.1 takes 1e-4 and 1.0e5 for strings: it wants a dot and a sign. Learning rates look so.
_SCIENTIFIC = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
_FLOAT = "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    """Plain values only, 1e-4 as a number, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = getattr(key_node, "value", None)
            line = key_node.start_mark.line + 1
            # "<<" merges a mapping and may stand there several times.
            if isinstance(key, str) and key != "<<" and seen.setdefault(key, line) != line:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands there twice", key_node.start_mark
                )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that `_Loader` would take for numbers, and needs no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Loader.add_implicit_resolver(_FLOAT, _SCIENTIFIC, list("-+0123456789."))
_Dumper.add_implicit_resolver(_FLOAT, _SCIENTIFIC, list("-+0123456789."))


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration.

    Args:
        path: A YAML file.
        overrides: Settings that replace those of the file: `a.b.c=value`, the value in YAML.

    Returns:
        The configuration, all defaults filled in.

    Raises:
        ConfigError: The file cannot be read, or for all problems in it at once, one line each.
    """
    source = str(path)
    data = parse(read_text(Path(path)), source)
    return _build(data, overrides, source)


def from_dict(settings: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Build a configuration from a mapping such as `to_yaml` wrote or a YAML file holds.

    Raises:
        ConfigError: For all problems at once, one line each.
    """
    return _build(settings, overrides, "configuration")


def to_yaml(config: RunConfig) -> str:
    """Return a configuration with all its defaults; loading it again gives an equal one."""
    return yaml.dump(
        config.model_dump(mode="json"),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )


def template() -> str:
    """Return the commented population.yaml that `evo-grpo init` writes."""
    return (Path(__file__).parent / "population.yaml").read_text(encoding="utf-8")


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of population.yaml, with which editors complete and check it."""
    made = RunConfig.model_json_schema()
    # A group with a shorthand may also be given by one string: `model: tiny-sums`.
    for name, field in RunConfig.model_fields.items():
        if getattr(field.annotation, "shorthand", None) is not None:
            group = made["properties"][name]
            made["properties"][name] = {
                "anyOf": [{"type": "string", "minLength": 1}, {"$ref": group["$ref"]}],
                "description": group["description"],
            }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **made,
        "title": "population.yaml of evo-grpo",
        "description": "A run of evo-grpo: `model` and `env` are required, all else has defaults.",
    }


def parse(text: str, source: str) -> object:
    """Return the plain values in YAML source.

    Raises:
        ConfigError: It is not YAML; names line and column.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{source}{where}: expected YAML, but {error.problem}") from None
    except yaml.reader.ReaderError as error:  # its own message has two lines
        raise ConfigError(
            f"{source}, character {error.position + 1}: expected YAML, but it holds "
            f"{chr(error.character)!r}: {error.reason}"
        ) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{source}: expected YAML, but {error}") from None


def read_text(path: Path) -> str:
    """Return a text file's content.

    Raises:
        ConfigError: There is none, or it is not text.
    """
    if path.is_dir():
        raise ConfigError(f"{path}: expected a YAML file, got a folder")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; write one with: evo-grpo init {path}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected text in UTF-8, but {error.reason}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _build(data: object, overrides: Sequence[str], source: str) -> RunConfig:
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{source}: expected a mapping with the keys {', '.join(RunConfig.model_fields)}, "
            f"got {shown(data)}; write an example with: evo-grpo init"
        )
    settings: dict[Any, Any] = dict(data)
    for override in overrides:
        _apply(settings, override)
    wrong = [key for key in settings if not isinstance(key, str)]
    if wrong:
        raise ConfigError(f"{source}: expected strings as keys, got {shown(wrong[0])}")
    try:
        return RunConfig(**settings)
    except RecursionError:
        # An anchor inside of itself; plain values cannot say where.
        raise ConfigError(f"{source}: expected plain values, but one contains itself") from None
    except Problems as problems:
        raise problems.of(source if not overrides else f"{source} with --set") from None


def _apply(settings: dict[Any, Any], override: str) -> None:
    """Set one value in place, copying the groups on its way, since they belong to the caller."""
    path, equals, text = override.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(
            f"--set {override}: expected a.b.c=value, for instance --set evolve.selection.size=3"
        )
    if not text.strip():
        raise ConfigError(
            f"--set {override}: expected a value after =; write {path}=null for none, or leave it "
            "out for what the file says"
        )
    value = parse(text, f"--set {override}")
    here = settings
    for depth, name in enumerate(names[:-1], start=1):
        here[name] = here = _opened(here.get(name), tuple(names[:depth]), override)
    here[names[-1]] = value


def _opened(inside: object, path: tuple[str, ...], override: str) -> dict[Any, Any]:
    """Return a copy of the mapping at a path, where there may be nothing yet or a plain string."""
    if inside is None:
        return {}
    if isinstance(inside, Mapping):
        return dict(inside)
    group = group_at(RunConfig, path)
    shorthand = getattr(group, "shorthand", None)
    if isinstance(inside, str) and shorthand is not None:
        return {shorthand: inside}
    raise ConfigError(
        f"--set {override}: expected a mapping at {'.'.join(path)}, found {shown(inside)}"
    )
