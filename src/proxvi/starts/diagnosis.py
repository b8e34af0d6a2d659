"""`luck`: many starts in one program, and a report of how much the result depends on the start."""

import warnings
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import tqdm.auto
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpyro.infer import SVI
from numpyro.infer.util import log_density

from proxvi._typing import Params, ParamTree, Tree
from proxvi._validation import check_integer, check_key, check_number, common_length
from proxvi.estimators import as_scheduled
from proxvi.starts._labels import Labels, find_labels, match
from proxvi.starts._lanes import OTHER_STARTS, Lanes, take
from proxvi.starts.report import Luck
from proxvi.svi import ProximitySVIState
from proxvi.training import has_converged, is_time_to_ask

__all__ = ["luck"]

WINDOWS = 100  # of a trace
PRIOR_DRAWS = 2  # points, beside the best answer, at which labels are permuted
SAMPLES = 200  # of a posterior, for its means and standard deviations

Optimise = Callable[[Any], tuple[ParamTree, Array]]


def luck(
    inference: SVI | Optimise,
    key: Array | None = None,
    num_steps: int | None = None,
    *data: Tree,
    starts: int | Tree = 32,
    batch_size: int | None = None,
    tolerance: float = 2.0,
    best_known: float | None = None,
    floor: float | None = None,
    particles: int = 100,
    average_last: int = 1,
    stop_within: float | None = None,
    mesh: Mesh | None = None,
    executor: Executor | None = None,
    progress_bar: bool = True,
) -> Luck:
    """Measure how much an inference depends on its start: run it from many, and compare where they end.

        ELBO_s = E_q[log p(x, z) − log q(z)] at the end of start s,   share = #{s: ELBO_s ≥ max ELBO − tolerance} / n

    Args:
        inference: NumPyro's `SVI`, or a `ProximitySVI`. Its `run` skips a step that is not finite; here the step is
            taken, and the start may end without a finite ELBO. Or a function of one start that returns the final
            parameters and the ELBOs during the run, the last of which is that of the final parameters; then
            `particles` is not used, and `num_steps`, `data`, `batch_size`, `stop_within` and `executor` must be left
            out.
        key: for the starts and the samples.
        num_steps: of each start.
        data: the arguments of the model.
        starts: how many starts. For a function also the starts themselves, as a tree of arrays with a leading axis.
        batch_size: rows of the arrays in a batch; None for all of them. The final ELBO is that of all rows, so the
            model must take these, too.
        tolerance: ELBOs that differ by less count as the same, in nats. They are those of all rows together, so a
            network on many rows needs more: a tenth of their number, say.
        best_known: the best ELBO that is known from elsewhere, if any, to compare with.
        floor: the ELBO of a null model, if any; a start that ends below it has found nothing.
        particles: samples for each final ELBO, the same ones for all starts.
        average_last: of a function: the final ELBO is the mean of this many last entries of its trace.
        stop_within: stop early, when doubling the steps would gain less than this many nats in every start. The noise
            of the losses is taken into account. Only without a constraint, annealing or KL warm-up. None takes all
            steps.
        mesh: devices to spread the starts over; None takes all of them.
        executor: whose workers advance the starts, such as Dask's `client.get_executor()`; None for this process.
        progress_bar: whether to show one.

    Returns:
        The report. Print it, or look at its `verdict`.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax, proxvi
        >>> from numpyro.infer import SVI, Trace_ELBO
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> def model(x):
        ...     a, b = (numpyro.sample(name, dist.Normal(0, 3)) for name in "ab")
        ...     numpyro.sample("x", dist.Normal(a * b, 0.1), obs=x)
        >>> svi = SVI(model, AutoNormal(model), optax.adam(0.02), Trace_ELBO())
        >>> report = proxvi.luck(svi, jax.random.key(0), 2_000, jnp.array(2.0), starts=16, progress_bar=False)
        >>> print(report.verdict)
        No luck: all 16 starts end within 2 nats of the best (at least 81% of all starts). One run is enough.
        >>> print(report.distances["a"].max() > 10)  # but a = b = 1.4 is another answer than a = b = -1.4
        True
    """
    check_number("tolerance", tolerance, above=0.0, remedy="2 nats is the default")
    for name, value in {"best_known": best_known, "floor": floor}.items():
        if value is not None:
            check_number(name, value, remedy="leave it out if none is known")
    settings: dict[str, Any] = {"tolerance": tolerance, "best_known": best_known, "floor": floor}
    if isinstance(inference, SVI):
        if key is None or num_steps is None:
            raise ValueError(
                "`key` and `num_steps` must be given with an SVI, got None; write `luck(svi, jax.random.key(0), 5_000, "
                "x)`."
            )
        check_key(key)
        check_integer("num_steps", num_steps, remedy="1 is one step")
        if average_last != 1:
            raise ValueError(
                f"`average_last` must be left out with an SVI, whose final ELBO takes `particles`, got {average_last}."
            )
        check_integer("starts", starts, at_least=2, remedy="with one start there is nothing to compare")
        check_integer("particles", particles, at_least=2, remedy="the ELBO is a mean over samples")
        if stop_within is not None:
            remedy = "2 nats are a good choice, and None takes all steps"
            check_number("stop_within", stop_within, above=0.0, remedy=remedy)
            if getattr(inference, "constraints", ()) or as_scheduled(inference.loss).needs_step():
                raise ValueError(
                    "`stop_within` must be None with a constraint, annealing or KL warm-up, which need the whole run, "
                    f"got {stop_within}; leave it out."
                )
        lanes = Lanes(inference, key, data, batch_size, starts, mesh, executor=executor)
        return _of_lanes(lanes, key, num_steps, starts, particles, progress_bar, stop_within, settings)
    if not callable(inference):
        raise TypeError(
            f"`inference` must be an SVI or a function of a start, got {inference!r}; write `luck(svi, key, 5_000, x)`."
        )
    if num_steps is not None or data:
        raise TypeError(
            f"`inference` must be an SVI where `num_steps` and data are given, got the function {inference!r}; a "
            "function of a start has them inside."
        )
    for name, value in {"batch_size": batch_size, "stop_within": stop_within, "executor": executor}.items():
        if value is not None:
            raise ValueError(f"`{name}` must be None with a function of a start, got {value!r}; leave it out.")
    check_integer("average_last", average_last, remedy="1 takes the last ELBO")
    if isinstance(starts, int | np.integer):
        check_integer("starts", starts, at_least=2, remedy="with one start there is nothing to compare")
        if key is None:
            raise ValueError("`key` must be given where `starts` is a number, got None; pass `jax.random.key(0)`.")
        starts = jax.random.split(key, int(starts))
    return _of_function(inference, starts, average_last, mesh, settings)


def _of_lanes(
    lanes: Lanes,
    key: Array,
    num_steps: int,
    starts: int,
    particles: int,
    progress_bar: bool,
    stop_within: float | None,
    settings: dict[str, Any],
) -> Luck:
    start_key, elbo_key, sample_key = (jax.random.fold_in(key, i) for i in range(3))
    states = lanes.start(jax.random.split(start_key, starts), num_steps)
    if alike := lanes.are_alike(states):
        warnings.warn(
            f"`inference` must begin at another point for each key, got {starts} starts with the same parameters, so "
            f"only the luck of the noise is measured; {OTHER_STARTS}.",
            stacklevel=3,
        )
    ends = np.unique(np.linspace(0, num_steps, min(WINDOWS, num_steps) + 1).astype(int))
    windows = []
    with tqdm.auto.tqdm(total=num_steps, disable=not progress_bar, unit="step", dynamic_ncols=True) as bar:
        for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            states, loss = lanes.advance(states, begin, end - begin)
            windows.append(-loss)
            bar.update(end - begin)
            best = np.max(windows[-1], where=np.isfinite(windows[-1]), initial=-np.inf)
            bar.set_postfix_str(f"best ELBO {best:.5g}", refresh=False)
            if stop_within is not None and is_time_to_ask(begin, end) and _all_converged(windows, stop_within):
                break
        bar.set_postfix_str("estimates the final ELBOs and posteriors")
        estimates = lanes.elbos(states, elbo_key, particles).astype(np.float64)
        elbos = estimates.mean(0)
        distances, matched = {}, ()
        if np.any(np.isfinite(elbos)):
            best = int(np.nanargmax(np.where(np.isfinite(elbos), elbos, np.nan)))
            try:
                distances, matched = _differences(lanes, states, best, sample_key)
            except Exception as error:  # such as too little memory: the starts must not be lost for it
                warnings.warn(f"`luck` could not compare the answers of the starts: {error!r}", stacklevel=3)
    return Luck(
        elbos,
        np.stack(windows, axis=1),
        lanes.params(states),
        errors=estimates.std(0, ddof=1) / np.sqrt(particles),
        distances=distances,
        matched=matched,
        begin_alike=alike,
        **settings,
    )


def _all_converged(windows: list[np.ndarray], within: float) -> bool:
    """Whether no start is still on its way; one that is lost is not."""
    traces = np.stack(windows, axis=1)
    return all(has_converged(-trace, within) or not np.isfinite(trace[-1]) for trace in traces)


def _differences(
    lanes: Lanes, states: ProximitySVIState, best: int, key: Array
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """By site, how far the answers of each start are from those of the best; and sites whose labels were matched."""
    svi, data = lanes.svi, lanes.source.arrays
    params = {**lanes.params(states), **(states.mutable_state or {})}

    def sample(params: Params, data: Tree, key: Array) -> Params:
        params = jax.tree.map(lambda x: x, params)  # a copy, for a network writes into its mutable state
        guide = numpyro.handlers.substitute(numpyro.handlers.seed(svi.guide, key), data=params)
        trace = numpyro.handlers.trace(guide).get_trace(*data, **svi.static_kwargs)
        return {
            name: jnp.asarray(site["value"])
            for name, site in trace.items()
            if site["type"] == "sample" and not site["is_observed"] and not site["infer"].get("is_auxiliary", False)
        }

    @jax.jit
    def of_all(params: Params, data: Tree, keys: Array) -> tuple[Params, Params]:
        rows = jnp.arange(states.rng_key.shape[0])  # there may be no parameters
        return jax.lax.map(lambda one: moments(lambda key: sample(one[0], data, key), keys), (params, rows))

    means, deviations = jax.tree.map(np.asarray, of_all(params, data, jax.random.split(key, SAMPLES)))

    shapes = jax.eval_shape(sample, take(params, 0), data, key)
    discrete = {name for name, x in shapes.items() if not jnp.issubdtype(x.dtype, jnp.floating)}
    for name in discrete:  # draws that are all the same do not exclude a few others: one in `SAMPLES` has this width
        deviations[name] = np.maximum(deviations[name], SAMPLES**-0.5)
    # A point estimate has no width to measure by.
    wide = [name for name, mean in means.items() if np.any(deviations[name] > 1e-5 * np.abs(mean))]
    means, deviations = ({name: moment[name] for name in wide} for moment in (means, deviations))

    labels: list[Labels] = []
    # A discrete latent has no mean value, and mutable state changes with every call of the model.
    if not discrete and states.mutable_state is None:
        try:
            labels = _labels(svi, {name: mean[best] for name, mean in means.items()}, take(params, best), data, key)
        except Exception as error:  # whatever a model may raise: the starts must not be lost for it
            warnings.warn(f"`luck` could not tell whether labels can be permuted: {error!r}", stacklevel=4)
    for label in labels:
        means, deviations = match(label, means, deviations, best)
    distances = {name: _distance(means[name], deviations[name], best) for name in means}
    return distances, tuple(sorted({name for label in labels for name in label.axes}))


def moments(sample: Callable[[Array], Params], keys: Array) -> tuple[Params, Params]:
    """Means and standard deviations of draws, one after the other (Welford's way): all may not fit into memory."""

    def draw(key: Array) -> Params:
        return jax.tree.map(lambda x: x.astype(jnp.result_type(float)), sample(key))

    def add(so_far: tuple[Params, Params], numbered: tuple[Array, Array]) -> tuple[tuple[Params, Params], None]:
        (old, squares), (count, key) = so_far, numbered
        values = draw(key)
        new = jax.tree.map(lambda x, mean: mean + (x - mean) / count, values, old)
        squares = jax.tree.map(lambda total, x, a, b: total + (x - a) * (x - b), squares, values, old, new)
        return (new, squares), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(draw, keys[0]))
    counts = 1.0 + jnp.arange(len(keys))
    (means, squares), _ = jax.lax.scan(add, (zeros, zeros), (counts, keys))
    return means, jax.tree.map(lambda x: jnp.sqrt(x / len(keys)), squares)


def _labels(svi: SVI, values: Params, params: Params, data: Tree, key: Array) -> list[Labels]:
    """The labels that can be permuted: tried at the best answer and at draws from the prior."""

    def model(key: Array) -> Callable[..., Any]:
        return numpyro.handlers.substitute(numpyro.handlers.seed(svi.model, key), data=params)

    @jax.jit
    def density(values: Params, data: Tree) -> Array:
        return jnp.asarray(log_density(model(key), data, svi.static_kwargs, values)[0])

    @jax.jit
    def draw(key: Array, data: Tree) -> Params:
        trace = numpyro.handlers.trace(model(key)).get_trace(*data, **svi.static_kwargs)
        return {name: trace[name]["value"] for name in values}

    points = [values, *(draw(k, data) for k in jax.random.split(key, PRIOR_DRAWS))]
    return find_labels(
        [jax.tree.map(np.asarray, point) for point in points], lambda values: float(density(values, data))
    )


def _distance(mean: np.ndarray, deviation: np.ndarray, best: int) -> np.ndarray:
    """The largest difference of means to the best start, in standard deviations of both."""
    scale = np.sqrt((deviation**2 + deviation[best] ** 2) / 2)
    apart = np.abs(mean - mean[best])
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(apart == 0, 0.0, apart / scale)
    return ratio.reshape(len(mean), -1).max(1, initial=0.0)


def _of_function(
    optimise: Optimise, starts: Tree, average_last: int, mesh: Mesh | None, settings: dict[str, Any]
) -> Luck:
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
                f"`inference` must return its ELBOs as one vector, got {jnp.ndim(trace)} axes; return `(params, "
                "elbos)`."
            )
        if average_last > len(trace):
            raise ValueError(
                f"`average_last` must be at most the {len(trace)} ELBOs that `inference` returns, got {average_last}; "
                "lower it, or return more of them."
            )
        return params, trace

    params, traces = jax.jit(jax.vmap(checked), out_shardings=spread)(starts)
    params, traces = jax.tree.map(lambda x: x[:count], (params, traces))
    traces = np.asarray(traces, np.float64)
    return Luck(traces[:, -average_last:].mean(1), traces, params, **settings)
