"""Group advantages against rlox's: equal values, and seconds per call in the same process.

    OMP_NUM_THREADS=1 python experiments/bench_advantages.py [--quick] [--out FILE]

rlox (Rust) is installed on first use, without its dependencies, into a virtual environment of its
own, experiments/bench/.venvs/rlox, and imported from there with the numpy and torch of this
interpreter. Both sides get one flat float64 array, the only kind that rlox takes, and divide by the
population's standard deviation: ddof=0, eps=0. A ratio above 1 says that evo-grpo is the faster.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

from common import HERE, Report, interleaved, median, parser, ratio

# Before rlox is imported: as many threads for its pool as for everyone.
os.environ.setdefault("RAYON_NUM_THREADS", os.environ["OMP_NUM_THREADS"])

import numpy as np
import numpy.typing as npt

from evo_grpo.learn.objective.advantages import group_advantages

RESULT = HERE / "results" / "advantages.json"
# gymnasium and what it imports: rlox imports it, and evo-grpo does not depend on it.
PEER = ("rlox==1.2.0", "gymnasium==1.4.0", "cloudpickle==3.1.2", "farama-notifications==0.0.6")
INSTALL_SECONDS = 120
GROUP = 8
TOLERANCE = 1e-6
JUDGED_FROM = 4096
"""Rewards from which the ratio is held against its target; below, a call is mostly checks."""
CALLS = {64: 1000, 4096: 200, 1_048_576: 4}
"""Rewards, and the calls that make one sample."""

Rewards = npt.NDArray[np.float64]
Advantages = Callable[[Rewards], Rewards]


def load_rlox() -> Callable[[Rewards, int], Rewards]:
    """Install rlox when it is not there and return its compute_batch_group_advantages."""
    folder = HERE / ".venvs" / "rlox"
    python = folder / "bin" / "python"
    # Of one release of Python: its extension has to load into this interpreter.
    tag = f"{sys.implementation.cache_tag}-{'-'.join(PEER)}"
    stamp = folder / f".installed-{tag}"
    if not stamp.is_file():
        print(f"installing {PEER[0]} into {folder.relative_to(HERE)}", file=sys.stderr)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        run([sys.executable, "-m", "venv", "--clear", str(folder)])
        run([*pip, "--no-deps", *PEER])
        stamp.touch()
    release = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # Last, so that only what this interpreter lacks comes from there.
    sys.path.append(str(folder / "lib" / release / "site-packages"))
    from rlox import compute_batch_group_advantages

    return compute_batch_group_advantages


def run(command: list[str]) -> None:
    """Run one step of the installation, or stop with what it said."""
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=INSTALL_SECONDS)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"rlox: installation failed: {error.stderr[-600:]}") from error
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"rlox: not installed within {INSTALL_SECONDS} seconds") from error


def kinds(count: int) -> dict[str, Rewards]:
    """Return rewards by kind: without ties, and of 0 and 1, some groups all alike."""
    random = np.random.default_rng(count)
    return {
        "normal": random.normal(size=count),
        "0 and 1": (random.random(count) < 0.8).astype(np.float64),
    }


def sample(call: Advantages, rewards: Rewards, calls: int) -> Callable[[], float]:
    """Return what measures the seconds of one call, as the mean of a few in a row."""

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call(rewards)
        return (time.perf_counter() - start) / calls

    return seconds


def compare(count: int, sides: dict[str, Advantages], repeats: int) -> dict[str, Any]:
    """Compare values and times at one number of rewards.

    Args:
        count: Rewards.
        sides: The two functions, ours first.
        repeats: Samples of each side.

    Returns:
        A line of the table.
    """
    ours, theirs = sides
    rewards = kinds(count)
    apart = 0.0
    for values in rewards.values():
        got, expected = (call(values) for call in sides.values())
        assert got.shape == expected.shape == values.shape
        apart = float(np.maximum(apart, np.abs(got - expected).max()))  # keeps a NaN
    samples = interleaved(
        {name: sample(call, rewards["normal"], CALLS[count]) for name, call in sides.items()},
        repeats,
    )
    pairs = [a / b for a, b in zip(samples[theirs], samples[ours], strict=True)]
    low, _, high = statistics.quantiles(pairs, n=4)
    return {
        "rewards": count,
        "groups": count // GROUP,
        "repeats": repeats,
        "calls_per_sample": CALLS[count],
        "evo_grpo_us": 1e6 * median(samples, ours),
        "rlox_us": 1e6 * median(samples, theirs),
        "ratio": ratio(samples, theirs, ours),
        "ratio_quartiles": f"{low:.3g} to {high:.3g}",
        "ratio_of_medians": median(samples, theirs) / median(samples, ours),
        "largest_difference": apart,
    }


def main() -> int:
    """Measure all sizes."""
    given = parser(__doc__.partition("\n")[0]).parse_args()
    if not given.quick and given.out is None:
        given.out = RESULT
    rlox = load_rlox()
    sides: dict[str, Advantages] = {
        "evo-grpo": lambda rewards: group_advantages(rewards, GROUP, ddof=0, eps=0),
        "rlox": lambda rewards: rlox(rewards, GROUP),
    }
    report = Report("advantages", given)
    for count in list(CALLS)[: 2 if given.quick else None]:
        line = compare(count, sides, given.repeats or (5 if given.quick else 101))
        report.add(
            f"Group advantages, groups of {GROUP}, float64, rlox {version('rlox')}, "
            f"{os.environ['OMP_NUM_THREADS']} thread(s)",
            **line,
        )
        named = f"{count:,} rewards"
        report.at_most(f"largest difference, {named}", line["largest_difference"], TOLERANCE)
        if count >= JUDGED_FROM:
            report.at_least(f"rlox's seconds over evo-grpo's, {named}", line["ratio"], 1.0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
