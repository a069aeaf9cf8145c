"""Draw docs/pictures/report.png and report-training.png from the report of a run.

Needs the extras `report` and `browser`, and Chromium:

    evo-grpo run population.yaml --compare --out runs/pictures
    python docs/generate/pictures.py runs/pictures
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from evo_grpo import write_report

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
PARTS = {"report.png": (".page-legend", "#family"), "report-training.png": ("#training",) * 2}
"""Picture -> selectors of the first and the last part of the page in it."""
WIDTH = 1100
"""Width of the window in pixels."""
ALL_DRAWN = "[...document.querySelectorAll('.chart')].every(one => one.dataset.drawn)"


def main(run: str) -> None:
    """Draw the pictures of a run."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page_file = write_report(run, Path(folder) / "report.html")
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto(page_file.as_uri())
        # Printing draws the figures that are not in sight too.
        page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        page.wait_for_function(ALL_DRAWN)
        page.add_style_tag(
            content="nav { display: none } .page-legend { position: static !important }"
        )
        for name, (first, last) in PARTS.items():
            top, bottom = (page.locator(one).bounding_box() for one in (first, last))
            height = bottom["y"] + bottom["height"] - top["y"]
            clip = {"x": 0, "y": top["y"], "width": WIDTH, "height": height}
            page.screenshot(path=PICTURES / name, full_page=True, clip=clip)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
