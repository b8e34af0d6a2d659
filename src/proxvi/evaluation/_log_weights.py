"""Log weights of samples of a guide under a model, row by row."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from numpyro import handlers

from proxvi._distributions import log_density
from proxvi._typing import Float, Guide, Int, Model, Params, Scalar, Trace, Tree

__all__ = ["check_sites", "log_weights"]

ModelAndGuide = tuple[Model, Guide]


def log_weights(
    params: Params,
    key: Array,
    numbers: Int[Array, " rows"],
    rows: tuple[Tree, ...],
    pair: ModelAndGuide,
    plates: tuple[str, ...],
    mesh: Mesh,
    num_samples: int,
    at_once: tuple[int, int],
) -> Float[Array, "rows samples"]:
    """`w_ns = log p(x_n, z_s) − log q(z_s | x_n)`.

    Samples of one row that run together share what depends on the row only, such as the inference network. A layer of
    the model is one matrix product over all rows and samples that run together.

    Args:
        params: of the model and the guide.
        key: for the samples.
        numbers: of the rows, which are also their indices in `plates`.
        rows: the data.
        pair: model and guide.
        plates: those that hold all rows.
        mesh: devices to spread the rows over.
        num_samples: of each row.
        at_once: how many rows, and how many samples of each, run together on a device.
    """

    def on_one_device(
        params: Params, key: Array, numbers: Int[Array, " own_rows"], rows: tuple[Tree, ...]
    ) -> Float[Array, "own_rows samples"]:
        def of_row(numbered: tuple[Array, tuple[Tree, ...]]) -> Float[Array, " samples"]:
            number, row = numbered
            args, row_keys = jax.tree.map(lambda x: x[None], row), jax.random.split(jax.random.fold_in(key, number))

            def of_sample(sample: Int[Array, ""]) -> Scalar:
                keys = jax.random.fold_in(row_keys[0], sample), jax.random.fold_in(row_keys[1], sample)
                traces = _traces(keys, pair, {**params, **dict.fromkeys(plates, number[None])}, args)
                return _log_density(traces[0]) - _log_density(traces[1])

            samples = jnp.arange(-(-num_samples // at_once[1]) * at_once[1])  # whole batches; what is over is dropped
            return jax.lax.map(of_sample, samples, batch_size=at_once[1])[:num_samples]

        return jax.lax.map(of_row, (numbers, rows), batch_size=at_once[0])

    spread, everywhere = PartitionSpec(mesh.axis_names[0]), PartitionSpec()
    run = jax.shard_map(
        on_one_device,
        mesh=mesh,
        in_specs=(everywhere, everywhere, spread, spread),
        out_specs=spread,
        check_vma=False,  # devices do not talk to each other here
    )
    return run(params, key, numbers, rows)


def _traces(
    keys: Array | tuple[Array, Array], pair: ModelAndGuide, params: Params, args: tuple[Tree, ...]
) -> tuple[Trace, Trace]:
    """The trace of the model at a sample of the guide, and the guide's."""
    model, guide = (handlers.seed(f, key) for f, key in zip(pair, keys, strict=True))
    guide_trace = handlers.trace(handlers.substitute(guide, data=params)).get_trace(*args)
    replayed = handlers.substitute(handlers.replay(model, guide_trace), data=params)
    return handlers.trace(replayed).get_trace(*args), guide_trace


def _log_density(trace: Trace) -> Scalar:
    """The log density of all sites together, without their scales."""
    total = jnp.zeros(())
    for site in trace.values():
        if site["type"] == "sample":
            total = total + jnp.sum(log_density(site))
    return total


def check_sites(pair: ModelAndGuide, params: Params, args: tuple[Tree, ...]) -> tuple[str, ...]:
    """Refuse models for which `log_weights` would not be the likelihood of a row: compare the shapes of 1 and 2 rows.

    Returns:
        The plates that hold all rows, subsampled to those that the model is given.
    """

    def sites(count: int) -> list[Trace]:
        found: list[Trace] = []

        def look(params: Params, args: tuple[Tree, ...]) -> None:
            found.extend(_traces(jax.random.split(jax.random.key(0)), pair, params, args))

        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), jnp.result_type(x)), args)
        jax.eval_shape(look, params, batch)
        return found

    one, two = sites(1), sites(2)
    for kind, remedy in {
        "param": "pass `result.params`",
        "mutable": "pass `{**result.params, **result.state.mutable_state}`",
    }.items():
        missing = {n for trace in one for n, s in trace.items() if s["type"] == kind} - params.keys()
        if missing:
            raise ValueError(f"`params` must hold all parameters, got none for {sorted(missing)}; {remedy}.")
    latent, sampled = ({n for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"]} for trace in one)
    other = latent ^ {n for n in sampled if not one[1][n]["infer"].get("is_auxiliary") or n in latent}
    if other:
        raise ValueError(
            f"`guide` must sample the latent variables of `model`, got {sorted(other)} in one of them only; add them "
            "to the other."
        )
    of_rows = set()
    for before, after in zip(one, two, strict=True):
        for name in before.keys() & sampled:
            if jnp.size(after[name]["value"]) != 2 * jnp.size(before[name]["value"]):
                raise ValueError(
                    "`model` and `guide` must give each row latent variables of its own, got "
                    f"`{name}`, which all rows share; make it a parameter."
                )
        for name, (size, seen) in ((n, s["args"]) for n, s in before.items() if s["type"] == "plate"):
            if seen in (None, size):
                continue
            if (seen, after[name]["args"][1]) != (1, 2):
                raise ValueError(
                    f"`model` and `guide` must see all of a row, got the plate `{name}` with {seen} of {size}; leave "
                    "out its `subsample_size`."
                )
            of_rows.add(name)
    return tuple(sorted(of_rows))
