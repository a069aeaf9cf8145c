"""The figures of a run, made with plotly, which the extra `report` installs."""
