"""The examples run, at a small scale, and show what they say."""

import ast
import base64
import json
import re
import runpy
import threading
import urllib.request
from pathlib import Path

import pytest

from evo_grpo import settings as configuration

EXAMPLES = Path(__file__).parents[2] / "examples"
FIGURE = "application/vnd.plotly.v1+json"
NOTEBOOK = json.loads((EXAMPLES / "population.ipynb").read_text(encoding="utf-8"))


@pytest.fixture
def main(tmp_path, monkeypatch):
    """Gives the function `main` of an example, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda name: runpy.run_path(str(EXAMPLES / name))["main"]


@pytest.mark.slow
def test_own_data_learns(main, capsys):
    summary = main("own_data.py")(rounds=2, steps=6)
    assert summary["best"]["mean"] > summary["base"]["mean"] + 0.05
    assert "digits right on 30 test rows" in capsys.readouterr().out


@pytest.mark.slow
def test_several_rewards_are_told_apart(main):
    means = main("several_rewards.py")(rounds=2, steps=2)
    assert {"reward/right", "reward/close"} <= set(means.columns)
    total = means["reward/right"] + 0.3 * means["reward/close"]
    # A function that abstains counts for nothing in a sum, and is left out of its own mean.
    assert ((total - means["reward"]).abs() < 0.1).all()


def test_a_game_is_played(main):
    assert 0 <= main("game.py")(rounds=1, steps=1) <= 2


@pytest.mark.slow
def test_a_selection_of_ones_own_plans(main, capsys):
    results = main("custom_selection.py")(rounds=2, steps=2)
    assert set(results) == {"tournament", "most improved"}
    assert "most improved" in capsys.readouterr().out


@pytest.mark.slow
def test_the_winner_is_served(main, capsys):
    with main("export_and_serve.py")(rounds=1, port=0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/?prompt=12%2B07%3D"
        with urllib.request.urlopen(url, timeout=60) as answer:
            served = answer.read().decode()
        server.shutdown()
    said = capsys.readouterr().out
    assert f"12+07= {served}\n" in said
    assert served.isdigit()
    assert "--lora-modules winner=runs/serve-adapter" in said


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = {}
    shown = [
        run_cell("".join(cell["source"]), space)
        for cell in NOTEBOOK["cells"]
        if cell["cell_type"] == "code"
    ]
    untrained, trained, board, *figures = shown[:6]
    for value in (untrained, trained, board):
        assert value._repr_html_().strip()
    assert all(figure.to_plotly_json()["data"] for figure in figures)
    assert shown[-1]["best"] > shown[-1]["base"]


def test_the_notebook_is_shipped_with_the_outputs_of_its_cells():
    code = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(cell["outputs"] for cell in code)
    digest = runpy.run_path(str(EXAMPLES.parent / "docs" / "generate" / "notebook.py"))["digest"]
    assert NOTEBOOK["metadata"]["sources"] == digest(NOTEBOOK), (
        "the cells have changed since they ran; run: python docs/generate/notebook.py"
    )
    text = json.dumps([cell["outputs"] for cell in code])
    assert not re.search(r"/(home|root|tmp|Users)/", text)
    assert "Traceback" not in text


def test_every_figure_of_the_notebook_is_a_picture_too():
    """Pages that show notebooks draw no plotly."""
    outputs = [one for cell in NOTEBOOK["cells"] for one in cell.get("outputs", [])]
    figures = [one["data"] for one in outputs if FIGURE in one.get("data", {})]
    assert len(figures) == 4
    for data in figures:
        assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")


def test_every_example_has_a_row():
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert len(names) == 6
    for name in names:
        assert f"]({name})" in text


def run_cell(source, space):
    """Run a cell, and return the value of its last line, as a notebook shows it."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), space)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), space) if last else None


def test_the_real_model_s_rows_are_those_of_its_script_and_its_run_is_valid(tmp_path):
    folder = EXAMPLES / "real_model"
    runpy.run_path(str(folder / "make_rows.py"))["main"](tmp_path)
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    config = configuration.load(folder / "population.yaml")
    assert (config.population.size, config.model.name) == (8, "smollm2")


@pytest.mark.parametrize(
    ("completion", "value"),
    [(" 7", 1.0), ("7.", 1.0), ("7 apples", 0.7), ("5", 0.3 * 7 / 9 + 0.3), ("seven", 0.0)],
)
def test_the_real_model_s_reward(completion, value):
    reward = runpy.run_path(str(EXAMPLES / "real_model" / "score.py"))["reward"]
    assert reward(completion, answer="7", question="3 + 4 =") == pytest.approx(value)
