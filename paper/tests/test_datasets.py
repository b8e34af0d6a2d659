"""The digits: the right bytes or an error that says what is wrong, wherever the files are."""

import hashlib
import http.server
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pooch
import pytest

from proxvi_paper import datasets

ROWS = {"train": 5, "valid": 3, "test": 2}
SMALL = {
    part: np.random.default_rng(rows).integers(0, 2, (rows, datasets.PIXELS), dtype=np.uint8)
    for part, rows in ROWS.items()
}


def text(values: np.ndarray) -> bytes:
    return b"".join(b" ".join(b"%d" % value for value in row) + b"\n" for row in values)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three small files in the format of the large ones, which the module takes for the right ones."""
    files = {}
    place = tmp_path / "digits"
    place.mkdir()
    for part, values in SMALL.items():
        raw = text(values)
        (place / f"binarized_mnist_{part}.amat").write_bytes(raw)
        files[part] = datasets._File(len(values), hashlib.sha256(raw).hexdigest())
    monkeypatch.setattr(datasets, "FILES", files)
    monkeypatch.delenv("PROXVI_DATA", raising=False)
    return place


def check(digits: datasets.BinarizedMNIST) -> None:
    for part, values in SMALL.items():
        assert getattr(digits, part).dtype == np.uint8
        np.testing.assert_array_equal(getattr(digits, part), values)


def test_files_are_found_in_the_folder_and_through_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(datasets.binarized_mnist(folder))
    check(datasets.binarized_mnist(str(folder)))
    monkeypatch.setenv("PROXVI_DATA", str(folder))
    check(datasets.binarized_mnist())
    folder.rename(folder.parent / "binarized_mnist")
    monkeypatch.setenv("PROXVI_DATA", str(folder.parent))
    check(datasets.binarized_mnist())


def test_a_folder_that_is_itself_a_link_is_fine(folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder, target_is_directory=True)
    check(datasets.binarized_mnist(link))


TRAIN = "binarized_mnist_train.amat"


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def link_away(path: Path) -> None:
    outside = path.parent.parent / "outside.amat"
    path.rename(outside)
    path.symlink_to(outside)


# What was done to the first file, and what the error must say of it.
DAMAGED = [
    ("empty", rewrite(lambda raw: b""), "must have 7840 bytes, got 0"),
    ("truncated by a byte", rewrite(lambda raw: raw[:-1]), "must have 7840 bytes, got 7839"),
    ("truncated by half", rewrite(lambda raw: raw[: len(raw) // 2]), "got 3920"),
    ("a row short", rewrite(lambda raw: raw[: 4 * 1568]), "got 6272"),
    ("a row more", rewrite(lambda raw: raw + raw[:1568]), "got 9408"),
    ("lines of Windows", rewrite(lambda raw: raw.replace(b"\n", b"\r\n")), "got 7845"),
    ("a page of HTML", rewrite(lambda raw: b"<html>404</html>"), "got 16"),
    ("the valid file in its place", rewrite(lambda raw: text(SMALL["valid"])), "got 4704"),
    ("a flipped value", rewrite(lambda raw: bytes([raw[0] ^ 1]) + raw[1:]), "must have the SHA-256"),
    ("a flipped bit", rewrite(lambda raw: raw[:-2] + bytes([raw[-2] ^ 64]) + raw[-1:]), "must have the SHA-256"),
    ("rows in another order", rewrite(lambda raw: raw[1568:] + raw[:1568]), "must have the SHA-256"),
    ("zeros", rewrite(lambda raw: bytes(len(raw))), "must have the SHA-256"),
    ("missing", lambda path: path.unlink(), "must hold binarized_mnist_train.amat"),
    ("a folder", replace(lambda path: path.mkdir()), "must be a file, got something else"),
    ("a pipe", replace(lambda path: os.mkfifo(path)), "must be a file, got something else"),
    ("a link to nothing", replace(lambda path: path.symlink_to("nothing")), "must be a file, got something else"),
    ("a link to itself", replace(lambda path: path.symlink_to(TRAIN)), "must be a file, got something else"),
    ("a link out of the folder", link_away, "got a link out of its folder"),
    ("a link to a device", replace(lambda path: path.symlink_to("/dev/zero")), "got a link out of its folder"),
]


@pytest.mark.parametrize(("damage", "message"), [case[1:] for case in DAMAGED], ids=[case[0] for case in DAMAGED])
def test_damaged_files_are_refused(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder / TRAIN)
    with pytest.raises((ValueError, FileNotFoundError), match=TRAIN) as refusal:
        datasets.binarized_mnist(folder)
    assert message in str(refusal.value)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"`folder` must hold .* got .*nowhere.*leave `folder` out"):
        datasets.binarized_mnist(tmp_path / "nowhere")


@pytest.fixture
def server(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files as a web server has them, and an empty cache."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *args: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        monkeypatch.setattr(datasets, "URL", f"http://127.0.0.1:{web.server_port}/")
        monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "cache" / name)
        yield folder
        web.shutdown()


def test_files_are_downloaded_once(server: Path) -> None:
    check(datasets.binarized_mnist())
    for path in server.iterdir():
        path.unlink()
    check(datasets.binarized_mnist())


def test_a_damaged_download_is_refused(server: Path) -> None:
    (server / TRAIN).write_bytes(b"<html>moved</html>")
    with pytest.raises(ValueError, match=TRAIN):
        datasets.binarized_mnist()


def test_a_damaged_cache_is_downloaded_again(server: Path, tmp_path: Path) -> None:
    datasets.binarized_mnist()
    (cached,) = (tmp_path / "cache").rglob(TRAIN)
    cached.write_bytes(b"0")
    check(datasets.binarized_mnist())
    assert server.exists()


def test_the_digits_themselves() -> None:
    """Known properties of the real files; without them it is skipped, but not where a build must not skip."""
    shared = Path(os.environ.get("PROXVI_DATA") or "/nowhere")
    if not os.environ.get("CI") and not any(path.exists() for path in (shared / TRAIN, shared / "binarized_mnist")):
        pytest.skip("PROXVI_DATA does not name a folder with the digits")
    started = time.perf_counter()
    digits = datasets.binarized_mnist()
    seconds = time.perf_counter() - started
    assert [part.shape for part in digits] == [(50_000, 784), (10_000, 784), (10_000, 784)]
    assert all(part.dtype == np.uint8 and set(np.unique(part)) == {0, 1} for part in digits)
    assert 0.12 < digits.train.mean() < 0.14
    assert shared.name == "nowhere" or seconds < 10
