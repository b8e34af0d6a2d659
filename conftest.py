"""What every test runs under: strict ranks, eight CPU devices, and as many examples of a law as the profile says."""

import os

# LLVM's full optimisation is a third of the time of these tests. `XLA_FLAGS= pytest` is with it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")

import jax
import pytest
from hypothesis import HealthCheck, Phase, settings

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile(
    "proxvi",
    deadline=None,
    derandomize=True,  # the same examples every time: a failure is the change's, never the day's
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
settings.load_profile("proxvi")


SLOW_EXAMPLES = ("belief_network", "autoencoder", "ProximitySVI", "fit")  # they train; a docstring takes no marker


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the examples in docstrings that take long."""
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.name.rsplit(".", 1)[-1] in SLOW_EXAMPLES:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def digits() -> None:
    """The real ones; without them tests are skipped, but not where a build must not skip."""
    if "CI" not in os.environ and not os.environ.get("PROXVI_DATA"):
        pytest.skip("PROXVI_DATA does not name a folder with the digits")
