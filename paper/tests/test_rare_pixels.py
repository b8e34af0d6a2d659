"""The costs of pixels against those of a network whose units do not vary, and parameters out of a checkpoint."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import proxvi
from proxvi_paper.datasets import BinarizedMNIST
from proxvi_paper.experiments import rare_pixels
from proxvi_paper.models.sbn import BAD, belief_network

TRAIN = np.random.default_rng(0).integers(0, 2, (1_000, 6), dtype=np.uint8)
TRAIN[:, 0] = 0  # never on
TRAIN[:, 1] = np.arange(1_000) < 5  # on in 1 of 200
VALID = np.array([[1, 1, 0, 1, 0, 1], [0, 1, 1, 0, 0, 1], [0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0]], np.uint8)
NETWORK = belief_network(TRAIN.mean(0), units=(3,), start=BAD)
PARAMS: dict[str, Any] = {
    "prior": np.array([1.0, -2.0, 0.5], np.float32),
    "encoder1_weights": np.zeros((6, 3), np.float32),
    "encoder1_bias": np.array([60.0, -60.0, 60.0], np.float32),  # the units are on, off, on
    "decoder1_weights": np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32),
    "decoder1_bias": np.linspace(-30.0, 2.0, 6, dtype=np.float32),
}


def softplus(x: Any) -> Any:
    return np.logaddexp(0.0, np.asarray(x, np.float64))


def test_costs_of_pixels_and_units_are_what_the_equations_say() -> None:
    pixels, divergences, units = rare_pixels.costs(NETWORK, PARAMS, VALID, 2)
    logits = PARAMS["decoder1_weights"][[0, 2]].sum(0) + PARAMS["decoder1_bias"]
    np.testing.assert_allclose(pixels, softplus(np.where(VALID == 1, -1, 1) * logits), rtol=1e-5)
    np.testing.assert_allclose(divergences, softplus([-1.0, -2.0, -0.5]).sum(), rtol=1e-5)
    np.testing.assert_array_equal(units, 2.0)


def test_groups_of_pixels_and_digits_add_up() -> None:
    pixels, divergences, _ = map(np.asarray, rare_pixels.costs(NETWORK, PARAMS, VALID, 1))
    elbos = -pixels.sum(1) - divergences
    printed = rare_pixels.report(NETWORK, PARAMS, BinarizedMNIST(TRAIN, VALID, VALID), 1).replace("−", "-")
    rows = {row[0]: row[1:] for row in (line.strip("| ").split(" | ") for line in printed.splitlines()[2:])}
    median = np.median(PARAMS["decoder1_weights"][:, 0])
    assert rows["0"] == ["1", f"{median:.1f}", "1", f"{elbos[0]:.1f}", "2.0", f"{pixels[:, 0].mean():.1f}"]
    assert rows["to 1/10,000"] == ["0", "", "0", "", "", "0.0"]
    assert rows["to 1/100"][2:4] == ["1", f"{elbos[1]:.1f}"]
    assert rows["more"][2:4] == ["2", f"{elbos[2:].mean():.1f}"]  # an empty digit has no rare pixel
    assert rows["all"][-1] == f"{-elbos.mean():.1f}"


@pytest.mark.slow
def test_a_checkpoint_gives_the_parameters_and_the_settings_of_its_trial(tmp_path: Path) -> None:
    svi = proxvi.ProximitySVI(*NETWORK, optax.adam(0.1), proxvi.LeaveOneOutELBO(2), ())
    checkpointing = proxvi.Checkpointing(tmp_path, configuration={"start": "bad", "units": [3]})
    with jax.numpy_rank_promotion("allow"):  # NumPyro broadcasts a prior over the rows
        result = proxvi.fit(svi, jax.random.key(0), 5, TRAIN, batch_size=10, checkpointing=checkpointing)
    step, settings, params = rare_pixels.read(tmp_path / "5")
    assert (step, settings) == (5, {"start": "bad", "units": [3]})
    jax.tree.map(np.testing.assert_array_equal, params, result.params)
