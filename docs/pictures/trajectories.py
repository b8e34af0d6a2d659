"""Draw where the means of figure 1's model go, by four methods: real trajectories of 25 starts on one data set.

    python docs/pictures/trajectories.py

The settings are those of `proxvi reproduce figure-1`; the speed limit has none. The pictures are written beside this
file.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import proxvi
from proxvi.plots import COLOURS, pyplot, save
from proxvi_paper.experiments.figure_1 import TRUTH, ring
from proxvi_paper.models import factor

STEPS, EVERY, STARTS = 10_000, 25, 25
BLUE, ORANGE = COLOURS[:2]


def entropy(params: factor.Factor) -> Any:
    """The entropy of every feature of every point."""
    return proxvi.entropy(factor.posterior(params))


def run(optimizer: Any, heat: Any, x: jax.Array, start: jax.Array) -> tuple[Any, Any]:
    """The means on the way, and the ELBO at the end."""
    optimizer = optax.with_extra_args_support(optimizer)
    params = factor.start(start)

    def step(carry: Any, t: Any) -> Any:
        params, state = carry
        loss, gradient = jax.value_and_grad(lambda p: -factor.elbo(p, x, heat(t, start, x)))(params)
        updates, state = optimizer.update(gradient, state, params, value=loss)
        return (optax.apply_updates(params, updates), state), None

    def stretch(carry: Any, t: Any) -> Any:
        return jax.lax.scan(step, carry, t + jnp.arange(EVERY))[0], carry[0].means

    (params, _), means = jax.lax.scan(stretch, (params, optimizer.init(params)), jnp.arange(0, STEPS, EVERY))
    return jnp.concatenate([means, params.means[None]]), factor.elbo(params, x)


def main() -> None:
    """Run all starts by each method, and draw them."""
    plt = pyplot()
    x, starts = factor.simulate(jax.random.split(jax.random.key(0), 10)[0], TRUTH), ring(STARTS)
    decay = optax.exponential_decay(1.0, STEPS, 1e-10)
    adam = optax.adam(0.1, b2=0.99)  # see the study of the settings in docs/figure-1.md

    def cold(_t: Any, _start: Any, _x: Any) -> Any:
        return 1.0

    def annealed(t: Any, start: Any, x: Any) -> Any:
        return jnp.maximum(1.0, jnp.abs(factor.elbo(factor.start(start), x)) * decay(t))

    methods = {
        "VI": (adam, cold),
        "annealing": (adam, annealed),
        "PVI, entropy": (proxvi.proximity(adam, proxvi.Proximity(entropy, magnitude=decay)), cold),
        "speed limit": (optax.chain(optax.adam(0.1), proxvi.speed_limit(entropy, over=STEPS / 3)), cold),
    }
    best = float(run(adam, cold, x, TRUTH + jnp.array([1e-3, -1e-3]))[1])
    figure, panels = plt.subplots(1, 4, figsize=(13, 3.7), sharex=True, sharey=True, layout="constrained")
    for axes, (name, (optimizer, heat)) in zip(panels, methods.items(), strict=True):
        every = jax.jit(jax.vmap(lambda start, o=optimizer, h=heat: run(o, h, x, start)))
        paths, elbos = map(np.asarray, every(starts))
        free = elbos >= best - 2.0
        axes.plot(*paths.transpose(2, 1, 0), color="0.6", lw=0.7, zorder=1)
        axes.plot(*paths[:, 0].T, ".", color="0.4", ms=4, zorder=2)
        axes.plot(*paths[~free, -1].T, "X", color=ORANGE, ms=7, zorder=4)
        axes.plot(*paths[free, -1].T, "o", color=BLUE, ms=6, zorder=3)
        axes.set(title=f"{name}: {free.sum()} of {STARTS} not trapped", xlabel="$\\mu_1$", aspect="equal")
        axes.spines[["top", "right"]].set_visible(False)
        print(f"{name:14} {free.sum()} of {STARTS} not trapped, median {np.median(best - elbos):.1f} nats below")
    panels[0].set_ylabel("$\\mu_2$")
    save(figure, Path(__file__).with_suffix(".png"), svg=True)


if __name__ == "__main__":
    main()
