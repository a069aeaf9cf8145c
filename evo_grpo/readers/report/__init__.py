"""A run as a page with figures, while it goes on and afterwards; runs side by side."""
