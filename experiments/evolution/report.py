"""From results/*.jsonl to the tables of README.md and the pictures beside it.

    python experiments/evolution/report.py [--results FOLDER] [--no-pictures]

Tables go between the markers of README.md, what stands around them is left alone. Pictures need
matplotlib.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arms import ARMS, BEYOND_LR, NAMES, PROMPTS, REFERENCE, TASKS, Arm, plan
from lines import Line, read
from rich.console import Console
from rich.table import Table
from stats import Estimate, bootstrap, paired, times_best

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- {} begin -->", "<!-- {} end -->"
LARGEST_DEVIATION = 0.02
UNTOUCHED = range(8, 16)
"""Seeds that nobody looked at while the defaults were designed."""
LEFT_OUT = ("median", "best on", "failed runs", "optimism", "s per 10k tokens", "ahead")
"""Columns that a terminal has no room for."""
WEIGHTS = ("weights-equal", "weights-exact", "weights-random")
FIXED_RANKS = ("rank-1", "rank-4", "rank-16", "rank-random")
FIXED_PROMPTS = (*(f"prompt-{name}" for name in PROMPTS), "prompt-random")
REFERENCES = ("random", REFERENCE, "one", *WEIGHTS, *FIXED_RANKS, *FIXED_PROMPTS)
"""Arms that the others are held against."""
RECOMBINED = ("new-none", "new-average", "new-svd_subspace", "new-layer_wise", "new-svd_noise")
"""Arms of settings that were removed, with `new-none` beside them: no run can repeat them."""
UNSEARCHED = {
    "search-kl_shaping": "search-nothing-at-beta",
    "search-warmup": "search-nothing-scheduled",
}
"""Arms that searched what may no longer be searched, with the arm that each is held against."""
BEYOND = {*(arm.name for arm in (*BEYOND_LR, *NAMES)), *UNSEARCHED}

Rows = list[list[str]]


class Results:
    """The lines of one task, by arm in the order of `ARMS`, then `UNSEARCHED` and `RECOMBINED`.

    Args:
        lines: Of the results file.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        """Sort; of two lines for one run the later counts."""
        latest = {(line["arm"], line["seed"]): line for line in lines}
        self.by_arm: dict[str, list[Line]] = {}
        for name in (*ARMS, *UNSEARCHED, *RECOMBINED):
            mine = [line for (arm, _), line in sorted(latest.items()) if arm == name]
            if mine:
                self.by_arm[name] = mine

    def only(self, seeds: Sequence[int]) -> Results:
        """Return the lines of some seeds."""
        return Results([line for line in self.lines() if line["seed"] in seeds])

    def arms(self, names: set[str]) -> Results:
        """Return the lines of some arms."""
        return Results([line for line in self.lines() if line["arm"] in names])

    def lines(self) -> list[Line]:
        """Return all lines."""
        return [line for mine in self.by_arm.values() for line in mine]

    def seeds(self) -> list[int]:
        """Return the seeds that occur."""
        return sorted({line["seed"] for line in self.lines()})

    def scores(self) -> dict[str, dict[int, float]]:
        """Return arm -> seed -> test score."""
        return {
            arm: {line["seed"]: line["test"]["mean"] for line in mine}
            for arm, mine in self.by_arm.items()
        }


def number(value: float) -> str:
    """Write a score in three digits, without the zero in front."""
    text = f"{abs(value):.3f}"
    return ("−" if value < 0 and float(text) else "") + text.removeprefix("0")


def interval(estimate: Estimate, *, sign: bool = False) -> str:
    """Write a mean and its interval."""
    mean = number(estimate.mean)
    if sign and not mean.startswith("−"):
        mean = f"+{mean}"
    if estimate.seeds < 2:
        return mean
    return f"{mean} [{number(estimate.low)}, {number(estimate.high)}]"


def tokens(line: Line) -> int:
    """Return all tokens that count against the budget."""
    return line["training"]["tokens"] + line["evaluation"]["tokens"]


def deviations(lines: Sequence[Line]) -> dict[str, float]:
    """Return the arms whose sampled tokens are off the reference arm's by more than 2%, and how.

    Over the seeds that both have, as tokens / tokens - 1. Runs that failed ended early: left out.
    """
    results = Results([line for line in lines if line["state"] == "ok"])
    spent = {arm: {line["seed"]: line for line in mine} for arm, mine in results.by_arm.items()}
    reference = spent.get(REFERENCE, {})
    off: dict[str, float] = {}
    for arm, mine in spent.items():
        shared = sorted(set(mine) & set(reference))
        if not shared:
            continue
        more = sum(tokens(mine[s]) for s in shared) / sum(tokens(reference[s]) for s in shared) - 1
        if abs(more) > LARGEST_DEVIATION:
            off[arm] = more
    return off


def unplanned(lines: Sequence[Line]) -> dict[str, float]:
    """Return the arms whose sampled rows are off their plan by more than 2%, as rows / rows - 1."""
    off: dict[str, float] = {}
    for arm, mine in Results([line for line in lines if line["state"] == "ok"]).by_arm.items():
        rows = sum(line["training"]["rows"] + line["evaluation"]["rows"] for line in mine)
        planned = sum(sum(line["planned"].values()) for line in mine)
        if abs(rows / planned - 1) > LARGEST_DEVIATION:
            off[arm] = rows / planned - 1
    return off


def scores_table(results: Results) -> Rows:
    """Return what each arm reached, the header first."""
    wins = times_best(results.scores())
    table = [
        ["arm", "seeds", "test", "median", "worst", "best on", "collapsed", "failed runs",
         "optimism", "training tokens", "evaluation tokens", "s per 10k tokens"]
    ]  # fmt: skip
    for arm, mine in results.by_arm.items():
        test = [line["test"]["mean"] for line in mine]
        ok = [line for line in mine if line["state"] == "ok"]
        # A mean of two agents never had a fitness of its own.
        known = [line for line in ok if line["fitness"] is not None]
        optimism = [line["fitness"] - line["test"]["mean"] for line in known]
        seconds = [10_000 * sum(line["seconds_per_round"]) / tokens(line) for line in ok]
        table.append([
            arm,
            str(len(mine)),
            interval(bootstrap(test)),
            number(statistics.median(test)),
            number(min(test)),
            f"{wins[arm]:g}",
            f"{statistics.mean(line['collapsed'] for line in mine):.0%}",
            str(len(mine) - len(ok)),
            interval(bootstrap(optimism), sign=True) if optimism else "",
            _thousands(line["training"]["tokens"] for line in mine),
            _thousands(line["evaluation"]["tokens"] for line in mine),
            # A trial's rounds are not all of the arm's: what it spent is not in one run's seconds.
            "" if not ok or _in_trials(arm) else f"{statistics.median(seconds):.2f}",
        ])  # fmt: skip
    return table


def _in_trials(arm: str) -> bool:
    return arm in ARMS and ARMS[arm].driver == "tpe"


def differences_table(results: Results, references: Sequence[str]) -> Rows:
    """Return each arm minus each reference, paired by seed, the header first."""
    scores = results.scores()
    there = [name for name in references if name in scores]
    if not there:
        return []
    table = [["arm", *(text for name in there for text in (f"− {name}", "ahead"))]]
    for arm, mine in scores.items():
        row = [arm]
        for name in there:
            difference = None if name == arm else paired(mine, scores[name])
            row += ["", ""] if difference is None else _difference(difference)
        table.append(row)
    return table


def _difference(difference: Estimate) -> list[str]:
    text = interval(difference, sign=True)
    clear = difference.low > 0 or difference.high < 0  # NaN of a single seed is neither
    return [f"**{text}**" if clear else text, f"{difference.ahead:g} of {difference.seeds}"]


def ranges_table(results: Results) -> Rows:
    """Return what is worth searching: each arm's ranges, score, and gain over searching nothing.

    Searching nothing is under the conditions of the arm; see `Arm.against`.
    """
    scores = results.scores()
    table = [["arm", "ranges", "lr begins at", "seeds", "test", "worst", "− nothing", "− lr"]]
    for arm, mine in results.by_arm.items():
        made = mine[-1]["overrides"]
        ranges = made["evolve.hyperparameters"]
        told = [f"{name} {_range(values)}" for name, values in ranges.items()]
        against = (UNSEARCHED.get(arm) or ARMS[arm].against, "search-lr")
        gains = [paired(scores[arm], scores.get(other, {})) for other in against]
        test = [line["test"]["mean"] for line in mine]
        table.append([
            arm,
            "; ".join(told) or "–",
            "drawn" if "lr" in ranges else f"{made['algorithm.lr']:g}",
            str(len(mine)),
            interval(bootstrap(test)),
            number(min(test)),
            *(
                "" if gain is None or arm == name else _difference(gain)[0]
                for gain, name in zip(gains, against, strict=True)
            ),
        ])  # fmt: skip
    return table


def _range(values: Mapping[str, Any]) -> str:
    if "choices" in values:
        return f"of {', '.join(map(str, values['choices']))}"
    return f"{values['min']:g} to {values['max']:g}"


def _thousands(values: Any) -> str:  # noqa: ANN401 -- an iterable of numbers
    return f"{statistics.mean(values) / 1000:.1f}k"


def markdown(table: Rows) -> str:
    """Return a table in Markdown."""
    if not table:
        return ""
    header, *rows = table
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def arms_text() -> str:
    """Return the table of all arms, and what each costs on the task sums."""
    table = [["arm", "what it is", "agents", "rounds × steps × prompts", "training + evaluation"]]
    for arm in ARMS.values():
        made = plan(TASKS["sums"], arm)
        sizes = _sizes(made.places, arm)
        shape = f"{made.rounds} × {made.steps} × {made.prompts}"
        table.append([arm.name, arm.note, sizes, shape, f"{made.training:,} + {made.evaluation:,}"])
    return markdown(table)


def _sizes(places: tuple[int, ...], arm: Arm) -> str:
    if arm.driver == "tpe":
        return "1 a trial"
    constant = len(set(places)) == 1
    return str(places[0]) if constant else ", ".join(map(str, places))


def task_text(name: str, lines: Sequence[Line]) -> str:
    """Return the section of a task."""
    results = Results(lines)
    compared, beyond = (
        results.arms({arm for arm in results.by_arm if (arm in BEYOND) == wanted})
        for wanted in (False, True)
    )
    recombined = results.arms({"new", *RECOMBINED})
    compared = compared.arms(set(compared.by_arm) - {*RECOMBINED})
    parts = [f"### {name}", circumstances_text(results)]
    untouched = [seed for seed in results.seeds() if seed in UNTOUCHED]
    splits = [(f"All {len(results.seeds())} seeds", results.seeds())]
    if untouched and untouched != results.seeds():
        splits.append((f"Seeds {_span(untouched)}, untouched while designing", untouched))
    for title, seeds in splits:
        some = compared.only(seeds)
        parts += [f"**{title}**", markdown(scores_table(some))]
        parts.append(markdown(differences_table(some, REFERENCES)))
    if beyond.by_arm:
        for title, seeds in splits:
            table = markdown(ranges_table(beyond.only(seeds)))
            parts += [f"**Hyperparameters beyond lr. {title}**", table]
    if set(RECOMBINED) & set(recombined.by_arm):
        parts += ["**Recombination**", markdown(scores_table(recombined))]
        parts.append(markdown(differences_table(recombined, ("new",))))
    return "\n\n".join(part for part in parts if part)


def circumstances_text(results: Results) -> str:
    """Return when, where and with what the lines were measured, and which arms are off budget."""
    lines = results.lines()
    dates = sorted({line["date"] for line in lines})
    commits = sorted({line["commit"][:7] + line["commit"][40:] for line in lines})
    last = lines[-1]
    versions = ", ".join(f"{package} {v}" for package, v in last["versions"].items())
    machine, jobs = last["machine"], sorted({line["jobs"] for line in lines})
    text = (
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, commit {', '.join(commits)}; "
        f"{versions}; Python {machine['python']}; {machine['processor']}, {machine['cores']} "
        f"cores, {' or '.join(map(str, jobs))} process(es) of one thread."
    )
    off = deviations(lines)
    if off:
        told = ", ".join(f"{arm} {more:+.1%}" for arm, more in off.items())
        text += f" More than 2% off the reference arm's tokens: {told}."
    return text


def _span(seeds: Sequence[int]) -> str:
    return str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"


def terminal(lines: Sequence[Line], console: Console) -> None:
    """Print what each arm reached."""
    results = Results(lines)
    if not results.by_arm:
        return
    for rows in (scores_table(results), differences_table(results, REFERENCES)):
        if not rows:
            continue
        header, *body = rows
        shown = [place for place, name in enumerate(header) if name not in LEFT_OUT]
        table = Table(*(header[place] for place in shown))
        for row in body:
            table.add_row(*(row[place].replace("**", "") for place in shown))
        console.print(table)


def put(text: str, name: str, inside: str) -> str:
    """Return a text with something else between the markers of a name.

    Raises:
        ValueError: The markers are not there.
    """
    begin, end = BEGIN.format(name), END.format(name)
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"expected the lines {begin} and {end}; put them where the tables belong")
    return f"{before}{begin}\n\n{inside}\n\n{end}{after}"


def main(given: Sequence[str] | None = None) -> int:
    """Write the tables and the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--readme", type=Path, default=HERE / "README.md")
    parser.add_argument("--no-pictures", action="store_true")
    options = parser.parse_args(given)
    tasks = {name: read(options.results / f"{name}.jsonl") for name in TASKS}
    sections: list[str] = []
    for name, lines in tasks.items():
        if not lines:
            continue
        section = task_text(name, lines)
        if not options.no_pictures:
            from pictures import draw  # imported here: it needs matplotlib

            drawn = draw(name, Results(lines).by_arm, options.readme.parent)
            section += "".join(f"\n\n![{title}]({file})" for title, file in drawn.items())
        sections.append(section)
    text = options.readme.read_text(encoding="utf-8")
    text = put(text, "arms", arms_text())
    text = put(text, "results", "\n\n".join(sections) or "No run is finished yet.")
    options.readme.write_text(text, encoding="utf-8")
    print(f"{options.readme}: {sum(map(len, tasks.values()))} runs of {len(sections)} tasks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
