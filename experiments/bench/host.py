"""What the host does between the launches of a round, on a CPU, at shapes that are run on GPUs.

    OMP_NUM_THREADS=1 python experiments/bench/host.py [--shapes 0.5B 3B] [--tokenizer NAME]

Rounds of eight agents, as `evo-grpo run` plays them, with a run folder. The base has the shape's
sizes and weights of zeros; what a device computes is left out: the decode loop draws random tokens,
forward passes give zeros, and gradients are not computed. All else is done: prompts, packing,
texts, rewards, metrics, copies of agents, digests, files. Seconds of the device are subtracted, and
those of the writer, whose thread works beside the next round, stand apart. Copies from a device and
launches are not part of it: tests/device/counts.json counts them.
"""

import json
import pkgutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from common import Report, parser, quiet

THREADS = quiet()

import torch  # noqa: E402 -- after the threads are fixed, as what follows
from rounds import DEFAULT  # noqa: E402
from shapes import COMMON, EMBEDDED, LARGE, QUESTIONS  # noqa: E402
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from evo_grpo import settings as configuration  # noqa: E402
from evo_grpo.learn.learner import Learner  # noqa: E402
from evo_grpo.learn.updates import OwnOptimizers  # noqa: E402
from evo_grpo.model.base import SharedBase  # noqa: E402
from evo_grpo.population.round import Round, next_slots, play_round  # noqa: E402
from evo_grpo.record.observer import Observer  # noqa: E402
from evo_grpo.record.run_dir import RunDir  # noqa: E402
from evo_grpo.training.assemble import prepare  # noqa: E402
from evo_grpo.training.writer import FolderWriter  # noqa: E402

AGENTS, STEPS, PROMPTS, GROUP, TOKENS = 8, 4, 4, 8, 128
VALIDATION = 64
#: Functions whose seconds are told, and what the table calls them.
PARTS = {
    "evo_grpo.envs.single_turn.ReasoningGym.judge": "rewards",
    "evo_grpo.rollout.native.native_engine.NativeEngine._pad": "prompts, padded",
    "evo_grpo.rollout.native.native_engine.NativeEngine._groups": "completions, as texts",
    "evo_grpo.population.steps.rows_from_trajectories": "rows to learn from",
    "evo_grpo.learn.learner.pack": "micro-batches, packed",
    "evo_grpo.learn.learner.collate": "micro-batches, as tensors",
    "evo_grpo.population.steps.report_steps": "metrics of steps",
    "evo_grpo.population.cohort.cohort.Cohort.learn": "losses and their metrics, on a CPU",
    "evo_grpo.population.cohort.cohort.Cohort.rollout": "requests, keys and draws",
    "evo_grpo.population.round.save": "checkpoints, copied",
    "evo_grpo.population.round.plan_and_record": "plan and record",
    "evo_grpo.population.round.carry_out": "plan, carried out",
    "evo_grpo.training.writer.FolderWriter._write_round": "files (writer)",
}
Seconds = dict[str, float]
SEEDED = torch.Generator().manual_seed(0)


def reward(completion: str, answer: int, **columns: object) -> float:
    """Reward a completion by its characters, so that groups differ."""
    del columns
    return (sum(map(ord, completion)) + answer) % 97 / 97


def base_of(shape: str, tokenizer: str) -> SharedBase:
    """Return a base in bf16 whose weights are all one, so that nothing is drawn."""
    config = Qwen2Config(**{**COMMON, **LARGE[shape]})
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.fill_(0.01)
    return SharedBase(model.eval(), AutoTokenizer.from_pretrained(tokenizer), shape)


class Clock:
    """Seconds of calls, by name; those of the device and of inner calls are not counted twice."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.seconds: Seconds = {}
        self.within = threading.local()

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose own seconds are added to `name`."""

        def timing(*given: object, **named: object) -> object:
            outside, start = getattr(self.within, "inner", 0.0), time.perf_counter()
            self.within.inner = 0.0
            try:
                return call(*given, **named)
            finally:
                spent = time.perf_counter() - start
                own = spent - self.within.inner
                self.seconds[name] = self.seconds.get(name, 0.0) + own
                self.within.inner = outside + spent

        return timing


def drawn(loop: Any) -> Any:  # noqa: ANN401 -- a decode loop, and its output
    """Stand for `DecodeLoop.run`: all tokens are drawn at once, from nothing."""
    out = loop.output
    out.tokens.random_(3, len(loop.base.tokenizer), generator=SEEDED)
    out.logprobs.fill_(-1.0)
    loop.decoder = None
    return out


def nothing(learner: Learner, agents: object, batch: Any, forward: object) -> Any:  # noqa: ANN401
    """Stand for `Learner._logprobs`: log-probs and entropies of 0."""
    zeros = torch.zeros(len(batch.targets))
    return zeros.requires_grad_(), zeros


def stepped(updates: OwnOptimizers, agents: Any) -> None:  # noqa: ANN401
    """Stand for `OwnOptimizers.step`: the first makes the moments of AdamW."""
    for agent, metrics in agents:
        metrics |= {"grad_norm": 0.0}
        metrics["updates"] += 1
        if agent.optimizer.state:
            continue
        for parameter in updates.slots.parameters(agent.adapter):
            parameter.grad = torch.zeros_like(parameter)
        agent.optimizer.step()
        agent.optimizer.zero_grad(set_to_none=True)


#: What a device does, and what stands for it.
STANDINS: dict[str, Callable[..., Any]] = {
    "evo_grpo.rollout.native.loop.DecodeLoop.run": drawn,
    "evo_grpo.rollout.native.native_engine.NativeEngine._decoder": lambda *_, **__: (
        mock.MagicMock()
    ),
    "evo_grpo.learn.learner.Learner._logprobs": nothing,
    "evo_grpo.learn.updates.OwnOptimizers.backward": lambda *_: None,
    "evo_grpo.learn.updates.OwnOptimizers.step": stepped,
}


def played(shape: str, tokenizer: str, rounds: int, stack: ExitStack) -> list[Seconds]:
    """Play rounds, and return the seconds of their parts."""
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="bench-host-")))
    rows = [json.dumps({"question": QUESTIONS[n % 4] * 11, "answer": n}) for n in range(400)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    task = {"kind": "dataset", "train": str(folder / "rows.jsonl"), "prompt": "{question} {answer}",
            "reward": "host:reward"}  # fmt: skip
    config = configuration.load(DEFAULT, [
        f"env={json.dumps(task)}",
        f"population.size={AGENTS}", f"population.rounds={rounds + 2}", "population.sizes=constant",
        f"population.steps_per_round={STEPS}", f"algorithm.prompts_per_step={PROMPTS}",
        f"algorithm.group_size={GROUP}", f"algorithm.max_output_tokens={TOKENS}",
        f"algorithm.min_output_tokens={TOKENS}", f"evolve.fitness.prompts={VALIDATION}",
        "evolve.dead_steps=null", "algorithm.beta=0.0", "engine.device=cpu", "engine.kernels=off",
        "evolve.hyperparameters={lr: {min: 1e-5, max: 1e-3}}", "record.checkpoints=last",
        "engine.max_decode_rows=4096", "engine.max_tokens_per_microbatch=65536",
    ])  # fmt: skip
    clock, lines = Clock(), list[Seconds]()
    base = base_of(shape, tokenizer)
    stack.enter_context(mock.patch.object(SharedBase, "load", return_value=base))
    prepared = prepare(config)
    for path, stand_in in STANDINS.items():
        stack.enter_context(mock.patch(path, clock.timed("device", stand_in)))
    for path, name in PARTS.items():
        stack.enter_context(mock.patch(path, clock.timed(name, pkgutil.resolve_name(path))))
    text = configuration.to_yaml(config)
    run = stack.enter_context(RunDir.create(folder / "run", config.name, text, force=False))
    writer = stack.enter_context(FolderWriter(run, keep="last"))
    slots, past = prepared.slots, list[Any]()
    for number in range(rounds + 1):
        clock.seconds = {}
        start = time.perf_counter()
        parts = prepared.cohort, prepared.env, prepared.round_settings, slots
        record = play_round(Round(*parts, number, writer, Observer(), past=past))
        whole = time.perf_counter() - start
        writer._pending[-1].result()  # so that no round is written beside another
        past.append(record)
        slots = next_slots(record)
        found = {name: clock.seconds.get(name, 0.0) for name in PARTS.values()}
        found["host, in all"] = whole - clock.seconds["device"]
        lines.append(found)
        print(shape, number, found, flush=True)
    return lines


def measure(report: Report, shape: str, tokenizer: str, rounds: int) -> None:
    """Report the medians of the parts of a round, without the first."""
    with ExitStack() as stack:
        lines = played(shape, tokenizer, rounds, stack)
    for name in lines[0]:
        seconds = statistics.median(line[name] for line in lines[1:])
        report.add(f"Host, a round of {AGENTS} agents, {shape}", part=name, ms=1e3 * seconds)


def main() -> int:
    """Measure the shapes."""
    given = parser(str(__doc__).partition("\n")[0])
    given.add_argument("--shapes", nargs="+", choices=list(LARGE), default=list(LARGE))
    given.add_argument("--tokenizer", default=str(EMBEDDED), help="folder of another tokenizer")
    chosen = given.parse_args()
    report = Report("host", chosen)
    for shape in chosen.shapes:
        measure(report, shape, chosen.tokenizer, chosen.repeats or (1 if chosen.quick else 5))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
