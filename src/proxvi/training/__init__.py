"""Long runs that can be watched, stopped and resumed."""

from proxvi.training._batches import Arrays
from proxvi.training._chunks import ordered
from proxvi.training._convergence import has_converged, is_time_to_ask
from proxvi.training._run_fingerprint import describe, program_digest
from proxvi.training.checkpoints import ConfigurationError
from proxvi.training.fitting import fit
from proxvi.training.options import Checkpointing, Reporting, Validation

__all__ = [
    "Arrays",
    "Checkpointing",
    "ConfigurationError",
    "Reporting",
    "Validation",
    "describe",
    "fit",
    "has_converged",
    "is_time_to_ask",
    "ordered",
    "program_digest",
]
