"""An agent of a run as a folder that loads elsewhere, with its card."""
