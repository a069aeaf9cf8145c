"""The model card of an export: the agent, its scores, its schedule, and code that uses it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from evo_grpo.after.export.snippet import Use, transformers_snippet, vllm_snippet
from evo_grpo.printable import printable
from evo_grpo.record.arms import arm_label
from evo_grpo.record.replay import read_replay
from evo_grpo.record.story import rivals_text
from evo_grpo.record.wording import count, with_error
from evo_grpo.schema.search_space import plain_choice

if TYPE_CHECKING:
    from evo_grpo.record.choice import ChosenAgent
    from evo_grpo.record.records import AgentRecord
    from evo_grpo.schema.hparams import Value
    from evo_grpo.types import Score

COLUMNS = (
    *("round", "member", "made by", "fitness"),
    *("lr", "beta", "clip_coef", "group_size", "temperature"),
)
"""Columns of the schedule."""
_MARKUP = re.compile(r"[\\`*<>\[\]|&~#$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
"""Characters with a meaning in the middle of a line of Markdown; not the one in group_size."""


def card(choice: ChosenAgent, config: Mapping[str, Any], use: Use, digest: str) -> str:
    """Return the README.md of an export; rounds count from 1 in it.

    `config` has the run's settings, `digest` is the recorded SHA-256 of the adapter's tensors.
    """
    merged, base = use.contents.dtype is not None, use.base.shown
    record, lines = choice.agent.record, choice.agent.lines
    facts = [_origin(choice)]
    if (score := choice.agent.fitness) is not None:
        facts.append(f"validation fitness: {_score(score)} ({score.n} prompts)")
        for one in score.further:
            wanted = "fewer are better" if one.minimize else "more are better"
            facts.append(
                f"validation {_plain(one.name)}: {with_error(one.mean, one.se, 4)} ({wanted})"
            )
    elif choice.agent.kind != "mean":
        why = f"it failed ({_plain(record.reason)})" if record.reason else "it was not evaluated"
        facts.append(f"validation fitness: none, {why}")
    facts += _compared(choice)
    if record.hparams.prompt is not None:
        facts.append(f"prompt: {_plain(record.hparams.prompt)}, of env.prompts of the run")
    facts.append(f"adapter sha256: `{digest}`")
    run = choice.run.resolve().name
    what = (
        f"One ordinary model: {_code(base)} with a LoRA adapter merged into it"
        if merged
        else f"A LoRA adapter over {_code(base)}"
    )
    return _CARD.format(
        front=_front_matter(use.base.hub_id, merged=merged),
        what=what,
        task=_code(_name(config.get("env"), "kind")),
        run=_plain(run),
        code=_code(run),
        title=choice.title,
        facts="\n".join(f"- {fact}" for fact in facts),
        schedules="\n\n".join(_table(line, alone=len(lines) == 1) for line in lines),
        replay=replay_section(choice.run),
        use=_use(use),
    )


def _front_matter(base: str | None, *, merged: bool) -> str:
    """Return the header of the card, one line for each key.

    `base` is the id of the base on the Hub, None where it has none: the Hub refuses other names.
    """
    front: dict[str, Any] = {} if base is None else {"base_model": base}
    front["library_name"] = "transformers" if merged else "peft"
    front["tags"] = ["grpo", *([] if merged else ["lora"]), "evo-grpo"]
    return yaml.safe_dump(
        front,
        sort_keys=False,
        default_flow_style=None,
        width=math.inf,
    )


def _origin(choice: ChosenAgent) -> str:
    agent = choice.agent
    after = f"as it was after round {agent.record.round + 1}"
    if agent.kind == "mean":
        first, second = (line[-1] for line in agent.lines)
        founder = choice.view.founders[first.member]
        return (
            f"kind: mean of the adapters of members {first.member} and {second.member} (agents "
            f"{first.agent} and {second.agent} of the last round), which both descend from member "
            f"{founder}"
        )
    if agent.kind in ("archive", "ever"):
        return f"kind: the best agent of all rounds, {after}"
    if agent.kind == "named":
        return f"kind: chosen among all, {after}"
    return "kind: the best agent of the last round"


def _compared(choice: ChosenAgent) -> list[str]:
    view, winner = choice.view, choice.view.winner
    if view.summary is None or winner is None:
        return [_plain(sentence) for sentence in view.missing]
    if not choice.is_winner:
        return [f"not judged on the test split: the winner of the run is {winner.name}"]
    facts: list[str] = []
    if winner.final is not None and view.rivals:
        facts.append(
            f"final comparison on {winner.final.n} validation prompts: {_score(winner.final)} "
            f"against {rivals_text(winner, view.rivals)}"
        )
        if any(one.tie for one in view.rivals):
            facts.append("tie: it is not shown to be ahead of those marked so")
    assert winner.test is not None, "a run with a summary was judged"
    assert view.base is not None, "and its base model too"
    facts.append(
        f"test split, judged once: {_score(winner.test)} (base model {_score(view.base)}) on "
        f"{count(winner.test.n, 'prompt')}"
    )
    if choice.loss:
        facts.append(f"**worse than the base model**: {choice.loss}")
    return [*facts, *(_plain(sentence) for sentence in view.missing)]


def _table(line: Sequence[AgentRecord], *, alone: bool) -> str:
    title = "" if alone else f"Of member {line[-1].member}:\n\n"
    header = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return title + "\n".join([*header, *_schedule(line)])


def _value(value: Value) -> str:
    named = isinstance(value, str | bool)
    return _plain(plain_choice(value)) if named else f"{value:.3g}"


def _schedule(path: Sequence[AgentRecord]) -> list[str]:
    rows: list[str] = []
    previous: int | None = None
    for record in path:
        h = record.hparams
        changed = record.mutation.changes.items()
        changes = ", ".join(f"{_plain(name)} {_value(a)} → {_value(b)}" for name, (a, b) in changed)
        made = _plain(record.mutation.op) + (f" ({changes})" if changes else "")
        fitness = f"{record.score.mean:.4f}" if record.score else "failed"
        pair = h.clip_coef if isinstance(h.clip_coef, tuple) else (h.clip_coef,)
        cells = [
            str(record.round + 1),
            str(record.member),
            "continues" if record.member == previous else made,
            fitness,
            f"{h.lr:.3g}",
            f"{h.beta:.3g}",
            ":".join(f"{value:.3g}" for value in pair),
            str(h.group_size),
            f"{h.temperature:.3g}",
        ]
        rows.append("| " + " | ".join(cells) + " |")
        previous = record.member
    return rows


def replay_section(run: Path) -> str:
    """Return the section about a replay, an empty string where the run has none."""
    found = read_replay(run)
    if found is None:
        return ""
    schedule = found.schedule
    whose = "of the first of the two" if schedule.kind == "mean" else "above"
    prompts = ", ".join(f"{schedule.prompts_per_step(one):.3g}" for one in schedule.rounds)
    lines = [
        "",
        "## Is it the schedule?",
        "",
        f"After the run, agents were trained from scratch with the schedule {whose}, and others "
        "with its last values, with the tokens of the whole run. Prompts per step of the winner's "
        f"line by round: {prompts}.",
        "",
        "| trained with | tokens | test |",
        "|---|---:|---:|",
        *(
            f"| {arm_label(one.name, 0)} | {one.tokens:,} | {_score(one.test)} |"
            for one in found.trained
        ),
        f"| the winner, in its population | {schedule.tokens:,} | {_score(found.winner)} |",
        "",
        found.verdict,
        "",
        found.caveat(),
        "",
    ]
    return "\n".join(lines)


def _use(use: Use) -> str:
    merged, pushed = use.contents.dtype is not None, use.pushed
    parts: list[str] = []
    if merged:
        dequantised = (
            " of the dequantised GGUF file" if use.base.source and use.base.source.gguf_file else ""
        )
        parts.append(
            f"The adapter was merged into the weights{dequantised} in float32; they are stored in "
            f"{use.contents.dtype}."
        )
    elif use.base.is_inside and not use.base.embedded:
        parts.append(
            f"`base/` holds the base's weights, dequantised, in {use.base.dtype}: those that the "
            "adapter was trained over."
        )
    elif use.base.is_inside:
        parts.append("`base/` holds the base model, which ships inside evo-grpo.")
    if use.base.quantization is not None and not merged:
        parts.append(
            f"It was trained over the base in {use.base.quantization} (engine.quantization); over "
            "its full weights it answers slightly otherwise."
        )
    if use.hidden:
        parts.append(
            f"It was trained with {count(use.hidden, 'solved example')} in front of each question. "
            "They are rows of the run's data, so the code has `...` in their place: write your own."
        )
    packages = "transformers" if merged else "transformers and PEFT"
    where = "anywhere" if pushed is not None else "in this folder"
    parts.append(f"Run {where}, with {packages}:")
    parts.append(f"```python\n{transformers_snippet(use)}\n```")
    if use.base.quantization is None or merged:
        parts.append(f"With vLLM, as a file, {where}:")
        parts.append(f"```python\n{vllm_snippet(use)}\n```")
    return "\n\n".join(parts)


def _score(score: Score) -> str:
    """Return a mean reward with its standard error; "none" where it is not finite."""
    return "none" if math.isnan(score.mean) else with_error(score.mean, score.se, 4)


def _name(value: Any, key: str) -> str:  # noqa: ANN401 -- any YAML value
    return str(value.get(key) if isinstance(value, dict) else value)


def _plain(text: str) -> str:
    """Return a string from outside as Markdown that shows it literally."""
    return _MARKUP.sub(r"\\\g<0>", printable(text))


def _code(text: str) -> str:
    """Return a string from outside as a code span, also if it contains backticks."""
    text = printable(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if longest or not text else ""
    return f"{fence}{space}{text}{space}{fence}"


_CARD = """---
{front}---

# {run}: {title}

{what}, trained on {task} by the evo-grpo run {code} and selected from a population.

{facts}

## Schedule and lineage

The hyperparameters that produced it, round by round (counted from 1), along its line of parents:

{schedules}
{replay}
## Use

{use}
"""
