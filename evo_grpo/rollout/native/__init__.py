"""The built-in engine: one prefill per (agent, prompt), one decode loop for all agents."""
