"""How much an inference depends on its start, and what to do about it."""

from proxvi.starts.diagnosis import luck
from proxvi.starts.racing import Race, Round, race
from proxvi.starts.report import Basin, Luck

__all__ = ["Basin", "Luck", "Race", "Round", "luck", "race"]
