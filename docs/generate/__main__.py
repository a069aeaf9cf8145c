"""Write all files that are generated from the settings, the commands and the pinned packages.

python docs/generate            writes the files
python docs/generate --check    lists files that are out of date, and exits with 1 if there is one
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import classes
import command_line
import configuration
import metrics
import packages
import signature
import strategies

from evo_grpo.settings import json_schema, template

ROOT = Path(__file__).resolve().parents[2]

FILES: dict[str, Callable[[], str]] = {
    "docs/api.md": classes.page,
    "docs/command_line.md": command_line.page,
    "docs/configuration.md": configuration.page,
    "docs/dependencies.md": packages.page,
    "docs/metrics.md": metrics.page,
    "docs/strategies.md": strategies.page,
    "evo_grpo/api/keywords.py": signature.page,
    "population.schema.json": lambda: json.dumps(json_schema(), indent=1) + "\n",
    # The file at the root is a copy of the template that `evo-grpo init` writes.
    "population.yaml": template,
}


def main() -> int:
    """Write or check the files."""
    stale: list[str] = []
    for name, make in FILES.items():
        path, text = ROOT / name, make()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
                print(f"wrote {name}")
    if stale and "--check" in sys.argv:
        print(f"stale: {', '.join(stale)}; run: python docs/generate")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
