"""The command line: `proxvi reproduce figure-1`. Needs the extras `cli` and `plot`."""

import os
from typing import Annotated, Any, Union

__all__ = ["main"]


def main() -> None:
    """Entry point of the command `proxvi`."""
    # One device a core, over which `multistart` and `evaluate` spread their work; before JAX looks.
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(len(os.sched_getaffinity(0))))
    try:
        import tyro
    except ImportError as error:
        raise SystemExit("the command line needs tyro: pip install 'proxvi[cli,plot]'") from error
    from proxvi.experiments import figure_1

    experiments = {"figure-1": figure_1.reproduce, "figure-1-settings": figure_1.reproduce_settings}
    named = (Annotated[Any, tyro.conf.subcommand(name, constructor=f)] for name, f in experiments.items())
    choices = Union[tuple(named)]  # noqa: UP007, they are known only now

    def reproduce(experiment: choices) -> str:  # pyright: ignore[reportInvalidTypeForm]
        """Make a figure or table of the paper again."""
        return experiment

    print(
        tyro.extras.subcommand_cli_from_dict(
            {"reproduce": reproduce},
            prog="proxvi",
            description="Proximity variational inference: the experiments of the paper.",
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        )
    )
