"""`hush doctor` and `hush --version`: versions of packages, and checks of this machine."""

import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Literal

import typer

from hush import __version__
from hush.cli import options as opt
from hush.cli.output import print_json
from hush.core.extensions import INSTALL, extensions
from hush.core.randomness import has_triton

EXTRAS = {
    "sklearn": {"scikit-learn": "1.6"},
    "lightning": {"lightning": "2.6"},
    "transformers": {"accelerate": "1.15", "peft": "0.21", "transformers": "5.22"},
}
"""Packages of each extra with their oldest supported version, as in pyproject.toml."""


@dataclass(frozen=True)
class Check:
    """Outcome of one check, with one line of text."""

    name: str
    state: Literal["ok", "missing", "failed"]
    text: str


def installed(package: str) -> str | None:
    """Version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> list[str]:
    """Versions of hush, Python, torch and the packages of the extras, without importing them."""
    packages = ["torch", "triton", *(name for extra in EXTRAS.values() for name in extra)]
    found = [f"{name} {installed(name) or 'not installed'}" for name in [*packages, "hush-dp-recipes"]]
    return [f"hush {__version__}", f"Python {platform.python_version()}", *found]


def doctor(as_json: opt.AsJson = False) -> None:
    """Check private steps, GPU, Triton, extras and data on this machine.

    The exit status is 1 if a check fails.

    Example: hush doctor
    """
    checks = list(_checks())
    if as_json:
        print_json({"versions": versions(), "checks": [asdict(check) for check in checks]})
    else:
        print(*versions()[:3], sep=", ")
        for check in checks:
            print(f"{check.state:8}{check.name}: {check.text}")
    if any(check.state == "failed" for check in checks):
        raise typer.Exit(1)


def _checks() -> Iterator[Check]:
    import torch

    yield _attempt("private step on cpu", partial(_private_step, "cpu"))
    if count := torch.cuda.device_count() if torch.cuda.is_available() else 0:
        for device in (f"cuda:{number}" for number in range(count)):
            yield _attempt(f"private step on {device}", partial(_private_step, device))
        slower = "not found: private steps on a GPU are slower. torch 2.8 or later for CUDA installs it"
        found = f"{installed('triton')}: GPU kernels are used"
        yield Check("Triton", "ok", found) if has_triton() else Check("Triton", "missing", slower)
    else:
        built = (
            f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        )
        yield Check("GPU", "missing", f"none found; this torch {built}")
    yield from (_extra(name) for name in EXTRAS)
    datasets = ", ".join(extensions("datasets"))
    found = f"data sets {datasets}; commands {', '.join(extensions('commands'))}"
    yield Check("recipes", "ok", found) if datasets else Check("recipes", "missing", INSTALL)
    yield _data()


def _attempt(name: str, check: Callable[[], str]) -> Check:
    """Run a check; return its text or its error."""
    try:
        return Check(name, "ok", check())
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        return Check(name, "failed", f"{type(error).__name__}: {first}")


def _private_step(device: str) -> str:
    """Minimum time of ten private steps of a small model, and the name of the device."""
    import torch

    from hush import PrivateStep, plans

    model = torch.nn.Linear(64, 10, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = plans.dpsgd(rate=0.25, clip_norm=1.0, multiplier=1.0)
    step = PrivateStep(model, torch.nn.CrossEntropyLoss(), optimizer, plan, records=1024)
    data = torch.zeros(1024, 64, device=device), torch.arange(1024, device=device) % 10
    times = []
    for batch in step.batches(data, steps=10):
        start = perf_counter()
        step(batch)
        if device != "cpu":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - start)
    name = platform.machine() if device == "cpu" else torch.cuda.get_device_name(device)
    return f"{1000 * min(times):.1f} ms for a small model, {name}"


def _extra(name: str) -> Check:
    """Whether the packages of an extra are installed and recent enough."""
    found = {package: installed(package) for package in EXTRAS[name]}
    way = f"In a clone of hush, run pip install '.[{name}]'"
    if missing := [package for package, have in found.items() if have is None]:
        return Check(name, "missing", f"{', '.join(missing)} not installed. {way}")
    text = ", ".join(f"{package} {have}" for package, have in found.items())
    for package, oldest in EXTRAS[name].items():
        if _numbers(found[package] or "") < _numbers(oldest):
            return Check(name, "failed", f"{text}: {package} must be {oldest} or later. {way}")
    return Check(name, "ok", text)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)[:2]]


def _data() -> Check:
    """Whether HUSH_DATA names a directory."""
    if not (value := os.environ.get("HUSH_DATA")):
        return Check(
            "data directory", "missing", "HUSH_DATA is not set; the data set digits needs no files"
        )
    folder = Path(value).expanduser()
    if not folder.is_dir():
        return Check("data directory", "failed", f"HUSH_DATA={value} is not a directory")
    return Check("data directory", "ok", f"{folder}: {', '.join(sorted(os.listdir(folder))) or 'empty'}")
