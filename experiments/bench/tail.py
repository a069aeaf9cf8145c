"""Completions of a heavy tail, more than are decoded at once: 1 in 20 is eight times the median.

    python experiments/bench/tail.py [--quick] [--shapes 1M 10M] [--median 24] [--out FILE]
    python experiments/bench/tail.py --gpu     on a CPU, with the cache, blocks and shares of a GPU

8 agents with groups of 8, 256 and 1,024 rows through 128 places, the same lengths for all:
refilled          a row that ends hands its place to one that waits
in pieces         128 rows at a time, each piece to its end
HF, no LoRA       transformers' continuous batching on the plain base, where the device has it
vLLM              one LoRARequest per row, where decode.py --vllm has installed it

Row-steps are rows times decode steps, over those needed, the tokens of the completions. A step
takes as long as it has rows on a CPU, and about equally long on a GPU.
"""

import argparse
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from common import HERE, Report, interleaved, median, parser, quiet, ratio

THREADS = quiet()

import torch  # noqa: E402 -- after the threads are fixed, as what follows
from decode import vllm_side  # noqa: E402
from jobs import Job, Work, load_base, population, random_model  # noqa: E402
from transformers import GenerationConfig  # noqa: E402

from evo_grpo.model.llama import decode  # noqa: E402
from evo_grpo.model.llama.cache import FixedCache  # noqa: E402
from evo_grpo.rollout.native import loop  # noqa: E402
from evo_grpo.rollout.native import native_engine as engine  # noqa: E402
from evo_grpo.rollout.native import rows as native_rows  # noqa: E402

AGENTS, GROUP, PLACES = 8, 8, 128


class Watched:
    """The lengths of all rows, and the row-steps of a call.

    Both sides see the same length for a row, drawn from the key of its draws.
    """

    def __init__(self, middle: int) -> None:
        """Replace the length limits of all rows from now on."""
        self.middle, self.done, self.steps = middle, 0, 0
        expand, draw = native_rows.expand_rows, loop.Batch.draw

        def expanded(requests: Any, *given: Any, **named: Any) -> Any:  # noqa: ANN401
            rows, source = expand(requests, *given, **named)
            lengths = [self.length(key) for r in requests for key in r.row_keys()]
            rows.sampling = replace(
                rows.sampling, limit=torch.tensor(lengths), shortest=min(lengths)
            )
            return rows, source

        def drawn(rows: loop.Batch, *given: Any) -> None:
            self.done += len(rows.tokens)
            self.steps += 1
            draw(rows, *given)

        native_rows.expand_rows = expanded
        loop.Batch.draw = drawn  # pyright: ignore[reportAttributeAccessIssue]

    def length(self, key: int) -> int:
        """Return the length of a row: eight medians, or between half and three halves of one."""
        chance = random.Random(key)
        if chance.random() < 1 / 20:
            return 8 * self.middle
        return chance.randint(self.middle // 2, 3 * self.middle // 2)


def compare(
    report: Report, watched: Watched, shape: str, rows: int, repeats: int, *, peers: bool
) -> None:
    """Compare all sides on so many rows."""
    work = Work(rows // (AGENTS * GROUP), GROUP, 8 * watched.middle)
    job = Job(*population(load_base(shape), AGENTS, work, max_decode_rows=PLACES), work)
    done: dict[str, tuple[int, int]] = {}
    own_cache = decode.cache_for

    def counted(name: str, *, hands_on: bool) -> Callable[[], None]:
        def generate() -> None:
            job._calls = 0  # the same lengths each time
            watched.done = watched.steps = 0
            engine.refills_rows = lambda device: hands_on
            # No other cache takes further rows.
            decode.cache_for = (lambda _, *sizes: FixedCache(*sizes)) if hands_on else own_cache
            job.generate()
            decode.cache_for = own_cache
            done[name] = watched.done, watched.steps

        return generate

    sides: dict[str, Callable[[], object]] = {
        "refilled": counted("refilled", hands_on=True),
        "in pieces": counted("in pieces", hands_on=False),
    }
    lengths = [len(c.token_ids) for mine in job.groups for g in mine for c in g.completions]
    sides |= continuous(shape, job, lengths) if peers else {}
    with ExitStack() as stack:
        if peers and (HERE / ".venvs" / "vllm").is_dir():
            sides |= vllm_side(job, lengths, stack, PLACES)
        samples = interleaved(sides, repeats)
    for name in sides:
        report.add(
            f"Heavy tail through {PLACES} places, {shape}",
            rows=rows, side=name, seconds=median(samples, name),
            tokens_per_second=sum(lengths) / median(samples, name),
            row_steps=done[name][0] / sum(lengths) if name in done else None,
            steps=done[name][1] if name in done else None,
            refilled_is_faster=ratio(samples, name, "refilled"),
        )  # fmt: skip
    if rows == 1024:
        report.at_most(
            f"heavy tail, {rows} rows, {shape}: row-steps done over needed",
            done["refilled"][0] / sum(lengths), 1.1,
        )  # fmt: skip


def continuous(shape: str, job: Job, lengths: list[int]) -> dict[str, Callable[[], object]]:
    """Return transformers' continuous batching of the same rows, if it runs here."""
    plain = random_model(shape)
    plain.set_attn_implementation("paged|sdpa")
    ids = [list(p.token_ids) for _ in job.slots for p in job.prompts for _ in range(GROUP)]
    settings = GenerationConfig(do_sample=True, eos_token_id=-1, pad_token_id=0, top_k=0)

    def generate() -> None:
        with plain.continuous_batching_context_manager(generation_config=settings) as manager:
            for own, length in zip(ids, lengths, strict=True):
                manager.add_request(own, max_new_tokens=length)
            for _ in ids:
                manager.get_result(timeout=60)

    try:
        generate()
    except Exception as error:
        reason = str(error).partition("\n")[0]
        print(f"HF, {shape}: not measured: {type(error).__name__}: {reason}", file=sys.stderr)
        return {}
    return {"HF, no LoRA": generate}


def arguments() -> argparse.Namespace:
    """Read the command line."""
    given = parser(__doc__.partition("\n")[0])
    given.add_argument("--shapes", nargs="+", choices=["1M", "10M"], default=["1M", "10M"])
    given.add_argument("--median", type=int, default=24, help="tokens of the median completion")
    given.add_argument("--gpu", action="store_true", help="decode as on a GPU, without the peers")
    return given.parse_args()


def main() -> int:
    """Run all comparisons."""
    given = arguments()
    report = Report("tail", given)
    watched = Watched(given.median)
    if given.gpu:
        decode.cache_for = lambda device, *sizes: FixedCache(*sizes)
        loop.block_of = lambda device: 8
        loop._LEAVE_SHARE = loop._LEAVE_SHARE_OF_GRAPHS
        loop._REFILL_SHARE = loop._REFILL_SHARE_OF_GRAPHS
    repeats = given.repeats or (1 if given.quick else 3)
    for shape in ["1M"] if given.quick else given.shapes:
        for rows in (256, 1024):
            compare(report, watched, shape, rows, repeats, peers=not given.gpu)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
