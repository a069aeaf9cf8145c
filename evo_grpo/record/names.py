"""Names of the files and folders in a run folder."""

import re

CONFIG = "population.yaml"
INPUTS = "inputs.json"
"""Inputs of the run: settings, digests of the files that the run reads, versions."""
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
"""Name of the reader of the log that updates report.html."""
EARLIER = re.compile(r"(?:summary|compare|replay)\.rounds-(\d+)(?:\.json)?")
"""Names of results from before a run was extended; the group is its number of rounds then."""
LOCK = ".lock"
COMPLETIONS = "completions"
METRICS = "metrics"
"""Folder with the metrics of each GRPO step and agent, a file per round."""
NOTES = "notes.jsonl"
"""Events outside of rounds, such as a pause or a refused request."""
FILES = (CONFIG, ROUNDS, INPUTS, JOURNAL, STUDY, *STUDY_ASIDES, LEADERBOARD, SUMMARY, REPORT, NOTES)
"""Files directly in a run folder; the first two mark it as a run folder."""
CHECKPOINTS = "checkpoints"
BEST = f"{CHECKPOINTS}/best"
"""Copy of the checkpoint of the best agent of all rounds so far."""
MEAN = f"{CHECKPOINTS}/mean"
"""Checkpoint of the mean of two related survivors, if the mean won the final comparison."""
ATTRIBUTES = "attributes.json"
"""The file of a checkpoint that is written last. It holds the digests of the other files."""
ASIDES = (f"{CHECKPOINTS}/.best-new", f"{CHECKPOINTS}/.best-old")
"""Temporary folders, used while `BEST` is replaced."""

OF_ROUNDS = (COMPLETIONS, METRICS, CHECKPOINTS)
"""Folders with files or folders that are named after their round; checkpoints/ has others too."""
STEERING = "steering"
"""Folder with a file for each request; the run removes the file once it records the outcome."""

REQUEST = re.compile(r"(\d{20,})-[0-9a-f]{8}\.json")
"""Name of a request's file: a number that grows, then random digits."""

READERS = "readers"
"""Folder with the position of each reader in the log, and with files that readers write."""
TRACKERS = "trackers"
"""Folder with files that trackers of the run write."""
OF_READERS = (READERS, TRACKERS)
"""Folders to which other processes write while they follow the run."""
JUDGED = "judge"
"""Folder with the answers of LLM judges, which a resume uses again."""
COMPARE = "compare"
"""Folder of `run --compare` in a finished run: populations without evolution, and the result."""
COMPARISON = f"{COMPARE}/compare.json"
COMPARED = ("guess", "random")
"""The populations of a comparison, each in a run folder below `COMPARE`."""

REPLAY = "replay"
"""Folder of `evo-grpo replay` in a finished run: the result, and a checkpoint per training."""
REPLAY_RESULT = f"{REPLAY}/replay.json"
REPLAYED = ("schedule-run", "constant-run")
"""The two kinds of training of a replay, each with a folder below `REPLAY`."""

REPLAY_PARTS = (REPLAY_RESULT, *(f"{REPLAY}/{name}" for name in REPLAYED))
"""Files and folders of a replay, the result first."""

PARTS = (*FILES[2:], BEST, MEAN, *ASIDES, *OF_READERS, JUDGED, COMPARISON, *REPLAY_PARTS)
"""Files and folders with the same path in every run, but not the two that mark a run folder."""
OWN = (*FILES, LOCK, *OF_ROUNDS, STEERING, *OF_READERS, JUDGED, COMPARE, REPLAY)
"""Names of all files and folders that a run may have directly in its folder, but `EARLIER`."""

BASELINE = "# Without evolution, beside the run two folders above it; training tokens: "
"""Start of population.yaml for a population without evolution; its number of tokens follows."""
RECORDED_IN_PYTHON = "# Recorded by Population.train with objects that no file can name: "
"""Start of population.yaml for a run with Python objects as settings; a list of them follows."""
