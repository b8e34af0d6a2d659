"""What the tests of this room run under."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def numpyro_may_promote_ranks() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield
