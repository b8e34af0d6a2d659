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


def find_labels(points: list[Values], log_density: Callable[[Values], float]) -> list[Labels]:
    """The labels that can be permuted without a change of `log p(x, z)` at any of the points.

    A rotation by one and an exchange of the first two components generate all permutations. At an optimum, components
    may be alike without being exchangeable, so some of the points must be elsewhere.
    """
    before = [(values, density) for values in points if np.isfinite(density := log_density(values))]
    if len(before) < 2:
        return []

    def unchanged(labels: Labels) -> bool:
        count = labels.components
        orders = np.roll(np.arange(count), 1), np.array([1, 0, *range(2, count)])
        return all(
            abs(log_density(labels.permute(values, order)) - density) <= 1e-3 + 1e-5 * abs(density)  # float32 rounds
            for values, density in before
            for order in orders
        )

    found = []
    for count in sorted({n for value in points[0].values() for n in value.shape if 1 < n <= MOST}):
        candidates = (labels for labels in _candidates(points[0], count) if unchanged(labels))
        labels = next(candidates, None)
        # To match components, a site must have one axis of them.
        if labels is not None and any(len(axes) == 1 for axes in labels.axes.values()):
            found.append(labels)
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
    from scipy.optimize import linear_sum_assignment  # jax needs SciPy anyway; it takes a moment to import
    from scipy.spatial.distance import cdist

    starts = len(next(iter(means.values())))
    matched: list[tuple[Values, Values]] = []
    for start in range(starts):
        ours, theirs = ({name: moment[i] for name, moment in means.items()} for i in (best, start))
        cost = np.zeros((labels.components, labels.components))
        for name, axes in labels.axes.items():
            if len(axes) == 1:
                a, b = (_rows(x[name], axes[0]) for x in (ours, theirs))
                scale = np.mean([np.square(deviations[name][i], dtype=float).mean() for i in (best, start)])
                cost += cdist(a, b, "sqeuclidean") / (scale + 1e-10 * np.square(a).mean() + 1e-30)
        _, order = linear_sum_assignment(np.nan_to_num(cost, nan=0.0, posinf=1e30))
        spread = {name: moment[start] for name, moment in deviations.items()}
        matched.append((labels.permute(theirs, order), labels.permute(spread, order)))
    return (
        {name: np.stack([mean[name] for mean, _ in matched]) for name in means},
        {name: np.stack([spread[name] for _, spread in matched]) for name in means},
    )


def _rows(value: np.ndarray, axis: int) -> Float[np.ndarray, "components numbers"]:
    """One row for each component."""
    return np.moveaxis(value, axis, 0).reshape(value.shape[axis], -1).astype(np.float64)
