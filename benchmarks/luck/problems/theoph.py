"""One-compartment pharmacokinetics of 12 subjects who took theophylline."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from problems import Problem, columns


def problem(scale: float = 1.0) -> Problem:
    time, concentration, dose = (jnp.asarray(x) for x in columns("theoph.csv", "Time", "conc", "Dose"))
    subject = np.unique(columns("theoph.csv", "Subject")[0], return_inverse=True)[1]

    def model() -> None:
        population = jnp.asarray(numpyro.sample("population", dist.Normal(0, 1.5).expand([3]).to_event(1)))
        spread = jnp.asarray(numpyro.sample("spread", dist.LogNormal(-1, 0.7).expand([3]).to_event(1)))
        z = jnp.asarray(numpyro.sample("z", dist.Normal(0, 1).expand([12, 3]).to_event(2)))
        sigma = numpyro.sample("sigma", dist.LogNormal(-1, 1))
        absorption, clearance, volume = jnp.exp(population + spread * z)[subject].T  # logs of the three are normal
        elimination = clearance / volume
        gap = absorption - elimination
        gap = jnp.where(jnp.abs(gap) < 1e-3, 1e-3, gap)
        decay = jnp.exp(-elimination * time) - jnp.exp(-absorption * time)
        numpyro.sample("conc", dist.Normal(dose * absorption / (volume * gap) * decay, sigma), obs=concentration)

    return Problem(model, scale=scale)
