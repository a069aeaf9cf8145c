"""Generate the table at the end of docs/dependencies.md: licences of the pinned packages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.message import Message
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import cast

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "dependencies.md"
CONSTRAINTS = ROOT / "constraints.txt"
MARK = "<!-- Written by docs/generate from constraints.txt, up to the end of the page. -->"

# How packages name a licence in their metadata, by what SPDX calls it.
SPDX = {
    "Apache-2.0": (
        *("Apache", "Apache 2.0", "Apache License 2.0", "Apache 2.0 License"),
        *("Apache License, Version 2.0", "Apache Software License"),
        "Apache Software License 2.0",
    ),
    "BSD-3-Clause": ("BSD 3-Clause License",),
    # Which of them stands in the package alone.
    "BSD": ("BSD License",),
    "GPL-3.0-or-later": ("GPL-3.0+",),
    "ISC": ("ISC License",),
    "MIT": ("MIT License",),
    "MPL-2.0": ("Mozilla Public License 2.0 (MPL 2.0)",),
    "PSF-2.0": ("PSFL", "Python Software Foundation License"),
}
_SPDX = {name: spdx for spdx, names in SPDX.items() for name in names}
# Whose metadata say nothing: read in the licence file inside the package.
OWN = {"zss": "BSD-3-Clause"}


@dataclass(frozen=True)
class Pin:
    """A line of constraints.txt.

    Attributes:
        name: The package, as the line writes it.
        version: Its one version.
    """

    name: str
    version: str


def normalised(name: str) -> str:
    """Return the normalized name of a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> list[Pin]:
    """Return the pinned packages of a file of constraints, by name."""
    lines = (line.partition("#")[0].strip() for line in path.read_text("utf-8").splitlines())
    found = [Pin(*line.split("==")) for line in lines if line]
    return sorted(found, key=lambda pin: normalised(pin.name))


def page() -> str:
    """Return docs/dependencies.md with a table of the current pins."""
    text = PAGE.read_text(encoding="utf-8")
    written, mark, table = text.partition(MARK)
    if not mark:
        raise SystemExit(f"{PAGE.name}: expected the line {MARK} above the table")
    known = _known(table)
    rows = [f"| {pin.name} | {pin.version} | {_licence(pin, known)} |" for pin in pins(CONSTRAINTS)]
    head = ["| package | version | licence |", "|---|---|---|"]
    return written + "\n".join([mark, "", *head, *rows, ""])


def _known(table: str) -> dict[Pin, str]:
    """Return the licences that the page already has."""
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+) \|$", table, re.MULTILINE)
    return {Pin(name, version): licence for name, version, licence in rows}


def _licence(pin: Pin, known: dict[Pin, str]) -> str:
    """Return a licence from the metadata of the installed package, or from the page.

    Some of constraints.txt is not installed everywhere: the extra `smollm2` is compiled, and the
    tests also run on older versions of all. What stands on the page of the same version stays.
    """
    try:
        found = distribution(pin.name)
    except PackageNotFoundError:
        found = None
    # A local version such as 2.13.0+cpu is another build of the same release.
    if found is not None and found.version.partition("+")[0] == pin.version:
        return _said(cast("Message", found.metadata), pin)
    if pin not in known:
        raise SystemExit(
            f"{pin.name} {pin.version}: expected it to be installed, since {PAGE.name} has no "
            "licence of this version yet; install it for once, or write its row by hand"
        )
    return known[pin]


def _said(metadata: Message, pin: Pin) -> str:
    """Return what a package says of its licence: an expression, a short text, or classifiers."""
    expression, text = metadata["License-Expression"], metadata["License"]
    if expression:
        return str(expression)
    # Some put the whole licence there.
    if text and text != "UNKNOWN" and "\n" not in text.strip() and len(text) <= 60:
        name = text.strip()
        return _SPDX.get(name, name)
    if pin.name in OWN:
        return OWN[pin.name]
    names = [
        line.rpartition(" :: ")[2]
        for line in metadata.get_all("Classifier", [])
        if line.startswith("License :: ")
    ]
    if not names:
        raise SystemExit(
            f"{pin.name} {pin.version}: its metadata name no licence; look into the package and "
            "give it an entry in OWN"
        )
    return " AND ".join(_SPDX.get(name, name) for name in names)
