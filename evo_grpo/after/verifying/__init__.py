"""Check that every file of a run folder agrees with the records of the run."""
