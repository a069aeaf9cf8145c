"""Prints how large the package is, by room: `python tests/size.py [CHECKOUT]`.

Lines are all lines of all modules. Code is what is left of them without docstrings, imports, blank
lines and comments. A module with a single importer is one that one other module of the package
imports.
"""

import ast
import sys
from collections import Counter, defaultdict
from pathlib import Path

COLUMNS = ("lines", "code", "docstrings", "imports", "modules", "single", "raises")
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def modules(package: Path) -> dict[str, Path]:
    """The dotted name of each module of a package -> its file."""
    files = sorted(package.rglob("*.py"))
    names = (".".join(file.relative_to(package.parent).with_suffix("").parts) for file in files)
    return {name.removesuffix(".__init__"): file for name, file in zip(names, files, strict=True)}


def measure(text: str) -> tuple[Counter[str], set[str]]:
    """Count the lines of a module by kind; return them with the names that it imports."""
    kinds: dict[int, str] = {}
    imported = set()
    raises = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            kinds |= dict.fromkeys(range(docstring.lineno, docstring.end_lineno + 1), "docstrings")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            kinds |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), "imports")
            module = getattr(node, "module", None)
            names = [alias.name for alias in node.names]
            imported |= {module, *(f"{module}.{name}" for name in names)} if module else set(names)
        raises += isinstance(node, ast.Raise)
    lines = Counter(
        kinds.get(number) or ("code" if line.strip() and line.lstrip()[0] != "#" else "other")
        for number, line in enumerate(text.splitlines(), start=1)
    )
    return lines + Counter(lines=lines.total(), raises=raises, modules=1), imported


def rooms(root: Path) -> dict[str, Counter[str]]:
    """Count each room of the package of a checkout: its folders, and `.` for single files."""
    package = root / "evo_grpo"
    files = modules(package)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    importers: dict[str, set[str]] = defaultdict(set)
    place = {
        name: file.relative_to(package).parts[0] if file.parent != package else "."
        for name, file in files.items()
    }
    for name, file in files.items():
        counted, imported = measure(file.read_text(encoding="utf-8"))
        counts[place[name]] += counted
        for other in imported & set(files) - {name}:
            importers[other].add(name)
    for name, by in importers.items():
        counts[place[name]]["single"] += len(by) == 1 and files[name].name != "__init__.py"
    return dict(counts)


def main(root: Path) -> None:
    """Print a row for each room, the whole package with its shares, and the lines of the tests."""
    counts = rooms(root)
    whole = sum(counts.values(), Counter())
    print(f"{'':<12}" + "".join(f"{column:>12}" for column in COLUMNS))
    for name, room in [*sorted(counts.items()), ("package", whole)]:
        print(f"{name:<12}" + "".join(f"{room[column]:>12,}" for column in COLUMNS))
    lines = whole["lines"]
    print(f"docstrings {whole['docstrings'] / lines:.1%}, imports {whole['imports'] / lines:.1%}")
    print(f"{1000 * whole['raises'] / lines:.1f} raises per 1,000 lines")
    tests = [file.read_text(encoding="utf-8") for file in (root / "tests").rglob("*.py")]
    print(f"tests {sum(len(text.splitlines()) for text in tests):,} lines")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1])
