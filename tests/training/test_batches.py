"""Batches: addressed by the step, or streamed and resumed at their place."""

from pathlib import Path
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import proxvi
from proxvi.training._batches import ORDERED_ROWS, Arrays, Stream

from . import faults
from .common import KEY, ROWS, CrashError, crash_at

# Many runs here are too short to let go of the constraint.
pytestmark = pytest.mark.filterwarnings("ignore:the constraint on:UserWarning")


def test_each_epoch_visits_every_row_once_in_another_order() -> None:
    source = Arrays((np.arange(103),), 10, KEY, longest=25)
    seen = []
    step = 0
    while step < 30:
        feed, length = source.feed(step, 30 - step)
        seen += [np.asarray(source.pick(feed, jnp.asarray(step + i), jnp.asarray(i))[0]) for i in range(length)]
        step += length
    epochs = np.array(seen).reshape(3, 100)
    assert all(len(set(epoch)) == 100 for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])
    again = Arrays((np.arange(103),), 10, KEY, longest=7)  # addressed by the step, whatever the length of a feed
    feed, _ = again.feed(17, 1)
    np.testing.assert_array_equal(again.pick(feed, jnp.asarray(17), jnp.asarray(0))[0], seen[17])


def test_orders_of_many_large_epochs_are_not_made_at_once() -> None:
    source = Arrays((np.arange(100_000),), 50_000, KEY, longest=1_000)
    (_, orders), length = source.feed(0, 1_000)
    assert orders.size <= ORDERED_ROWS
    assert length == 20  # ten epochs of two steps


class CountedBatches:
    """An iterator that says where it is by a number of NumPy's."""

    def __init__(self) -> None:
        self.position = np.int64(0)

    def __iter__(self) -> "CountedBatches":
        return self

    def __next__(self) -> np.ndarray:
        self.position += 1
        return np.ones((4, 2), np.float32)

    def get_state(self) -> dict[str, Any]:
        """Not JSON."""
        return {"position": self.position}


def test_a_position_that_a_checkpoint_cannot_hold_is_refused_before_the_first_step() -> None:
    source = Stream(CountedBatches(), longest=10)
    with pytest.raises(TypeError, match=r"`data` must have a `get_state` that returns JSON or bytes.*int64"):
        source.describe()


@pytest.mark.nightly
@pytest.mark.parametrize("batch_size", [50, pytest.param(500, marks=pytest.mark.nightly)])
def test_grain_resumes_in_the_middle_of_an_epoch(tmp_path: Path, batch_size: int) -> None:
    """10^4 or 10^5 records, streamed in shuffled batches; a crash in the second epoch."""
    records = 3.0 + np.random.default_rng(1).standard_normal((200 * batch_size, 2), np.float32)
    loaded: list[bytes] = []

    def note(batch: Any) -> Any:
        loaded.append(batch.tobytes())
        return batch

    def fit(folder: Path, callback: Any = None) -> Any:
        batches = grain.MapDataset.source(list(records)).shuffle(seed=0).batch(batch_size).map(note)
        loader = batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))

        def model(x: Any) -> None:
            mean = numpyro.sample("mean", dist.Normal(jnp.zeros(2), 10.0).to_event(1))
            with numpyro.plate("data", len(records), subsample_size=x.shape[0]):
                numpyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)

        constraint = proxvi.Proximity(proxvi.entropy, magnitude=optax.exponential_decay(1.0, 200, 1e-10))
        svi = proxvi.ProximitySVI(model, AutoNormal(model), optax.adam(0.01), Trace_ELBO(), constraint)
        reporting = proxvi.Reporting(every=30, callback=callback)
        return proxvi.fit(
            svi, KEY, 600, loader, checkpointing=proxvi.Checkpointing(folder, every=0.0), reporting=reporting
        )

    alone = fit(tmp_path / "alone")
    batches = set(loaded)
    assert len(batches) == 200
    with pytest.raises(CrashError):
        fit(tmp_path / "crash", callback=crash_at(330))
    loaded.clear()
    again = fit(tmp_path / "crash")
    assert faults.bits(again) == faults.bits(alone)
    assert set(loaded) <= batches  # the same batches, records and all
    assert len(loaded) <= 330  # and not from the beginning: the first to be looked at, and those from 300 on


@pytest.mark.nightly
@pytest.mark.parametrize("once", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["list", "generator"])
def test_a_plain_iterable_is_skipped_to_its_place(tmp_path: Path, once: bool) -> None:
    batches = [ROWS[100 * i : 100 * (i + 1)] for i in range(10)]

    def fit(folder: Path, callback: Any = None) -> Any:
        data = (batches[i % 10] for i in range(1_000)) if once else batches
        checkpointing = proxvi.Checkpointing(folder, every=0.0)
        reporting = proxvi.Reporting(every=10, callback=callback)
        return proxvi.fit(faults.make_svi(), KEY, 105, data, checkpointing=checkpointing, reporting=reporting)

    alone = fit(tmp_path / "alone")
    with pytest.raises(CrashError):
        fit(tmp_path / "crash", callback=crash_at(70))
    assert faults.bits(fit(tmp_path / "crash")) == faults.bits(alone)
    with pytest.raises(ValueError, match=r"`data` ended after 10 batches and cannot be started again"):
        proxvi.fit(faults.make_svi(), KEY, 105, (batch for batch in batches))
    with pytest.raises(ValueError, match="`batch_size` must be None where `data` is an iterable"):
        proxvi.fit(faults.make_svi(), KEY, 105, batches, batch_size=10)
