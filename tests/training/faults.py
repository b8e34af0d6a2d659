"""Faults that a run of `proxvi.fit` survives: kill −9, signals, flipped bits, cut files, a full disk, NaN and more.

    python tests/training/faults.py all --folder /tmp/faults --json results/faults.json
    python tests/training/faults.py kill --times 200 --folder /tmp/faults

The tests run the same faults, fewer times. Each compares the final bits (parameters, optimiser, reference, losses) with
those of a run without a fault, and fails if they differ. The full disk is a small file system; to mount it needs root.
"""

import argparse
import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import platform
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import orbax.checkpoint  # noqa: F401, before a worker is forked, which would take a second for it
from numpyro.distributions.constraints import positive
from numpyro.infer import Trace_ELBO

import proxvi
from proxvi.training._chunks import ChunkPacer, ChunkRunner
from proxvi.training._devices import is_key
from proxvi.training._orbax_store import OrbaxStore
from proxvi.training.checkpoints import Checkpoints

STEPS, NUM_ROWS = 3_000, 1_000
FATAL = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
AT_ONCE = 6  # runs of the soak
PAIRS_AT_ONCE = 3  # of processes that train together
DISTURBANCES = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP", "flip", "cut")  # of which it takes one a minute


def model(x, bad=False):
    mean = numpyro.sample("mean", dist.Normal(jnp.zeros(50), 10.0).to_event(1))
    numpyro.factor("spoil", jnp.log(jnp.where(bad, -1.0, 1.0)))
    with numpyro.plate("data", NUM_ROWS, subsample_size=x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)


def guide(*_):
    """As AutoNormal, but a run begins faster: the first call of an automatic guide is not one program."""
    loc, scale = numpyro.param("loc", jnp.zeros(50)), numpyro.param("scale", jnp.full(50, 0.1), constraint=positive)
    numpyro.sample("mean", dist.Normal(loc, scale).to_event(1))


def make_svi():
    constraint = proxvi.Proximity(proxvi.entropy, magnitude=optax.exponential_decay(1.0, STEPS // 2, 1e-10))
    return proxvi.ProximitySVI(model, guide, optax.adam(0.05, b2=0.99), Trace_ELBO(), constraint)


class SlowStream:
    """Batches of 100 rows that take `seconds` each, as from a slow disk."""

    def __init__(self, seconds):
        self._seconds, self._rows, self._next = seconds, data(), 0

    def __iter__(self):
        return self

    def __next__(self):
        time.sleep(self._seconds)
        at, self._next = self._next * 100 % NUM_ROWS, self._next + 1
        return self._rows[at : at + 100]

    def get_state(self):
        """The position, for a checkpoint."""
        return {"next": self._next}

    def set_state(self, state):
        """Go to a position."""
        self._next = state["next"]


def run(folder, *, checkpoint_every=0.0, batch_seconds=None, **reporting):
    """The run that the faults disturb; with `folder` None it saves nothing, with `batch_seconds` it is a slow one."""
    checkpointing = None
    if folder is not None:
        checkpointing = proxvi.Checkpointing(folder / "checkpoints", every=checkpoint_every)
        reporting = {"metrics_file": folder / "metrics.jsonl", **reporting}
    reporting = proxvi.Reporting(**{"every": 100, "progress": False, **reporting})
    options = {"checkpointing": checkpointing, "reporting": reporting}
    if batch_seconds is not None:
        return proxvi.fit(make_svi(), jax.random.key(0), STEPS, SlowStream(batch_seconds), **options)
    return proxvi.fit(make_svi(), jax.random.key(0), STEPS, data(), batch_size=100, **options)


def bits(result):
    """A digest of parameters, optimiser, references and losses."""
    read = (result.state.optim_state, [c.constraint for c in result.state.constraints], result.losses, result.params)
    return digest(read)


def digest(tree):
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        total.update(np.ascontiguousarray(jax.random.key_data(leaf) if is_key(leaf) else leaf).tobytes())
    return total.hexdigest()


def data():
    return 3.0 + np.random.default_rng(0).standard_normal((NUM_ROWS, 50), np.float32)


def work(folder, output, jumps=None, **options):
    """The run in a process of its own, which ends by printing its bits."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # `nohup` and `&` have these ignored, and `fit` heeds it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if jumps is not None:
        jump_about(jumps)
    try:
        print("bits", bits(run(folder, **options)), flush=True)
    except KeyboardInterrupt:  # as the interpreter does; `multiprocessing` has a status of its own
        os._exit(128 + signal.SIGINT)


def jump_about(seed):
    """Let the wall clock jump by up to a day, every second."""
    chance, real = random.Random(seed), time.time
    offset, until = 0.0, 0.0

    def jumping():
        nonlocal offset, until
        if time.monotonic() > until:
            offset, until = chance.uniform(-86_400.0, 86_400.0), time.monotonic() + 1.0
        return real() + offset

    time.time = jumping


def start(folder, **options):
    """A process that has imported everything, as it would be a moment after its start."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__" if __name__ == "__mp_main__" else __name__])  # in a process of a pool
    process = context.Process(target=work, args=(folder, folder / "output"), kwargs=options)
    process.start()
    return process


def send(process, number):
    assert process.pid is not None
    os.kill(process.pid, number)


def printed(folder):
    output = folder / "output"
    return output.read_text() if output.exists() else ""  # not there if it was killed in its first moments


def bits_printed(text):
    return [line.split()[1] for line in text.splitlines() if line.startswith("bits ")]


def lines(folder):
    path = folder / "metrics.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):  # cut off by the kill
            found.append(json.loads(line))
    return found


def identity(folder):
    """The metrics file is replaced, as a whole, when a run resumes."""
    path = folder / "metrics.jsonl"
    return path.stat().st_ino if path.exists() else None


def acknowledged(folder):
    return max((line["step"] for line in lines(folder) if "checkpoint" in line), default=0)


def resumed(folder):
    return max((line["step"] for line in lines(folder) if "resumed" in line), default=0)


def checkpoint_steps(folder):
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def kill(folder, times, seed=0, number=signal.SIGKILL):
    """End the run at random moments, until it is through; then again from the start, until it was ended so often."""
    alone, chance = folder / "alone", random.Random(seed)
    start(alone).join()
    (expected,) = bits_printed(printed(alone))
    ended = runs = lost = different = unsaved = 0
    slowest = 0.0  # from the signal to the end
    while ended < times:
        runs += 1
        place = folder / f"run-{runs}"
        shutil.rmtree(place, ignore_errors=True)
        promised, life = 0, None
        while True:
            file = identity(place)
            process, sent = start(place), 0.0
            if ended < times:
                started, before = time.monotonic(), len(lines(place))
                # from any moment of the start-up to well into the run: at first by the clock, then by what is written
                if chance.random() < 0.3:
                    time.sleep(chance.uniform(0.0, life or 4.0))
                else:
                    while process.exitcode is None and len(lines(place)) <= before + 1:
                        time.sleep(0.005)
                    life = time.monotonic() - started
                    time.sleep(chance.uniform(0.0, 0.3))
                if process.exitcode is None:
                    sent = time.monotonic()
                    send(process, number)
            process.join()
            if identity(place) != file:  # it lived to resume
                lost += resumed(place) < promised
            if process.exitcode == 0:
                different += bits_printed(printed(place)) != [expected]
                break
            if process.exitcode not in (-number, 128 + number):
                raise SystemExit(f"the run failed with {process.exitcode}: {printed(place)[-2_000:]}")
            ended += 1
            promised = max(promised, acknowledged(place))
            if process.exitcode == 128 + number and "saved step" in printed(place):
                slowest = max(slowest, time.monotonic() - sent)
                unsaved += f"saved step {promised} of" not in printed(place)
        damaged = [path.name for path in (place / "checkpoints").iterdir() if "damaged" in path.name]
        if damaged:
            raise SystemExit(f"a kill damaged {damaged}")
        shutil.rmtree(place)
    assert lost == different == unsaved == 0, (lost, different, unsaved)
    return {"times": ended, "runs": runs, "slowest": round(slowest, 1)}


def spoil(path, kind, chance):
    """Flip one bit of a file, or cut it short; returns the byte."""
    content = bytearray(path.read_bytes())
    at = chance.randrange(max(len(content), 1))
    if kind == "flip":
        content[at] ^= 1 << chance.randrange(8)
    path.write_bytes(content if kind == "flip" else content[:at])
    return at


def damage(folder, times, seed=0, *, kind, runs=3):
    """Flip one bit, or cut a file short, anywhere in the newest checkpoint; then load. `runs` times, also go on."""
    shutil.rmtree(folder, ignore_errors=True)
    pristine, place = folder / "pristine", folder / "damaged"
    alone = bits(run(pristine))
    fresh = ChunkRunner(make_svi(), jax.random.key(0), (data(),), 100, ChunkPacer(100, 100), None)
    configuration = {**fresh.describe(), "user": None}

    def load(path):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            checkpoints = Checkpoints(OrbaxStore(path / "checkpoints", keep=3), configuration)
            found = checkpoints.restore(lambda step: {"state": fresh.state, "losses": np.empty(step, np.float32)})
        checkpoints.close()
        return found, any("is damaged" in str(w.message) for w in warned)

    steps = checkpoint_steps(pristine / "checkpoints")
    whole = {}  # what each checkpoint holds: the newest, then without it the one before
    for newest in reversed(steps):
        found, _ = load(pristine)
        assert found is not None
        whole[newest] = digest(found.tree)
        if newest == steps[-1]:
            shutil.copytree(pristine, folder / "copy")
        shutil.rmtree(pristine / "checkpoints" / str(newest))
    shutil.rmtree(pristine)
    (folder / "copy").rename(pristine)

    files = [path for path in sorted((pristine / "checkpoints" / str(steps[-1])).rglob("*")) if path.is_file()]
    sizes = [path.stat().st_size for path in files]
    chance, outcomes = random.Random(seed), []
    for i in range(times):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(pristine, place)
        victim = chance.choices(files, sizes if kind == "flip" else None)[0]
        at = spoil(place / victim.relative_to(pristine), kind, chance)
        found, noticed = load(place)
        where = f"a {kind} in {victim.relative_to(pristine)} at byte {at}"
        assert found is not None, f"{where} lost every checkpoint"
        assert found.step == steps[-2 if noticed else -1], f"{where} lost the checkpoint without a word"
        assert digest(found.tree) == whole[found.step], f"{where} was loaded"
        outcomes.append(noticed)
        if i < runs:
            assert bits(run(place)) == alone, f"{where} changed the result"
    return {"times": times, "noticed": sum(outcomes)}


def disk(folder, *_):
    """A disk that fills up, and a folder that cannot be written to."""
    shutil.rmtree(folder, ignore_errors=True)
    small = folder / "small"
    small.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], check=True)
    said = {}
    try:
        filler = small / "filler"

        def fill(step, _):
            if step == 1_000:
                with filler.open("wb", buffering=0) as file:
                    try:
                        while True:
                            file.write(b"0" * 512)
                    except OSError:
                        pass

        try:
            run(small, metrics_file=None, callback=fill)
        except OSError as error:
            said["disk full"] = str(error)
        else:
            raise SystemExit("a full disk went unnoticed")
        filler.unlink()
        assert bits(run(small, metrics_file=None)) == bits(run(None))
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        try:
            run(small, metrics_file=None)
        except OSError as error:
            said["read-only folder"] = str(error)
        else:
            raise SystemExit("a read-only folder went unnoticed")
    finally:
        subprocess.run(["umount", str(small)], check=True)
    print(said)
    return {"times": 2}


def nan(folder, times, seed=0):
    """NaN at random steps, step 0 among them; then from some step on."""
    shutil.rmtree(folder, ignore_errors=True)
    rows = data()
    bad = np.append(np.random.default_rng(seed).choice(np.arange(1, STEPS), times - 1, replace=False), 0)

    def batches(spoilt):
        return [(rows[:100], np.asarray(t in spoilt)) for t in range(STEPS)]

    svi = make_svi()
    svi.max_skipped_in_a_row = 100  # a third of the steps are bad, so that ten in a row may come by chance
    reporting = proxvi.Reporting(every=100, progress=False)
    result = proxvi.fit(svi, jax.random.key(0), STEPS, batches(set(bad)), reporting=reporting)
    assert sorted(np.flatnonzero(np.isnan(result.losses))) == sorted(bad)
    assert int(result.state.skipped.total) == times
    assert np.all(np.isfinite(jax.tree.leaves(result.params)[0]))
    options = {"reporting": reporting, "checkpointing": proxvi.Checkpointing(folder, every=0.0)}
    try:
        proxvi.fit(make_svi(), jax.random.key(0), STEPS, batches(set(range(1_234, STEPS))), **options)
    except FloatingPointError as error:
        said = str(error)
    else:
        raise SystemExit("NaN went unnoticed")
    kept = checkpoint_steps(folder)
    assert kept
    assert 1_000 <= max(kept) <= 1_234
    print(said)
    return {"times": times}


def clock(folder, times, seed=0):
    """A wall clock that jumps by up to a day, every second: Orbax gives up what it thinks took a day."""
    shutil.rmtree(folder, ignore_errors=True)
    expected, again = [bits(run(None))], 0
    for i in range(times):
        start(folder / str(i), jumps=seed + i).join()
        text = printed(folder / str(i))
        assert bits_printed(text) == expected, text
        again += text.count("was not written at attempt")
    return {"times": times, "repeated": again}


def same_folder(folder, *_):
    """A second run in the folder of the first."""
    shutil.rmtree(folder, ignore_errors=True)
    first = start(folder)
    while first.exitcode is None and not lines(folder):
        time.sleep(0.01)
    send(first, signal.SIGSTOP)  # it has the folder for longer than the other waits
    began = time.monotonic()
    try:
        run(folder)
    except RuntimeError as error:
        said = str(error)
    else:
        raise SystemExit("two runs shared a folder")
    waited = time.monotonic() - began
    send(first, signal.SIGCONT)
    first.join()
    assert bits_printed(printed(folder)) == [bits(run(None))]
    print(said)
    return {"times": 1, "slowest": round(waited)}


def soak(folder, times, seed=0, *, minute=60.0, batch_seconds=0.2):
    """Six runs at once, of ten minutes each; each has a fault every minute, `times` in all."""
    shutil.rmtree(folder, ignore_errors=True)
    expected = bits(run(None, batch_seconds=0.0))
    deal = [len(range(i, times, AT_ONCE)) for i in range(AT_ONCE)]
    with ProcessPoolExecutor(AT_ONCE, multiprocessing.get_context("spawn")) as pool:
        jobs = [
            pool.submit(soak_one, folder / str(i), count, seed + i, minute, batch_seconds, expected)
            for i, count in enumerate(deal)
        ]
        found = [job.result() for job in jobs]
    total = {name: sum(one[name] for one in found) for name in ("runs", "damaged", "seconds_alive")}
    return {
        "times": times,
        "runs": total["runs"],
        "damaged": total["damaged"],
        "minutes": round(total["seconds_alive"] / 60),
    }


def soak_one(folder, times, seed, minute, batch_seconds, expected):
    """One run after the other, with a fault every minute, until there were so many."""
    chance, done, runs, damaged, alive = random.Random(seed), 0, 0, 0, 0.0
    while done < times or runs == 0:
        place, promised, finished = folder / str(runs), 0, False
        while not finished:
            file, kind, began = identity(place), "none", time.monotonic()
            # after the last fault nothing is left to wait for
            process = start(place, checkpoint_every=5.0, batch_seconds=batch_seconds if done < times else 0.0)
            while done < times and process.exitcode is None:
                process.join(chance.uniform(0.5, 1.5) * minute)
                if process.exitcode is not None:
                    break
                kind = chance.choice(DISTURBANCES)
                with contextlib.suppress(ProcessLookupError):  # it ended a moment ago
                    if kind == "SIGSTOP":
                        send(process, signal.SIGSTOP)
                        time.sleep(chance.uniform(0.0, 0.5) * minute)
                        send(process, signal.SIGCONT)
                    else:
                        send(process, signal.SIGKILL if kind in ("flip", "cut") else signal.Signals[kind])
                done += 1
                if kind != "SIGSTOP":
                    break
            process.join(10 * 60.0)
            alive += time.monotonic() - began
            finished, text = process.exitcode == 0, printed(place)
            assert finished or process.exitcode in {*(-n for n in FATAL), *(128 + n for n in FATAL)}, (kind, text)
            if identity(place) != file:  # it lived to resume
                assert resumed(place) >= promised, f"{kind}: resumed at {resumed(place)}, saved {promised}"
                promised = acknowledged(place)
                # Ctrl-C may have come before the loop, when nothing is saved yet, and has the same status.
                told = process.exitcode in (128 + signal.SIGTERM, 128 + signal.SIGHUP)
                assert not told or "saved step" in text, (kind, text)
            steps = checkpoint_steps(place / "checkpoints")
            if kind in ("flip", "cut") and not finished and len(steps) > 1:
                newest = place / "checkpoints" / str(steps[-1])
                spoil(chance.choice([path for path in sorted(newest.rglob("*")) if path.is_file()]), kind, chance)
                promised, damaged = steps[-2], damaged + 1
        assert bits_printed(printed(place)) == [expected], printed(place)
        shutil.rmtree(place)
        runs += 1
    return {"runs": runs, "damaged": damaged, "seconds_alive": alive}


def start_two(folder, disturbance="", count=2):
    """Two processes that train together, or one of them; see two_processes.py."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("two_processes.py")
    return [
        subprocess.Popen(
            [sys.executable, str(script), str(port), str(number), str(folder), disturbance],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(count)
    ]


def together(folder, times, seed=0):
    """Two processes, one of which is told to end, then killed, then stopped; then one cannot verify a checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    alone = [bits_printed(process.communicate()[0]) for process in start_two(folder / "alone", "only stream")]

    def disturb_pair(number):
        """One run, disturbed in all ways; seconds from each signal to the end of the process that did not get it."""
        place, chance, seconds = folder / str(number), random.Random(seed + number), {}
        for kind in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
            both = start_two(place, "only stream")
            step = max(checkpoint_steps(place), default=0) + chance.randint(1, 40)
            while both[1].poll() is None and max(checkpoint_steps(place), default=0) < step:
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 0.5))
            assert both[1].poll() is None, both[1].communicate()[0]
            sent = time.monotonic()
            both[1].send_signal(kind)
            both[0].wait(timeout=60)
            seconds[kind.name] = time.monotonic() - sent
            both[1].kill() if kind == signal.SIGSTOP else None
            texts = [process.communicate(timeout=300)[0] for process in both]
            told = [128 + signal.SIGTERM] * 2
            assert kind != signal.SIGTERM or [process.returncode for process in both] == told, texts
        both = start_two(place, "unverified")
        texts = [process.communicate(timeout=300)[0] for process in both]
        assert [process.returncode for process in both] == [0, 0], texts
        assert [bits_printed(text) for text in texts] == alone, texts
        shutil.rmtree(place)
        return seconds

    with ThreadPoolExecutor(PAIRS_AT_ONCE) as pool:  # mostly a process waits for the other one, which is gone
        found = list(pool.map(disturb_pair, range(math.ceil(times / 4))))
    slowest = {f"slowest {kind}": round(max(one[kind] for one in found), 1) for kind in found[0]}
    return {"times": 4 * len(found), **slowest}


def deadline(folder, *_):
    """From SIGTERM to the exit, with 1 and 2 processes, and batches that take 1 ms, 0.1 s and 1 s to load."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found = {}
    for seconds in (0.001, 0.1, 1.0):
        for count in (1, 2):
            place = folder / f"{count}-{seconds}"
            processes = start_two(place, f"slow={seconds}" if count == 2 else f"alone={seconds}", count)
            time.sleep(40.0)  # compiled, and far from a report
            sent = time.monotonic()
            processes[-1].send_signal(signal.SIGTERM)
            texts = [process.communicate(timeout=120)[0] for process in processes]
            assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * count, texts
            assert "saved step" in texts[-1], texts
            found[f"{count} processes, {seconds:g} s a step"] = round(time.monotonic() - sent, 2)
    return {"times": len(found), **found}


SAME = "0 damaged checkpoints, 0 acknowledged ones lost, 0 runs with other bits at the end"
SAVED = f"0 exits without saving, at most {{slowest}} s to the exit; {SAME}"
SEEN = (
    "{noticed:,} noticed, and the checkpoint before it loaded; the others in bytes that carry nothing; 0 loaded wrong"
)
# What was done, and what came of it; a run that does otherwise fails.
SENTENCES = {
    "kill": ("kill −9 at random moments", SAME),
    "sigterm": ("SIGTERM at random moments", SAVED),
    "sigint": ("Ctrl-C at random moments", SAVED),
    "sighup": ("SIGHUP at random moments", SAVED),
    "flip": ("one bit flipped in the newest checkpoint", SEEN),
    "cut": ("a file of it cut short", SEEN),
    "nan": ("NaN at random steps, the first among them", "all skipped and counted, the run completed"),
    "disk": ("a disk that fills up; one that is read-only", "errors that say so; resumed, same bits at the end"),
    "clock": (
        "a run whose clock jumps by up to a day, every second",
        "{repeated} checkpoints were written at a later attempt; same bits at the end",
    ),
    "same_folder": ("a second run in the same folder", "refused after {slowest} s, the first not disturbed"),
    "together": (
        "two processes, several pairs at once: one is told to end, killed, stopped, or cannot verify a checkpoint",
        "same bits at the end; the other one ended within {slowest SIGTERM}, {slowest SIGKILL} and {slowest SIGSTOP} s",
    ),
    "soak": (
        "six slow runs at once: each is killed, told to end, stopped, or killed and damaged every minute",
        "{minutes} minutes of running, {runs} runs completed, {damaged} checkpoints damaged; 0 others lost, "
        "0 runs with other bits at the end",
    ),
    "deadline": (
        "SIGTERM, then seconds to the exit",
        "steps of 1 ms, 0.1 s and 1 s, 1 process: {1 processes, 0.001 s a step}, {1 processes, 0.1 s a step} and "
        "{1 processes, 1 s a step}; 2: {2 processes, 0.001 s a step}, {2 processes, 0.1 s a step} and "
        "{2 processes, 1 s a step}",
    ),
}


def table(figures):
    """The table of docs/long-runs.md."""
    rows = ["| fault | times | result |", "|---|---|---|"]
    for name, (fault, result) in SENTENCES.items():
        if name in figures:
            # `str.format` would take the dots of "0.001 s" for attributes
            said = re.sub(
                r"\{([^}:]+)(:,)?\}", lambda m, of=figures[name]: format(of[m[1]], "," if m[2] else ""), result
            )
            rows.append(f"| {fault} | {figures[name]['times']:,} | {said} |")
    return "\n".join(rows)


def added(before, now):
    """The figures of both: the slowest of what was slowest, the sum of all others."""
    return {name: (max if "slowest" in name else sum)([before.get(name, 0), value]) for name, value in now.items()}


# Each with how often and how many at a time; a figure is kept after each of these parts.
FAULTS = {
    "nan": (nan, 1_000, 1_000),
    "disk": (disk, 2, 2),
    "same_folder": (same_folder, 1, 1),
    "clock": (clock, 10, 10),
    "kill": (kill, 1_000, 50),
    "sigterm": (partial(kill, number=signal.SIGTERM), 200, 50),
    "sigint": (partial(kill, number=signal.SIGINT), 200, 50),
    "sighup": (partial(kill, number=signal.SIGHUP), 200, 50),
    "cut": (partial(damage, kind="cut"), 1_000, 250),
    "flip": (partial(damage, kind="flip"), 10_000, 1_000),
    "deadline": (deadline, 6, 6),
    "together": (together, 100, 12),
    "soak": (soak, 480, 60),
}


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("fault", choices=[*FAULTS, "all"])
    parser.add_argument("--folder", type=Path, required=True, help="for the runs")
    parser.add_argument("--times", type=int, help="default: 1,000 kills, cuts and NaN steps, 10,000 flips, 200 signals")
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    arguments = parser.parse_args()
    folder, times = arguments.folder, arguments.times
    folder.mkdir(parents=True, exist_ok=True)
    # `nohup` has it ignored, also in a worker's first moments; a handler is not inherited.
    signal.signal(signal.SIGHUP, lambda *_: None)
    cache = str(folder / "compiled")  # for the workers, who compile the same again
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    for name in FAULTS if arguments.fault == "all" else [arguments.fault]:
        check, most, part = FAULTS[name]
        figures = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
        while (done := figures.get(name, {}).get("times", 0)) < (times or most):
            began = time.monotonic()
            now = check(folder / name, min(part, (times or most) - done), done)
            figures[name] = added(figures.get(name, {}), {**now, "seconds": round(time.monotonic() - began)})
            print(table(figures), flush=True)
            if arguments.json is not None:
                figures["versions"] = {"python": platform.python_version()} | {
                    library: metadata.version(library) for library in ("proxvi", "jax", "numpyro", "orbax-checkpoint")
                }
                arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
