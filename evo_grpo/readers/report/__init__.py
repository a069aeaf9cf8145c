"""Writes a run, training or finished, or several runs side by side, as a page with figures."""
