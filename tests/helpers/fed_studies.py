"""Studies that are fed from run folders, and what their trials must say."""

from optuna.storages import InMemoryStorage
from random_runs import HP_CONFIG

from evo_grpo.readers.reader import feed
from evo_grpo.record.database import open_study
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.study import StudyReader
from evo_grpo.training.recorded_inputs import read_inputs_of

SPACE = {name: {"min": one.min, "max": one.max} for name, one in HP_CONFIG.parameters.items()}
"""The ranges of `make_run`, as a file has them."""


def reader_of(folder, url, id=""):
    return StudyReader(folder, read_inputs_of(folder).id, url, id)


def send(folder, url):
    """Feed the database as `evo-grpo follow` does."""
    feed(folder, "optuna", lambda id: reader_of(folder, url, id), from_start=True)


def said(trial):
    """All that a trial says; its id is the storage's own."""
    return (
        *(trial.number, trial.state, trial.values, trial.params, trial.distributions),
        *(trial.user_attrs, trial.intermediate_values, trial.system_attrs),
        *(trial.datetime_start, trial.datetime_complete),
    )


def expected(records, space=HP_CONFIG):
    """Return what the trials of a run's rounds say."""
    lineage = Lineage(open_study(InMemoryStorage(), "any"), space)
    for record in records:
        lineage.record(record)
    return list(map(said, lineage.study.trials))
