"""Show platform, versions, devices, and which implementation of each operation is taken and why."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
from pathlib import Path
from typing import Annotated, Any

import typer

from dsv4dist.cli.options import HELP, OptionError
from dsv4dist.cli.output import JsonOption, json_on_stdout
from dsv4dist.config.runtime import CHOICES

PACKAGES = ("ray", "triton", "pyzmq", "safetensors", "tokenizers", "amdsmi")


def command(
    *,
    kernels: Annotated[str, typer.Option(metavar="|".join(CHOICES["kernels"]), help=HELP["kernels"])] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Print one table, or one JSON row per operation with everything else in it."""
    if kernels not in CHOICES["kernels"]:
        raise OptionError(f"--kernels is {kernels!r}; choose from {', '.join(CHOICES['kernels'])}")
    from dsv4dist.kernels.ops import chosen_ops

    facts = {"platform": platform_name(), "devices": devices(), "versions": versions()}
    rows = [{"op": op, "implementation": name, "why": why} for op, name, why in chosen_ops(kernels)]
    if as_json:
        with json_on_stdout() as stream:
            for row in rows:
                stream.write(json.dumps({**row, **facts}) + "\n")
        return
    print(f"platform  {facts['platform']}")
    for device in devices() or ["no GPU"]:
        print(f"device    {device}")
    for name, version in versions().items():
        print(f"{name:<12}{version}")
    print()
    width = max(len(row["op"]) for row in rows)
    for row in rows:
        print(f"{row['op']:<{width}}  {row['implementation']:<10}  {row['why']}")


def platform_name() -> str:
    """`rocm`, `cuda` or `cpu`: what PyTorch here is built for and finds a device of."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return "rocm" if torch.version.hip else "cuda"


def devices() -> list[str]:
    """One line per GPU that this process sees: name, architecture, memory."""
    import torch

    from dsv4dist.arch import arch_name

    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        arch = arch_name(facts)
        found.append(f"{index}: {facts.name}, {arch}, {facts.total_memory / 2**30:.0f} GiB")
    return found


def versions() -> dict[str, Any]:
    """Versions by name; None for what is not installed."""
    import torch

    from dsv4dist import __version__

    return {
        "dsv4dist": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        **{name: _version(name) for name in PACKAGES},
        "aiter": aiter_version(),
    }


def aiter_version() -> str | None:
    """AMD's kernel library, told by its `ops` from unrelated packages that answer to the same name.

    Looks at files only: importing the library takes long, and importing a stranger is unwise."""
    spec = importlib.util.find_spec("aiter")
    if spec is None:
        return None
    owners = importlib.metadata.packages_distributions().get("aiter", [])
    owner = f"{owners[0]} {_version(owners[0])}" if owners else f"from {spec.origin}"
    if any((Path(place) / "ops").is_dir() for place in spec.submodule_search_locations or []):
        return owner
    return f"not AMD's: {owner} answers to the name aiter"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
