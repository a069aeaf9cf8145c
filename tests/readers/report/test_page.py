import base64
import hashlib
import json
import re

import pytest

from evo_grpo.readers.report.figures.axes import new_figure
from evo_grpo.readers.report.page import Page, Table, cards, sortable, text

HOSTILE = (
    '</script><script>document.title="ran"</script><img src=x onerror=alert(1)>\u2028&amp;\x1b[2J'
)


def scripts(page):
    return re.findall(r"<script(?P<kind>[^>]*)>(?P<body>.*?)</script>", page, re.S)


def rendered():
    page = Page(HOSTILE, HOSTILE)
    page.section("one", HOSTILE, cards([(HOSTILE, HOSTILE, HOSTILE)]), HOSTILE)
    page.section("two", "Table", sortable(Table([HOSTILE], [[(HOSTILE, HOSTILE)]]), [""]))
    figure = new_figure(HOSTILE, "y")
    page.section("three", "Figure", page.chart(figure))
    page.data("strings", [HOSTILE, {"key": HOSTILE}])
    return page.render()


def test_strings_from_outside_end_no_element_and_begin_none():
    page = rendered()
    bodies = [body for kind, body in scripts(page)]
    assert len(bodies) == 4  # data, one figure, plotly and ours
    assert 'title="ran"</script>' not in page
    assert "<img" not in page.replace(bodies[2], "")
    assert "\x1b" not in page
    assert "\u2028" not in bodies[0]


def test_data_comes_back_as_it_was():
    data, figure, *_ = (body for _, body in scripts(rendered()))
    assert json.loads(data)["strings"] == [HOSTILE, {"key": HOSTILE}]
    assert json.loads(figure)["layout"]["xaxis"]["title"]["text"] == HOSTILE


def test_the_policy_lets_the_two_scripts_run_and_nothing_be_fetched():
    page = rendered()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    running = [body for kind, body in scripts(page) if "application/json" not in kind]
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in running]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules.pop("script-src") == " ".join(f"'sha256-{one}'" for one in digests)
    assert rules == {
        "default-src": "'none'",
        "img-src": "data: blob:",
        "style-src": "'unsafe-inline'",
    }
    outside = page
    for _, body in scripts(page):
        outside = outside.replace(body, "")
    assert not re.search(r'(src|href)="(?!#|data:)', outside)


def test_numbers_that_json_does_not_have_become_null():
    page = Page("numbers", "")
    page.data("values", [float("nan"), float("inf"), 1.5, {"a": (float("-inf"),)}])
    data = json.loads(scripts(page.render())[0][1])
    assert data["values"] == [None, None, 1.5, {"a": [None]}]


def test_half_a_surrogate_pair_does_not_break_the_page():
    page = Page("broken \ud800", "")
    page.section("one", "A section", text("half \ud800 of it"))
    page.data("values", "\ud800")
    found = page.render().encode("utf-8").decode()
    assert re.search(r"<title>broken [^<]+</title>", found)
    assert re.search(r"half \S+ of it", found)
    assert "values" in json.loads(scripts(found)[0][1])


def test_a_table_says_by_what_it_sorts():
    made = sortable(Table(["a", "b"], [[("1,000", 1000), ("", None)]]), ["gone"])
    assert '<tr class="gone"><td data-value="1000">1,000</td><td data-value=""></td></tr>' in made
    assert made.count("<th ") == 2


@pytest.mark.parametrize("live", [True, False])
def test_only_a_page_of_what_goes_on_loads_itself_again(live):
    assert ('id="refresh"' in Page("run", "", live=live).render()) == live


def test_text_is_escaped_for_markup_and_screens():
    assert text("<a & 'b'>\x07") == "&lt;a &amp; &#x27;b&#x27;&gt;\\x07"
