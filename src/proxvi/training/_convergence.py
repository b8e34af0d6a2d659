"""Has a run converged? A rule for noisy losses."""

import math

import numpy as np

from proxvi._typing import Float

__all__ = ["has_converged", "is_time_to_ask", "still_to_gain"]

WINDOWS = 20  # of each quarter, by which the noise of its mean is measured
FEWEST = 5  # of them
CONFIDENCE = 2.0  # standard errors
GROWTH = 1.1  # of the number of steps from one question to the next: each has its own chance of a wrong answer


def still_to_gain(losses: Float[np.ndarray, " steps"]) -> tuple[float, float]:
    """What as many steps again would gain in nats, and its standard error.

        gain = 4 (mean ELBO of the last quarter − mean ELBO of the quarter before)

    A quarter later the mean is higher by the difference; as long as a run slows down, four quarters gain less than four
    times as much. The error is that of means over windows, so it sees noise that lasts for some steps. NaN before there
    are enough steps, or with losses that are not finite.

    Example:
        >>> import numpy as np
        >>> steps = np.arange(1, 4_001)
        >>> gain, error = still_to_gain(100 / steps)
        >>> round(gain, 3)  # the truth is 100 / 4000 − 100 / 8000 = 0.0125
        0.047
    """
    count = min(WINDOWS, len(losses) // 4)
    if count < FEWEST:
        return math.nan, math.nan
    length = len(losses) // (4 * count)
    windows = -losses[len(losses) - 2 * count * length :].reshape(2, count, length).mean(2, dtype=np.float64)
    # Half the mean square of differences of neighbours is the variance of a window; a trend hardly changes it.
    variance = np.mean(np.diff(windows, axis=1) ** 2, axis=1) / 2
    return 4 * float(windows[1].mean() - windows[0].mean()), 4 * math.sqrt(float(variance.sum()) / count)


def has_converged(losses: Float[np.ndarray, " steps"], within: float) -> bool:
    """Whether as many steps again would gain less than `within` nats, with a confidence of 98%.

    A gain below 0 counts as 0: it is noise, and no reason to stop before the noise is small.
    """
    gain, error = still_to_gain(losses)
    return max(gain, 0.0) + CONFIDENCE * error <= within


def is_time_to_ask(before: int, step: int) -> bool:
    """Whether the run has grown enough since a step `before`; it depends on nothing else, so a resumed run agrees."""
    return math.floor(math.log(step, GROWTH)) > math.floor(math.log(max(before, 1), GROWTH))
