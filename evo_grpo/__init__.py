"""An evolving population of GRPO agents over one shared language model."""
