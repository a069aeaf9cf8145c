"""The mathematics of GRPO as pure functions: advantages, ratios, losses, learning-rate schedule."""
