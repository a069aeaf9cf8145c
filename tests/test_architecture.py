"""The rules of the house, read from the source: who may import whom, how long a file may grow,
what loads no torch, and that nobody touches a global random generator.

`LAYERS` is the picture of docs/architecture.md. A module that moves changes both.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "evo_grpo"

# From the bottom to the top, as in docs/architecture.md. A name stands for a module or for a folder
# with all that is in it. A module imports from its own row and from the rows above it in this list,
# never from a row below; names on one row do not know each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("escaping",),
    ("errors",),
    ("places",),
    ("assets", "seeding", "sources", "types", "working"),
    ("schema.patterns", "schema.validation"),
    ("schema",),
    ("evolve",),
    ("settings",),
    ("model", "record"),
    ("envs",),
    ("rollout",),
    ("learn.objective",),
    ("learn",),
    ("population.ranks", "population.turns"),
    ("population.zero",),
    ("population.cohort",),
    ("population.checkpoints", "population.evaluate"),
    ("population.rules", "population.stats"),
    ("population.rollouts",),
    ("population.steps",),
    ("population",),
    ("training.sizing", "training.strategies"),
    ("training.steering", "training.writer"),
    ("training.shortages", "training.starting"),
    ("training.resolve",),
    ("training.assemble",),
    ("training.recorded_inputs",),
    ("training.judge",),
    ("training.restoring",),
    ("training",),
    ("readers.terminal",),
    ("readers.report",),
    ("readers",),
    ("analysis.export",),
    ("analysis",),
    ("api",),
    ("api.agilerl",),
    ("agilerl", "quickstart"),
    ("cli",),
    ("__init__",),
    ("__main__",),
)

# In one folder, and still no word to each other: a selection must not know what varies. By prefix,
# so that a strategy in a file of its own is held to it too.
STRANGERS = (("evolve.select", "evolve.explore"),)

MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 60
REASON = re.compile(r"#\s*Longer than (?P<lines>\d+) lines because \S")

# The rooms that answer at once, and what none of them may load.
TORCH_FREE = (
    "__init__",
    "analysis.export",
    "cli",
    "envs",
    "errors",
    "evolve",
    "escaping",
    "readers",
    "record",
    "schema",
    "seeding",
    "settings",
    "sources",
    "training.sizing",
    "training.strategies",
    "types",
)
HEAVY = ("torch", "transformers", "peft", "accelerate")
SLOW_TO_LOAD = (*HEAVY, "optuna", "pandas", "datasets")
TEMPLATE = ROOT / PACKAGE / "settings" / "templates" / "sums" / "population.yaml"

GLOBAL_GENERATOR_REASON = re.compile(r"#\s*Global generator because \S")
# What makes a generator in place of using the global one. Ruff's NPY002 finds numpy's.
HARMLESS_RANDOM = {"Random", "SystemRandom"}
TORCH_GLOBAL = re.compile(
    r"torch\.(random\.(?!fork_rng)\w+|seed|manual_seed|initial_seed|[gs]et_rng_state"
    r"|cuda\.(manual_seed|manual_seed_all|seed|seed_all|[gs]et_rng_state(_all)?))"
)
# These draw from the global generator unless they are given one.
TORCH_DRAWS = re.compile(
    r"torch\.((rand|randn|randint)(_like)?|randperm|normal|bernoulli|multinomial|poisson)"
)
TENSOR_DRAWS = {
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "log_normal_",
    "normal_",
    "orthogonal_",
    "random_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
}


@dataclass(frozen=True)
class Module:
    """One source file: its name inside the package ("model.fused", "model", "__init__")."""

    name: str
    path: Path
    is_package: bool

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))


def read_modules(package: Path) -> dict[str, Module]:
    """Every module below `package` by its name inside it; the package's own is "__init__"."""
    modules: dict[str, Module] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        if is_package and len(parts) > 1:
            parts = parts[:-1]
        name = ".".join(parts)
        modules[name] = Module(name, path, is_package)
    return modules


MODULES = read_modules(ROOT / PACKAGE)


def within(name: str, room: str) -> bool:
    """Whether a module is a room, or lies in it."""
    return name == room or name.startswith(f"{room}.")


@cache
def room_of(name: str) -> tuple[int, str] | None:
    """The layer and the room of a module: the longest room whose name begins its own."""
    found = [
        (len(room), layer, room)
        for layer, rooms in enumerate(LAYERS)
        for room in rooms
        if within(name, room)
    ]
    return max(found)[1:] if found else None


def absolute(module: Module, node: ast.ImportFrom) -> str:
    """The full name of what `from ... import` names, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    parts = [PACKAGE, *(module.name.split(".") if module.name != "__init__" else [])]
    if not module.is_package:
        parts = parts[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


@cache
def named_imports(module: Module) -> list[tuple[int, str]]:
    """Line and full name of every import, wherever it stands: at the top, inside a function, under
    TYPE_CHECKING (an annotation is knowledge of the other module too) or as import_module("...").
    """
    found: list[tuple[int, str]] = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and node.args:
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            target = getattr(node.args[0], "value", None)
            if name in {"import_module", "__import__"} and isinstance(target, str):
                found.append((node.lineno, target))
    return found


def arrows(module: Module, modules: dict[str, Module]) -> Iterator[tuple[int, str]]:
    """Line and name of every module of the package that `module` imports."""
    for line, full_name in named_imports(module):
        head, *rest = full_name.split(".")
        if head != PACKAGE:
            continue
        # "evo_grpo.model.base.SharedBase" is the module model.base: the longest part that is one,
        # or that is a room of LAYERS (a module that is not written yet).
        room = room_of(".".join(rest))
        names = [".".join(rest[:end]) for end in range(1, len(rest) + 1)]
        known = [name for name in names if name in modules or (room and name == room[1])]
        target = known[-1] if known else "__init__"
        if target != module.name:
            yield line, target


def broken_arrow(source: str, target: str) -> str | None:
    """Why `source` must not import `target`, or None where it may."""
    source_room, target_room = room_of(source), room_of(target)
    if source_room is None or target_room is None:
        return None  # test_every_module_has_a_layer says so
    pair = f"{PACKAGE}.{source} imports {PACKAGE}.{target}"
    if any(
        (within(source, one) and within(target, other))
        or (within(source, other) and within(target, one))
        for one, other in STRANGERS
    ):
        return f"{pair}, and the two must not know each other: pass values between them instead"
    if target_room[0] > source_room[0]:
        return (
            f"{pair}, which lies above it ({target_room[1]!r} over {source_room[1]!r}): "
            "move what both need down, or pass it in as an argument"
        )
    if target_room[0] == source_room[0] and target_room[1] != source_room[1]:
        return (
            f"{pair}, its neighbour on the same layer: "
            "move what both need to a lower layer, or let the caller connect them"
        )
    return None


def dotted(node: ast.expr) -> str:
    """ "torch.cuda.seed" for the expression that reads so, "" for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def forked_lines(tree: ast.Module) -> set[int]:
    """Lines inside `with torch.random.fork_rng(...)`, which puts torch's global generator back: the
    one way to feed a third party that takes no generator.
    """
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
        if isinstance(item.context_expr, ast.Call)
        and dotted(item.context_expr.func).endswith("random.fork_rng")
        for line in range(node.lineno, node.end_lineno + 1)
    }


def global_draws(module: Module) -> Iterator[tuple[int, str]]:
    """Line and text of every use of a global random generator, but torch's where it is forked."""
    forked = forked_lines(module.tree)
    known: dict[str, str] = {}  # the names of this file -> what they stand for
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head = alias.name.split(".")[0]
                known[alias.asname or head] = alias.name if alias.asname else head
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        written = dotted(node.func)
        head, _, tail = written.partition(".")
        name = ".".join(part for part in (known.get(head, ""), tail) if part)
        holder, _, function = name.rpartition(".")
        given = any(word.arg == "generator" for word in node.keywords) or node.lineno in forked
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if (
            (holder == "random" and function not in HARMLESS_RANDOM)
            or (node.lineno not in forked and TORCH_GLOBAL.fullmatch(name))
            or function == "set_seed"  # of transformers and accelerate: seeds all of them
            or (not given and TORCH_DRAWS.fullmatch(name))
            or (not given and method in TENSOR_DRAWS)
        ):
            yield node.lineno, ast.unparse(node.func)


def has_reason(lines: list[str], line: int, pattern: re.Pattern[str]) -> bool:
    """Whether the given line (counted from 1) or the one above it carries the comment."""
    return any(pattern.search(text) for text in lines[max(0, line - 2) : line])


def write_package(folder: Path, files: dict[str, str]) -> dict[str, Module]:
    """A package for the tests of these tests."""
    for name, text in files.items():
        path = folder / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return read_modules(folder / PACKAGE)


# --- the package ---------------------------------------------------------------------------------


def test_every_module_has_a_layer():
    without = [name for name in MODULES if room_of(name) is None]
    assert not without, (
        f"no layer: {', '.join(without)}. Add each to LAYERS in tests/test_architecture.py, on the "
        "lowest row that is above all it imports, and to the picture in docs/architecture.md."
    )


def test_imports_point_downwards():
    broken = [
        f"{module.path.relative_to(ROOT)}:{line}: {why}"
        for module in MODULES.values()
        for line, target in arrows(module, MODULES)
        if (why := broken_arrow(module.name, target))
    ]
    assert not broken, "\n".join(broken)


def test_no_import_cycles():
    graph = {
        name: {target for _, target in arrows(module, MODULES)} for name, module in MODULES.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("modules import each other in a circle: " + " <- ".join(error.args[1]))


def too_long(module: Module) -> Iterator[str]:
    """What of a module is longer than it may be without a reason."""
    where, lines = module.path.relative_to(ROOT), module.text.splitlines()
    if len(lines) > MAX_MODULE_LINES and not REASON.search(lines[0]):
        yield (
            f"{where} has {len(lines)} lines, more than {MAX_MODULE_LINES}: split it by noun, or "
            f"begin it with '# Longer than {MAX_MODULE_LINES} lines because ...'"
        )
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = node.end_lineno - node.lineno + 1
        if ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            length -= docstring.end_lineno - docstring.lineno + 1
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        if length > MAX_FUNCTION_LINES and not has_reason(lines, first, REASON):
            yield (
                f"{where}:{node.lineno}: {node.name} has {length} lines without its docstring, "
                f"more than {MAX_FUNCTION_LINES}: split it, or write above it "
                f"'# Longer than {MAX_FUNCTION_LINES} lines because ...'"
            )


def test_modules_and_functions_are_short():
    found = [text for module in MODULES.values() for text in too_long(module)]
    assert not found, "\n".join(found)


def test_no_global_generator():
    draws = [
        f"{module.path.relative_to(ROOT)}:{line}: {name} uses a global generator: take one made "
        f"by {PACKAGE}.seeding as an argument, or write '# Global generator because ...' above"
        for module in MODULES.values()
        for line, name in global_draws(module)
        if not has_reason(module.text.splitlines(), line, GLOBAL_GENERATOR_REASON)
    ]
    assert not draws, "\n".join(draws)


def loaded_by(code: str, unwanted: tuple[str, ...]) -> list[str]:
    """Which of the unwanted packages a fresh interpreter has loaded after running `code`."""
    script = f"{code}\nimport sys\nprint('LOADED', *(set({unwanted!r}) & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, f"{code!r} failed:\n{done.stderr}"
    return sorted(done.stdout.splitlines()[-1].split()[1:])


def full_name(name: str) -> str:
    return PACKAGE if name == "__init__" else f"{PACKAGE}.{name}"


def test_torch_free_modules_load_no_torch():
    free = [name for name in MODULES if (room := room_of(name)) and room[1] in TORCH_FREE]
    code = "\n".join(f"import {full_name(name)}" for name in free)
    if (loaded := loaded_by(code, HEAVY)) == []:
        return
    guilty = [name for name in free if loaded_by(f"import {full_name(name)}", HEAVY)]
    pytest.fail(f"{', '.join(map(full_name, guilty))} must not load {', '.join(loaded)}")


@pytest.mark.parametrize("name", ["__init__", "settings", "cli", "cli.commands"])
def test_the_front_door_loads_nothing_slow(name: str):
    assert loaded_by(f"import {full_name(name)}", SLOW_TO_LOAD) == []


def test_until_ctrl_c_is_handled_hardly_anything_is_loaded():
    late = ("logging", "re", "threading", "typing")
    bare = loaded_by("pass", late)
    assert loaded_by(f"import {PACKAGE}.cli.stopping", late) == bare
    assert loaded_by(f"import {PACKAGE}.cli", ("enum", *late)) == loaded_by("pass", ("enum", *late))


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["check", str(TEMPLATE)], ["schema"]]
)
def test_a_command_that_only_tells_loads_nothing_slow(arguments: list[str]):
    code = (
        "import sys\n"
        f"from {PACKAGE}.cli import main\n"
        f"sys.argv = ['evo-grpo', *{arguments!r}]\n"
        "try:\n"
        "    code = main()\n"
        "except SystemExit as leaving:\n"
        "    code = leaving.code\n"
        "assert not code, code"
    )
    # Planning draws no rows and calls no reward function.
    assert loaded_by(code, (*SLOW_TO_LOAD, "numpy", "asyncio")) == []


# --- these tests themselves, on packages small enough to see the fault ---------------------------


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        ("record/lineage.py", "model/base.py", "neighbour"),
        ("population/checkpoints/read.py", "population/evaluate.py", "neighbour"),
        ("evolve/select/tournament.py", "evolve/explore/mutate.py", "must not know each other"),
        ("evolve/explore/lognormal.py", "evolve/select/ranked.py", "must not know each other"),
        ("evolve/select.py", "model/base.py", "lies above"),
        ("learn/objective/losses.py", "learn/learner.py", "lies above"),
        ("population/cohort/cohort.py", "population/round.py", "lies above"),
        ("training/run.py", "api/population.py", "lies above"),
        ("sources.py", "model/base.py", "lies above"),
        ("settings/run.py", "training/run.py", "lies above"),
        ("types.py", "__init__.py", "lies above"),
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        "from {target} import x",
        "def late():\n    import {target}",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {target} import X",
        "import importlib\nimportlib.import_module('{target}')",
    ],
)
def test_a_wrong_arrow_is_found(tmp_path: Path, form: str, source: str, target: str, why: str):
    name = ".".join([PACKAGE, *Path(target).with_suffix("").parts]).removesuffix(".__init__")
    modules = write_package(tmp_path, {target: "", source: form.format(target=name)})
    module = modules[".".join(Path(source).with_suffix("").parts)]
    (found,) = {target for _, target in arrows(module, modules)}
    message = broken_arrow(module.name, found)
    assert message is not None
    assert why in message
    assert f"{PACKAGE}.{module.name}" in message
    assert f"{PACKAGE}.{found}" in message


def test_relative_imports_are_resolved(tmp_path: Path):
    files = {
        "errors.py": "",
        "model/__init__.py": "from . import base\nfrom ..errors import X",
        "model/base.py": "from .. import errors\nfrom .adapters import Y",
        "model/adapters.py": "",
    }
    modules = write_package(tmp_path, files)
    assert [target for _, target in arrows(modules["model"], modules)] == ["model.base", "errors"]
    assert [target for _, target in arrows(modules["model.base"], modules)] == [
        "errors",
        "model.adapters",
    ]


def test_a_module_not_written_yet_counts_by_its_room(tmp_path: Path):
    files = {"evolve/select.py": "from evo_grpo.learn.objective.losses import x"}
    modules = write_package(tmp_path, files)
    assert [target for _, target in arrows(modules["evolve.select"], modules)] == [
        "learn.objective"
    ]


def test_every_row_of_the_picture_exists():
    for room in (room for rooms in LAYERS for room in rooms):
        assert any(within(name, room) for name in MODULES) or (ROOT / PACKAGE / room).is_dir(), room
    for room in (*TORCH_FREE, *(name for pair in STRANGERS for name in pair)):
        assert any(within(name, room) for name in MODULES), room


def test_right_arrows_pass():
    assert broken_arrow("model.forward.fused", "model.lora.slots") is None
    assert broken_arrow("learn.learner", "learn.objective.losses") is None
    assert broken_arrow("training.run", "evolve.select") is None
    assert broken_arrow("api.population", "training.run") is None
    assert broken_arrow("training.sizing.model_size", "sources") is None
    assert room_of("unheard_of") is None


def test_global_draws_are_found(tmp_path: Path):
    text = "\n".join(
        [
            "import random",
            "import torch",
            "import transformers",
            "from random import choice as pick",
            "random.random()",
            "pick([1])",
            "torch.manual_seed(1)",
            "torch.rand(2)",
            "torch.zeros(2).normal_()",
            "transformers.set_seed(1)",
            "with torch.random.fork_rng():\n    torch.manual_seed(1)\n    torch.rand(2)",
            "random.Random(1).random()",
            "torch.rand(2, generator=g)",
            "torch.zeros(2).normal_(generator=g)",
        ]
    )
    modules = write_package(tmp_path, {"model/base.py": text})
    assert [line for line, _ in global_draws(modules["model.base"])] == list(range(5, 11))
