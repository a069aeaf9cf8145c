"""Conversion of the two ends of a clip range between ratio bounds and distances from 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evo_grpo.schema.search_space import RLParameter


def end_of_distance(name: str, distance: RLParameter) -> RLParameter:
    """Return the range of the bound at one end, given the range of its distance from 1."""
    if name == "clip_low":
        return distance.within(max(0.0, 1 - distance.max), 1 - distance.min)
    return distance.within(1 + distance.min, 1 + distance.max)


def distance_of_end(name: str, end: RLParameter) -> RLParameter | None:
    """Return the range of a bound's distance from 1; None if the range of the bound contains 1."""
    if name == "clip_low" and end.max <= 1:
        return end.within(1 - end.max, 1 - end.min)
    if name == "clip_high" and end.min >= 1:
        return end.within(end.min - 1, end.max - 1)
    return None


def from_distance(name: str, end: RLParameter, distance: float) -> float:
    """Return the bound at a distance from 1, clamped to its range."""
    return end.clip(1 - distance if name == "clip_low" else 1 + distance)
