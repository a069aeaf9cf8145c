"""The report in a real browser: Debian's Chromium without a head, driven by playwright.

`make test-browser` installs playwright and fails where a test would be skipped.
"""

import json
import os
import shutil
from importlib.util import find_spec

import pytest
import shown_run

from evo_grpo.readers.report.compared_runs import compare_runs, write_compared_runs
from evo_grpo.readers.report.run_page import write_report
from evo_grpo.record.run_dir import RunDir

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = "needs playwright (pip install 'evo-grpo[browser]') and chromium (Debian's package)"
if os.environ.get("EVO_GRPO_BROWSER") and (find_spec("playwright") is None or CHROMIUM is None):
    raise RuntimeError(MISSING)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_spec("playwright") is None or CHROMIUM is None, reason=MISSING),
]

PLANTED = (
    "</script><script>document.title = 'ran'</script><img src=x onerror=\"document.title='ran'\">"
)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield driver, chromium
        chromium.close()


@pytest.fixture
def opened(browser):
    """Open a file as a person would; at the end nothing may have gone wrong or been fetched."""
    driver, chromium = browser
    wrong, contexts = [], []

    def open_page(file, device=None, **context):
        options = {**(driver.devices[device] if device else {}), **context}
        contexts.append(chromium.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on(
            "request",
            lambda request: (
                request.url.startswith(("file:", "data:", "blob:"))
                or wrong.append(f"request: {request.url}")
            ),
        )
        page.goto(file.resolve().as_uri())
        page.wait_for_selector("html[data-ready=yes]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with completions, of which one would like to run a script."""
    folder = shown_run.run_folder(str(tmp_path_factory.mktemp("browser") / "run"))
    (folder / "completions").mkdir()
    for round in range(2):
        rows = [
            {"round": round, "agent": agent, "prompt": f"{agent}+{round}=", "completion": text,
             "reward": reward, "tokens": 4, "ended": True, "error": ""}
            for agent, text, reward in ((0, PLANTED, 0.25), (1, f"forty-two {round}", 1.0 - round))
        ]  # fmt: skip
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "completions" / f"round-000{round}.jsonl").write_text(lines)
    write_report(folder)
    return folder


def drawn(page, index):
    """Scroll to a figure, and wait until it is drawn."""
    chart = page.locator(".chart").nth(index)
    chart.scroll_into_view_if_needed()
    chart.and_(page.locator("[data-drawn=yes]")).wait_for()
    return chart


@pytest.mark.parametrize("options", [{}, {"device": "Pixel 5"}, {"color_scheme": "dark"}])
def test_all_figures_are_drawn_without_an_error_or_a_request(opened, run, options):
    page = opened(run / "report.html", **options)
    count = page.locator(".chart").count()
    assert count >= 6
    for index in range(count):
        assert drawn(page, index).locator("svg.main-svg").count() > 0
    width = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    assert width <= 0, "the page scrolls sideways"


def test_a_node_of_the_tree_shows_its_details(opened, run):
    page = opened(run / "report.html", viewport={"width": 1200, "height": 900})
    tree = drawn(page, 1)
    node = tree.locator(".scatterlayer .points path").nth(2).bounding_box()
    page.mouse.move(node["x"] + node["width"] / 2, node["y"] + node["height"] / 2)
    label = tree.locator(".hoverlayer .hovertext")
    label.first.wait_for()
    said = label.first.text_content()
    assert "member 2" in said
    assert "lr 1e-3 -> 1.2e-3" in said


def test_the_leaderboard_sorts_by_a_click_and_back(opened, run):
    page = opened(run / "report.html")
    column = page.locator("#leaderboard th button", has_text="agent")
    agents = page.locator("#leaderboard tbody tr td:nth-child(2)")
    assert agents.all_text_contents() == ["1", "0"]
    column.click()
    page.locator("#leaderboard th:nth-child(2)[aria-sort=ascending]").wait_for()
    assert agents.all_text_contents() == ["0", "1"]
    column.click()
    page.locator("#leaderboard th:nth-child(2)[aria-sort=descending]").wait_for()
    assert agents.all_text_contents() == ["1", "0"]


def test_the_one_legend_shows_agents_alone(opened, run):
    page = opened(run / "report.html")
    chart = drawn(page, 0)
    assert page.locator(".figures .chart .legend").count() == 0
    names = page.locator(".figures > .page-legend button")
    assert [name.strip() for name in names.all_text_contents()] == ["● agent 0", "■ agent 1"]
    faint = (
        "e => [...e.querySelectorAll('.scatterlayer .trace')].filter("
        "t => Number(t.style.opacity || 1) < 0.2).length"
    )
    assert chart.evaluate(faint) == 0
    names.nth(1).click()
    page.locator(".page-legend button[aria-pressed=true]").wait_for()
    page.wait_for_function(f"() => ({faint})(document.querySelector('.chart')) > 0", timeout=10_000)


def test_completions_are_grouped_by_prompt_with_the_right_answer_and_folded(opened, tmp_path):
    folder = shown_run.run_folder(str(tmp_path / "run"))
    (folder / "completions").mkdir()
    rows = [
        {"round": 0, "agent": agent, "prompt": prompt, "answer": right, "completion": f"{n}",
         "reward": 0.0, "tokens": 4, "ended": True, "error": ""}
        for prompt, right, count in (("12+07=", "019", 13), ("50+50=", "100", 2))
        for n in range(count)
        for agent in [n % 2]
    ]  # fmt: skip
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "completions" / "round-0000.jsonl").write_text(lines)
    page = opened(write_report(folder))
    groups = page.locator(".prompt-group")
    assert groups.locator(".prompt").all_text_contents() == ["50+50=", "12+07="]
    assert groups.locator(".right code").all_text_contents() == ["100", "019"]
    long = groups.nth(1)
    assert long.locator(".completion").count() == 10
    long.get_by_text("3 more").click()
    assert long.locator(".completion").count() == 13
    page.fill("#search", "019")
    assert groups.count() == 1


def test_on_a_phone_the_fitness_is_in_sight_beside_the_name(opened, run):
    page = opened(run / "report.html", device="Pixel 5")
    heads = page.locator("#leaderboard th")
    assert heads.all_text_contents()[:3] == ["rank", "agent", "fitness"]
    heads.nth(2).scroll_into_view_if_needed()
    box = heads.nth(2).bounding_box()
    assert box["x"] + box["width"] <= page.viewport_size["width"]


def test_completions_are_searched_ordered_and_filtered(opened, run):
    page = opened(run / "report.html")
    shown = page.locator(".completion")
    assert shown.count() == 4
    page.fill("#search", "FORTY")
    assert shown.locator(".answer").all_text_contents() == ["forty-two 1", "forty-two 0"]
    page.select_option("#order", "best")
    assert shown.locator(".answer").all_text_contents() == ["forty-two 0", "forty-two 1"]
    page.select_option("#order", "worst")
    page.fill("#search", "")
    assert shown.locator(".meta b").all_text_contents()[0] == "reward 0"
    page.select_option("#agent", "0")
    assert shown.count() == 2
    assert page.text_content("#matches") == "2 of 4"


def test_a_completion_with_a_script_in_it_is_text(opened, run):
    page = opened(run / "report.html")
    page.select_option("#agent", "0")
    assert page.locator(".completion .answer").first.text_content() == PLANTED
    assert page.title() == "run"


def test_a_reader_chooses_the_theme(opened, run):
    page = opened(run / "report.html", color_scheme="light")
    colour = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(colour) == "rgb(255, 255, 255)"
    page.click("#theme")
    assert page.evaluate(colour) == "rgb(13, 17, 23)"
    page.reload()
    page.wait_for_selector("html[data-ready=yes]")
    assert page.evaluate(colour) == "rgb(13, 17, 23)"


def test_the_page_of_an_unfinished_run_loads_what_was_written_meanwhile(
    opened, tmp_path, monkeypatch
):
    monkeypatch.setattr("evo_grpo.readers.report.page.REFRESH", 1)
    folder = shown_run.run_folder(str(tmp_path / "run"), rounds=1, summary=False)
    page = opened(write_report(folder))
    assert page.locator("#refresh").is_checked()
    with RunDir.open(folder) as opened_folder:
        opened_folder.append_round(shown_run.two_rounds()[1])
    write_report(folder)
    page.get_by_text("2 rounds, unfinished").wait_for()


def test_runs_side_by_side(opened, run, tmp_path):
    other = shown_run.run_folder(str(tmp_path / "other"))
    page = opened(write_compared_runs(compare_runs([run, other]), tmp_path / "both.html"))
    count = page.locator(".chart").count()
    assert count >= 1
    for index in range(count):
        assert drawn(page, index).locator("svg.main-svg").count() > 0
    assert page.locator("#results tbody tr").count() == 2
