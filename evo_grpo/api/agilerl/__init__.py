"""The public classes with the names, the arguments and the defaults that they have in AgileRL."""
