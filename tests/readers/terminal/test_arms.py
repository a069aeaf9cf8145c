"""A comparison and a replay in the terminal: bars, differences, sentences, the schedule."""

import io

import pytest
from rich.console import Console
from shown_replay import BETTER, ROUNDS, replay, schedule

from evo_grpo.readers.terminal.result import schedule_table, schedule_title, show_arms
from evo_grpo.record.arms import arm_label, comparison_arms


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


def shown(arms, width=120):
    console = Console(file=io.StringIO(), width=width)
    show_arms(console, arms)
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]


def bars(comparison, width=120):
    return shown(comparison_arms(comparison), width)


def lines(table):
    console = Console(width=120, file=io.StringIO())
    console.print(table)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def blocks(line):
    return sum(character in "█▉▊▋▌▍▎▏" for character in line)


def test_a_bar_is_as_long_as_its_result():
    guess, random, evolved, *basis = bars(result(guess=0.25, random=0.5, evolved=1.0))
    assert guess.startswith("eight agents at your guess  ")
    assert random.startswith("eight random guesses  ")
    assert evolved.startswith("evolved  ")
    assert [blocks(line) for line in (guess, random, evolved)] == [10, 20, 40]
    assert evolved.endswith("1.00 ± 0.01  1,000 tokens")
    assert " ".join(basis) == (
        "Compared at equal tokens, on the same 256 test prompts with the same draws. Tokens for "
        "training + evaluation: guess 900 + 100, random 900 + 100, evolved 900 + 100."
    )


@pytest.mark.parametrize("width", [80, 100])
def test_a_narrow_terminal_has_shorter_bars_and_cuts_nothing(width):
    found = bars(result(guess=0.25, random=0.5, evolved=1.0), width)
    assert all(len(line) <= width for line in found[:3])
    assert all("1,000 tokens" in line for line in found[:3])


def test_rewards_of_any_range_have_bars():
    guess, random, evolved, *_ = bars(result(guess=-1.0, random=0.0, evolved=3.0))
    assert [blocks(line) for line in (guess, random, evolved)] == [10, 0, 30]
    (guess, *_) = bars(result(guess=None, evolved=0.5))
    assert " - " in guess


def test_tokens_that_differ_are_not_called_equal():
    (sentence,) = comparison_arms(result(guess=0.2, evolved=0.5, tokens={"guess": 700})).sentences
    assert sentence.startswith("Compared at tokens that differ by up to 20%, on the same 256 test")


def test_large_populations_are_numbered():
    assert arm_label("guess", 8) == "eight agents at your guess"
    assert arm_label("random", 32) == "32 random guesses"


def test_a_replay_has_bars_spreads_differences_and_sentences_in_a_usual_terminal():
    found = replay({"schedule-run": BETTER})
    text = shown(found.arms(), width=80)
    assert all(len(line) <= 80 for line in text[:7])
    assert "…" not in "".join(text)
    assert text[0].startswith("schedule  ")
    assert text[0].endswith("0.75 ± 0.06  spread 0.000  6,176 tokens")
    assert text[2].split()[:2] == ["the", "winner"]
    assert text[2].endswith("0.50 ± 0.13                1,808 tokens")
    assert text[4].split()[:3] == ["schedule", "last", "values"]
    assert text[4].split()[-3] == "0.250"
    assert text[6].startswith("last values  the winner")
    assert " ".join(text[7:]) == f"{found.verdict} {found.caveat()}"


def test_one_training_of_each_kind_has_no_spread():
    assert "spread" not in "".join(shown(replay(repeats=1).arms()))


def test_the_schedule_counts_rounds_from_one_and_shows_what_may_move():
    text = lines(schedule_table(schedule()))
    assert text[0].split()[2:] == [
        *("lr", "beta", "clip", "group", "temperature", "prompts/step", "tokens")
    ]
    assert text[3].split() == ["3", "9", "2e-3", "0", "0.2", "5", "1", "13", "1,040"]
    still = lines(schedule_table(schedule(ROUNDS[:2], mutable=("lr",))))
    assert "temperature" not in still[0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("last", "the best agent of the last round"),
        ("archive", "the best agent of any round"),
        ("mean", "the mean of members 3 and 5, of which the schedule follows the first"),
    ],
)
def test_the_title_names_every_kind_of_winner(kind, words):
    parents = (3, 5) if kind == "mean" else ()
    title = schedule_title("runs/one", schedule(kind=kind, parents=parents))
    assert title.startswith(f"runs/one: the winner is member 9, {words}; its schedule over 3")
