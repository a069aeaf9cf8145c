"""Tasks and games of other packages."""
