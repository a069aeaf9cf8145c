"""The classes of this package with AgileRL's names, positions, defaults and extra parameters."""
