"""The two ends of a clip range: as bounds of the ratio, and as distances from 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evo_grpo.schema.search_space import RLParameter


def end_of_distance(name: str, distance: RLParameter) -> RLParameter:
    """Turn the range of a distance from 1 into that of the bound at one end."""
    if name == "clip_low":
        return distance.within(max(0.0, 1 - distance.max), 1 - distance.min)
    return distance.within(1 + distance.min, 1 + distance.max)


def distance_of_end(name: str, end: RLParameter) -> RLParameter | None:
    """Turn the range of a bound into that of its distance from 1; None where it holds 1 inside."""
    if name == "clip_low" and end.max <= 1:
        return end.within(1 - end.max, 1 - end.min)
    if name == "clip_high" and end.min >= 1:
        return end.within(end.min - 1, end.max - 1)
    return None


def from_distance(name: str, end: RLParameter, distance: float) -> float:
    """Return the bound at a distance from 1, inside of its range."""
    return end.clip(1 - distance if name == "clip_low" else 1 + distance)
