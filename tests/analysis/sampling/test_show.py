"""Answers and results on a screen: one line each, and nothing that a terminal would obey."""

import io
import math
from dataclasses import replace

from rich.console import Console

from evo_grpo.analysis.sampling.answers import Sampled
from evo_grpo.analysis.sampling.evaluation import Judged
from evo_grpo.analysis.sampling.show import show_judged, show_sampled
from evo_grpo.types import Score


def shown(show, value, width=80):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    show(console, value)
    return console.file.getvalue()


def test_a_prompt_with_its_answers():
    prompt, texts = "first\nsecond", ("a\nb", "\x1b[31m[red]")
    own = Sampled(prompt, "agent 1, member 4", texts, (1.0, None), (True, False))
    base = Sampled(prompt, "base", ("c",), (0.5,), (True,))
    assert shown(show_sampled, [own, base]).splitlines() == [
        "> first",
        "> second",
        "agent 1, member 4:",
        "  - a",
        "    b  [reward 1.00]",
        r"  - \x1b[31m[red] ...",
        "base:",
        "  - c  [reward 0.50]",
        "",
    ]


def test_a_result_with_its_base():
    judged = Judged(
        "best", "sums", "test", 2, 1.0, Score(0.75, 0.05, 64), Score(0.5, 0.06, 64), 0.25, 0.04,
        (0.17, 0.33), sign=1,
    )  # fmt: skip
    assert shown(show_judged, judged).splitlines() == [
        "best: 0.7500 ± 0.0500 on 64 test prompts of sums, 2 samples each at temperature 1",
        "base: 0.5000 ± 0.0600",
        "gain: +0.2500 ± 0.0400, 95% interval +0.1700 to +0.3300",
        "adapter ahead on these prompts",
    ]
    chance = replace(judged, sign=0)
    assert shown(show_judged, chance).splitlines()[-1] == "no difference shown"


def test_a_result_alone_and_of_a_single_prompt():
    alone = Judged("best", "sums", "test", 1, 0.5, Score(1.0, math.nan, 1))
    assert shown(show_judged, alone).splitlines() == [
        "best: 1.0000 on 1 test prompt of sums, 1 sample each at temperature 0.5"
    ]
    single = Judged(
        "best", "sums", "test", 1, 1.0, Score(1.0, math.nan, 1), Score(0.0, math.nan, 1), 1.0,
        math.nan, (math.nan, math.nan),
    )  # fmt: skip
    assert shown(show_judged, single).splitlines()[-1] == "gain: +1.0000 ± -"
