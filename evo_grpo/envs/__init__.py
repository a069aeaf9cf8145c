"""Where prompts and rewards come from: datasets, the built-in tasks, and outside libraries."""
