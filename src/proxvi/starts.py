"""`multistart`: many starts in one program, and a report of how much the result depends on the start."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from proxvi._typing import Float, Int, ParamTree, Tree
from proxvi._validation import check_integer, common_length

__all__ = ["Basin", "Sensitivity", "Starts", "multistart"]


class Basin(NamedTuple):
    """Starts that ended at about the same ELBO.

    Args:
        elbo: the best of them.
        starts: numbers of the starts, the best one first.
    """

    elbo: float
    starts: Int[np.ndarray, " starts"]


class Sensitivity(NamedTuple):
    """How much an inference depends on its start; prints as a table.

    Args:
        tolerance: ELBOs that differ by less count as the same, in nats.
        best: the best final ELBO.
        median: the median of them.
        worst: the worst finite one.
        share: the share of starts within the tolerance of the best.
        not_finite: how many starts ended without a finite ELBO.
        basins: groups of starts, the best first. Sorted by ELBO, a gap above the tolerance starts a new group.
    """

    tolerance: float
    best: float
    median: float
    worst: float
    share: float
    not_finite: int
    basins: tuple[Basin, ...]

    def __str__(self) -> str:
        count = sum(len(basin.starts) for basin in self.basins) + self.not_finite
        lines = [
            f"{self.share:.0%} of {count} starts end within {self.tolerance:g} nats of the best ELBO, {self.best:.2f}; "
            f"median {self.median:.2f}, worst {self.worst:.2f}",
            f"{'basin':>7} {'ELBO':>12} {'below best':>12} {'starts':>8}  for example start",
        ]
        shown = self.basins[:10]
        for number, (elbo, starts) in enumerate(shown, 1):
            lines.append(f"{number:7d} {elbo:12.2f} {self.best - elbo:12.2f} {len(starts):8d}  {starts[0]}")
        if len(self.basins) > len(shown):
            rest = sum(len(basin.starts) for basin in self.basins[len(shown) :])
            lines.append(f"{'':7} and {len(self.basins) - len(shown)} more basins with {rest} starts")
        if self.not_finite:
            lines.append(f"{self.not_finite} starts ended without a finite ELBO")
        return "\n".join(lines)


class Starts(NamedTuple):
    """Where many starts ended.

    Args:
        elbos: the final ELBO of each start.
        params: the final parameters, with a leading axis of starts.
        traces: the ELBOs during the run, starts × steps.
    """

    elbos: Float[Array, " starts"]
    params: ParamTree
    traces: Float[Array, "starts steps"]

    def report(self, tolerance: float = 2.0) -> Sensitivity:
        """How much the result depends on the start.

        Args:
            tolerance: ELBOs that differ by less count as the same, in nats. It must be larger than the noise of the
                final ELBOs.
        """
        if not tolerance > 0:
            raise ValueError(f"`tolerance` must be above 0, got {tolerance}; 2 nats is the default.")
        elbos = np.asarray(self.elbos, np.float64)
        finite = np.flatnonzero(np.isfinite(elbos))
        if finite.size == 0:
            raise ValueError(f"`elbos` must have a finite entry, got none in {elbos.size}; look at `traces`.")
        order = finite[np.argsort(-elbos[finite], kind="stable")]
        ends = np.flatnonzero(-np.diff(elbos[order]) > tolerance) + 1
        basins = tuple(Basin(float(elbos[group[0]]), group) for group in np.split(order, ends))
        return Sensitivity(
            tolerance=tolerance,
            best=float(elbos[order[0]]),
            median=float(np.median(elbos[finite])),
            worst=float(elbos[order[-1]]),
            share=float(np.sum(elbos[finite] >= elbos[order[0]] - tolerance) / elbos.size),
            not_finite=int(elbos.size - finite.size),
            basins=basins,
        )


def multistart(
    optimise: Callable[[Tree], tuple[ParamTree, Array]],
    starts: Tree,
    *,
    average_last: int = 1,
    mesh: Mesh | None = None,
) -> Starts:
    """Run an optimisation from many starts, as one compiled program.

        params_s, trace_s = optimise(start_s)   for all s at once,   elbo_s = mean of the last entries of trace_s

    Args:
        optimise: a function of one start. It returns the final parameters and the ELBOs during the run, the last of
            which is that of the final parameters. It is mapped over the starts by `jax.vmap`.
        starts: random keys, or initial parameters (any pytree), with a leading axis of starts.
        average_last: the final ELBO is the mean of this many last entries of a trace; take more than 1 if the ELBO is a
            noisy estimate.
        mesh: devices to spread the starts over; None takes all of them.

    Returns:
        Final ELBOs, parameters and traces; `report()` says how much they depend on the start.

    Example:
        >>> import jax, jax.numpy as jnp, optax, proxvi
        >>> def optimise(start):  # two hills, of heights 0 and −1
        ...     def elbo(x):
        ...         return jnp.maximum(-((x - 1) ** 2), -((x + 1) ** 2) - 1)
        ...     optimizer = optax.sgd(0.1)
        ...     def step(carry, _):
        ...         x, state = carry
        ...         updates, state = optimizer.update(-jax.grad(elbo)(x), state)
        ...         return (x + updates, state), elbo(x + updates)
        ...     (x, _), trace = jax.lax.scan(step, (start, optimizer.init(start)), length=100)
        ...     return x, trace
        >>> print(proxvi.multistart(optimise, jnp.linspace(-3.0, 3.0, 6)).report(tolerance=0.1))
        50% of 6 starts end within 0.1 nats of the best ELBO, -0.00; median -0.50, worst -1.00
          basin         ELBO   below best   starts  for example start
              1        -0.00         0.00        3  3
              2        -1.00         1.00        3  0

        With NumPyro, the starts are keys. An autoguide remembers its first start, so make a new one inside::

            def optimise(key):
                svi = proxvi.ProximitySVI(model, AutoNormal(model), optimizer, elbo, constraint)
                result = svi.run(key, 5_000, x, progress_bar=False)
                return result.params, -result.losses

            report = proxvi.multistart(optimise, jax.random.split(key, 100), average_last=100).report()
    """
    check_integer("average_last", average_last, remedy="1 takes the last ELBO")
    count = common_length("starts", starts, "use `jax.random.split(key, n)`, or stack the initial parameters")
    mesh = Mesh(np.array(jax.devices()), "starts") if mesh is None else Mesh(mesh.devices, mesh.axis_names)  # Auto axes
    devices = mesh.devices.shape[0]
    rows = jnp.arange(-(-count // devices) * devices) % count  # equally many for each device; the surplus is dropped
    spread = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    starts = jax.device_put(jax.tree.map(lambda x: x[rows], starts), spread)

    def checked(start: Tree) -> tuple[ParamTree, Array]:
        """`optimise`, whose results are checked while it is compiled, before the work."""
        params, trace = optimise(start)
        if jnp.ndim(trace) != 1:
            raise ValueError(
                f"`optimise` must return its ELBOs as one vector, got {jnp.ndim(trace)} axes; return `(params, elbos)`."
            )
        if average_last > len(trace):
            raise ValueError(
                f"`average_last` must be at most the {len(trace)} ELBOs that `optimise` returns, got {average_last}; "
                "lower it, or return more of them."
            )
        return params, trace

    params, traces = jax.jit(jax.vmap(checked), out_shardings=spread)(starts)
    params, traces = jax.tree.map(lambda x: x[:count], (params, traces))
    return Starts(jnp.mean(traces[:, -average_last:], axis=1), params, traces)
