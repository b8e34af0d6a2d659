"""`evaluate`: ELBO and marginal likelihood of held-out data by importance sampling, with their errors."""

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from proxvi._typing import Float, Guide, Model, Params, Tree
from proxvi._validation import check_integer, check_key, common_length
from proxvi.evaluation._log_weights import check_sites, log_weights
from proxvi.training import program_digest

__all__ = ["Evaluation", "evaluate"]

TOO_HEAVY = 0.7  # k̂ above it: the variance of the estimate cannot be trusted (Vehtari et al. 2024)
ROUNDING = 1e-3  # log weights of float32 that differ by less are the same
ON_HOST = 2**18  # log weights of one device that are summarised together
PROGRAMS = 8  # compiled ones that are kept

_programs: dict[tuple[str, Mesh], Callable[..., Array]] = {}


class Evaluation(NamedTuple):
    """How well a model explains data; prints as a summary.

    With `w_ns` the log weight of sample s of row n, `S` samples and `N` rows:

        elbos_n = mean_s w_ns,  log_likelihoods_n = log mean_s exp w_ns,  effective_n = (Σ_s exp w_ns)² / Σ_s exp 2w_ns

    Attributes:
        elbo: mean of `elbos`.
        elbo_standard_error: of that mean as an estimate for new data: standard deviation of `elbos` over √N.
        elbo_monte_carlo_error: of that mean as an estimate for these data; more samples lower it.
        log_likelihood: mean of `log_likelihoods`.
        log_likelihood_standard_error: as for the ELBO.
        log_likelihood_monte_carlo_error: as for the ELBO; by the delta method, the variance of row n is
            `(S / effective_n − 1) / (S − 1)`. Do not trust it where many k̂ are above 0.7.
        log_likelihood_bias: roughly the bias of `log_likelihood`: minus half the mean of those variances. More samples
            lower it, more rows do not.
        effective_sample_size: mean of `effective_sample_sizes`.
        khat_above: share of rows with k̂ above 0.7. The estimates of such rows depend on a few samples and are not
            reliable. Rows whose k̂ is not known are not counted; NaN if no k̂ is known.
        num_samples: `S`.
        elbos: for each row.
        log_likelihoods: for each row.
        effective_sample_sizes: for each row, between 1 and `S`.
        khats: for each row the Pareto k̂ of its weights (PSIS). −∞ if the largest weights are all equal, ∞ if most of
            them are 0 relative to the largest. NaN if no Pareto distribution fits, if `S` is below 25, or if
            `arviz-stats` is not installed (the extra `diagnostics`).
    """

    elbo: float
    elbo_standard_error: float
    elbo_monte_carlo_error: float
    log_likelihood: float
    log_likelihood_standard_error: float
    log_likelihood_monte_carlo_error: float
    log_likelihood_bias: float
    effective_sample_size: float
    khat_above: float
    num_samples: int
    elbos: Float[np.ndarray, " rows"]
    log_likelihoods: Float[np.ndarray, " rows"]
    effective_sample_sizes: Float[np.ndarray, " rows"]
    khats: Float[np.ndarray, " rows"]

    def __str__(self) -> str:
        unknown = int(np.sum(np.isnan(self.khats)))
        above = "no k̂" if unknown == len(self.khats) else f"{self.khat_above:.0%} of rows with k̂ above {TOO_HEAVY}"
        if 0 < unknown < len(self.khats):
            above += f" ({unknown} without k̂ not counted)"
        return (
            f"{'':14} {'mean':>10} {'± data':>9} {'± samples':>9}\n"
            f"{'ELBO':14} {self.elbo:10.3f} {self.elbo_standard_error:9.3f} {self.elbo_monte_carlo_error:9.3f}\n"
            f"{'log likelihood':14} {self.log_likelihood:10.3f} {self.log_likelihood_standard_error:9.3f} "
            f"{self.log_likelihood_monte_carlo_error:9.3f}   bias {self.log_likelihood_bias:.3f}\n"
            f"{len(self.elbos)} rows, {self.effective_sample_size:.1f} of {self.num_samples} samples effective, {above}"
        )


def evaluate(
    key: Array,
    model: Model,
    guide: Guide,
    params: Params,
    data: Tree,
    *,
    num_samples: int,
    chunk: int = 250,
    progress: bool | None = None,
    mesh: Mesh | None = None,
) -> Evaluation:
    """Estimate the ELBO and the marginal likelihood of each row of the data, with samples of the guide.

        w_ns = log p(x_n, z_s) − log q(z_s | x_n),   z_s ~ q(z | x_n)
        E[mean_s w_ns] = ELBO(x_n) ≤ E[log mean_s exp w_ns] ≤ log p(x_n)

    The model and the guide see one row at a time, as a batch of 1. No latent variable may be shared by rows. Densities
    are not scaled: `handlers.scale` and the scale of a subsampled plate are ignored. In a plate that is subsampled to
    the given rows, row n has index n, so a guide may have parameters for each row. A sample depends only on the key, on
    the number of its row and on its own number, so `chunk` and `mesh` change the rounding only.

    Args:
        key: for the samples.
        model: a NumPyro model of a batch of rows. It is run on one row at a time, so a `numpyro.factor` that belongs to
            no row counts in every one.
        guide: its guide.
        params: values of all parameters of both, as in `result.params`.
        data: the rows, as the argument of the model (a tuple for several arguments).
        num_samples: `S`, samples for each row; the paper takes 5,000.
        chunk: how many pairs of a row and a sample each device computes at once. It bounds the memory. 250 fit the
            cache of a CPU; use more on a GPU.
        progress: whether to show a progress bar; None shows it on a terminal.
        mesh: devices of this process; rows are sharded along its first axis. None takes all devices.

    Returns:
        The two means, their errors, and the estimates for each row.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> def model(x):
        ...     with numpyro.plate("data", len(x)):
        ...         z = numpyro.sample("z", dist.Normal(0, 1))
        ...         numpyro.sample("x", dist.Normal(z, 1), obs=x)
        >>> def guide(x):
        ...     with numpyro.plate("data", len(x)):
        ...         numpyro.sample("z", dist.Normal(numpyro.param("slope", 0.5) * x, 0.8))
        >>> x = jnp.linspace(-2.0, 2.0, 5)  # marginally Normal(0, √2)
        >>> result = evaluate(jax.random.key(0), model, guide, {"slope": 0.5}, x, num_samples=1_000)
        >>> round(float(dist.Normal(0, 2**0.5).log_prob(x).mean()), 2), round(result.log_likelihood, 2)
        (-1.77, -1.77)
        >>> result.khat_above  # the share of rows whose estimate is not reliable; `print(result)` shows all
        0.0
    """
    check_key(key)
    check_integer("num_samples", num_samples, at_least=2, remedy="the error is estimated from their spread")
    check_integer("chunk", chunk, remedy="a smaller one takes less memory and more time")
    args: tuple[Tree, ...] = data if isinstance(data, tuple) else (data,)
    rows = common_length("data", args, "write `x[None]` for one row")
    plates = check_sites((model, guide), params, args)
    mesh = Mesh(np.array(jax.local_devices()), "rows") if mesh is None else Mesh(mesh.devices, mesh.axis_names)
    if any(device.process_index != jax.process_index() for device in mesh.devices.flat):
        raise ValueError(
            "`mesh` must hold devices of this process only, got some of others; leave it out, and give each process "
            "rows of its own."
        )
    devices = mesh.devices.shape[0]
    spread, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (mesh.axis_names[:1], ()))
    share, limit = -(-rows // devices), max(1, ON_HOST // num_samples)  # rows of one device, in all and in a group
    at_once = _even(share, min(limit, max(1, chunk // num_samples))), _even(num_samples, chunk)
    group = devices * at_once[0] * _even(-(-share // at_once[0]), limit // at_once[0])
    params, key = jax.device_put((params, key), everywhere)
    shown = (sys.stderr.isatty() if progress is None else progress) and jax.process_index() == 0
    weigh = partial(
        log_weights, pair=(model, guide), plates=plates, mesh=mesh, num_samples=num_samples, at_once=at_once
    )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((group, *x.shape[1:]), jnp.result_type(x)), args)
    weigh = _compiled(weigh, mesh, params, key, jnp.arange(group), shapes)
    summaries = []
    with tqdm.tqdm(total=rows, disable=not shown, unit="row", dynamic_ncols=True) as bar:
        for first in range(0, rows, group):
            numbers = np.arange(first, first + group) % rows  # as many in every group; what is over is dropped below
            batch = jax.device_put((numbers, jax.tree.map(lambda x, at=numbers: x[at], args)), spread)
            weights = weigh(params, key, *batch)
            summaries.append(_summary(np.asarray(weights, np.float64)[: rows - first]))
            bar.update(len(summaries[-1][0]))
    elbos, elbo_variances, log_likelihoods, variances, effective, khats = (
        np.concatenate(parts) for parts in zip(*summaries, strict=True)
    )
    known = khats[~np.isnan(khats)]
    return Evaluation(
        *_mean(elbos, elbo_variances),
        *_mean(log_likelihoods, variances),
        log_likelihood_bias=-0.5 * float(np.mean(variances)),
        effective_sample_size=float(np.mean(effective)),
        khat_above=float(np.mean(known > TOO_HEAVY)) if len(known) else float("nan"),
        num_samples=num_samples,
        elbos=elbos,
        log_likelihoods=log_likelihoods,
        effective_sample_sizes=effective,
        khats=khats,
    )


def _compiled(weigh: Callable[..., Array], mesh: Mesh, *example: Tree) -> Callable[..., Array]:
    """`weigh`, compiled once for all calls that compute the same: its model may read variables that have changed."""
    known = program_digest(jax.make_jaxpr(weigh)(*example)), mesh
    if known not in _programs and len(_programs) == PROGRAMS:
        del _programs[next(iter(_programs))]
    return _programs.setdefault(known, jax.jit(weigh))


def _summary(log_weights: Float[np.ndarray, "rows samples"]) -> tuple[Float[np.ndarray, " rows"], ...]:
    """Of each row: the ELBO and its variance, the log likelihood and its variance, the effective samples, k̂."""
    samples = log_weights.shape[1]
    # Weights that are all 0, or NaN, give NaN. PSIS's smoothed weights, which are not used, overflow where k̂ is large.
    with np.errstate(invalid="ignore", over="ignore"):
        top = np.max(log_weights, axis=1, keepdims=True)
        gaps = log_weights - top
        weights = np.exp(gaps)
        total = np.sum(weights, axis=1)
        effective = total**2 / np.sum(weights**2, axis=1)
        return (
            top[:, 0] + np.mean(gaps, axis=1),
            np.var(gaps, axis=1, ddof=1) / samples,
            top[:, 0] + np.log(total / samples),
            (np.maximum(samples / effective, 1.0) - 1.0) / (samples - 1),
            effective,
            _khats(log_weights),
        )


def _khats(log_weights: Float[np.ndarray, "rows samples"]) -> Float[np.ndarray, " rows"]:
    samples = log_weights.shape[1]
    unknown = np.full(len(log_weights), np.nan)
    if samples < 25:  # a tail of less than 5, too few for a fit
        return unknown
    try:
        from arviz_stats.base.array import array_stats
    except ImportError:
        return unknown

    def khat(row: Float[np.ndarray, " samples"]) -> float:
        if np.ptp(row) < ROUNDING:
            return -np.inf
        # No fit is possible where even the lower quarter of the tail is 0 beside the largest weight.
        if np.count_nonzero(row > np.max(row) - 700.0) < 0.75 * min(samples / 5, 3 * samples**0.5):
            return np.inf
        try:
            return float(array_stats.psislw(-row)[1])  # it wants minus the log weights
        except ValueError:  # all of the tail is one value
            return -np.inf

    return np.array([khat(row) for row in log_weights])


def _mean(values: Float[np.ndarray, " rows"], variances: Float[np.ndarray, " rows"]) -> tuple[float, float, float]:
    """The mean, its error over data, its error over samples."""
    count = len(values)
    with np.errstate(invalid="ignore"):
        spread = np.std(values, ddof=1) if count > 1 else np.nan
        return float(np.mean(values)), float(spread / count**0.5), float(np.sum(variances) ** 0.5 / count)


def _even(total: int, limit: int) -> int:
    """The size of equal parts, or nearly, of at most `limit`."""
    return -(-total // -(-total // limit))
