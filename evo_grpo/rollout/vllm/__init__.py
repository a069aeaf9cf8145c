"""The vLLM engine: it runs in a separate process and exchanges token ids over a socket."""
