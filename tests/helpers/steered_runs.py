"""Small runs that are steered while they train, by an observer in the same process."""

from dataclasses import replace

from small_run import Told, outcome

from evo_grpo.record.observer import Observer
from evo_grpo.record.steering import ask, state_of
from evo_grpo.types import RequestOutcome

#: Of the small run: 0 and 1 keep their groups of 4, so that all operations can be told apart.
OPERATIONS = {
    "set": ("set", {"agent": 0, "values": {"lr": 0.002, "group_size": 5}}),
    "clone": ("clone", {"source": 0, "agent": 2}),
    "stop": ("stop-agent", {"agent": 1}),
}


class Steers(Told):
    """Asks a run for something while it trains.

    Args:
        asked: (stage, round) -> the requests asked then, each as operation and keywords of `ask`.
        stop: As `Told` takes it.
    """

    def __init__(self, asked, stop=None):
        super().__init__(stop)
        self.asked = asked
        self.folder = None
        self.notes = []

    def started(self, run_dir, rounds, first_round, settings):
        self.folder = run_dir
        super().started(run_dir, rounds, first_round, settings)

    def note(self, text):
        self.notes.append(text)

    def _note(self, what, round):
        for op, given in self.asked.pop((what, round), ()):
            ask(self.folder, op, **given)
        super()._note(what, round)


class AsksOnce(Observer):
    """Asks for something in the second round, where nobody has asked for it yet."""

    def __init__(self, folder):
        self.folder = folder

    def stage(self, round, name, done, total):
        if (name, round) != ("evaluate", 1):
            return
        standing = state_of(self.folder)
        there = [*standing.waiting, *(one.request for _, one in standing.became)]
        for op, given in OPERATIONS.values():
            if op not in {one.op for one in there}:
                ask(self.folder, op, **given)


def steered_outcome(folder):
    """All that must be equal between equal runs that were steered alike, at whatever time."""
    found = outcome(folder)
    # What a person was told depends on when they asked.
    found["files"] = [name for name in found["files"] if name != "notes.jsonl"]
    found["rounds"] = [
        (replace(record, steering=tuple(map(timeless, record.steering))), decisions)
        for record, decisions in found["rounds"]
    ]
    return found


def timeless(one: RequestOutcome):
    return replace(one, request=replace(one.request, id="", asked=0.0, after=0))


def tensors(folder):
    """The bytes of every tensor file of a run, by path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*.safetensors"))
    }
