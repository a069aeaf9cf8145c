"""Declares `record.trackers`: the trackers of a run, and the settings of each kind."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import BeforeValidator, model_validator

from evo_grpo.errors import EngineUnavailable
from evo_grpo.schema.group import Group, as_list, setting
from evo_grpo.schema.problems import Problem, Problems, refuse


class Tracker(NamedTuple):
    """A kind of tracker; a pip extra and a module in readers/trackers have the same name.

    Attributes:
        module: Import name of the tracker's package.
        takes: Names of the settings that the tracker accepts.
    """

    module: str
    takes: tuple[str, ...]


KINDS: Mapping[str, Tracker] = {
    "tensorboard": Tracker("tensorboard", ("folder",)),
    "wandb": Tracker("wandb", ("project", "name", "folder", "online")),
    "trackio": Tracker("trackio", ("project", "name", "folder", "server")),
    "mlflow": Tracker("mlflow", ("project", "name", "folder", "server")),
    "comet": Tracker("comet_ml", ("project", "name", "folder", "online")),
}
if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[tuple(KINDS)]
_CREDENTIALS = re.compile(r"//[^/]*@")


class TrackerConfig(Group):
    """A tracker that follows the run. A plain string is its kind: `[tensorboard, wandb]`."""

    shorthand: ClassVar[str | None] = "kind"

    kind: Kind = setting(
        meaning=f"{', '.join(f'`{kind}`' for kind in KINDS)}; each has an extra of its name."
    )
    project: str | None = setting(
        None,
        "Project in wandb or trackio, experiment in MLflow; null: `evo-grpo`.",
        min_length=1,
    )
    name: str | None = setting(
        None, "Name of the run in the tracker; null: that of the run folder.", min_length=1
    )
    folder: str | None = setting(
        None,
        "Folder that the tracker writes to; TensorBoard makes one folder per run in it. null: "
        "`trackers/<kind>` in the run folder.",
        min_length=1,
    )
    online: bool = setting(
        False,
        "wandb, Comet: send data to the service, with the login of this machine; otherwise send it "
        "later with `wandb sync` or `comet upload`.",
    )
    server: str | None = setting(
        None,
        "MLflow: URL of a tracking server, without a password. trackio: a Space, `user/name`. "
        "null writes to the folder.",
        min_length=1,
    )

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        takes = KINDS[self.kind].takes
        refuse(
            Problem((name,), f"{self.kind} takes {', '.join(takes)} alone; remove it")
            for name in ("project", "name", "folder", "online", "server")
            if getattr(self, name) not in (None, False) and name not in takes
        )
        if _CREDENTIALS.search(self.server or ""):
            text = "expected a URL without user and password, which would be recorded; set "
            text += "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
            raise Problems.one(text, "server")
        return self


Trackers = Annotated[list[TrackerConfig], BeforeValidator(as_list)]


def problems_of(trackers: Sequence[TrackerConfig]) -> Iterator[Problem]:
    """Yield a problem for each kind that occurs more than once."""
    kinds = [tracker.kind for tracker in trackers]
    for number, kind in enumerate(kinds):
        if kind in kinds[:number]:
            text = f"expected each kind once, got {kind!r} again; remove one of them"
            yield Problem((number, "kind"), text)


def check_trackers(trackers: Iterable[TrackerConfig]) -> None:
    """Refuse a tracker whose package is not installed; import nothing.

    Raises:
        EngineUnavailable: A package is missing; the message names it.
    """
    for tracker in trackers:
        module = KINDS[tracker.kind].module
        if find_spec(module) is None:
            raise missing_tracker(tracker.kind, f"No module named {module!r}")


def missing_tracker(kind: str, reason: str) -> EngineUnavailable:
    """Return the error for a tracker whose package cannot be imported."""
    return EngineUnavailable(
        f"record.trackers: {kind} needs a package that cannot be used here ({reason}): pip install "
        f'"evo-grpo[{kind}]", or remove it'
    )
