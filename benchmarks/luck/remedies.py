"""What people do about luck, each with the same number of gradient steps and one setting for all problems.

A remedy is a function of a problem (as a function of the scale of its starts), the number of steps, a key, and the
number of seeds. It returns the true ELBO of each seed at the end, or None if it does not apply. A new one is such a
function, and a line in `REMEDIES`.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
from jax.flatten_util import ravel_pytree
from numpyro.infer import SVI, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoDelta
from numpyro.infer.util import initialize_model
from problems import Problem

import proxvi

Make = Callable[[float], Problem]


def adam(problem: Problem, steps: int, b2: float = 0.999) -> optax.GradientTransformation:
    """The optimiser of all remedies."""
    return optax.adam(optax.cosine_decay_schedule(problem.rate, steps), b2=b2)


def several(svi: SVI, problem: Problem, steps: int, key: jax.Array, seeds: int, restarts: int = 1) -> np.ndarray:
    """Each seed is the best of some runs."""
    try:
        ended = proxvi.luck(
            svi,
            key,
            steps,
            *problem.data,
            starts=seeds * restarts,
            batch_size=problem.batch_size,
            particles=problem.particles,
            progress_bar=False,
        )
    except ValueError as error:
        if "must have a finite entry" not in str(error):
            raise
        return np.full(seeds, -np.inf)  # all of them ended with NaN
    return np.where(np.isfinite(ended.elbos), ended.elbos, -np.inf).reshape(seeds, restarts).max(axis=1)


def plain(make: Make, steps: int, key: jax.Array, seeds: int, *, restarts: int = 1, scale: float = 1.0) -> np.ndarray:
    """NumPyro's `SVI`; with restarts, which share the steps, the best of them."""
    problem = make(scale)
    svi = SVI(problem.model, problem.new_guide(), adam(problem, steps // restarts), problem.loss)
    return several(svi, problem, steps // restarts, key, seeds, restarts)


def decaying(steps: int) -> optax.Schedule:
    """As in the paper: down to 10⁻¹⁰ of its start, here by half of the run."""
    return optax.exponential_decay(1.0, max(steps // 2, 1), 1e-10)


def warm_up(make: Make, steps: int, key: jax.Array, seeds: int) -> np.ndarray | None:
    """The weight of the KL divergence rises from 0 to 1 over half of the run; for latents that are continuous."""
    problem = make(1.0)
    if not isinstance(problem.loss, Trace_ELBO):
        return None
    loss = proxvi.WarmUpELBO(problem.loss, optax.linear_schedule(0.0, 1.0, steps // 2))
    return constrained(problem, steps, key, seeds, (), loss)


def annealing(make: Make, steps: int, key: jax.Array, seeds: int) -> np.ndarray:
    """Deterministic annealing: the temperature of the entropy falls from 10 to 1 over half of the run."""
    problem = make(1.0)
    temperature = optax.exponential_decay(10.0, steps // 2, 0.1)
    return constrained(problem, steps, key, seeds, (), proxvi.AnnealedELBO(problem.loss, temperature, relative=False))


def pvi(make: Make, steps: int, key: jax.Array, seeds: int, *, statistic: Any = None) -> np.ndarray:
    """The paper's constraint, with the setting that docs/choosing.md recommends."""
    problem = make(1.0)
    constraint = proxvi.Proximity(statistic or problem.statistic, magnitude=decaying(steps))
    return constrained(problem, steps, key, seeds, constraint, problem.loss, b2=0.99)


def speed_limit(make: Make, steps: int, key: jax.Array, seeds: int) -> np.ndarray:
    """A speed limit on the entropy, over a third of the run."""
    problem = make(1.0)
    return constrained(problem, steps, key, seeds, proxvi.SpeedLimit(problem.statistic), problem.loss)


def constrained(
    problem: Problem, steps: int, key: jax.Array, seeds: int, constraint: Any, loss: Any, b2: float = 0.999
) -> np.ndarray:
    """Runs of a `ProximitySVI`."""
    optimizer = adam(problem, steps, b2)
    svi = proxvi.ProximitySVI(problem.model, problem.new_guide(), optimizer, loss, constraint)
    return several(svi, problem, steps, key, seeds)


def race(make: Make, steps: int, key: jax.Array, seeds: int, *, methods: tuple[str, ...] = ("plain",)) -> np.ndarray:
    """64 lanes, of which the worse half is dropped again and again."""
    problem = make(1.0)
    svi = SVI(problem.model, problem.new_guide(), optax.adam(problem.rate), problem.loss)
    elbos = [
        proxvi.race(
            svi,
            seed_key,
            steps,
            *problem.data,
            starts=64 // len(methods),
            methods=methods,
            batch_size=problem.batch_size,
            particles=problem.particles,
            progress_bar=False,
        ).elbo
        for seed_key in jax.random.split(key, seeds)
    ]
    return np.array(elbos)


def map_start(make: Make, steps: int, key: jax.Array, seeds: int) -> np.ndarray | None:
    """A quarter of the steps for the mode of the posterior; the mean-field guide starts there."""
    problem = make(1.0)
    if problem.guide is not None:
        return None
    first = steps // 4

    def mode(key: jax.Array) -> Any:
        guide = AutoDelta(problem.model)
        svi = SVI(problem.model, guide, adam(problem, first), problem.loss)
        return guide.median(unwatched(svi, key, first, problem.data))

    modes = jax.jit(lambda keys: jax.lax.map(mode, keys))(jax.random.split(jax.random.fold_in(key, 0), seeds))
    return from_modes(problem, modes, steps - first, jax.random.fold_in(key, 1), seeds)


FOR_64_LANES = 768  # steps, the least that `race` takes for its default of 64


def race_of_modes(make: Make, steps: int, key: jax.Array, seeds: int) -> np.ndarray | None:
    """Half of the steps for a race of 64 searches for the mode (32 if they are few); the guide starts at the winner."""
    problem = make(1.0)
    if problem.guide is not None:
        return None
    guide, first = AutoDelta(problem.model), steps // 2
    starts = 64 if first >= FOR_64_LANES else 32
    svi = SVI(problem.model, guide, optax.adam(problem.rate), problem.loss)
    try:
        winners = [
            guide.median(proxvi.race(svi, seed_key, first, *problem.data, starts=starts, progress_bar=False).params)
            for seed_key in jax.random.split(jax.random.fold_in(key, 0), seeds)
        ]
    except FloatingPointError:
        return np.full(seeds, -np.inf)  # as on `topics`, where all of them end so
    modes = jax.tree.map(lambda *x: jnp.stack(x), *winners)
    return from_modes(problem, modes, steps - first, jax.random.fold_in(key, 1), seeds)


def from_modes(problem: Problem, modes: Any, steps: int, key: jax.Array, seeds: int) -> np.ndarray:
    """Plain runs that start at given values of the latent variables."""

    def one(key: jax.Array, mode: Any) -> jax.Array:
        run_key, elbo_key = jax.random.split(key)
        guide = problem.new_guide(init_loc_fn=init_to_value(values=mode))
        svi = SVI(problem.model, guide, adam(problem, steps), problem.loss)
        params = unwatched(svi, run_key, steps, problem.data)

        def elbo(key: jax.Array) -> jax.Array:
            return -jnp.asarray(problem.loss.loss(key, params, problem.model, guide, *problem.data))

        return jax.lax.map(elbo, jax.random.split(elbo_key, problem.particles)).mean()

    every = jax.jit(lambda keys, modes: jax.lax.map(lambda both: one(*both), (keys, modes)))
    return np.asarray(every(jax.random.split(key, seeds), modes), np.float64)


def unwatched(svi: SVI, key: jax.Array, steps: int, data: tuple[Any, ...]) -> Any:
    """The parameters after a run within `jit`."""
    state = jax.lax.fori_loop(0, steps, lambda _, state: svi.update(state, *data)[0], svi.init(key, *data))
    return svi.get_params(state)


PATHS, DRAWS = 16, 25


def pathfinder(make: Make, steps: int, key: jax.Array, seeds: int) -> np.ndarray | None:
    """BlackJAX's Pathfinder, 16 paths of at most 300 iterations; the approximation with the best ELBO.

    Its covariance is not diagonal. A path of n iterations takes about n gradients and 25 n evaluations for its ELBOs,
    which are not counted.
    """
    problem = make(1.0)
    if problem.guide is not None:
        return None
    iterations = min(steps // PATHS, 300)

    def one(key: jax.Array) -> jax.Array:
        def path(key: jax.Array) -> jax.Array:
            start_key, path_key, elbo_key = jax.random.split(key, 3)
            initial, potential, *_ = initialize_model(start_key, problem.model, model_args=problem.data)
            flat, unravel = ravel_pytree(initial.z)

            def log_density(z: jax.Array) -> jax.Array:
                return -potential(unravel(z))

            state, _ = blackjax.vi.pathfinder.approximate(
                path_key, log_density, flat, num_samples=DRAWS, maxiter=iterations, ftol=1e-6
            )
            draws, log_q = blackjax.vi.pathfinder.sample(elbo_key, state, problem.particles)
            return jnp.mean(jax.lax.map(log_density, draws) - log_q)

        elbos = jax.lax.map(path, jax.random.split(key, PATHS))
        return jnp.max(jnp.where(jnp.isfinite(elbos), elbos, -jnp.inf))

    return np.asarray(jax.jit(lambda keys: jax.lax.map(one, keys))(jax.random.split(key, seeds)), np.float64)


def pymc_advi(make: Make, steps: int, key: jax.Array, seeds: int) -> np.ndarray | None:
    """PyMC's ADVI as it comes: mean field, its own optimiser and rate, on the log density of unconstrained latents."""
    problem = make(1.0)
    if problem.guide is not None:
        return None
    import pymc  # takes seconds to import
    from pytensor.link.jax.ops import wrap_jax

    logging.getLogger("pymc").setLevel(logging.ERROR)
    models = [
        initialize_model(start_key, problem.model, model_args=problem.data)
        for start_key in jax.random.split(key, seeds)
    ]
    starts = [ravel_pytree(model.param_info.z)[0] for model in models]
    potential, unravel = models[0].potential_fn, ravel_pytree(models[0].param_info.z)[1]  # the same for all seeds

    def log_density(z: Any) -> jax.Array:
        return -potential(unravel(z.astype(jnp.float32)))

    @jax.jit
    def elbo(key: jax.Array, mean: jax.Array, scale: jax.Array) -> jax.Array:
        q = dist.Normal(mean, scale).to_event(1)
        draws = q.sample(key, (problem.particles,))
        return jnp.mean(jax.lax.map(log_density, draws) - q.log_prob(draws))

    elbos = []
    for i, start in enumerate(starts):
        with pymc.Model():
            z = pymc.Flat("z", shape=start.shape)
            pymc.Potential("log_density", cast(Any, wrap_jax(log_density)(z)))
            try:
                fitted = pymc.fit(
                    steps, method="advi", start={"z": np.asarray(start, float)}, random_seed=i, progressbar=False
                )
            except FloatingPointError:  # it ended with NaN
                elbos.append(-np.inf)
                continue
        moments = (jnp.asarray(x.eval(), jnp.float32) for x in (fitted.mean, fitted.std))
        elbos.append(float(elbo(jax.random.fold_in(key, i), *moments)))
    return np.array(elbos)


REMEDIES: dict[str, Callable[[Make, int, jax.Array, int], np.ndarray | None]] = {
    "one run": plain,
    "best of 4": partial(plain, restarts=4),
    "best of 16": partial(plain, restarts=16),
    "small start": partial(plain, scale=0.1),
    "MAP start": map_start,
    "KL warm-up": warm_up,
    "annealing": annealing,
    "PVI, entropy": pvi,
    "PVI, mean and variance": partial(pvi, statistic=proxvi.mean_variance),
    "speed limit": speed_limit,
    "race, plain": race,
    "race, plain and speed limit": partial(race, methods=("plain", "speed limit")),
    "race of MAP starts": race_of_modes,
    "Pathfinder": pathfinder,
    "PyMC's ADVI": pymc_advi,
}
