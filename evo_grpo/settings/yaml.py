"""Reads and writes YAML: plain values of bounded size, and the settings of a run."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from evo_grpo.errors import ConfigError
from evo_grpo.escaping import shorten
from evo_grpo.schema.messages import group_at, shown
from evo_grpo.schema.problems import Problem, Problems, refuse
from evo_grpo.settings.run import RunConfig

MAX_YAML_BYTES = 1 << 20
"""Size limit of a YAML file; put rows into a file that `env.train` names."""
_TAG = "tag:yaml.org,2002:"
# YAML 1.1 reads 1e-4 and 1.0e5 as strings, since it requires a dot and a sign.
_SCIENTIFIC = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
_SHOWN = 60
_ROWS = "put rows into a file that env.train names"


class _Refused(yaml.MarkedYAMLError):
    """An error for valid YAML with a value that no configuration may contain."""


class Loader(yaml.SafeLoader):
    """Loads plain values only; reads 1e-4 as a number and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping; refuse duplicate keys."""
        lines: dict[Any, int] = {}
        # A tag such as !!map may precede any node; the base class refuses other nodes.
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():  # pyright: ignore[reportUnnecessaryIsInstance] -- see above
            key = getattr(key_node, "value", None)
            line = key_node.start_mark.line + 1
            # "<<" merges a mapping and may occur several times.
            if isinstance(key, str) and key != "<<" and lines.setdefault(key, line) != line:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} occurs twice", key_node.start_mark
                )
        return super().construct_mapping(node, deep)


class WrittenOutLoader(Loader):
    """Refuses anchors, because ten lines of aliases can expand to 10^9 values."""

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
    """Parse YAML text into plain values.

    `source` names the file in messages. `loader` is `WrittenOutLoader` for files of run folders,
    because these are untrusted data.
    """
    try:
        return yaml.load(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, shorten(str(error.problem))
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        if not isinstance(error, _Refused):
            problem = f"expected YAML, but {problem.removeprefix('but ')}"
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        where = f", line {line}, column {column}"
        problem = f"expected text, got the character U+{error.character:04X}; remove it"
    except RecursionError:
        where, problem = "", "expected YAML, but its lists and mappings are nested too deeply"
    raise ConfigError(f"{source}{where}: {problem}")


def read_text(path: Path) -> str:
    """Return the content of a YAML file of at most `MAX_YAML_BYTES`."""
    try:
        with path.open("rb") as file:  # read no further than needed: it may be a device
            data = file.read(MAX_YAML_BYTES + 1)
        if len(data) <= MAX_YAML_BYTES:
            return data.decode("utf-8")
        problem = f": expected at most {MAX_YAML_BYTES:,} bytes of YAML, got more; {_ROWS}"
    except FileNotFoundError:
        problem = f": no such file; write one with: evo-grpo init {path}"
    except IsADirectoryError:
        problem = (
            ": expected a YAML file, got a folder; name the file in it, or continue a run with: "
            f"evo-grpo resume {path}"
        )
    except OSError as error:
        problem = f": cannot be read: {error.strerror}; give permission, or name another file"
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        problem = (
            f", line {line}: expected text in UTF-8, got the byte "
            f"0x{error.object[error.start]:02x} ({error.reason}); save the file as UTF-8"
        )
    except ValueError as error:  # a null character
        problem = f": not a valid file name: {error}"
    raise ConfigError(f"{path}{problem}")


def _string(loader: Loader, node: Any) -> str:  # noqa: ANN401 -- of any kind, with a tag
    """Return a string; join the surrogate pairs with which JSON escapes characters above U+FFFF."""
    text = loader.construct_scalar(node)
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:  # a lone surrogate; the check of the setting refuses it
        return text


def _checked(construct: Callable[[Any, Any], Any], noun: str) -> Callable[[Any, Any], Any]:
    """Return `construct` with a clearer error for a value that is no `noun`."""

    def constructed(loader: Loader, node: Any) -> Any:  # noqa: ANN401 -- whatever it makes
        try:
            return construct(loader, node)
        except (ValueError, LookupError, ArithmeticError, AttributeError):
            text = shorten(str(node.value), _SHOWN)
            problem = f'expected {noun}, got {text}; for a string put it in quotes: "{text}"'
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


REMOVED: dict[tuple[str, ...], tuple[object, str]] = {
    ("evolve", "recombine"): ("none", "since it helped nowhere"),
    ("evolve", "svd_noise"): (0, "since it helped nowhere"),
    ("engine", "compile"): (None, "since it was slower with large models"),
    ("engine", "vllm", "stop_sequences"): ([], "and algorithm.stop serves every engine"),
    ("engine", "vllm", "process"): ("child", "and vLLM always runs in a separate process"),
}
"""Path of a removed setting, which older run folders have -> (the value that means what is done
now, why the setting was removed)."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration.

    Args:
        path: A YAML file.
        overrides: Settings that replace those of the file, as `a.b.c=value` with a YAML value.

    Returns:
        The configuration, with all defaults filled in.

    Raises:
        ConfigError: The file cannot be read, or has problems, which are listed one per line.
    """
    source = str(path)
    return _without_objects(_build(parse(read_text(Path(path)), source), overrides, source), source)


def from_dict(settings: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Build a configuration from a mapping with the structure of population.yaml.

    Raises:
        ConfigError: The settings have problems, which are listed one per line.
    """
    return _build(settings, overrides, "configuration")


def as_config(config: RunConfig | str | Path | Mapping[str, Any]) -> RunConfig:
    """Return the settings of a run, given as a RunConfig, the path of a YAML file or a mapping.

    Raises:
        ConfigError: The argument has another type, or a setting is wrong.
    """
    if isinstance(config, RunConfig):
        return config
    if isinstance(config, str | Path):
        return load(config)
    if isinstance(config, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are untyped
        return from_dict(config)
    raise ConfigError(
        f"config: expected a RunConfig, the path of a YAML file or a mapping, got {shown(config)}"
    )


def from_written(text: str, source: str, *, past: bool = False) -> RunConfig:
    """Build a configuration from YAML that `to_yaml` wrote to a run folder; refuse anchors.

    A setting that no longer exists is an error if it had an effect; with `past`, it is left out.
    """
    settings = with_current_keys(parse(text, source, WrittenOutLoader))
    if past and isinstance(settings, Mapping):
        settings, _ = without_removed(cast("Mapping[Any, Any]", settings))
    return _without_objects(_build(settings, (), source), source)


def with_current_keys(settings: Any) -> Any:  # noqa: ANN401 -- as it was given
    """Return settings that a version before 0.3 wrote, with the present meaning of each key.

    There, `engine.overlap` was the number of parts of a shard, and `engine.vllm` had stop
    sequences.
    """
    engine: Any = settings.get("engine") if isinstance(settings, Mapping) else None
    if not isinstance(engine, Mapping):
        return settings
    settings, engine = {**cast("dict[Any, Any]", settings)}, {**cast("dict[Any, Any]", engine)}
    settings["engine"] = engine
    vllm: Any = engine.get("vllm")
    if isinstance(vllm, Mapping) and "stop_sequences" in vllm:
        engine["vllm"] = vllm_settings = {**cast("dict[Any, Any]", vllm)}
        stop = vllm_settings.pop("stop_sequences")
        if stop and engine.get("rollout") == "vllm":
            settings["algorithm"] = {**settings.get("algorithm", {}), "stop": stop}
    if type(parts := engine.get("overlap")) is int:
        engine |= {"overlap": True, "shards": (engine.get("shards") or 1) * parts}
    return settings


def to_yaml(config: RunConfig) -> str:
    """Return a configuration as YAML, with all defaults; the YAML loads as an equal configuration.

    Raises:
        ConfigError: The text is longer than the size limit of `load`.
    """
    text = yaml.dump(
        config.model_dump(mode="json"),
        Dumper=Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )
    if len(text.encode()) > MAX_YAML_BYTES:
        raise ConfigError(
            f"configuration: expected at most {MAX_YAML_BYTES:,} bytes of YAML with all defaults, "
            f"got {len(text.encode()):,}; {_ROWS}"
        )
    return text


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of population.yaml, for completion and checks in editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **RunConfig.model_json_schema(),
        "title": "population.yaml of evo-grpo",
        "description": "A run of evo-grpo: `model` and `env` are required, the rest has defaults.",
    }


def _build(data: object, overrides: Sequence[str], source: str) -> RunConfig:
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{source}: expected a mapping with the keys {', '.join(RunConfig.model_fields)}, "
            f"got {shown(data)}; write an example with: evo-grpo init"
        )
    settings: dict[Any, Any] = dict(data)
    for override in overrides:
        _apply(settings, override)
    bad_keys = [key for key in settings if not isinstance(key, str)]
    if bad_keys:
        raise ConfigError(f"{source}: expected strings as keys, got {shown(bad_keys[0])}")
    settings, removed = without_removed(settings)
    try:
        config = RunConfig(**settings)
        refuse(removed)
    except Problems as error:
        heading = f"{source} with --set" if overrides else source
        raise Problems(*removed, *error.problems, source=heading) from None
    return config


def without_removed(settings: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[Problem]]:
    """Return settings without those in `REMOVED`, and a problem for each that had an effect."""
    remaining, problems = dict(settings), list[Problem]()
    for path, (harmless, why) in REMOVED.items():
        group: dict[Any, Any] = remaining
        for name in path[:-1]:
            subgroup: Any = group.get(name)
            if not isinstance(subgroup, Mapping):
                break
            group[name] = group = dict(cast("Mapping[Any, Any]", subgroup))
        else:
            if (value := group.pop(path[-1], harmless)) != harmless:
                expected = "null" if harmless is None else harmless
                text = (
                    f"expected {expected}, got {shown(value)}: it was removed, {why}; leave it "
                    "out, or finish a run with the version that began it"
                )
                problems.append(Problem(path, text))
    return remaining, problems


def _without_objects(config: RunConfig, source: str) -> RunConfig:
    """Refuse a file that contains rows of the task; only a mapping from Python may have them."""
    if objects := config.env.objects():
        raise ConfigError(
            f"{source}: expected the name of a file with the rows, got the rows themselves: "
            f"{', '.join(objects)}; write them to a file ending in .jsonl, one per line, or give "
            "the settings from Python, as a mapping"
        )
    return config


def _apply(settings: dict[Any, Any], override: str) -> None:
    """Apply an override to `settings`; copy the groups on its path, since they are the caller's."""
    path, sign, text = override.partition("=")
    names = tuple(path.strip().split("."))
    where = f"--set {shorten(override)}"
    problem = ""
    if not sign or not all(names):
        problem = "expected a.b.c=value, for instance --set evolve.selection.size=3"
    elif not text.strip():
        problem = (
            f"expected a value after =; write {'.'.join(names)}=null for none, or leave it out to "
            "keep the value of the file"
        )
    if problem:
        raise ConfigError(f"{where}: {problem}")
    value = parse(text, where)
    group = settings
    for depth, name in enumerate(names[:-1], start=1):
        group[name] = group = _group_copy(group.get(name), names[:depth], where)
    group[names[-1]] = value


def _group_copy(inside: object, path: tuple[str, ...], where: str) -> dict[Any, Any]:
    """Return a copy of `inside`, the group at `path`: {} for None, a mapping for a shorthand."""
    if inside is None:
        return {}
    if isinstance(inside, Mapping):
        return dict(inside)
    group = group_at(RunConfig, path)
    shorthand = getattr(group, "shorthand", None)
    if isinstance(inside, str) and shorthand is not None:
        return {shorthand: inside}
    raise ConfigError(f"{where}: expected a mapping at {'.'.join(path)}, found {shown(inside)}")
