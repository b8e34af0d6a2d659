"""Faults that a run of `proxvi.fit` survives: kill −9, SIGTERM, flipped bits, cut files, a full disk, NaN.

    python tests/training/faults.py all --folder /tmp/faults
    python tests/training/faults.py kill --times 200 --folder /tmp/faults

The tests run the same faults, fewer times. Each compares the final bits (parameters, optimiser, reference, losses) with
those of a run without a fault, and fails if they differ. The full disk is a small file system; to mount it needs root.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import proxvi
from proxvi.training._chunks import ChunkPacer, ChunkRunner
from proxvi.training._devices import is_key
from proxvi.training._orbax_store import OrbaxStore
from proxvi.training.checkpoints import Checkpoints

STEPS, NUM_ROWS = 3_000, 1_000


def model(x, bad=False):
    mean = numpyro.sample("mean", dist.Normal(jnp.zeros(50), 10.0).to_event(1))
    numpyro.factor("spoil", jnp.log(jnp.where(bad, -1.0, 1.0)))
    with numpyro.plate("data", NUM_ROWS, subsample_size=x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)


def make_svi():
    constraint = proxvi.Proximity(proxvi.entropy, magnitude=optax.exponential_decay(1.0, STEPS // 2, 1e-10))
    return proxvi.ProximitySVI(model, AutoNormal(model), optax.adam(0.05, b2=0.99), Trace_ELBO(), constraint)


def run(folder, *, checkpoint_every=0.0, **reporting):
    """The run that the faults disturb; with `folder` None it saves nothing."""
    checkpointing = None
    if folder is not None:
        checkpointing = proxvi.Checkpointing(folder / "checkpoints", every=checkpoint_every)
        reporting = {"metrics_file": folder / "metrics.jsonl", **reporting}
    reporting = proxvi.Reporting(**{"every": 100, "progress": False, **reporting})
    return proxvi.fit(
        make_svi(), jax.random.key(0), STEPS, data(), batch_size=100, checkpointing=checkpointing, reporting=reporting
    )


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


def start(folder):
    """The run in a process of its own, which ends by printing its bits."""
    return subprocess.Popen(
        [sys.executable, __file__, "worker", "--folder", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


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


def kill(folder, times, number=signal.SIGKILL):
    """End the run at random moments, until it is through; then again from the start, until it was ended so often."""
    alone, chance = start(folder / "alone").communicate()[0].decode().strip(), random.Random(0)
    assert alone
    ended = runs = lost = different = unsaved = 0
    while ended < times:
        runs += 1
        place = folder / f"run-{runs}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        promised, life = 0, None
        while True:
            file = identity(place)
            process = start(place)
            if ended < times:
                started, before = time.monotonic(), len(lines(place))
                # from any moment of the start-up to well into the run: at first by the clock, then by what is written
                if chance.random() < 0.3:
                    time.sleep(chance.uniform(0.0, life or 4.0))
                else:
                    while process.poll() is None and len(lines(place)) <= before + 1:
                        time.sleep(0.005)
                    life = time.monotonic() - started
                    time.sleep(chance.uniform(0.0, 0.3))
                process.send_signal(number)
            output, errors = process.communicate()
            if identity(place) != file:  # it lived to resume
                lost += resumed(place) < promised
            if process.returncode == 0:
                different += output.decode().strip() != alone
                break
            promised = max(promised, acknowledged(place))
            if process.returncode == -number:
                ended += 1
            elif number == signal.SIGTERM and process.returncode == 128 + signal.SIGTERM:
                ended += 1
                unsaved += f"saved step {promised} of" not in errors.decode()
            else:
                raise SystemExit(f"the run failed: {errors.decode()[-2_000:]}")
        damaged = [path.name for path in (place / "checkpoints").iterdir() if "damaged" in path.name]
        if damaged:
            raise SystemExit(f"a kill damaged {damaged}")
        shutil.rmtree(place)
    print(
        f"{signal.Signals(number).name}: {ended} times over {runs} runs; 0 damaged checkpoints, {lost} acknowledged "
        f"ones lost, {unsaved} exits without saving, {different} runs with other bits at the end"
    )
    assert lost == different == unsaved == 0


def damage(folder, flips, cuts, runs=3):
    """Flip one bit, or cut a file short, anywhere in the newest checkpoint; then load. `runs` times, also go on."""
    shutil.rmtree(folder, ignore_errors=True)
    pristine, place = folder / "pristine", folder / "damaged"
    alone = bits(run(pristine))
    fresh = ChunkRunner(make_svi(), jax.random.key(0), (data(),), 100, ChunkPacer(100, 100), None)
    configuration = {**fresh.describe(), "user": None}

    def load(path):
        checkpoints = Checkpoints(OrbaxStore(path / "checkpoints", keep=3), configuration)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = checkpoints.restore(lambda step: {"state": fresh.state, "losses": np.empty(step, np.float32)})
        checkpoints.close()
        return found, any("is damaged" in str(w.message) for w in warned)

    steps = sorted(int(path.name) for path in (pristine / "checkpoints").iterdir() if path.name.isdigit())
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
    chance, outcomes = random.Random(0), {"flip": [], "cut": []}
    for i, kind in enumerate(["flip"] * flips + ["cut"] * cuts):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(pristine, place)
        victim = chance.choices(files, sizes if kind == "flip" else None)[0]
        path = place / victim.relative_to(pristine)
        content = bytearray(path.read_bytes())
        at = chance.randrange(max(len(content), 1))
        if kind == "flip":
            content[at] ^= 1 << chance.randrange(8)
        path.write_bytes(content if kind == "flip" else content[:at])
        found, noticed = load(place)
        where = f"a {kind} in {victim.relative_to(pristine)} at byte {at}"
        assert found is not None, f"{where} lost every checkpoint"
        assert found.step == steps[-2 if noticed else -1], f"{where} lost the checkpoint without a word"
        assert digest(found.tree) == whole[found.step], f"{where} was loaded"
        outcomes[kind].append(noticed)
        if i < runs:
            assert bits(run(place)) == alone, f"{where} changed the result"
    for kind, noticed in outcomes.items():
        print(
            f"{kind}: {len(noticed)} times; {sum(noticed)} noticed, and the checkpoint before it loaded; "
            f"{len(noticed) - sum(noticed)} in bytes that carry nothing, the same state loaded; 0 loaded wrong"
        )


def disk(folder):
    """A disk that fills up, and a folder that cannot be written to."""
    shutil.rmtree(folder, ignore_errors=True)
    small = folder / "small"
    small.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], check=True)
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
            print(f"disk full: {str(error)[:300]}")
        else:
            raise SystemExit("a full disk went unnoticed")
        filler.unlink()
        assert bits(run(small, metrics_file=None)) == bits(run(None))
        print("disk full: resumed from the checkpoint before, same bits at the end")
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        try:
            run(small, metrics_file=None)
        except OSError as error:
            print(f"read-only folder: {error}")
        else:
            raise SystemExit("a read-only folder went unnoticed")
    finally:
        subprocess.run(["umount", str(small)], check=True)


def nan(folder, times):
    """NaN at random steps, then from some step on."""
    shutil.rmtree(folder, ignore_errors=True)
    rows = data()
    bad = np.random.default_rng(1).choice(np.arange(1, STEPS), times, replace=False)

    def batches(spoilt):
        return [(rows[:100], np.asarray(t in spoilt)) for t in range(STEPS)]

    reporting = proxvi.Reporting(every=100, progress=False)
    result = proxvi.fit(make_svi(), jax.random.key(0), STEPS, batches(set(bad)), reporting=reporting)
    assert sorted(np.flatnonzero(np.isnan(result.losses))) == sorted(bad)
    assert int(result.state.skipped.total) == times
    assert np.all(np.isfinite(jax.tree.leaves(result.params)[0]))
    print(f"NaN at {times} random steps: all {int(result.state.skipped.total)} left out and counted, the run completed")
    options = {"reporting": reporting, "checkpointing": proxvi.Checkpointing(folder, every=0.0)}
    try:
        proxvi.fit(make_svi(), jax.random.key(0), STEPS, batches(set(range(1_234, STEPS))), **options)
    except FloatingPointError as error:
        print(f"NaN from step 1234 on: {error}")
    else:
        raise SystemExit("NaN went unnoticed")
    kept = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    assert kept
    assert 1_000 <= max(kept) <= 1_234
    print(f"NaN from step 1234 on: checkpoints kept: {kept}")


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("fault", choices=["kill", "terminate", "damage", "disk", "nan", "all", "worker"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--times", type=int, default=None, help="of 200 kills, 20 SIGTERMs, 500 flips, 200 NaN steps")
    arguments = parser.parse_args()
    folder, times = arguments.folder, arguments.times
    if arguments.fault == "worker":
        print(bits(run(folder)))
        return
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")  # for the workers, who compile the same again
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    checks = {
        "nan": lambda: nan(folder / "nan", times or 200),
        "damage": lambda: damage(folder / "damage", times or 500, max((times or 500) // 5, 1)),
        "terminate": lambda: kill(folder / "terminate", times or 20, signal.SIGTERM),
        "kill": lambda: kill(folder / "kill", times or 200),
        "disk": lambda: disk(folder / "disk"),
    }
    for name in checks if arguments.fault == "all" else [arguments.fault]:
        checks[name]()


if __name__ == "__main__":
    main()
