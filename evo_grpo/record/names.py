"""Names of the files and folders in a run folder."""

import re

CONFIG = "population.yaml"
INPUTS = "inputs.json"
"""Inputs of the run: settings, digests of the files that it reads, versions."""
ROUNDS = "rounds.jsonl"
JOURNAL = "journal.log"
STUDY = "study.db"
"""Optuna's trials in SQLite, if `record.storage` asks for that instead of the journal."""
STUDY_ASIDES = (f"{STUDY}-journal", f"{STUDY}-wal", f"{STUDY}-shm")
"""Files that SQLite keeps beside the database during a write."""
LEADERBOARD = "leaderboard.csv"
SUMMARY = "summary.json"
REPORT = "report.html"
"""The run as a web page, made from the other files."""
REPORT_READER = "report"
"""Name of the reader that updates the page."""
EARLIER = re.compile(r"(?:summary|compare|replay)\.rounds-(\d+)(?:\.json)?")
"""Names of a run's results from before an extension, with the number of rounds until then."""
LOCK = ".lock"
COMPLETIONS = "completions"
METRICS = "metrics"
"""Metrics of each GRPO step and agent, a file per round."""
NOTES = "notes.jsonl"
"""Events outside of rounds, such as a pause or a refused request."""
FILES = (CONFIG, ROUNDS, INPUTS, JOURNAL, STUDY, *STUDY_ASIDES, LEADERBOARD, SUMMARY, REPORT, NOTES)
"""Files directly in the folder; the first two mark it as a run folder."""
CHECKPOINTS = "checkpoints"
BEST = f"{CHECKPOINTS}/best"
"""Copy of the checkpoint of the best agent of all rounds so far."""
MEAN = f"{CHECKPOINTS}/mean"
"""The mean of related survivors, if it won the final comparison."""
ATTRIBUTES = "attributes.json"
"""The file of a checkpoint that is written last. It holds the digests of the other files."""
ASIDES = (f"{CHECKPOINTS}/.best-new", f"{CHECKPOINTS}/.best-old")
"""Temporary folders, used while `BEST` is replaced."""

OF_ROUNDS = (COMPLETIONS, METRICS, CHECKPOINTS)
"""Folders whose entries are named after their round."""
STEERING = "steering"
"""Requests to the run, a file each, which is removed when the request is carried out."""

REQUEST = re.compile(r"(\d{20,})-[0-9a-f]{8}\.json")
"""Name of a request's file: a number that grows, then random digits."""

READERS = "readers"
"""The position of each reader in the log, and files that readers write."""
TRACKERS = "trackers"
"""Files that trackers of the run write."""
OF_READERS = (READERS, TRACKERS)
"""Folders to which other processes write while they follow the run."""
JUDGED = "judge"
"""Answers of judges, which a resume uses again."""
COMPARE = "compare"
"""Files that a comparison adds to a finished run: populations without evolution, and its result."""
COMPARISON = f"{COMPARE}/compare.json"
COMPARED = ("guess", "random")
"""The populations of a comparison, each in a run folder below `COMPARE`."""

REPLAY = "replay"
"""Files that `evo-grpo replay` adds to a finished run: its result and a checkpoint per training."""
REPLAY_RESULT = f"{REPLAY}/replay.json"
REPLAYED = ("schedule-run", "constant-run")
"""The two kinds of training of a replay, each with a folder below `REPLAY`."""

REPLAY_PARTS = (REPLAY_RESULT, *(f"{REPLAY}/{name}" for name in REPLAYED))
"""Files and folders of a replay, the result first."""

PARTS = (*FILES[2:], BEST, MEAN, *ASIDES, *OF_READERS, JUDGED, COMPARISON, *REPLAY_PARTS)
"""Files and folders with one name in every run, except those by which a run is recognised."""
OWN = (*FILES, LOCK, *OF_ROUNDS, STEERING, *OF_READERS, JUDGED, COMPARE, REPLAY)
"""Files and folders directly in the folder."""

BASELINE = "# Without evolution, beside the run two folders above it; training tokens: "
"""First line of population.yaml in a folder of a comparison, before the number of tokens."""
RECORDED_IN_PYTHON = "# Recorded by Population.train with objects that no file can name: "
"""First line of population.yaml where settings are objects from Python."""
