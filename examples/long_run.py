"""A run that can be killed: start it, stop it however you like, start it again.

    python examples/long_run.py --folder runs/bars

A sigmoid belief network of 16 units learns pictures of bars (8 × 8 pixels, each of 16 bars there or not). Its start
switches every unit off; the entropy constraint keeps them alive until the weights have found their place.

Started by SLURM (`sbatch examples/slurm.sh`) or Kubernetes (`kubectl apply -f examples/kubernetes.yaml`), its processes
train together: every batch is split among their devices.
"""

import argparse
import os
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax

import proxvi
from proxvi.training import trackers

SIZE, UNITS, BATCH = 8, 16, 64
PIXELS = SIZE * SIZE


def bars(key, count):
    """Pictures in which each of 8 rows and 8 columns is lit with probability 1/8."""
    row, column = jax.random.bernoulli(key, 1 / 8, (2, count, SIZE))
    return (row[:, :, None] | column[:, None, :]).reshape(count, PIXELS).astype(jnp.float32)


@contextmanager
def each_picture(pictures):
    """The ELBO is that of one picture, whatever the size of a batch."""
    count = pictures.shape[0]
    with numpyro.handlers.scale(scale=1 / count), numpyro.plate("data", count):
        yield


def model(pictures):
    weights = jnp.asarray(numpyro.param("weights", jnp.full((UNITS, PIXELS), -5.0)))
    bias = jnp.asarray(numpyro.param("bias", jnp.zeros(PIXELS)))
    prior = numpyro.param("prior", jnp.full(UNITS, jnp.log(0.001 / 0.999)))
    with each_picture(pictures):
        z = numpyro.sample("z", dist.Bernoulli(logits=prior).to_event(1))
        numpyro.sample("x", dist.Bernoulli(logits=z @ weights + bias).to_event(1), obs=pictures)


def guide(pictures):
    kernel = jax.nn.initializers.glorot_normal()(jax.random.key(0), (PIXELS, UNITS))
    weights, bias = numpyro.param("encoder", kernel), numpyro.param("encoder_bias", jnp.zeros(UNITS))
    with each_picture(pictures):
        numpyro.sample("z", dist.Bernoulli(logits=pictures @ weights + bias).to_event(1))


def join_others():
    """Find the other processes of this job; those of SLURM JAX finds by itself."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if "JOB_COMPLETION_INDEX" in os.environ:  # an indexed job of Kubernetes
        number, index = int(os.environ["PROCESSES"]), int(os.environ["JOB_COMPLETION_INDEX"])
        jax.distributed.initialize(os.environ["COORDINATOR"], number, index)
    elif "SLURM_STEP_NODELIST" in os.environ:
        jax.distributed.initialize()


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints and metrics")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--tensorboard", action="store_true", help="watch it: tensorboard --logdir FOLDER")
    arguments = parser.parse_args()
    join_others()

    magnitude = optax.exponential_decay(1.0, arguments.steps // 2, 1e-10)
    constraint = proxvi.Proximity(proxvi.entropy, magnitude=magnitude, reference=proxvi.statistic_average())
    svi = proxvi.ProximitySVI(model, guide, optax.adam(0.01, b2=0.99), proxvi.LeaveOneOutELBO(5), constraint)
    tracker = trackers.to_tensorboard(arguments.folder / "tensorboard") if arguments.tensorboard else None
    result = proxvi.fit(
        svi,
        jax.random.key(0),
        arguments.steps,
        bars(jax.random.key(1), 5_000),
        batch_size=BATCH,  # a multiple of the number of devices
        checkpointing=proxvi.Checkpointing(arguments.folder / "checkpoints", every=5.0),
        reporting=proxvi.Reporting(every=500, metrics_file=arguments.folder / "metrics.jsonl", callback=tracker),
        validation=proxvi.Validation(bars(jax.random.key(2), 200)),
        mesh=jax.make_mesh((jax.device_count(),), ("data",)) if jax.device_count() > 1 else None,
    )
    final = -float(result.losses[-100:].mean())
    print(f"ELBO of a picture: {final:.1f}; the best possible is about {-SIZE * 2 * 0.377:.1f}")


if __name__ == "__main__":
    main()
