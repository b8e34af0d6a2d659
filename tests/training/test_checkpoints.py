"""Checkpoints: verified before they are used, refused if they are of another run."""

import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import proxvi
from proxvi.training._orbax_store import OrbaxStore
from proxvi.training.checkpoints import Checkpoints

from . import faults
from .common import KEY, ROWS

# Many runs here are too short to let go of the constraint.
pytestmark = pytest.mark.filterwarnings("ignore:the constraint on:UserWarning")


@pytest.mark.slow
def test_checkpoints_of_another_run_are_refused_by_name(tmp_path: Path) -> None:
    def fit(
        rows: Any = ROWS,
        key: Any = KEY,
        steps: int = 200,
        rate: float = 0.05,
        batch_size: int = 100,
        configuration: Any = None,
    ) -> Any:
        svi = proxvi.ProximitySVI(faults.model, AutoNormal(faults.model), optax.adam(rate), Trace_ELBO(), ())
        checkpointing = proxvi.Checkpointing(tmp_path, configuration=configuration)
        return proxvi.fit(svi, key, steps, rows, batch_size=batch_size, checkpointing=checkpointing)

    fit()
    for name, options in {
        "batch_size": {"batch_size": 50},
        "key": {"key": jax.random.key(1)},
        "data": {"rows": ROWS[:500]},
        "data_digest": {"rows": ROWS + 1.0},
        "user": {"configuration": {"mine": 1}},
        "program": {"rate": 0.1},
    }.items():
        with pytest.raises(proxvi.ConfigurationError, match=rf"checkpoint 200 in .* for `{name}`.*, this run"):
            fit(**options)
    with pytest.raises(ValueError, match="`num_steps` must be at least 200"):
        fit(steps=100)
    assert len(fit(steps=300).losses) == 300  # going on for longer is no other run


@pytest.mark.slow
def test_a_constraint_on_another_site_is_another_run(tmp_path: Path) -> None:
    def model(x: Any) -> None:
        one, two = (numpyro.sample(name, dist.Normal(0.0, 1.0)) for name in ("one", "two"))
        numpyro.sample("x", dist.Normal(one + two, 1.0), obs=x)

    def fit(statistic: Any) -> Any:
        svi = proxvi.ProximitySVI(
            model, AutoNormal(model), optax.adam(0.1), Trace_ELBO(), proxvi.Proximity(statistic, magnitude=1.0)
        )
        return proxvi.fit(svi, KEY, 10, ROWS[:, 0], checkpointing=proxvi.Checkpointing(tmp_path))

    def of(site: str) -> Any:
        return lambda q: proxvi.entropy(q[site])

    fit(of("one"))
    fit(of("one"))
    with pytest.raises(proxvi.ConfigurationError, match=r"for `program` \(the program of a step"):
        fit(of("two"))


@pytest.mark.slow
def test_arrays_that_the_model_closes_over_are_part_of_the_run(tmp_path: Path) -> None:
    def fit(scale: Any) -> Any:
        def model(x: Any) -> None:
            numpyro.sample("x", dist.Normal(numpyro.sample("mean", dist.Normal(0.0, 1.0)), scale), obs=x)

        svi = SVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO())
        return proxvi.fit(svi, KEY, 10, ROWS[:, 0], checkpointing=proxvi.Checkpointing(tmp_path))

    fit(jnp.full(1_000, 1.0))
    fit(jnp.full(1_000, 1.0))
    with pytest.raises(proxvi.ConfigurationError, match="for `program`"):
        fit(jnp.full(1_000, 2.0))


@pytest.mark.slow
def test_settings_of_the_model_go_into_the_svi(tmp_path: Path) -> None:
    def model(x: Any, spread: float) -> None:
        numpyro.sample("x", dist.Normal(numpyro.sample("mean", dist.Normal(0.0, spread)), 1.0), obs=x)

    def fit(model: Any, **settings: Any) -> Any:
        held = proxvi.Proximity(proxvi.kl_to_prior, magnitude=1.0)
        svi = proxvi.ProximitySVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO(), held, **settings)
        checkpointing = proxvi.Checkpointing(tmp_path / str(settings))
        return proxvi.fit(svi, KEY, 10, ROWS[:, 0], batch_size=1_000, checkpointing=checkpointing)

    given, bound = fit(model, spread=2.0), fit(partial(model, spread=2.0))
    assert faults.bits(given) == faults.bits(bound)
    assert faults.bits(fit(model, spread=3.0)) != faults.bits(bound)
    (tmp_path / str({"spread": 2.0})).rename(tmp_path / str({"spread": 4.0}))
    with pytest.raises(proxvi.ConfigurationError, match="for `program`"):
        fit(model, spread=4.0)


def test_state_of_another_shape_or_dtype_is_refused_by_name(tmp_path: Path) -> None:
    folder = Checkpoints(OrbaxStore(tmp_path, keep=2), {})
    folder.save(5, {"weights": jnp.zeros((3, 2)), "key": KEY}, {"note": 1})
    folder.wait()
    for other in (jnp.zeros((2, 3)), jnp.zeros((3, 2), jnp.bfloat16)):
        with pytest.raises(proxvi.ConfigurationError, match=r"has 'float32\[3, 2\]' for `\['weights'\]`"):
            folder.restore(lambda _, other=other: {"weights": other, "key": KEY})
    restored = folder.restore(lambda _: {"weights": jnp.ones((3, 2)), "key": jax.random.key(7)})
    assert restored is not None
    assert np.all(restored.tree["weights"] == 0)
    assert jnp.all(jax.random.key_data(restored.tree["key"]) == jax.random.key_data(KEY))
    assert restored.notes == {"note": 1}
    folder.close()


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxvi.training._orbax_store.LONGEST_WAIT", 1)
    first = OrbaxStore(tmp_path, keep=2)
    with pytest.raises(RuntimeError, match=r"`Checkpointing\.folder` must be a folder that no other run uses"):
        OrbaxStore(tmp_path, keep=2)
    first.close()
    OrbaxStore(tmp_path, keep=2).close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "times"), [("flip", 10), ("cut", 5), pytest.param("flip", 100, marks=pytest.mark.nightly)]
)
def test_damaged_checkpoints_are_never_loaded(tmp_path: Path, kind: str, times: int) -> None:
    faults.damage(tmp_path, times, kind=kind, runs=1)


@pytest.mark.slow
def test_a_folder_in_which_nothing_is_intact_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    faults.run(tmp_path, checkpoint_every=300.0)
    for _ in range(2):
        for file in (tmp_path / "checkpoints").glob("*/state/d/*"):
            file.write_bytes(b"")
        with pytest.raises(OSError, match=r"nothing but 3000 \(.*\); look at them"):
            faults.run(tmp_path)


@pytest.mark.slow
def test_checkpoints_that_fail_to_load_for_once_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is out of memory, a network disk that hiccups: that is no damage."""
    whole = faults.bits(faults.run(tmp_path, checkpoint_every=300.0))

    def fail(*_: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    with monkeypatch.context() as patch:
        patch.setattr("proxvi.training.checkpoints._digest", fail)
        with pytest.raises(OSError, match=r"nothing but 3000 \(RESOURCE_EXHAUSTED\)"):
            faults.run(tmp_path)
    assert faults.bits(faults.run(tmp_path, callback=lambda *_: pytest.fail("it is there"))) == whole


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        OSError, match=r"`Checkpointing\.folder` must be a folder that can be written to, got .*choose another"
    ):
        faults.run(tmp_path / "file" / "folder", metrics_file=None)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_an_error_and_the_checkpoint_before_is_intact(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("this machine does not mount")
    subprocess.run(["umount", tmp_path], check=True)
    faults.disk(tmp_path / "disk")


class _MemoryStore:
    """The smallest store: a dictionary."""

    location = "memory"

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}
        self.aside: list[str] = []

    def steps(self) -> list[int]:
        return list(self.kept)

    def save(self, step: int, leaves: Any, header: Any) -> bool:
        self.kept[step] = ({name: np.array(x) for name, x in leaves.items()}, header)
        return True

    def header(self, step: int) -> object:
        return self.kept[step][1]

    def load(self, step: int, like: Any) -> Any:  # noqa: ARG002
        return self.kept[step][0]

    def mark_damaged(self, step: int) -> str:
        del self.kept[step]
        self.aside.append(f"{step}.damaged")
        return self.aside[-1]

    def damaged(self) -> list[str]:
        return self.aside

    def close(self) -> None: ...


def test_any_store_is_verified_and_damage_is_put_aside() -> None:
    store = _MemoryStore()
    checkpoints = Checkpoints(store, {"mine": 1})
    for step in (1, 2):
        checkpoints.save(step, {"weights": np.full(3, step, np.float32)}, {"note": step})
        assert checkpoints.wait() == (step, f"memory/{step}")
    assert checkpoints.saved() is None
    assert checkpoints.latest() == 2
    store.kept[2][0]["['weights']"][0] += 1e-6
    with pytest.warns(UserWarning, match=r"checkpoint 2 in memory is damaged \(its contents .*renamed to 2\.damaged"):
        restored = checkpoints.restore(lambda _: {"weights": np.zeros(3, np.float32)})
    assert restored is not None
    assert (restored.step, restored.notes) == (1, {"note": 1})
    np.testing.assert_array_equal(restored.tree["weights"], 1.0)
    store.kept[1][1]["configuration"]["mine"] = 2  # damage in a header is not taken for another run
    with pytest.raises(OSError, match=r"nothing but 1 \(its header does not match its digest\), 2\.damaged"):
        checkpoints.restore(lambda _: {"weights": np.zeros(3, np.float32)})
    store.kept[1][1]["configuration"]["mine"] = 1
    with pytest.raises(proxvi.ConfigurationError, match="has 1 for `mine`, this run 3"):
        Checkpoints(store, {"mine": 3}).restore(lambda _: {"weights": np.zeros(3, np.float32)})
