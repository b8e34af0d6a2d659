"""Long runs that can be watched, stopped and resumed."""

from proxvi.training.checkpoints import ConfigurationError
from proxvi.training.fitting import fit
from proxvi.training.options import Checkpointing, Reporting, Validation

__all__ = ["Checkpointing", "ConfigurationError", "Reporting", "Validation", "fit"]
