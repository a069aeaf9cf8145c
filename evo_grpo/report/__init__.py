"""Reports on a finished run: the best adapter with its model card."""
