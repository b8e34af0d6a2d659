"""How much does an inference depend on its start? Two of them, by four methods.

    python examples/sensitivity.py --picture sensitivity.png

`mixture` is a Gaussian mixture with its assignments summed out, as in NumPyro's examples; its means and weights have a
mean-field normal posterior. `network` is the posterior of a small neural network for a curve in one dimension. Each
runs from many keys as one program, and the report says where they end.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO, init_to_sample
from numpyro.infer.autoguide import AutoNormal

import proxvi
from proxvi import plots


def mixture() -> tuple[Any, tuple[Any, ...]]:
    """Five clusters on a line; which mean explains which is up to the start."""
    centres = jnp.array([-8.0, -4.0, 0.0, 4.0, 8.0])
    key = jax.random.key(0)
    data = centres[jnp.arange(200) % 5] + 0.7 * jax.random.normal(key, (200,))

    def model(data):
        weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(5)))
        means = numpyro.sample("means", dist.Normal(jnp.zeros(5), 10.0).to_event(1))
        with numpyro.plate("data", data.shape[0]):
            components = dist.Normal(means, 0.7)
            numpyro.sample("x", dist.MixtureSameFamily(dist.Categorical(weights), components), obs=data)

    return model, (data,)


def network() -> tuple[Any, tuple[Any, ...]]:
    """A curve through 40 noisy points; 10 hidden units."""
    x = jnp.linspace(-3.0, 3.0, 40)
    y = jnp.sin(2 * x) + 0.1 * jax.random.normal(jax.random.key(1), (40,))

    def model(x, y):
        W = jnp.asarray(numpyro.sample("W", dist.Normal(jnp.zeros(10), 3.0).to_event(1)))
        b = jnp.asarray(numpyro.sample("b", dist.Normal(jnp.zeros(10), 3.0).to_event(1)))
        v = numpyro.sample("v", dist.Normal(jnp.zeros(10), 1.0).to_event(1))
        hidden = jnp.tanh(x[:, None] * W[None] + b[None])
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(hidden @ v, 0.1), obs=y)

    return model, (x, y)


def methods(steps: int, b2: float) -> dict[str, tuple[Any, Any, Any]]:
    """Optimiser, loss and constraint of each method."""
    adam = optax.adam(optax.cosine_decay_schedule(0.02, steps), b2=b2)
    elbo = TraceMeanField_ELBO(num_particles=5)
    decay = optax.exponential_decay(1.0, steps // 2, 1e-10)
    return {
        "VI": (adam, elbo, ()),
        "annealing": (adam, proxvi.AnnealedELBO(Trace_ELBO(num_particles=5), decay), ()),
        "PVI, entropy": (adam, elbo, proxvi.Proximity(proxvi.entropy, magnitude=decay)),
        "speed limit": (adam, elbo, proxvi.SpeedLimit()),
    }


def run(
    problem: tuple[Any, tuple[Any, ...]], method: tuple[Any, Any, Any], starts: int, steps: int, scale: float
) -> Any:
    (model, data), (optimizer, loss, constraint) = problem, method

    def optimise(key):
        guide = AutoNormal(model, init_loc_fn=init_to_sample, init_scale=scale)  # a used one would start as before
        svi = proxvi.ProximitySVI(model, guide, optimizer, loss, constraint)
        result = svi.run(key, steps, *data, progress_bar=False)
        return result.params, -result.losses

    return proxvi.luck(optimise, jax.random.key(2), starts=starts, average_last=steps // 20)


def summary(runs: dict[str, proxvi.Luck]) -> str:
    """One row a run, as a table in Markdown: the best of all counts, and not each method's own."""
    best: dict[str, float] = {}
    for name, ended in runs.items():
        problem = name.split(", ")[0]
        best[problem] = max(best.get(problem, ended.best_found), ended.best_found)
    lines = ["| inference, method | within 2 nats of the best | best | median | worst |", "|---|---|---|---|---|"]
    for name, ended in runs.items():
        good = replace(ended, best_known=best[name.split(", ")[0]]).good
        ends = " | ".join(f"{end:.1f}" for end in (ended.best_found, np.median(ended.elbos), np.min(ended.elbos)))
        lines.append(f"| {name} | {good} of {len(ended.elbos)} | {ends} |")
    return "\n".join(lines)


def main() -> dict[str, Any]:
    """Run both by all methods, print the reports, save the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    problems = {"mixture": mixture, "network": network}
    parser.add_argument("--only", nargs="+", choices=problems, default=list(problems), help="which of the two")
    every = list(methods(1, 0.99))
    parser.add_argument("--methods", nargs="+", choices=every, default=every, help="which of them")
    parser.add_argument("--starts", type=int, default=100)
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--b2", type=float, default=0.99, help="of Adam; Optax's default is 0.999")
    parser.add_argument("--init-scale", type=float, default=0.1, help="of the autoguide; NumPyro's default is 0.1")
    parser.add_argument("--picture", type=Path, default=None, help="where to save it; needs matplotlib")
    arguments = parser.parse_args()
    runs = {}
    for name in arguments.only:
        for title, method in methods(arguments.steps, arguments.b2).items():
            if title not in arguments.methods:
                continue
            ended = run(problems[name](), method, arguments.starts, arguments.steps, arguments.init_scale)
            runs[f"{name}, {title}"] = ended
            print(f"{name}, {title}\n{ended}\n", flush=True)
    print(summary(runs))
    if arguments.picture is not None:
        plots.luck(runs, arguments.picture)
    return runs


if __name__ == "__main__":
    main()
