"""Populations beside each other as bars."""

import io

import pytest
from rich.console import Console

from evo_grpo.readers.terminal.comparison import arm_label, basis_line, show_comparison


def result(**means):
    """A comparison with these test results, or the given tokens."""
    tokens = means.pop("tokens", {})
    return {
        "agents": 8,
        "split": "test",
        "arms": [
            {
                "name": name,
                "folder": ".",
                "tokens": {"training": tokens.get(name, 900), "evaluation": 100},
                "test": {"mean": mean, "se": 0.012, "n": 256},
            }
            for name, mean in means.items()
        ],
    }


def bars(shown, width=120):
    console = Console(file=io.StringIO(), width=width)
    show_comparison(console, shown)
    return [line for line in console.file.getvalue().splitlines() if line]


def blocks(line):
    return sum(character in "█▉▊▋▌▍▎▏" for character in line)


def test_a_bar_is_as_long_as_its_result():
    guess, random, evolved, basis = bars(result(guess=0.25, random=0.5, evolved=1.0))
    assert guess.startswith("eight agents at your guess  ")
    assert random.startswith("eight random guesses  ")
    assert evolved.startswith("evolved  ")
    assert [blocks(line) for line in (guess, random, evolved)] == [10, 20, 40]
    assert evolved.endswith("1.00 ± 0.01  1,000 tokens")
    assert basis == (
        "at equal tokens, on the same 256 test prompts with the same draws; tokens to train on + "
        "to evaluate: guess 900 + 100, random 900 + 100, evolved 900 + 100"
    )


@pytest.mark.parametrize("width", [80, 100])
def test_a_narrow_terminal_has_shorter_bars_and_cuts_nothing(width):
    lines = bars(result(guess=0.25, random=0.5, evolved=1.0), width)
    assert all(len(line) <= width for line in lines[:3])
    assert all("1,000 tokens" in line for line in lines[:3])


def test_rewards_of_any_range_have_bars():
    guess, random, evolved, _ = bars(result(guess=-1.0, random=0.0, evolved=3.0))
    assert [blocks(line) for line in (guess, random, evolved)] == [10, 0, 30]
    (guess, *_) = bars(result(guess=None, evolved=0.5))
    assert " - " in guess


def test_tokens_that_differ_are_not_called_equal():
    line = basis_line(result(guess=0.2, evolved=0.5, tokens={"guess": 700}))
    assert line.startswith("at tokens that differ by up to 20%, on the same 256 test prompts")


def test_large_populations_are_numbered():
    assert arm_label("guess", 8) == "eight agents at your guess"
    assert arm_label("random", 32) == "32 random guesses"
