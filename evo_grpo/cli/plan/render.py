"""Renders a plan as text for the terminal."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table

from evo_grpo.cli.plan.plan import Plan
from evo_grpo.evolve.explore.schedule import ROUND, ScheduleExploration
from evo_grpo.readers.terminal.console import NOTICE, safe
from evo_grpo.record import names
from evo_grpo.record.stopping import rules_in_words
from evo_grpo.record.wording import count, in_words, listed
from evo_grpo.schema.problems import shown_value
from evo_grpo.settings.learning_rate import usual_lr
from evo_grpo.settings.record import is_url
from evo_grpo.training.sizing.machine import MACHINE, dtypes, format_bytes
from evo_grpo.training.sizing.prompt_lengths import PromptLengths  # it may load pandas

LISTED = 8
"""Most decisions, entries of a schedule, names of layers, and agents, that the plan lists."""


def render_plan(plan: Plan, source: str) -> RenderableType:
    """Return a plan as two columns, with its warnings below; `source` names the file."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for title, text in _rows(plan):
        grid.add_row(safe(title), safe(text))
    parts: list[RenderableType] = [safe(f"{source} is valid.", "bold"), safe(""), grid]
    if plan.first is not None:
        length = count(plan.first.tokens, "token")
        parts += [safe(""), safe(f"the first prompt as the model gets it, {length}:", "bold")]
        parts += [safe(f"> {line}") for line in plan.first.text.split("\n")]
    if plan.warnings:
        parts.append(safe(""))
    parts += [safe(f"warning: {text}", NOTICE) for text in plan.warnings]
    return Group(*parts)


def _rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the rows (title, text) of a plan; a row without a title continues the row before it."""
    config = plan.config
    population, algorithm = config.population, config.algorithm
    yield (
        "population",
        f"{count(population.size, 'agent')}, {count(population.rounds, 'round')} of "
        f"{count(population.steps_per_round, 'step')}, {algorithm.kind}, selection "
        f"{_selection(plan)}",
    )
    if rules := rules_in_words(population.stop):
        yield "ends early", f"after the round in which {rules}"
    yield "decides", _decisions(plan)
    yield "places", _by_round(plan.places)
    yield "mutates", _mutating(plan)
    if isinstance(population.init, list | tuple) and (text := _begins(population.init)):
        yield "begins", text
    if isinstance(exploration := config.evolve.exploration, ScheduleExploration):
        yield "schedule", _schedule(exploration)
    yield "lr", _lr(plan)
    yield "task", _task(plan)
    if plan.prompts is not None:
        yield "prompts", _prompts(plan.prompts)
        if too_long := sum(plan.prompts.too_long.values()):
            outcome = "left out" if config.env.too_long == "drop" else "cut at the beginning"
            yield "", f"{count(too_long, 'row')} with a prompt too long for the context: {outcome}"
    else:
        yield "prompts", "made by the task when the run starts; evo-grpo try shows some"
    for number, call in enumerate(plan.calls):
        yield "" if number else "rewards", call
    yield "a step", _step(plan)
    yield "a round", f"at most {plan.tokens_per_round:,} tokens to train on"
    yield "evaluation", _evaluation(plan)
    yield from _end(plan)
    yield "the run", f"at most {plan.total_tokens:,} tokens"
    yield "base model", _base(plan)
    yield "an agent", _agent(plan)
    yield from _memory(plan)
    yield from _time(plan)
    yield from _files(plan)


def _begins(agents: Sequence[Mapping[str, object]]) -> str:
    """Return, as text, the initial values that `population.init` lists for agents."""
    texts = [
        f"agent {number} with " + ", ".join(f"{k} {shown_value(v)}" for k, v in values.items())
        for number, values in enumerate(agents)
        if values
    ]
    return "; ".join(texts[:LISTED] + ["..."] * (len(texts) > LISTED))


def _task(plan: Plan) -> str:
    if not plan.rows:
        return f"{plan.task}: episodes of at most {plan.turns} turns, started from seeds"
    rows = ", ".join(f"{plan.rows[split]:,} {split}" for split in ("train", "validation", "test"))
    different = {} if plan.prompts is None else plan.prompts.different
    if different == plan.rows or not different:
        return f"{plan.task}: {rows} rows"
    different_counts = ", ".join(
        f"{different[split]:,}" for split in ("train", "validation", "test")
    )
    return f"{plan.task}: {rows} rows, of {different_counts} different prompts"


def _prompts(lengths: PromptLengths) -> str:
    least, most, sampled, rows, *_ = lengths
    if not sampled:
        return "read when the run loads the tokenizer; evo-grpo try shows some"
    tokens = f"{least:,} to {most:,} tokens" if least < most else count(most, "token")
    return tokens if sampled == rows else f"{tokens}, in a sample of {sampled:,} of {rows:,} rows"


def _decisions(plan: Plan) -> str:
    """Return, as text, the rounds after which the run decides, and their numbers of agents."""
    if len(plan.decisions) == plan.config.population.rounds:
        return "after each round"
    parts: list[str] = []
    for finished in plan.decisions:
        agents = plan.places[finished - 1]
        parts.append(f"{finished} ({agents if parts else count(agents, 'agent')})")
    if (hidden := len(parts) - LISTED) > 0:
        parts = [*parts[: LISTED - 1], f"{hidden} more", parts[-1]]
    return f"after {'round' if len(parts) == 1 else 'rounds'} {listed(parts)}"


def _by_round(places: Sequence[int]) -> str:
    """Return the number of agents in each round as text."""
    if len(set(places)) == 1:
        return f"{count(places[0], 'agent')} in every round"
    parts: list[str] = []
    first = 1
    for agents, group in groupby(places):
        last = first + len(list(group)) - 1
        rounds = f"round {first}" if first == last else f"rounds {first}-{last}"
        parts.append(f"{agents if parts else count(agents, 'agent')} in {rounds}")
        first = last + 1
    return ", ".join(parts)


def _step(plan: Plan) -> str:
    least, most = plan.group_sizes
    groups = f"{plan.config.algorithm.group_size} completions"
    if least != most:
        groups += f" (as many rows where groups have {least} to {most})"
    in_turns = "" if plan.turns == 1 else f" in each of {plan.turns} turns"
    first, last = plan.places[0], plan.places[-1]
    share = f"{_share(plan, first)} per agent, {plan.prompts_per_step} prompts x {groups}"
    if last != first:
        share += f"; {_share(plan, last)} per agent once {count(last, 'agent')} "
        share += "is left" if last == 1 else "are left"
    return (
        f"{plan.rows_per_step:,} rows in all, of at most {plan.max_output_tokens} "
        f"tokens{in_turns}: {share}"
    )


def _share(plan: Plan, agents: int) -> str:
    rows = plan.rows_per_step / agents
    return f"{rows:,.0f}" if rows == int(rows) else f"about {rows:,.0f}"


def _evaluation(plan: Plan) -> str:
    config, fitness = plan.config, plan.config.evolve.fitness
    tokens = sum(plan.evaluation_tokens)
    samples = fitness.per_prompt(fitness.samples)
    text = (
        f"at most {tokens:,} tokens, {tokens / plan.total_tokens:.0%} of the run: "
        f"{plan.validation_prompts} prompts x {samples} for every agent"
    )
    between, rounds = min(fitness.in_between, plan.validation_prompts), config.population.rounds
    always_decides = len(plan.decisions) == rounds
    text += " that played" if always_decides else " at a decision"
    if not fitness.temperature:
        text += ", decoded greedily"
    if fitness.second_looks:
        text += f", and by racing up to {fitness.second_looks:.0%} more"
    if config.evolve.keeps_archive and len(plan.decisions) > 1:
        text += ", and for the archive and the best agent, to compare them"
    if not always_decides:
        text += (
            f"; {count(between, 'prompt')} x {samples} in other rounds"
            if between
            else "; none in other rounds, whose fitness is the mean reward of training"
        )
    return text


def _end(plan: Plan) -> Iterator[tuple[str, str]]:
    fitness = plan.config.evolve.fitness
    test = (
        f"base and best on {plan.test_prompts} test prompts x "
        f"{fitness.per_prompt(fitness.test_samples)}: at most {plan.test_tokens:,} tokens"
    )
    if not plan.finalists:
        yield "the end", test
        return
    yield (
        "the end",
        f"up to {plan.finalists} finalists on {plan.validation_prompts} validation prompts x "
        f"{fitness.per_prompt(fitness.final_samples)}: at most {plan.final_tokens:,} tokens",
    )
    yield "", test


def _selection(plan: Plan) -> str:
    """Return the kind and the settings of the selection as text."""
    selection = plan.config.evolve.selection
    settings = selection.model_dump(exclude={"kind"})
    shown = ", ".join(f"{name} {_shown(value)}" for name, value in settings.items() if value != {})
    return f"{selection.kind} ({shown})" if shown else selection.kind


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def _mutating(plan: Plan) -> str:
    shown: list[str] = []
    for name, parameter in plan.config.search_space().parameters.items():
        if parameter.choices is None:
            shown.append(f"{name} in [{shown_value(parameter.min)}, {shown_value(parameter.max)}]")
        else:
            shown.append(f"{name} of {', '.join(map(shown_value, parameter.choices))}")
    return ", ".join(shown) or "nothing"


def _schedule(exploration: ScheduleExploration) -> str:
    entries: list[str] = []
    for entry in exploration.rounds:
        values = [f"{name} {shown_value(v)}" for name, v in entry.items() if name != ROUND]
        entries.append(f"from round {entry[ROUND]} on {', '.join(values)}")
    shown = entries[:LISTED]
    return "; ".join(shown) + ("; ..." if len(shown) < len(entries) else "")


def _lr(plan: Plan) -> str:
    """Return the lr of the first agent, and the default lr, as text."""
    config = plan.config
    usual, lr = usual_lr(config.model), shown_value(config.algorithm.lr)
    default = f"{shown_value(usual.lr)} in [{shown_value(usual.low)}, {shown_value(usual.high)}]"
    return f"{lr} to begin with; the default for {usual.models} is {default}"


def _base(plan: Plan) -> str:
    base = plan.base
    kind = f" ({base.architecture})" if base.architecture else ""
    if base.parameters is None:
        return f"{base.name}{kind}: {base.note}"
    sizes = " or ".join(_by_dtype(plan, plan.base_bytes))
    sharded = plan.config.engine.base == "sharded"
    where = "its layers divided among the processes" if sharded else "loaded once"
    return f"{base.name}{kind}: {base.parameters:,} parameters, {sizes}, {where}"


def _by_dtype(plan: Plan, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield each size as text, with its dtype; with `engine.dtype: auto`, also with its device."""
    places = {"float32": "float32 on the CPU", "bfloat16": "bfloat16 on CUDA"}
    auto = plan.config.engine.dtype == "auto" and len(sizes) > 1
    for dtype, size in sizes.items():
        yield f"{format_bytes(size)} in {places[dtype] if auto else dtype}"


def _agent(plan: Plan) -> str:
    lora = plan.config.model.lora
    targets = lora.target_modules
    name = targets if isinstance(targets, str) else ", ".join(targets)
    if not isinstance(targets, str) and len(targets) > LISTED:
        name = f"{len(targets)} layers"
    if sets := lora.searched_sets(plan.config.search_space()):
        name = f"one of {len(sets)} sets of layers, {', '.join(sets)}"
    largest = plan.config.largest_lora.r
    ranks = f"rank {lora.r}" if largest == lora.r else f"ranks up to {largest}"
    text = f"LoRA of {ranks} on {name}: "
    if plan.adapter_parameters is None or plan.bytes_per_agent is None:
        return f"{text}size unknown, as is that of the base model"
    reference = ", and a reference" if plan.config.algorithm.separate_reference else ""
    bound = "up to " if sets or largest != lora.r else ""
    return (
        f"{text}{bound}{plan.adapter_parameters:,} parameters, "
        f"{format_bytes(plan.bytes_per_agent)} with gradient and Adam{reference}"
    )


def _memory(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield rows about the memory of one process: peak, parts, and whether they fit the GPU."""
    if not plan.memory:
        yield "memory", "unknown"
        return
    peaks = " or ".join(_by_dtype(plan, {memory.dtype: memory.peak for memory in plan.memory}))
    yield "memory", f"about {peaks} at the peak, in one process"
    fit = plan.fit
    shown = plan.memory[0] if fit is None else fit.plan
    yield "", ", ".join(f"{part.name} {format_bytes(part.bytes)}" for part in shown.parts)
    if fit is None or fit.setup.place == MACHINE:  # a warning says if the machine is too small
        if any(on == "cuda" for on in dtypes(plan.config).values()):
            yield (
                "",
                "on CUDA with few rows at once; --gpu 24GB or --gpu h100 plans for a card",
            )
        return
    verdict = "fits into" if fit.fits else "does not fit into"
    yield "", f"{verdict} the {format_bytes(fit.setup.capacity)} of {fit.setup.place}"
    if fit.chosen:
        yield "", f"chosen: {', '.join(f'{name} {value:,}' for name, value in fit.chosen.items())}"


def _time(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield rows for the time of the run on a GPU, and for the source of the GPU's rates."""
    if (time := plan.duration) is None:
        return
    phases = (("generate", time.generate), ("learn", time.learn), ("evaluate", time.evaluate))
    parts = ", ".join(f"{name} {in_words(seconds)}" for name, seconds in phases)
    yield "time", f"about {in_words(time.total)} without rewards: {parts}"
    rates = f"rates measured on this card, {time.measured}" if time.measured else "its data sheet"
    yield "", f"counted from {rates}; completions as long as they may be"


def _files(plan: Plan) -> Iterator[tuple[str, str]]:
    config = plan.config
    written = [names.CONFIG, names.ROUNDS, names.LEADERBOARD, names.SUMMARY]
    storage = config.record.storage
    if config.record.optuna and not is_url(storage):
        written.append(names.JOURNAL if storage is None else names.STUDY)
    if config.record.completions:
        written.append(f"{names.COMPLETIONS}/")
    if config.record.metrics:
        written.append(f"{names.METRICS}/")
    yield "writes", f"runs/{config.name}-<n>/ with {', '.join(written)} and {names.CHECKPOINTS}/"
    policy = config.record.checkpoints
    rounds_kept = {
        "all": "every round",
        "last": "the last round only",
        "best": "the last round, of each earlier round's best agent",
    }.get(str(policy), f"the last {policy} rounds")
    if config.record.keeps_best_apart(archive=config.evolve.keeps_archive):
        rounds_kept += " and of the best agent ever"
    size = plan.checkpoint_bytes
    bound = "" if size is None else f", up to {format_bytes(size)}"
    yield "", f"checkpoints of {rounds_kept}{bound}"
    readers = [tracker.kind for tracker in config.record.trackers]
    if is_url(storage):
        readers.append(f"optuna (study {config.name}-<id> in {storage})")
    if readers:
        yield "readers", ", ".join(readers)
