"""How far a run is."""

import time
from dataclasses import dataclass, field

import numpy as np

from proxvi._typing import Json
from proxvi.svi import ACTIVE


@dataclass
class Progress:
    """What a checkpoint holds beside the state of the inference.

    Attributes:
        losses: of all steps of the run; those after `step` are not known yet.
        step: steps taken.
        best: the best validation ELBO; None before the first.
        waited: reports since then.
        started: when the run would have started if it had never been interrupted.
    """

    losses: np.ndarray
    step: int = 0
    best: float | None = None
    waited: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Time spent on the run, that before a restart included."""
        return time.monotonic() - self.started

    @property
    def losses_so_far(self) -> np.ndarray:
        """Of the steps taken."""
        return self.losses[: self.step]

    def add(self, losses: np.ndarray) -> None:
        """Count a chunk of steps."""
        self.losses[self.step : self.step + len(losses)] = losses
        self.step += len(losses)

    def mean_elbo(self, since: int) -> float:
        """The mean of the steps since `since` whose loss was finite; NaN if none was."""
        losses = self.losses_so_far[since:]
        finite = losses[np.isfinite(losses)]
        return -float(finite.mean(dtype=np.float64)) if finite.size else float("nan")

    def validate(self, elbo: float, shares: float | list[float]) -> None:
        """Count a report: is its validation ELBO the best so far?

        Args:
            elbo: of the held-out data.
            shares: of each constraint in the gradient. While a constraint is active, the ELBO may stand still or fall;
                that is no reason to stop.
        """
        better = bool(np.isfinite(elbo)) and (self.best is None or elbo > self.best)
        self.waited = 0 if better or np.any(np.asarray(shares) > ACTIVE) else self.waited + 1
        self.best = elbo if better else self.best

    def notes(self) -> Json:
        """All but the losses, for the header of a checkpoint."""
        return {"best": self.best, "waited": self.waited, "seconds": self.seconds}

    def resume(self, step: int, losses: np.ndarray, notes: Json) -> None:
        """Go on from a checkpoint."""
        self.losses[:step] = losses
        self.step, self.best, self.waited = step, notes["best"], notes["waited"]
        self.started = time.monotonic() - notes["seconds"]
