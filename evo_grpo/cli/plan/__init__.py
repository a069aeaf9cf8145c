"""The plan that `evo-grpo check` prints: the rows, tokens, memory and files of a run."""
