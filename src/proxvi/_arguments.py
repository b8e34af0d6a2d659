"""What an Optax `update` was called with, and what of it a statistic asks for."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Arguments(NamedTuple):
    """Which of the extra arguments of `update` a statistic asks for, by the names in its signature."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    everything: bool
    example: Mapping[str, Any]

    @classmethod
    def of(cls, statistic: Callable[..., Any], example: Mapping[str, Any] | None) -> "Arguments":
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
            # a default of None says that `update` may fill it in; any other is the caller's own choice
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

    def asks_for(self, name: str) -> bool:
        return self.everything or name in self.required or name in self.optional

    def chosen(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in extra.items() if self.asks_for(name)}

    def describe(self, statistic: Callable[..., Any], params: Any) -> Any:
        """Shapes and dtypes of the statistic, without computing it."""
        missing = [name for name in self.required if name not in self.example]
        if missing:
            raise ValueError(
                f"`example` must hold {missing}, which Optax's `init(params)` does not see, got "
                f"{sorted(self.example)}; pass `example={{'{missing[0]}': ...}}` with an array or a "
                "`jax.ShapeDtypeStruct`, or use `parameter_average`."
            )
        chosen = self.chosen(self.example)
        arrays = {name: value for name, value in chosen.items() if _is_arrays(value)}
        rest = {name: value for name, value in chosen.items() if name not in arrays}
        return jax.eval_shape(lambda p, arrays: statistic(p, **arrays, **rest), params, arrays)

    def bind(self, statistic: Callable[..., Any], params: Any, extra: Mapping[str, Any]) -> Callable[[Any], Any]:
        """The statistic as a function of parameters alone, in the dtypes of `params`.

        A float32 average of bfloat16 parameters is cast back, or the two sides would differ by rounding where the
        parameters agree.
        """
        missing = [name for name in self.required if name not in extra]
        if missing:
            raise TypeError(
                f"`statistic` takes {missing}, which `update` was not given, got {sorted(extra)}; call "
                f"`optimizer.update(grads, state, params, {missing[0]}=...)`."
            )
        chosen = self.chosen(extra)

        def at(p: Any) -> Any:
            return statistic(jax.tree.map(lambda x, like: jnp.asarray(x, jnp.result_type(like)), p, params), **chosen)

        return at


def _is_arrays(value: Any) -> bool:
    """Whether a value is to be traced; flags and such are not."""
    return all(hasattr(leaf, "shape") for leaf in jax.tree.leaves(value))


def check_call(updates: Any, params: Any, extra: Mapping[str, Any], *, relative: bool) -> None:
    if params is None:
        raise ValueError(
            "`params` must be given, got None, because the statistic is a function of them; call "
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
            "`value` must be the loss, got None, because the magnitude is relative to the first one; call "
            "`optimizer.update(grads, state, params, value=loss)`, or set `relative=False` and give the magnitude "
            "in absolute units."
        )
    if jnp.shape(extra["value"]) != ():
        raise ValueError(
            f"`value` must be a scalar, got shape {jnp.shape(extra['value'])}; pass the loss that was differentiated."
        )


def check_parameters(params: Any) -> None:
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
