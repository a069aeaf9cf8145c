"""The task of answer.py in Ray Tune over TRL; runs in TRL's environment, started by answer.py.

Argument: a JSON job as answer_trl.py gets it. PopulationBasedTraining with its defaults perturbs
the learning rate of eight GRPOTrainers after each round; every trial is a process of its own, and
all share one CPU. It answers once when Ray stands, then once for each line that it reads, with the
score of the next trial that has finished a round. Processor seconds are those of all its processes.

A trial that takes over another's policy goes on in its process, with a new trainer and a new
optimizer, whose moments come from the other trial as the weights do.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import ray
from answer_side import Questions, wait
from common import tell
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining


def train(config: dict[str, Any], job: dict[str, Any]) -> None:
    """Train as one trial, from its checkpoint if it has one, and report each round."""
    import torch
    from answer_trl import Rounds, trainer_of
    from transformers import logging

    imports = time.process_time()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    questions = Questions(job)
    checkpoint, first, state = tune.get_checkpoint(), 0, None
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        first = state["rounds"]
    if first == len(job["train"]) // job["steps"]:
        return
    trainer = trainer_of(questions, job, config["lr"], first)
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    if state:
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(state["adapter"][name])
        optimizer = trainer.create_optimizer()
        optimizer.load_state_dict(state["optimizer"])
        for group in optimizer.param_groups:
            group["lr"] = config["lr"]

    def report(number: int) -> None:
        score = questions.accuracy(trainer.model, job["validation"])
        with tempfile.TemporaryDirectory() as folder:
            torch.save(
                {
                    "rounds": first + number + 1,
                    "adapter": {name: p.detach() for name, p in trained.items()},
                    "optimizer": trainer.optimizer.state_dict(),
                },
                Path(folder) / "state.pt",
            )
            tune.report(
                {
                    "best": score,
                    "lr": config["lr"],
                    "round": first + number,
                    "process": os.getpid(),
                    "imports": imports,
                    "trainer_stands": stands,
                },
                checkpoint=tune.Checkpoint.from_directory(folder),
            )

    trainer.add_callback(Rounds(job["epochs"] * job["steps"], report))
    stands = time.time() - job["started"]
    trainer.train()


class Clock:
    """Wall seconds since a time.time(), and processor seconds of this process and its children."""

    def __init__(self, started: float) -> None:
        """Nothing is spent yet."""
        self.started = started
        # By process id: Tune pickles its callbacks, and what they hold.
        self.spent: dict[int, float] = {}

    def elapsed(self) -> dict[str, float]:
        """Return both; of a process that has ended, what it had spent when this was last called."""
        here = psutil.Process()
        for process in (here, *here.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self.spent[process.pid] = times.user + times.system
        return {"seconds": time.time() - self.started, "cpu_seconds": sum(self.spent.values())}


class Reports(tune.Callback):
    """Tells each report of a trial when it is asked for.

    Args:
        clock: What tells the time.
    """

    def __init__(self, clock: Clock) -> None:
        """Nothing is reported yet."""
        self.clock = clock

    def on_trial_result(self, *given: Any, result: dict[str, Any], **more: Any) -> None:
        """Answer, then wait."""
        del given, more
        names = ("best", "lr", "round", "process", "imports", "trainer_stands")
        told = {name: result[name] for name in names}
        tell({**self.clock.elapsed(), **told})
        wait()


def main() -> None:
    """Read the job, start Ray, and train."""
    job = json.loads(sys.argv[1])
    clock = Clock(job["started"])
    imported = clock.elapsed()
    low, high = job["range"]["min"], job["range"]["max"]
    ray.init(
        num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=10**8,
        configure_logging=False,
    )  # fmt: skip
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration", perturbation_interval=1, metric="best", mode="max",
        hyperparam_mutations={"lr": tune.loguniform(low, high)},
    )  # fmt: skip
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(train, job=job), {"cpu": 1 / len(job["lrs"])}),
        param_space={"lr": tune.grid_search(job["lrs"])},
        tune_config=tune.TuneConfig(scheduler=scheduler, reuse_actors=True),
        run_config=tune.RunConfig(
            storage_path=tempfile.mkdtemp(prefix="answer-ray-"), verbose=0,
            callbacks=[Reports(clock)],
        ),
    )  # fmt: skip
    packages = ("ray", "trl", "torch", "transformers", "peft")
    tell(
        {
            "imported": imported,
            "standing": clock.elapsed(),
            "versions": {name: version(name) for name in packages},
        }
    )
    wait()
    tuner.fit()


if __name__ == "__main__":
    main()
