"""The order in which an ELBO adds up its sites."""

from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO

import proxvi
from proxvi.estimators import OrderedTraceELBO
from proxvi.training._chunks import ordered


def test_trace_elbo_is_ordered_and_keeps_its_settings() -> None:
    given = Trace_ELBO(num_particles=3, vectorize_particles=False, multi_sample_guide=True)
    made = ordered(given)
    assert type(made) is OrderedTraceELBO
    assert vars(made) == vars(given)
    annealed = proxvi.AnnealedELBO(given, 2.0)
    tempered = ordered(annealed)
    assert type(tempered) is proxvi.AnnealedELBO
    assert type(tempered.elbo) is OrderedTraceELBO
    assert annealed.elbo is given  # the caller's is as it was


def test_other_elbos_are_left_as_they_are() -> None:
    class Mine(Trace_ELBO):
        pass

    for loss in (
        Mine(),
        TraceMeanField_ELBO(),
        Trace_ELBO(sum_sites=False),
        proxvi.AnnealedELBO(proxvi.LeaveOneOutELBO(5), 2.0),
    ):
        assert ordered(loss) is loss
