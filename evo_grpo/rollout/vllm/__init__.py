"""vLLM as a rollout engine: in a process of its own, fed with token ids over a socket."""
