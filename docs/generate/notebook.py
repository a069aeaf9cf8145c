"""Run examples/population.ipynb and write its outputs into it, figures as pictures too.

Pages that show notebooks draw no plotly figures; pictures stand for them there. The script needs
packages that nothing else does, and Chromium or Chrome for the pictures:

    pip install nbclient ipykernel kaleido
    python docs/generate/notebook.py
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "population.ipynb"
FIGURE, PICTURE = "application/vnd.plotly.v1+json", "image/png"
WIDTH = 900
"""Width of a picture in pixels."""
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def digest(notebook: dict[str, Any]) -> str:
    """Return the SHA-256 of the sources of all cells: outputs belong to one version of them."""
    sources = ["".join(cell["source"]) for cell in notebook["cells"]]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def add_picture(data: dict[str, Any]) -> None:
    """Draw the plotly figure of an output, if it has one, as a picture on white."""
    import plotly.graph_objects as go

    if FIGURE in data:
        figure = go.Figure(data[FIGURE]["data"], data[FIGURE]["layout"])
        figure.update_layout(paper_bgcolor="white")
        drawn = figure.to_image("png", width=WIDTH, height=figure.layout.height)
        data[PICTURE] = base64.b64encode(drawn).decode()


def main() -> None:
    """Run the notebook in a folder of its own, and write it with its outputs."""
    import nbformat
    from nbclient import NotebookClient

    os.environ["PLOTLY_RENDERER"] = "plotly_mimetype"
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, resources=resources, record_timing=False).execute()
    finished = finish(json.loads(nbformat.writes(notebook)))
    NOTEBOOK.write_text(json.dumps(finished, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def finish(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook that has run, without what belongs to the machine that ran it."""
    for cell in notebook["cells"]:
        cell["metadata"] = {}
        if cell["cell_type"] == "code":
            cell["outputs"] = list(tidied(cell["outputs"]))
    kernel = notebook["metadata"]["kernelspec"]
    notebook["metadata"] = {
        "kernelspec": kernel,
        "language_info": {"name": "python"},
        "sources": digest(notebook),
    }
    return notebook


def tidied(outputs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield outputs: what was printed in one piece without colours, and figures with pictures.

    Warnings of packages on the standard error are left out: they name paths of the machine.
    """
    printed = [one for one in outputs if one["output_type"] == "stream" and one["name"] == "stdout"]
    text = ANSI.sub("", "".join("".join(one["text"]) for one in printed))
    lines = [line.rstrip() + "\n" for line in text.splitlines()]
    if lines:
        yield {"name": "stdout", "output_type": "stream", "text": lines}
    for one in outputs:
        if one["output_type"] != "stream":
            add_picture(one.get("data", {}))
            yield one


if __name__ == "__main__":
    main()
