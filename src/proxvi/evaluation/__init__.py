"""How well a model explains held-out data."""

from proxvi.evaluation.importance_sampling import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate"]
