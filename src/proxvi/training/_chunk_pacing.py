"""How many steps `fit` takes before it looks up."""

import jax


class ChunkPacer:
    """Chunks of about a second, which end where a report is due.

    Several processes must take the same number of steps, so there every chunk goes up to the next report.

    Args:
        report_every: steps between two reports.
        num_steps: of the whole run.
    """

    def __init__(self, report_every: int, num_steps: int) -> None:
        self._report_every, self._num_steps = report_every, num_steps
        self.longest = min(report_every, num_steps)
        self._adapts, self._chunks = jax.process_count() == 1, 0
        self._pace = min(10, self.longest) if self._adapts else self.longest
        self.steps_per_second = 0.0

    def limit(self, step: int) -> int:
        """The most steps that the chunk after `step` may take."""
        return min(self._report_every - step % self._report_every, self._num_steps - step, self._pace)

    def record(self, length: int, seconds: float) -> None:
        """Adapt to the time that a chunk took."""
        self._chunks += 1
        self.steps_per_second = length / seconds
        if self._adapts and self._chunks > 1:  # the first one compiles
            self._pace = max(1, min(self.longest, int(self.steps_per_second)))

    def reports_at(self, step: int) -> bool:
        """Whether a report is due after `step` steps."""
        return step % self._report_every == 0 or step == self._num_steps

    def report_before(self, step: int) -> int:
        """The step of the last report before that of `step`; 0 if there was none."""
        return (step - 1) // self._report_every * self._report_every
