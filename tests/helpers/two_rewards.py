"""Reward functions for sums: is the answer right, and how large is its last digit."""


def exact(completion, answer):
    return float(completion == answer)


def last(completion):
    return int(completion[-1]) / 9 if completion[-1:].isdigit() else 0.0
