"""The report of a run as one page that needs nothing else: no server, no network."""
