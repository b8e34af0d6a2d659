"""Draw what a speed limit does in a run: entropy, floor and pull of README's mixture.

    python docs/pictures/speed_limit.py

Three clusters, all means start on one side. The pictures are written beside this file.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

import proxvi
from proxvi.plots import COLOURS, pyplot, save

STEPS = 4_000
(BLUE, ORANGE), GREY = COLOURS[:2], "0.45"


def model(x: jax.Array) -> None:
    """Three clusters of unit variance."""
    means = jnp.asarray(numpyro.param("means", jnp.array([10.0, 11.0, 12.0])))
    with numpyro.plate("data", len(x)):
        z = numpyro.sample("z", dist.CategoricalLogits(jnp.zeros(3)))
        numpyro.sample("x", dist.Normal(means[z], 1.0), obs=x)


def guide(x: jax.Array) -> None:
    """Each point has an assignment of its own."""
    logits = numpyro.param("logits", jnp.zeros((len(x), 3)))
    with numpyro.plate("data", len(x)):
        numpyro.sample("z", dist.CategoricalLogits(logits))


def entropy_by_point(q: dict[str, Any]) -> Any:
    """The entropy of each point's assignment."""
    return proxvi.entropy(q["z"].to_event(1))


def run(constraint: Any, x: jax.Array) -> dict[str, np.ndarray]:
    """Mean entropy, floor and pull at every step, and the ELBO at the end."""
    svi = proxvi.ProximitySVI(model, guide, optax.adam(0.05), proxvi.LeaveOneOutELBO(5), constraint)

    def step(state: Any, _: Any) -> Any:
        state, loss = svi.update(state, x)
        q = dist.CategoricalLogits(svi.get_params(state)["logits"])
        row = {"entropy": proxvi.entropy(q), "elbo": -loss}
        if constraint:
            (kept,) = state.constraints
            row |= {"floor": jnp.mean(kept.constraint.floor), "pull": kept.telemetry.pull}
        return state, row

    _, rows = jax.jit(lambda state: jax.lax.scan(step, state, length=STEPS))(svi.init(jax.random.key(1), x))
    return jax.tree.map(np.asarray, rows)


def main() -> None:
    """Run with and without the limit, and draw both."""
    plt = pyplot()
    x = jnp.array([-6.0, 0.0, 6.0])[jnp.arange(150) % 3] + jax.random.normal(jax.random.key(0), (150,))
    plain, limited = run((), x), run(proxvi.SpeedLimit(entropy_by_point, over=STEPS / 3), x)
    steps = np.arange(STEPS)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", width_ratios=(3, 2))
    ends = {name: found["elbo"][-100:].mean() for name, found in {"VI": plain, "limited": limited}.items()}
    left.plot(steps, plain["entropy"], color=ORANGE)
    left.plot(steps, limited["entropy"], color=BLUE)
    end = 2 * STEPS // 3  # of the limit
    left.plot(steps[:end], limited["floor"][:end], color=GREY, ls="--", lw=1)
    left.annotate(f"VI gives it up\nat once: ELBO {ends['VI']:.0f}", (1750, 0.06), color=ORANGE, va="bottom")
    left.annotate(f"with a speed limit:\nELBO {ends['limited']:.0f}", (750, 0.68), color=BLUE, va="bottom")
    left.annotate(
        "the floor: all of it may go\nin a third of the run, not faster", (1150, 0.28), color=GREY, va="bottom"
    )
    left.set(xlabel="step", ylabel="mean entropy, nats", title="Entropy of the assignments", ylim=(-0.03, 1.15))
    window = 25
    pull = np.convolve(limited["pull"], np.ones(window) / window, mode="same")
    right.plot(steps, pull, color=BLUE)
    right.set(
        xlabel="step", ylabel="lengths of Adam's update", title="How much of an update is changed", ylim=(0, None)
    )
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, Path(__file__).with_suffix(".png"), svg=True)


if __name__ == "__main__":
    main()
