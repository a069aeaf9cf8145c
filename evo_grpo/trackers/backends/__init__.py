"""What writes to each kind of tracker: a file a kind, in a process of its own."""
