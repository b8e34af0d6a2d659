"""Long runs that can be watched, stopped and resumed."""

from proxvi.training.checkpoints import ConfigurationError
from proxvi.training.fitting import fit

__all__ = ["ConfigurationError", "fit"]
