"""The data of the paper's experiments. The SHA-256 of each file is checked."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pooch

__all__ = ["BinarizedMNIST", "binarized_mnist"]

URL = "http://www.cs.toronto.edu/~larocheh/public/datasets/binarized_mnist/"
PIXELS = 784
REMEDY = "remove it and download it again"


class _File(NamedTuple):
    """The rows and the SHA-256 of a file."""

    rows: int
    sha256: str


FILES = {
    "train": _File(50_000, "ad693b29f94c14277b095f5238ddefbbdaaae0939789dd2f4f0205278cee3e4d"),
    "valid": _File(10_000, "1de3d397c40fe8eeb33dafd4099a1f665ec01e96d9be234aaeeac8a34930e2e2"),
    "test": _File(10_000, "e6687bfea3f820c174f33b7865140b2a2dd2930ef786f35d45795fc193b5ab2c"),
}


class BinarizedMNIST(NamedTuple):
    """Handwritten digits of 28 × 28 pixels that are on or off, a row each, as bytes 0 and 1.

    Attributes:
        train: 50,000 × 784.
        valid: 10,000 × 784.
        test: 10,000 × 784.
    """

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray


def binarized_mnist(folder: str | os.PathLike[str] | None = None) -> BinarizedMNIST:
    """Larochelle's fixed binarisation of MNIST (Larochelle & Murray 2011), the data of the paper.

    The files are `binarized_mnist_train.amat`, `binarized_mnist_valid.amat` and `binarized_mnist_test.amat`. Without
    `folder` they are looked for in `$PROXVI_DATA` and in `$PROXVI_DATA/binarized_mnist`, and files that are not there
    are downloaded once, into the user's cache. The SHA-256 of every file is checked at every call.

    Args:
        folder: the folder of the three files; with it nothing is downloaded.

    Returns:
        The three parts, in the order of the files.

    Raises:
        FileNotFoundError: if a file is not in `folder`.
        ValueError: if a file has other contents than it should have.
        OSError: if a file cannot be downloaded.

    Example:
        >>> BinarizedMNIST._fields
        ('train', 'valid', 'test')

        With the files, or a network to download them::

            digits = binarized_mnist()
            digits.train.shape, digits.train.dtype  # ((50000, 784), dtype('uint8'))
    """
    return BinarizedMNIST(
        *(_read(_find(f"binarized_mnist_{part}.amat", folder, FILES[part]), FILES[part]) for part in FILES)
    )


def _find(name: str, folder: str | os.PathLike[str] | None, file: _File) -> Path:
    """The path of the file, which is downloaded if it is not found."""
    if folder is not None:
        path = Path(folder) / name
        if not os.path.lexists(path):
            raise FileNotFoundError(
                f"`folder` must hold {name}, got {folder}, which does not; put the file there, or leave `folder` out "
                "to download it."
            )
        return path
    if shared := os.environ.get("PROXVI_DATA"):
        for path in (Path(shared) / name, Path(shared) / "binarized_mnist" / name):
            if os.path.lexists(path):
                return path
    try:
        cache = Path(pooch.os_cache("proxvi")) / "binarized_mnist"
        return Path(pooch.retrieve(URL + name, f"sha256:{file.sha256}", name, cache))
    except OSError as error:
        raise OSError(
            f"{name} must be downloaded, got no answer from {URL} ({type(error).__name__}); try again, or name the "
            "folder that has it in the environment variable PROXVI_DATA."
        ) from error


def _read(path: Path, file: _File) -> np.ndarray:
    """The contents of the file, if its SHA-256 is right."""
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(os.path.realpath(path.parent)):
        raise ValueError(
            f"{path} must be a file of its own, got a link out of its folder, to {target}; name the folder that it "
            "points to."
        )
    if not path.is_file():  # and not, for example, a pipe, from which reading would never end
        raise ValueError(f"{path} must be a file, got something else, such as a folder; {REMEDY}.")
    size, expected = path.stat().st_size, 2 * PIXELS * file.rows
    if size != expected:  # before it is read: it may be of any size
        raise ValueError(f"{path} must have {expected} bytes, got {size}; {REMEDY}.")
    raw = path.read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    if digest != file.sha256:
        raise ValueError(f"{path} must have the SHA-256 {file.sha256}, got {digest}; {REMEDY}.")
    # Each value, 0 or 1, is followed by a blank or the end of the line; the SHA-256 leaves nothing more to check.
    return np.frombuffer(raw, np.uint8).reshape(file.rows, 2 * PIXELS)[:, ::2] - np.uint8(ord("0"))
