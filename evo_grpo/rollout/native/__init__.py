"""The native engine: one prefill per (agent, prompt), one decode loop for the whole population."""
