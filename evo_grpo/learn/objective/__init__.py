"""Pure functions of GRPO: advantages and their shaping, ratios, losses."""
