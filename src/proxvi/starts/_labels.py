"""Labels that can be permuted: a mixture is the same in any order of its components.

Two starts that found the same clusters in another order have the same answer. So the components of each start are
matched to those of the best one before their posteriors are compared. Only where the model allows it: its joint density
must not change when the components trade places.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from proxvi._typing import Float

MOST = 200  # components; more of them are rows of the data rather
Values = dict[str, np.ndarray]


class Labels(NamedTuple):
    """Axes of latent variables that count the same components.

    Attributes:
        components: how many there are.
        axes: by site, the axes that are permuted together.
    """

    components: int
    axes: dict[str, tuple[int, ...]]

    def permute(self, values: Values, order: np.ndarray) -> Values:
        """The values with the components in this order."""
        changed = dict(values)
        for name, axes in self.axes.items():
            for axis in axes:
                changed[name] = np.take(changed[name], order, axis)
        return changed


def find_labels(values: Values, log_density: Callable[[Values], float]) -> list[Labels]:
    """The labels that can be permuted without a change of `log p(x, z)` at `values`.

    A rotation by one and an exchange of the first two components generate all permutations.
    """
    found = []
    before = None
    for count in sorted({n for value in values.values() for n in value.shape if 1 < n <= MOST}):
        for labels in _candidates(values, count):
            orders = np.roll(np.arange(count), 1), np.array([1, 0, *range(2, count)])
            before = log_density(values) if before is None else before
            changes = [abs(log_density(labels.permute(values, order)) - before) for order in orders]
            if np.isfinite(before) and max(changes) <= 1e-3 + 1e-5 * abs(before):  # rounding in float32
                found.append(labels)
                break
    return found


def _candidates(values: Values, count: int) -> Iterator[Labels]:
    """All axes of this length (the transitions of a hidden Markov model have two), or the first, or the last."""
    axes = {name: tuple(np.flatnonzero(np.equal(value.shape, count)).tolist()) for name, value in values.items()}
    axes = {name: found for name, found in axes.items() if found}
    yield Labels(count, axes)
    if any(len(found) > 1 for found in axes.values()):
        yield Labels(count, {name: found[:1] for name, found in axes.items()})
        yield Labels(count, {name: found[-1:] for name, found in axes.items()})


def match(labels: Labels, means: Values, deviations: Values, best: int) -> tuple[Values, Values]:
    """Means and deviations of all starts, with the components in the order of those of the start `best`.

    Args:
        labels: which can be permuted.
        means: posterior means, with a leading axis of starts.
        deviations: posterior standard deviations.
        best: the start to which the others are matched.
    """
    from scipy.optimize import linear_sum_assignment  # jax needs it anyway; it takes a moment to import

    starts = len(next(iter(means.values())))
    matched: list[tuple[Values, Values]] = []
    for start in range(starts):
        ours, theirs = ({name: moment[i] for name, moment in means.items()} for i in (best, start))
        cost = np.zeros((labels.components, labels.components))
        for name, axes in labels.axes.items():
            if len(axes) == 1:
                scale = np.sqrt((deviations[name][best] ** 2 + deviations[name][start] ** 2) / 2).mean() + 1e-30
                cost += _distances(ours[name], theirs[name], axes[0]) / scale**2
        _, order = linear_sum_assignment(np.nan_to_num(cost, nan=0.0, posinf=1e30))
        spread = {name: moment[start] for name, moment in deviations.items()}
        matched.append((labels.permute(theirs, order), labels.permute(spread, order)))
    return (
        {name: np.stack([mean[name] for mean, _ in matched]) for name in means},
        {name: np.stack([spread[name] for _, spread in matched]) for name in means},
    )


def _distances(ours: np.ndarray, theirs: np.ndarray, axis: int) -> Float[np.ndarray, "components components"]:
    """Squared distances of each of our components to each of theirs."""
    a, b = (np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1).astype(np.float64) for x in (ours, theirs))
    return np.sum((a[:, None] - b[None]) ** 2, axis=2)
