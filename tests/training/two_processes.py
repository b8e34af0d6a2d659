"""One of two processes that run `fit` together; started by the tests, with the port, its number and a folder.

A further argument disturbs it: `slow=0.1` makes every batch take so many seconds, and `alone=0.1` does so in a process
that trains by itself; with `unverified` process 1 cannot verify the newest checkpoint; with `late=40` it comes so many
seconds late to the first step.
"""

import sys
import time

import faults
import grain
import jax

import proxvi
from proxvi.training import checkpoints
from proxvi.training._chunks import ChunkRunner

STEPS = 200


def fit(num_steps, data, metrics_file, every=20, **options):
    reporting = proxvi.Reporting(every=every, metrics_file=metrics_file)
    result = proxvi.fit(faults.make_svi(), jax.random.key(0), num_steps, data, reporting=reporting, **options)
    print(f"bits {faults.bits(result)} loss {float(result.losses[-1]):.6f}", flush=True)


def fail_twice(verify):
    """A digest that is wrong for the first checkpoint, each time that it is read: a damaged disk of this host."""
    calls = iter([True, True])

    def digest(leaves):
        return "wrong" if next(calls, False) else verify(leaves)

    return digest


def come_late(run, seconds):
    """The same, but the first call takes longer: a program that this process alone has to compile."""
    waits = iter([seconds])

    def late(*args):
        time.sleep(next(waits, 0.0))
        return run(*args)

    return late


class Slow:
    """Batches that take a while, as those of a slow disk."""

    def __init__(self, rows, seconds):
        self.rows, self.seconds = rows, seconds

    def __iter__(self):
        while True:
            time.sleep(self.seconds)
            yield self.rows


if __name__ == "__main__":
    port, number, folder, *disturbance = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
    how, _, much = "".join(disturbance).partition("=")
    rows = faults.data()
    slow = {"every": 200_000, "checkpointing": proxvi.Checkpointing(folder)}
    if how == "alone":
        fit(1_000_000, Slow(rows[:100], float(much)), f"{folder}.jsonl", **slow)
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, number, heartbeat_timeout_seconds=20)
    mesh = jax.make_mesh((4,), ("data",))
    if how == "slow":
        fit(1_000_000, Slow(rows[:50], float(much)), f"{folder}.jsonl", mesh=mesh, **slow)
    if how == "late" and number == 1:
        ChunkRunner.run = come_late(ChunkRunner.run, float(much))  # pyright: ignore[reportAttributeAccessIssue]
    if how == "unverified" and number == 1:
        checkpoints._digest = fail_twice(checkpoints._digest)  # pyright: ignore[reportPrivateUsage]
    if not how:
        fit(100, rows, f"{folder}-arrays.jsonl", batch_size=100, mesh=mesh)
    # Each process streams the rows that it owns, in an order of its own, half a batch at a time.
    stream = grain.MapDataset.source(list(rows[number::2])).shuffle(seed=number).repeat().batch(50).to_iter_dataset()
    fit(STEPS, stream, f"{folder}.jsonl", mesh=mesh, checkpointing=proxvi.Checkpointing(folder, every=0.0))
