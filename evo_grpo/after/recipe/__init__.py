"""The winner of a run as the settings of another run, for the same model or a larger one."""
