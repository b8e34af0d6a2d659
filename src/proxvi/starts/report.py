"""The report of `luck`: how much an inference depends on its start."""

import html
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from proxvi._typing import Float, Int, Json, ParamTree
from proxvi._validation import check_number
from proxvi.starts._lanes import OTHER_STARTS

__all__ = ["Basin", "Luck"]

CONFIDENT = 0.95
QUANTILE = 1.96  # of the normal distribution, for that confidence
SHOWN = 10  # basins
SHORTEST = 20  # windows of a trace; of fewer, a tenth has no noise to compare a rise with
FAR = 3.0  # posterior standard deviations
NARROW = 5.0  # tolerances: a basin of starts that only move about one optimum


class Basin(NamedTuple):
    """Starts that ended at about the same ELBO.

    Attributes:
        elbo: the best of them.
        starts: numbers of the starts, the best one first.
        distance: how far their answers are from those of the best start, in posterior standard deviations; the largest
            of all starts and sites. NaN if not known.
        site: the name of that site.
    """

    elbo: float
    starts: Int[np.ndarray, " starts"]
    distance: float = math.nan
    site: str = ""


@dataclass(frozen=True, eq=False)
class Luck:
    """How much an inference depends on its start. Prints as a verdict and a table of the basins.

    Attributes:
        elbos: the ELBO at the end of each start.
        traces: the ELBO during the run, starts × windows of steps.
        params: the parameters at the end, with a leading axis of starts.
        tolerance: ELBOs that differ by less count as the same, in nats.
        best_known: the best ELBO that is known from elsewhere, if any.
        floor: the ELBO of a null model, if any; a start that ends below it has found nothing.
        errors: standard errors of `elbos`; 0 where they are exact, or not known.
        distances: by site, how far the posterior mean of each start is from that of the best start, in posterior
            standard deviations; that of the element that is farthest.
        matched: the sites whose components can be permuted, as in a mixture. They were put into the order of the best
            start before the answers were compared. Not with discrete latent variables, nor where `TraceEnum_ELBO` sums
            them out.
        begin_alike: whether all starts begin with the same parameters, and differ in their random numbers alone.

    Example:
        >>> import numpy as np
        >>> elbos = np.array([-10.0, -10.5, -30.0, -30.2, -30.1])
        >>> report = Luck(elbos, np.tile(elbos[:, None], (1, 100)), params=None)
        >>> print(report.verdict)
        2 of 5 starts end within 2 nats of the best (12% to 77% of all starts); the other 3 lose 20 to 20.2 nats. 5 starts are too few to tell the share. Race them: `proxvi.race`.
    """  # noqa: E501

    elbos: Float[np.ndarray, " starts"]
    traces: Float[np.ndarray, "starts windows"]
    params: ParamTree = field(repr=False)
    tolerance: float = 2.0
    best_known: float | None = None
    floor: float | None = None
    errors: Float[np.ndarray, " starts"] | None = None
    distances: dict[str, Float[np.ndarray, " starts"]] = field(default_factory=dict, repr=False)
    matched: tuple[str, ...] = ()
    begin_alike: bool = False

    def __post_init__(self) -> None:
        check_number("tolerance", self.tolerance, above=0.0, remedy="2 nats is the default")
        if not np.any(np.isfinite(self.elbos)):
            raise ValueError(
                f"`elbos` must have a finite entry, got none in {len(self.elbos)}; look at the model, and lower the "
                "learning rate."
            )

    @property
    def best(self) -> float:
        """The best ELBO that is known, from here or from elsewhere."""
        return max(self.best_found, -math.inf if self.best_known is None else float(self.best_known))

    @property
    def best_found(self) -> float:
        """The best ELBO of the starts."""
        return float(np.nanmax(self._finite))

    @property
    def _finite(self) -> np.ndarray:
        return np.where(np.isfinite(self.elbos), self.elbos, np.nan)

    @property
    def good(self) -> int:
        """How many starts end within the tolerance of the best."""
        return int(np.sum(self._finite >= self.best - self.tolerance))

    @property
    def share(self) -> float:
        """The share of starts that end within the tolerance of the best."""
        return self.good / len(self.elbos)

    @property
    def interval(self) -> tuple[float, float]:
        """A 95% interval (Wilson's) for that share among all starts that one could make."""
        n, z = len(self.elbos), QUANTILE
        centre = (self.share + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(self.share * (1 - self.share) / n + z * z / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)

    @property
    def median_loss(self) -> float:
        """How many nats below the best the median start ends; infinite if it has no finite ELBO."""
        return self.best - float(np.median(np.where(np.isnan(self._finite), -np.inf, self._finite)))

    @cached_property
    def climbing(self) -> np.ndarray:
        """Which starts still climb at the end.

        That is: fast enough to gain the tolerance in another run of the same length, and by more than their noise. The
        last tenth of the run is compared with the one before. Where its noise hides a rise, the last two fifths must
        show it, too.
        """
        gain, tenth = self._rise(10)
        _, fifth = self._rise(5)
        return (gain > self.tolerance / 10) & ((tenth > 3.0) | ((tenth > 1.0) & (fifth > 3.0)))

    def _rise(self, part: int) -> tuple[np.ndarray, np.ndarray]:
        """By how much a last part of the run is above the one before: in nats, and in standard errors."""
        length = self.traces.shape[1] // part
        if length < 1:
            return np.zeros(len(self.elbos)), np.zeros(len(self.elbos))
        end = np.where(np.isfinite(self.traces), self.traces, np.nan)[:, -2 * length :]
        rise = end[:, length:].mean(1) - end[:, :length].mean(1)
        # The noise of a mean of windows, by the differences of neighbours, which a trend hardly changes.
        error = np.sqrt(np.mean(np.diff(end, axis=1) ** 2, axis=1) / length)
        with np.errstate(divide="ignore", invalid="ignore"):
            return rise, np.where(rise == 0.0, 0.0, rise / error)

    @property
    def _may_climb(self) -> bool:
        """Whether most traces are too short for `climbing`, and rise by more than the tolerance in their second half.

        A single ELBO is no trace, and says nothing.
        """
        windows = self.traces.shape[1]
        finite = np.where(np.isfinite(self.traces), self.traces, np.nan)
        rise = finite[:, -1] - finite[:, (windows - 1) // 2]
        return windows < SHORTEST and bool(np.sum(rise > self.tolerance) > len(rise) / 2)

    @cached_property
    def basins(self) -> tuple[Basin, ...]:
        """Groups of starts, the best first. Sorted by ELBO, a gap above the tolerance begins a new group."""
        found = np.flatnonzero(np.isfinite(self.elbos))
        order = found[np.argsort(-self.elbos[found], kind="stable")]
        ends = np.flatnonzero(-np.diff(self.elbos[order]) > self.tolerance) + 1
        return tuple(Basin(float(self.elbos[g[0]]), g, *self._farthest(g)) for g in np.split(order, ends))

    def _farthest(self, group: np.ndarray) -> tuple[float, str]:
        largest = {name: float(np.fmax.reduce(distance[group])) for name, distance in self.distances.items()}
        site = max(largest, key=lambda name: np.nan_to_num(largest[name]), default="")
        return largest.get(site, math.nan), site

    @property
    def verdict(self) -> str:
        """What to make of it, in a sentence or two."""
        n, low, high = len(self.elbos), *self.interval
        near = f"within {self.tolerance:g} nats of the best"
        if self.begin_alike:
            return (
                f"All {n} starts begin at one point, so only the luck of the noise is measured, by which {self.good} "
                f"of them end {near}{self._others()}. To measure that of the start, {OTHER_STARTS}."
            )
        if self.climbing.sum() > n / 2:
            if self.good == n:
                return (
                    f"No luck so far: all {n} starts end {near}. But {self.climbing.sum()} of them still climb at the "
                    "end: run longer to be sure."
                )
            gain, spread = np.nanmedian(self._rise(10)[0]), np.nanmax(self._finite) - np.nanmin(self._finite)
            text = (
                f"{self.climbing.sum()} of {n} starts still climb at the end, by {_nats(gain)} nats in the last tenth "
                f"of the run, and differ by up to {_nats(spread)}: nothing can be said about luck yet. Run longer"
            )
            # A network that gains more by its steps than by its start.
            return text + (", or give the steps of all starts to one run." if spread < 10 * gain else ".")
        agree = f"all {n} starts end {near} (at least {low:.0%} of all starts)."
        if self._may_climb:
            spread = np.nanmax(self._finite) - np.nanmin(self._finite)
            text = (
                f"No luck so far: {agree} But" if self.good == n else f"{n} starts differ by up to {_nats(spread)}, but"
            )
            return (
                f"{text} {self.traces.shape[1]} ELBOs of each are too short a trace to tell whether they still climb: "
                "run longer, or return more of them."
            )
        if self.good == 0:
            return (
                f"None of {n} starts ends {near} known ELBO, {self.best:.2f}; the best of them loses "
                f"{_nats(self.best - self.best_found)} nats (at most {high:.0%} of all starts are good). "
                "Race more of them: `proxvi.race`."
            )
        if self.good == n:
            if high - low > 0.5:
                return f"No luck so far: {agree} {n} starts are too few to tell."
            return f"No luck: {agree} One run is enough."
        ends = "ends" if self.good == 1 else "end"
        text = f"{self.good} of {n} starts {ends} {near} ({low:.0%} to {high:.0%} of all starts){self._others()}."
        if high - low > 0.5:
            text += f" {n} starts are too few to tell the share."
        if self.share >= CONFIDENT:
            return text + " Luck hardly matters."
        basin = self.basins[0]
        width = basin.elbo - self.elbos[basin.starts[-1]]
        one_optimum = width <= NARROW * self.tolerance and not basin.distance > FAR
        if len(basin.starts) >= CONFIDENT * n and one_optimum:
            nearly = "All" if len(basin.starts) == n else "Nearly all"
            return text + f" {nearly} share a basin: let the learning rate decay, or run longer."
        restarts = math.ceil(math.log(1 - CONFIDENT) / math.log(1 - self.share))
        rescue = f", or keep the best of {restarts} restarts" if high - low <= 0.5 else ""
        return text + f" Race them: `proxvi.race`{rescue}."

    def _others(self) -> str:
        """What became of the starts that are not good."""
        near = self._finite >= self.best - self.tolerance
        lost = np.isnan(self._finite)
        mates = np.isin(np.arange(len(near)), self.basins[0].starts) & ~near
        losses = self.best - self._finite
        parts = []
        if mates.any():
            verb = "loses" if mates.sum() == 1 else "lose up to"
            parts.append(f"{mates.sum()} more in its basin {verb} {_nats(losses[mates].max())}")
        if (others := ~near & ~mates & ~lost).any():
            least, most = _nats(losses[others].min()), _nats(losses[others].max())
            name = "another one loses" if others.sum() == 1 else f"the other {others.sum()} lose"
            parts.append(f"{name} {least} nats" if least == most else f"{name} {least} to {most} nats")
        if lost.any():
            parts.append(f"{lost.sum()} ended without a finite ELBO")
        return "".join(f"; {part}" for part in parts)

    def _notes(self) -> list[str]:
        notes = []
        n = len(self.elbos)
        if hidden := self.basins[SHOWN:]:
            rest = sum(len(basin.starts) for basin in hidden)
            notes.append(f"and {_count(len(hidden), 'more basin')} with {_count(rest, 'start')}")
        if 0 < self.climbing.sum() <= n / 2:
            climb = "start still climbs" if self.climbing.sum() == 1 else "starts still climb"
            notes.append(
                f"{self.climbing.sum()} {climb} at the end, so the shares are not final. A race may begin now: it "
                "finishes its winner."
            )
        if self.floor is not None and (below := int(np.sum(self._finite < self.floor))):
            end, found = ("start ends", "it has") if below == 1 else ("starts end", "they have")
            notes.append(f"{below} {end} below the null model, {self.floor:.2f}: {found} found nothing.")
        if self.errors is not None:
            # Of starts that may be good or not. How far below a hopeless one ends does not matter.
            in_doubt = self._finite >= self.best - self.tolerance - 2 * self.errors
            if (error := np.max(self.errors, where=in_doubt, initial=0.0)) > self.tolerance / 2:
                notes.append(
                    f"The ELBOs have standard errors up to {_nats(error)} nats: raise `particles`, or `tolerance` to "
                    f"{_nats(2 * error)} at least."
                )
        if self.matched:
            names = ", ".join(f"`{name}`" for name in self.matched)
            notes.append(f"The components of {names} were matched first: the model is the same in any order of them.")
        near = np.flatnonzero(self._finite >= self.best - self.tolerance)
        far = [start for start in near if any(distance[start] > FAR for distance in self.distances.values())]
        if far:
            distance, site = self._farthest(np.array(far))
            has = "has" if len(far) == 1 else "have"
            notes.append(
                f"{len(far)} of {len(near)} starts that end equally well {has} another answer than the best (up to "
                f"{distance:.3g} sd in `{site}`): several answers fit, or its entries can trade places."
            )
        return notes

    def _rows(self) -> list[list[str]]:
        known, climbs = bool(self.distances), bool(self.climbing.any())
        rows = [["basin", "ELBO", "below best", "starts", "best start"]]
        rows[0] += ["still climb"] * climbs + ["from best answer"] * known
        for number, basin in enumerate(self.basins[:SHOWN], 1):
            cells = [f"{number}", f"{basin.elbo:.2f}", f"{self.best - basin.elbo:.2f}", f"{len(basin.starts)}"]
            cells += [f"{basin.starts[0]}"] + [f"{self.climbing[basin.starts].sum()}"] * climbs
            rows.append(cells + [f"{basin.distance:.3g} sd ({basin.site})"] * known)
        return rows

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([self.verdict, *table, *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self._notes())
        verdict = html.escape(self.verdict)
        return f"<p><b>{verdict}</b></p><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>{notes}"

    def to_dict(self) -> Json:
        """Everything but parameters and traces, as JSON takes it."""

        def listed(values: np.ndarray) -> list[float | None]:
            return [float(x) if np.isfinite(x) else None for x in values]

        return {
            "verdict": self.verdict,
            "elbos": listed(self.elbos),
            "errors": None if self.errors is None else listed(self.errors),
            "tolerance": float(self.tolerance),
            "best": self.best,
            "best_known": None if self.best_known is None else float(self.best_known),
            "floor": None if self.floor is None else float(self.floor),
            "share": self.share,
            "interval": list(self.interval),
            "median_loss": self.median_loss if math.isfinite(self.median_loss) else None,
            "climbing": int(self.climbing.sum()),
            "begin_alike": bool(self.begin_alike),
            "matched": list(self.matched),
            "distances": {name: listed(distance) for name, distance in self.distances.items()},
            "basins": [
                {
                    "elbo": basin.elbo,
                    "starts": basin.starts.tolist(),
                    "distance": basin.distance if math.isfinite(basin.distance) else None,
                    "site": basin.site,
                }
                for basin in self.basins
            ],
        }


def _nats(value: float) -> str:
    """Three digits, but no power of ten."""
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
