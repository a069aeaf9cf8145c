"""Built-in tasks: those of the embedded models, and `dataset` for the user's rows."""
