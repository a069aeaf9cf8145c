"""Whether a run folder is as it was written: every file against what the run recorded of it."""
