"""AgileRL's names, positions, defaults and extra parameters over this package's own classes."""
