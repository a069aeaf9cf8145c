"""The report of a run as one page that needs no server and no network."""
