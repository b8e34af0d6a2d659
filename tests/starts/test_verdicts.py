"""The verdict of `luck` on real problems of which the answer is known."""

from typing import Any

import jax
import optax
import problems
import pytest
from numpyro.infer import SVI

import proxvi

pytestmark = pytest.mark.slow


def verdict(name: str, num_steps: int, **options: Any) -> str:
    problem = problems.load(name)
    svi = SVI(problem.model, problem.new_guide(), optax.adam(problem.rate), problem.loss)
    with jax.numpy_rank_promotion("allow"):
        report = proxvi.luck(svi, jax.random.key(0), num_steps, *problem.data, progress_bar=False, **options)
    return report.verdict


def test_logistic_regression_has_one_optimum() -> None:
    assert verdict("logistic", 3_000, starts=16).startswith("No luck: all 16 starts end within 2 nats of the best")


def test_a_run_that_is_too_short_has_not_converged() -> None:
    assert "nothing can be said about luck yet" in verdict("logistic", 50, starts=16)


def test_none_of_a_hundred_starts_far_away_is_good() -> None:
    """The paper's figure 1: from a ring of radius 100, plain variational inference is always trapped."""
    said = verdict("factor", 8_000, starts=100, best_known=-275.0)
    assert said.startswith("None of 100 starts")
