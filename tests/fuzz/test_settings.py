"""Any text as population.yaml: a configuration and its plan, or an error that says what to mend."""

from functools import partial
from pathlib import Path

import pytest
import yaml
from fuzzing import fuzz, told_or
from hypothesis import example
from hypothesis import strategies as st

from evo_grpo.cli.plan.plan import make_plan
from evo_grpo.cli.plan.render import render_plan
from evo_grpo.errors import ConfigError
from evo_grpo.schema.hparams import MUTABLE
from evo_grpo.schema.messages import leaves
from evo_grpo.settings import RunConfig, from_dict, load, template, to_yaml
from evo_grpo.settings.yaml import parse

FILE = Path("population.yaml")
MINIMAL = "model: tiny-sums\nenv: sums\n"
ELSEWHERE = ("gem:", "reasoning_gym:", "textarena:", "verifiers:")
"""Environments whose arguments are read by other packages, and hub ids that are looked up."""

# --- text ----------------------------------------------------------------------------------------

INDICATORS = [*"\n\n\n   :::-,[]{}#&*!|>'\"%@`?\t~<=.\\/ea10_é\0"]
TOKENS = [
    "!!int ", "!!float ", "!!map ", "!!seq ", "!!str ", "!!bool ", "!!set ", "!!timestamp ", "!a ",
    "&a ", "*a", "<<: ", "<<: *a", "? ", "- ", "| \n  ", "> \n  ", "'", '"', '"\\ud800"', '"\\0"',
    "[", "]", "{", "}", ": ", ", ", "\n", "\n  ", "---\n", "...\n", "%YAML 1.1\n", "#", "\t",
    "null", "~", "true", "yes", ".nan", ".inf", "-.inf", "1e400", "1e-4", "0b_", "0x_", "0o7", "08",
    "2026-01-01", "2026-13-45", "2026-01-01T25:00:00Z", "1:59:59", "1:59.5", "9" * 25, "_1", "=",
    "model", "env", "population: ", "size: ", "lora: ", "selection: ", "kind: ", "start: ",
]  # fmt: skip
VALID = [
    MINIMAL,
    template(),
    to_yaml(from_dict({"model": "tiny-sums", "env": "sums"})),
    "model: {name: tiny-sums, lora: {target_modules: '.*q_proj', rank_pattern: {q_proj: 2}}}\n"
    "env: {kind: dataset, train: a.csv, reward: 'm:f', conversation: [{role: user, content: a}]}\n"
    "population: {size: 2, init: [{}, {lr: 1e-3}], sizes: [2, 2]}\n"
    "evolve: {selection: {kind: truncation}, exploration: {kind: resample}, hyperparameters: "
    "{lr: &a {min: 1e-4, max: 1e-2, start: [1e-3, 1e-3]}, beta: {<<: *a, min: 0}}}\n",
]


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A valid file, with a few places cut, copied, or replaced by what means something in YAML."""
    text = draw(st.sampled_from(VALID))
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        twice = st.just(text[start:end] * 2)
        put = draw(st.just("") | st.sampled_from(TOKENS) | twice | st.text(max_size=3))
        text = text[:start] + put + text[end:]
    return text


def planned(config: RunConfig | None) -> None:
    """Whatever is a configuration can be written, read again and planned."""
    if config is None or config.env.objects():  # objects from Python, which no file can hold
        return
    FILE.write_text(to_yaml(config), encoding="utf-8")
    assert load(FILE) == config
    if config.env.kind.startswith(ELSEWHERE):
        return
    if (plan := told_or(lambda: make_plan(config))) is not None:
        render_plan(plan, str(FILE))


def read(content: bytes) -> None:
    FILE.write_bytes(content)
    planned(told_or(lambda: load(FILE), ConfigError))


# What is imported by the first plan of each kind does not belong to the time of an input.
for _kind in ("sums", "foods", "dataset"):
    _env = {"kind": _kind, "reward": "m:f", "train": "x.csv"}
    told_or(partial(make_plan, from_dict({"model": "a/b", "env": _env})))


@fuzz(content=st.binary(max_size=200))
@example(content=b"\xef\xbb\xbf" + MINIMAL.encode())
@example(content=MINIMAL.encode("utf-16"))
def test_any_bytes_are_read_or_refused(content: bytes):
    read(content)


@fuzz(text=st.text(st.sampled_from(INDICATORS) | st.characters(codec="utf-8"), max_size=60))
@example(text=f"{MINIMAL}env: 0b_")
@example(text="!!map 5")
@example(text="a: !!bool x")
@example(text="a: !!timestamp x")
@example(text="1" + ":1" * 200 + ".5")
@example(text="2026-13-45")
@example(text="--- a\n--- b")
def test_any_text_is_read_or_refused(text: str):
    read(text.encode())


@pytest.mark.slow
@fuzz(text=mutated())
@example(text=f"{MINIMAL}population: {{rounds: 99999999999999999999}}")
@example(text=f"{MINIMAL}algorithm: {{lr: 1e308}}")
@example(text=f"{MINIMAL}evolve: {{fitness: {{racing: 1e308}}}}")
@example(text="model: tiny-sums\nenv: {kind: foods, args: {train_size: 9999999999999999999}}")
def test_a_valid_file_that_was_damaged_is_read_or_refused(text: str):
    read(text.encode())


@pytest.mark.slow
@fuzz(quick=40, values=st.lists(st.sampled_from(TOKENS), max_size=12))
@example(values=["~", "nobody"])
def test_any_override_is_taken_or_refused(values: list[str]):
    FILE.write_text(MINIMAL)
    override = "".join(values)
    groups = ("name", "model", "env", "evolve.selection", "population.init", "model.lora.r")
    for name in (*groups, override):
        planned(told_or(lambda: load(FILE, [f"{name}={override}"]), ConfigError))  # noqa: B023 -- called at once


# --- values --------------------------------------------------------------------------------------

WORDS = (
    "sums foods dataset none tiny-sums m:f ~x a/b x.csv auto grpo tournament halving mutate optuna "
    "on_copy same constant {q} (.+)+"
)
SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 20) | st.integers() | st.floats() | st.dates()
    | st.binary(max_size=3) | st.text(st.characters(exclude_categories=()), max_size=8)
    | st.sampled_from(WORDS.split())
)  # fmt: skip
NAMES = sorted(
    {part for path in leaves(RunConfig) for part in path} | set(MUTABLE) | {"min", "max"}
)
KEYS = st.one_of(st.sampled_from(NAMES), st.text(max_size=4), st.integers(), st.none(), st.floats())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
PATHS = st.sampled_from(
    [path[:n] for path in leaves(RunConfig) for n in range(1, len(path) + 1)]
    + [("evolve", "hyperparameters", name) for name in MUTABLE]
    + [("evolve", "hyperparameters", "lr", end) for end in ("min", "max", "start", "dtype")]
    + [("env", "args", name) for name in ("low", "high", "train_size", "food")]
    + [("evolve", "selection", "size"), ("evolve", "exploration", "args")]
)  # fmt: skip


Assigned = tuple[tuple[str, ...], object]


def nested(assigned: list[Assigned]) -> dict[str, object]:
    """Settings with values at paths; a later one replaces what is in its way."""
    settings: dict[str, object] = {"model": {"name": "tiny-sums"}, "env": {"kind": "sums"}}
    for path, value in assigned:
        here: dict[str, object] = settings
        for name in path[:-1]:
            if not isinstance(here.get(name), dict):
                here[name] = {}
            here = here[name]
        here[path[-1]] = value
    return settings


@fuzz(settings=st.dictionaries(KEYS, VALUES, max_size=5))
@example(settings={"model": [], 3.5: None})
@example(settings={"": {None: None}})
def test_any_values_are_taken_or_refused(settings: dict[object, object]):
    planned(told_or(lambda: from_dict(settings), ConfigError))


@pytest.mark.slow
@fuzz(assigned=st.lists(st.tuples(PATHS, VALUES), min_size=1, max_size=4))
@example(assigned=[(("evolve", "hyperparameters", "group_size"), {"min": 4, "max": 1e300})])
@example(assigned=[(("seed",), 10**4000)])
@example(assigned=[(("evolve", "hyperparameters", "lr"), {0: None})])
@example(assigned=[(("env", "conversation"), [{0: None}])])
@example(assigned=[(("env", "prompt"), "a\ud800")])
@example(assigned=[(("model", "lora", "rank_pattern"), {"*": 3})])
@example(assigned=[(("env", "args", "low"), float("inf"))])
def test_any_value_of_any_setting_is_taken_or_refused(assigned: list[Assigned]):
    planned(told_or(lambda: from_dict(nested(assigned)), ConfigError))


@fuzz(value=VALUES)
def test_any_value_that_yaml_can_write_is_read(value: object):
    try:
        text = yaml.safe_dump(value)
    except (yaml.YAMLError, TypeError):  # keys of several kinds cannot be sorted
        return
    told_or(lambda: parse(text, "text"), ConfigError)
