"""Pure functions of GRPO: advantages, ratios, losses, learning-rate schedule."""
