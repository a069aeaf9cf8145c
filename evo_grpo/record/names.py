"""Names of the files and folders in a run folder."""

import re

CONFIG = "population.yaml"
INPUTS = "inputs.json"
"""What the run was made of: settings, digests of the files that it reads, versions."""
ROUNDS = "rounds.jsonl"
JOURNAL = "journal.log"
STUDY = "study.db"
"""Optuna's trials in SQLite, in place of the journal where `record.storage` says so."""
STUDY_ASIDES = (f"{STUDY}-journal", f"{STUDY}-wal", f"{STUDY}-shm")
"""What SQLite keeps beside it during a write."""
LEADERBOARD = "leaderboard.csv"
SUMMARY = "summary.json"
REPORT = "report.html"
"""The run as a page for people; made from the other files at any time."""
REPORT_READER = "report"
"""Name of the reader that keeps it up to date."""
EARLIER = re.compile(r"(?:summary|compare|replay)\.rounds-(\d+)(?:\.json)?")
"""How the end of a run is called that was given more rounds: with the number it had before."""
LOCK = ".lock"
COMPLETIONS = "completions"
METRICS = "metrics"
"""What each GRPO step measured of each agent, a file per round."""
NOTES = "notes.jsonl"
"""What belongs to no round: the run is paused, a request is refused."""
FILES = (CONFIG, ROUNDS, INPUTS, JOURNAL, STUDY, LEADERBOARD, SUMMARY, REPORT, NOTES)
"""Files directly in the folder."""
CHECKPOINTS = "checkpoints"
BEST = f"{CHECKPOINTS}/best"
"""The best agent ever, as it was when it was the best."""
MEAN = f"{CHECKPOINTS}/mean"
"""The mean of related survivors, where it won the final comparison."""

OF_ROUNDS = (COMPLETIONS, METRICS, CHECKPOINTS)
"""Folders whose entries are named after the round that they belong to."""
STEERING = "steering"
"""What a person asks of the run: a file for each request, until it is carried out."""

WRITTEN_IN = (COMPLETIONS, METRICS, STEERING)
"""Folders in which a stop may leave a file that is half written."""

REQUEST = re.compile(r"(\d{20})-[0-9a-f]{8}\.json")
"""How such a file is called: by its number, and by chance. Until evo-grpo 0.2 the number was the
time in nanoseconds."""
COUNTER = f"{STEERING}/counter"
"""The number of the last request."""

READERS = "readers"
"""How far each reader of the log is, and what readers wrote."""
TRACKERS = "trackers"
"""What trackers of the run wrote."""
OF_READERS = (READERS, TRACKERS)
"""Folders that other processes write while they follow the run."""
COMPARE = "compare"
"""What a comparison adds to a finished run: populations without evolution, and its result."""
COMPARISON = f"{COMPARE}/compare.json"
COMPARED = ("guess", "random")
"""The populations of a comparison, each with a run folder below `COMPARE`."""

REPLAY = "replay"
"""What `evo-grpo replay` adds to a finished run: its result, and a checkpoint of each training."""
REPLAY_RESULT = f"{REPLAY}/replay.json"
REPLAYED = ("schedule-lineage", "constant-lineage", "schedule-run", "constant-run")
"""The trainings of a replay, each with a folder below `REPLAY`: values, then budget."""

BASELINE = "# Without evolution, beside the run two folders above it; training tokens: "
"""How population.yaml begins in a folder of a comparison: training ends by a number of tokens."""
RECORDED_IN_PYTHON = "# Recorded by Population.train with objects that no file can name: "
"""How population.yaml begins in a folder that Population.train wrote with objects in it."""
