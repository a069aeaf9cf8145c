"""What `evo-grpo check` prints: the rows, tokens, memory and files that a run will need."""
