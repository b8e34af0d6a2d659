"""The arguments of a statistic, by the names in its signature; checks of the arguments of an Optax `update`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from proxvi._typing import ParamTree, Statistic, Tree
from proxvi._validation import check_statistic


class Arguments(NamedTuple):
    """The arguments of a statistic after its first.

    Attributes:
        required: names without a default.
        optional: names with the default None, which are passed if there is a value.
        everything: whether the statistic takes `**kwargs`, and so all arguments.
        example: values or shapes by name, for `init`, which sees no batch.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    everything: bool
    example: Mapping[str, Tree]

    @classmethod
    def of(cls, statistic: Statistic, example: Mapping[str, Tree] | None = None) -> "Arguments":
        """Read the signature of a statistic."""
        if example is not None and not isinstance(example, Mapping):
            raise TypeError(
                f"`example` must be a dictionary of arguments by name, got {type(example).__name__}; write "
                "`example={'batch': batch}`."
            )
        try:
            parameters = list(inspect.signature(statistic).parameters.values())
        except (TypeError, ValueError):  # some built-in functions have no signature
            parameters = []
        if parameters and parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
            raise TypeError(
                f"`statistic` must take the parameters as its first positional argument, got {statistic!r}; write "
                "`lambda params: ...`."
            )
        rest = [p for p in parameters[1:] if p.kind is not inspect.Parameter.VAR_POSITIONAL]
        named = [p for p in rest if p.kind is not inspect.Parameter.VAR_KEYWORD]
        arguments = cls(
            required=tuple(p.name for p in named if p.default is inspect.Parameter.empty),
            # any other default is the caller's own choice
            optional=tuple(p.name for p in named if p.default is None),
            everything=len(named) < len(rest),
            example=dict(example or {}),
        )
        unknown = set(arguments.example) - {p.name for p in named}
        if unknown and not arguments.everything:
            raise ValueError(
                f"`example` may name only arguments of the statistic, {[p.name for p in named]}, got "
                f"{sorted(unknown)}; rename or drop them."
            )
        return arguments

    @classmethod
    def of_all(
        cls, statistics: Sequence[Statistic], example: Mapping[str, Tree] | None = None
    ) -> tuple["Arguments", ...]:
        """Those of several statistics, of which each may take a part of `example`."""
        if len(statistics) == 1:
            return (cls.of(statistics[0], example),)
        each = [cls.of(statistic) for statistic in statistics]
        unknown = [name for name in example or {} if not any(arguments.takes(name) for arguments in each)]
        if unknown:
            raise ValueError(
                f"`example` may name only arguments of the statistics, got {sorted(unknown)}; rename or drop them."
            )
        return tuple(arguments._replace(example=arguments.select(example or {})) for arguments in each)

    def takes(self, name: str) -> bool:
        """Whether the statistic is to be given this argument."""
        return self.everything or name in self.required or name in self.optional

    def select(self, extra: Mapping[str, Tree]) -> dict[str, Tree]:
        """Those of `extra` that the statistic takes."""
        return {name: value for name, value in extra.items() if self.takes(name)}

    def describe(self, statistic: Statistic, params: ParamTree) -> Tree:
        """Shapes and dtypes of the statistic, without computing it."""
        missing = [name for name in self.required if name not in self.example]
        if missing:
            raise ValueError(
                f"`example` must hold {missing}, which Optax's `init(params)` does not see, got "
                f"{sorted(self.example)}; pass `example={{'{missing[0]}': ...}}` with an array or a "
                "`jax.ShapeDtypeStruct`, or use `parameter_average`."
            )
        chosen = self.select(self.example)
        arrays = {name: value for name, value in chosen.items() if _is_arrays(value)}
        rest = {name: value for name, value in chosen.items() if name not in arrays}
        return jax.eval_shape(lambda p, arrays: statistic(p, **arrays, **rest), params, arrays)

    def bind(self, statistic: Statistic, params: ParamTree, extra: Mapping[str, Tree]) -> Callable[[ParamTree], Tree]:
        """The statistic as a function of the parameters alone, in the dtypes of `params`.

        A float32 average of bfloat16 parameters is cast back. Otherwise equal parameters would differ by rounding.
        """
        missing = [name for name in self.required if name not in extra]
        if missing:
            raise TypeError(
                f"`statistic` takes {missing}, which `update` was not given, got {sorted(extra)}; call "
                f"`optimizer.update(grads, state, params, {missing[0]}=...)`."
            )
        chosen = self.select(extra)

        def at(p: ParamTree) -> Tree:
            cast = jax.tree.map(lambda x, like: jnp.asarray(x, jnp.result_type(like)), p, params)
            value = statistic(cast, **chosen)
            check_statistic(value)
            return value

        return at


def _is_arrays(value: Tree) -> bool:
    """Whether a value is to be traced: flags are not."""
    return all(hasattr(leaf, "shape") for leaf in jax.tree.leaves(value))


def check_call(updates: ParamTree, params: ParamTree, extra: Mapping[str, Any], *, relative: bool) -> None:
    """Refuse a call of `update` without the parameters or, if `relative`, without the loss."""
    if params is None:
        raise ValueError(
            "`params` must be given, got None; the statistic is a function of them: call "
            "`optimizer.update(grads, state, params)`."
        )
    check_parameters(params)
    if jax.tree.structure(updates) != jax.tree.structure(params):
        raise ValueError(
            f"`updates` must have the structure of `params`, got {jax.tree.structure(updates)} for "
            f"{jax.tree.structure(params)}; pass the gradient of the loss with respect to `params`."
        )
    if not relative:
        return
    if extra.get("value") is None:
        raise ValueError(
            "`value` must be the loss, got None; the magnitude is relative to the first loss: call "
            "`optimizer.update(grads, state, params, value=loss)`, or set `relative=False` and give the magnitude "
            "in absolute units."
        )
    if jnp.shape(extra["value"]) != ():
        raise ValueError(
            f"`value` must be a scalar, got shape {jnp.shape(extra['value'])}; pass the loss that was differentiated."
        )


def check_parameters(params: ParamTree) -> None:
    """Refuse anything but a tree of real floating-point arrays."""
    named = jax.tree_util.tree_leaves_with_path(params)
    if not named:
        raise ValueError(
            f"`params` must hold at least one array, got {params!r}; give the optimiser the variational parameters."
        )
    for path, leaf in named:
        dtype = getattr(leaf, "dtype", type(leaf))
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"`params` must be real floating-point arrays, got {dtype} at "
                f"{jax.tree_util.keystr(path) or 'the tree itself'}; keep the rest out with `optax.masked` or "
                "`equinox.partition`."
            )
