"""The population forward: each row of a batch goes through its own agent's adapter."""
