"""Flow of the Nile over a hundred years: a line with two kinks."""

from problems import Problem, columns, standardized, unit_interval
from problems.mcycle import segmented


def problem(scale: float = 1.0) -> Problem:
    year, volume = columns("nile.csv", "year", "volume")
    return Problem(segmented(unit_interval(year), standardized(volume), kinks=2), scale=scale)
