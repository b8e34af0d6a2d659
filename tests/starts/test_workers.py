"""Starts that are dealt to the workers of an executor: a real Dask cluster, one of whose workers is killed."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.sharding import Mesh
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import proxvi

KEY = jax.random.key(0)
Y = jnp.sin(1.3 * jnp.arange(60))


def svi() -> SVI:
    # Defined here, and so sent to the workers by value: they cannot import this file.
    def wave(y: Any) -> None:
        frequency = jnp.asarray(numpyro.sample("frequency", dist.Uniform(0.0, 3.0)))
        numpyro.sample("y", dist.Normal(jnp.sin(frequency * jnp.arange(60)), 0.3).to_event(1), obs=y)

    return SVI(wave, AutoNormal(wave), optax.adam(0.01), Trace_ELBO())


def race(steps: int, **options: Any) -> proxvi.Race:
    return proxvi.race(svi(), KEY, steps, Y, progress_bar=False, **options)


def assert_same(one: proxvi.Race, other: proxvi.Race) -> None:
    assert (one.start, one.elbo) == (other.start, other.elbo)
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    for a, b in zip(one.rounds, other.rounds, strict=True):
        np.testing.assert_array_equal(a.lanes, b.lanes)
        np.testing.assert_array_equal(a.scores, b.scores)


def test_workers_find_the_same_winner_to_the_bit() -> None:
    steps = 3_000
    with ThreadPoolExecutor(2) as executor:
        assert_same(race(steps, executor=executor), race(steps))


def test_luck_is_the_same_to_the_bit() -> None:
    settings: dict[str, Any] = {"starts": 5, "progress_bar": False}
    with ThreadPoolExecutor(2) as executor:
        theirs = proxvi.luck(svi(), KEY, 300, Y, executor=executor, **settings)
    np.testing.assert_array_equal(theirs.elbos, proxvi.luck(svi(), KEY, 300, Y, **settings).elbos)


def test_a_mesh_and_an_executor_are_refused_together() -> None:
    with ThreadPoolExecutor(1) as executor, pytest.raises(ValueError, match="`mesh` must be None with an `executor`"):
        race(3_000, executor=executor, mesh=Mesh(np.array(jax.devices()[:1]), "lanes"))


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_a_dask_cluster_whose_worker_is_killed_finds_the_same_winner() -> None:
    distributed = pytest.importorskip("distributed")
    steps = 400_000
    alone = race(steps)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        killed: list[int] = []

        def kill_one() -> None:
            while not (busy := [worker for worker, tasks in client.processing().items() if tasks]):
                time.sleep(0.05)
            time.sleep(5.0)  # into its work
            pid = client.run(os.getpid)[busy[0]]
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

        murder = threading.Thread(target=kill_one)
        murder.start()
        together = race(steps, executor=client.get_executor())
        murder.join()
        assert killed
        assert killed[0] not in client.run(os.getpid).values()
    assert_same(together, alone)
