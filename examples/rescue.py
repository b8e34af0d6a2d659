"""Two inferences that depend on luck, and what rescues them.

    python examples/rescue.py mixture
    PROXVI_DATA=... python examples/rescue.py network

`mixture` is a Gaussian mixture whose means start anywhere; `network` a sigmoid belief network of 50 units with a bad
initialisation (prior 0.001, all generative weights −10) on 500 binarised MNIST digits. Every method gets the same
number of gradient steps and the same 20 seeds, all in one program. The table counts the seeds that come close to the
best ELBO that any of them found from the bad start; the picture shows them all. Those in parentheses start well.
"""

import argparse
import json
import platform
import re
import time
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI

import proxvi
from proxvi_paper.datasets import binarized_mnist


class Problem(NamedTuple):
    """A model and guide with arguments `(data, kl_weight)`, and how they are started and judged."""

    model: Any
    guide: Any
    init: Any  # (key, start) -> parameters; start is "bad", "small" or "good"
    data: Any
    batch_size: int | None
    learning_rate: float
    steps: int
    close: Any  # best ELBO -> the ELBO from which on a seed counts as rescued


def mixture() -> Problem:
    """Five clusters in the plane; each of 100 points has a discrete assignment of its own."""
    clusters, points = 5, 100
    angles = 2 * jnp.pi * jnp.arange(clusters) / clusters
    centres = 6.0 * jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)
    data = centres[jnp.arange(points) % clusters] + jax.random.normal(jax.random.key(0), (points, 2))

    def model(data, kl_weight):
        means = jnp.asarray(numpyro.param("means", centres))
        with numpyro.plate("data", points):
            with numpyro.handlers.scale(scale=kl_weight):
                z = numpyro.sample("z", dist.CategoricalLogits(jnp.zeros(clusters)))
            numpyro.sample("x", dist.Normal(means[z], 1.0).to_event(1), obs=data)

    def guide(data, kl_weight):
        del data
        logits = numpyro.param("logits", jnp.zeros((points, clusters)))
        with numpyro.plate("data", points), numpyro.handlers.scale(scale=kl_weight):
            numpyro.sample("z", dist.CategoricalLogits(logits))

    def init(key, start):
        means = jax.random.normal(key, (clusters, 2))
        means = {"bad": 10.0 * means, "small": 0.1 * means, "good": centres}[start]
        return {"means": means, "logits": jnp.zeros((points, clusters))}

    return Problem(model, guide, init, data, None, 0.05, 10_000, lambda best: best - 2.0)


def network() -> Problem:
    """A sigmoid belief network whose start switches every unit off."""
    units, pixels = 50, 784
    data = jnp.asarray(binarized_mnist().train[:500], jnp.float32)
    mean = data.mean(0)

    def model(data, kl_weight):
        weights = jnp.asarray(numpyro.param("weights", jnp.zeros((units, pixels))))
        bias = jnp.asarray(numpyro.param("bias", jnp.zeros(pixels)))
        prior = numpyro.param("prior", jnp.zeros(units))
        with numpyro.plate("data", data.shape[0]):
            with numpyro.handlers.scale(scale=kl_weight):
                z = numpyro.sample("z", dist.Bernoulli(logits=prior).to_event(1))
            numpyro.sample("x", dist.Bernoulli(logits=z @ weights + bias).to_event(1), obs=data)

    def guide(data, kl_weight):
        weights = numpyro.param("encoder", jnp.zeros((pixels, units)))
        bias = numpyro.param("encoder_bias", jnp.zeros(units))
        with numpyro.plate("data", data.shape[0]), numpyro.handlers.scale(scale=kl_weight):
            numpyro.sample("z", dist.Bernoulli(logits=(data - mean) @ weights + bias).to_event(1))

    def init(key, start):
        model_key, guide_key = jax.random.split(key)
        glorot = jax.nn.initializers.glorot_normal()
        good = start == "good"
        return {
            "weights": glorot(model_key, (units, pixels)) if good else jnp.full((units, pixels), -10.0),
            "bias": jnp.zeros(pixels),
            "prior": jnp.zeros(units) if good else jnp.full(units, jnp.log(0.001 / 0.999)),
            "encoder": glorot(guide_key, (pixels, units)) * (0.1 if start == "small" else 1.0),
            "encoder_bias": jnp.zeros(units),
        }

    return Problem(model, guide, init, data, 20, 0.02, 20_000, lambda best: 1.01 * best)


def fit(problem: Problem, svi: Any, key: Any, steps: int, *, start: str = "bad", warm_up: bool = False) -> Any:
    """Train, and return the ELBO of all the data at the end, by 100 particles."""
    init_key, state_key, batch_key, final_key = jax.random.split(key, 4)
    weights = jnp.minimum(1.0, (1 + jnp.arange(steps)) / (steps / 2)) if warm_up else jnp.ones(steps)

    def batch(t):
        if problem.batch_size is None:
            return problem.data
        index = jax.random.randint(jax.random.fold_in(batch_key, t), (problem.batch_size,), 0, len(problem.data))
        return problem.data[index]

    state = svi.init(state_key, batch(0), 1.0, init_params=problem.init(init_key, start))

    def step(state, t):
        return svi.update(state, batch(t), weights[t])[0], None

    state, _ = jax.lax.scan(step, state, jnp.arange(steps))
    estimate = proxvi.LeaveOneOutELBO(100, vectorize_particles=False)
    return -estimate.loss(final_key, svi.get_params(state), problem.model, problem.guide, problem.data, 1.0)


def statistic_of(problem: Problem) -> Any:
    """The entropy of each unit."""

    def by_point(q):  # the 100 assignments have logits of their own, so each is a unit, not one of a batch
        return proxvi.entropy(q["z"].to_event(1))

    return by_point if problem.batch_size is None else proxvi.entropy


def methods(problem: Problem, steps: int) -> dict[str, Any]:
    """Each method as a function of a key that returns the final ELBO."""
    elbo = proxvi.LeaveOneOutELBO(5)
    # The magnitude is down to 1e-10 of its start by half-time; the rest of the run is for the ELBO alone. Adam forgets
    # within 100 steps how large the gradients were: with its default of 1,000 it would step too little in a short run.
    decay = optax.exponential_decay(1.0, steps // 2, 1e-10)

    def optimizer(steps):
        return optax.adam(optax.cosine_decay_schedule(problem.learning_rate, steps), b2=0.99)

    adam = optimizer(steps)
    plain = partial(SVI, problem.model, problem.guide)
    ours = partial(proxvi.ProximitySVI, problem.model, problem.guide, adam)
    clipped = optax.chain(optax.clip_by_global_norm(10.0), adam)

    def restarts(key):
        runs = [fit(problem, plain(optimizer(steps // 5), elbo), k, steps // 5) for k in jax.random.split(key, 5)]
        return jnp.max(jnp.stack(runs))

    statistic = statistic_of(problem)
    # A speed limit does not touch Adam's moments, so Adam is as it comes; the last row tells what b2 changes.
    rate = optax.cosine_decay_schedule(problem.learning_rate, steps)
    limit = proxvi.SpeedLimit(statistic, over=steps / 3)
    limited = proxvi.ProximitySVI(problem.model, problem.guide, optax.adam(rate), elbo, limit)
    limited_adam = proxvi.ProximitySVI(problem.model, problem.guide, adam, elbo, limit)
    return {
        "(VI, good start)": lambda key: fit(problem, plain(adam, elbo), key, steps, start="good"),
        "VI": lambda key: fit(problem, plain(adam, elbo), key, steps),
        "VI, small start": lambda key: fit(problem, plain(adam, elbo), key, steps, start="small"),
        "VI, clipped gradients": lambda key: fit(problem, plain(clipped, elbo), key, steps),
        "VI, best of 5 restarts": restarts,
        "VI, KL warm-up": lambda key: fit(problem, plain(adam, elbo), key, steps, warm_up=True),
        "annealing": lambda key: fit(problem, ours(proxvi.AnnealedELBO(elbo, decay), ()), key, steps),
        "PVI, entropy": lambda key: fit(problem, ours(elbo, proxvi.Proximity(statistic, magnitude=decay)), key, steps),
        "PVI, entropy, statistic average": lambda key: fit(
            problem,
            ours(elbo, proxvi.Proximity(statistic, magnitude=decay, reference=proxvi.statistic_average())),
            key,
            steps,
        ),
        "(speed limit, good start)": lambda key: fit(problem, limited, key, steps, start="good"),
        "speed limit": lambda key: fit(problem, limited, key, steps),
        "speed limit, b2 0.99": lambda key: fit(problem, limited_adam, key, steps),
    }


def picture(elbos: dict[str, np.ndarray], threshold: float, title: str, path: Path) -> None:
    """One row of dots a method, the line from which on a seed counts as rescued."""
    from proxvi.plots import COLOURS, pyplot, save

    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 0.45 * len(elbos) + 1.4), layout="constrained")
    for row, values in enumerate(elbos.values()):
        good = values >= threshold
        axes.plot(-values[good], np.full(good.sum(), row), "o", color=COLOURS[0], alpha=0.6)
        axes.plot(-values[~good], np.full((~good).sum(), row), "o", color=COLOURS[1], alpha=0.6)
    axes.axvline(-threshold, color="grey", lw=1)
    axes.set_yticks(range(len(elbos)), [f"{name}  {int((v >= threshold).sum())}/{len(v)}" for name, v in elbos.items()])
    axes.set(xscale="log", xlabel="−ELBO of a data point after training (left is better)", title=title)
    axes.xaxis.set_major_locator(plt.MaxNLocator(8, steps=[1, 2, 5, 10]))  # by decades, there would be none above 100
    axes.xaxis.set_minor_locator(plt.NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.invert_yaxis()
    save(figure, path)


def finished(path: Path | None, settings: dict[str, Any]) -> np.ndarray | None:
    """The ELBOs of an earlier run with the same settings, if it was saved."""
    if path is None or not path.exists():
        return None
    saved = json.loads(path.read_text())
    if saved["settings"] != settings:
        raise SystemExit(f"{path} holds {saved['settings']}, not {settings}; name another folder for --results.")
    return np.array(saved["elbos"])


def save_result(
    path: Path, settings: dict[str, Any], elbos: np.ndarray, seconds: float, script: str = "rescue.py"
) -> None:
    """One result file a method, with what is needed to make it again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    versions = {name: metadata.version(name) for name in ("proxvi", "jax", "numpyro", "optax")}
    command = f"python examples/{script} {settings['problem']} --seeds {settings['seeds']} --steps {settings['steps']}"
    record = {"settings": settings, "elbos": elbos.tolist(), "seconds": round(seconds), "command": command}
    hardware = f"{platform.machine()}, {jax.device_count()} {jax.devices()[0].platform} device"
    path.write_text(json.dumps({**record, "versions": versions, "hardware": hardware}, indent=1) + "\n")


def main() -> dict[str, np.ndarray]:
    """Run one problem with all methods; print the table and save the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("problem", choices=["mixture", "network"])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=None, help="10,000 for the mixture, 20,000 for the network")
    parser.add_argument(
        "--results", type=Path, default=None, help="a folder of result files; what is there is not rerun"
    )
    parser.add_argument("--picture", type=Path, default=None, help="where to save it; needs matplotlib")
    parser.add_argument("--only", nargs="*", default=None, help="names of methods to run")
    arguments = parser.parse_args()

    problem = {"mixture": mixture, "network": network}[arguments.problem]()
    steps = arguments.steps or problem.steps
    keys = jax.random.split(jax.random.key(0), arguments.seeds)
    elbos = {}
    for name, method in methods(problem, steps).items():
        if arguments.only and name not in arguments.only:
            continue
        settings = {"problem": arguments.problem, "method": name, "seeds": arguments.seeds, "steps": steps}
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        path = arguments.results and arguments.results / f"{arguments.problem}-{slug}.json"
        known = finished(path, settings)
        if known is None:
            started = time.perf_counter()
            # All seeds in one program; one after the other where a seed fills the processor by itself.
            every = jax.vmap(method) if problem.batch_size is None else partial(jax.lax.map, method)
            known = np.asarray(jax.jit(every)(keys)) / len(problem.data)
            if path is not None:
                save_result(path, settings, known, time.perf_counter() - started)
        elbos[name] = known
        print(f"{name}: {np.sort(known).round(3)}", flush=True)
    rescues = {name: values for name, values in elbos.items() if not name.startswith("(")} or elbos
    best = max(np.nanmax(values) for values in rescues.values()) * len(problem.data)
    threshold = problem.close(best) / len(problem.data)
    print(f"\nbest ELBO a data point {best / len(problem.data):.3f}; rescued from {threshold:.3f} on\n")
    print("| method | rescued | median | worst |\n|---|---|---|---|")
    for name, values in elbos.items():
        rescued = int((values >= threshold).sum())
        print(f"| {name} | {rescued} of {len(values)} | {np.median(values):.3f} | {np.min(values):.3f} |")
    if arguments.picture is not None:
        picture(elbos, threshold, f"{arguments.problem}, {arguments.seeds} seeds, {steps:,} steps", arguments.picture)
    return elbos


if __name__ == "__main__":
    main()
