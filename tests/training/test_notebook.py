"""`fit` and `luck` in a notebook, run by a real Jupyter kernel."""

import pytest

SETTING = """
import jax, numpyro, numpyro.distributions as dist, optax, proxvi
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

x = 3.0 + jax.random.normal(jax.random.key(0), (200, 1))

def model(x):
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, 1.0), obs=x[:, 0])

svi = SVI(model, AutoNormal(model), optax.adam(0.05), Trace_ELBO())
"""
CELLS = ["result = proxvi.fit(svi, jax.random.key(0), 1_000, x)", "print(proxvi.luck(svi, jax.random.key(0), 400, x))"]


@pytest.mark.slow
def test_a_notebook_shows_the_progress_and_the_verdict() -> None:
    formats, client = pytest.importorskip("nbformat.v4"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = formats.new_notebook(cells=[formats.new_code_cell(source) for source in (SETTING, *CELLS)])
    client.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    fit, luck = (
        {o["name"]: "".join(p["text"] for p in cell.outputs if p.get("name") == o["name"]) for o in cell.outputs}
        for cell in notebook.cells[1:]
    )
    assert "100%" in fit["stderr"]
    assert "1000/1000" in fit["stderr"]
    assert "elbo -2" in fit["stderr"]
    assert "400/400" in luck["stderr"]
    assert luck["stdout"].startswith("No luck: all 32 starts end within 2 nats")
