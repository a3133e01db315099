"""Tools of a machine: NVIDIA's profilers, wherever they were installed, a GPU, and its driver's bindings."""

import re
import shutil
from pathlib import Path
from typing import Any

import torch

# Below the root of the file system, in the order in which they are looked through, after PATH.
_PLACES = {
    "ncu": (
        "usr/local/cuda/bin",
        "usr/local/cuda*/bin",
        "usr/local/cuda*/nsight-compute-*",
        "opt/nvidia/nsight-compute/*",
    ),
    "nsys": (
        "usr/local/cuda/bin",
        "usr/local/cuda*/bin",
        "usr/local/cuda*/nsight-systems-*/bin",
        "opt/nvidia/nsight-systems/*/bin",
        "opt/nvidia/nsight-compute/*/host/target-linux-*",  # Nsight Compute brings one along
    ),
}
_SOURCES = {
    "ncu": "Nsight Compute, a part of the CUDA toolkit (https://developer.nvidia.com/nsight-compute)",
    "nsys": "Nsight Systems, a part of the CUDA toolkit (https://developer.nvidia.com/nsight-systems)",
}


class Unavailable(Exception):
    """Error: the machine lacks something; the message says how to get it."""


def find(tool: str, root: Path = Path("/")) -> Path:
    """The executable of ``ncu`` or ``nsys``: that on PATH, else the newest where NVIDIA's installers put it.

    Raises:
        Unavailable: there is none.
    """
    on_path = shutil.which(tool)
    if on_path is not None:
        return Path(on_path)
    for place in _PLACES[tool]:
        for folder in sorted(root.glob(place), key=_version, reverse=True):
            found = shutil.which(tool, path=str(folder))
            if found is not None:
                return Path(found)
    looked = ", ".join(str(root / place) for place in _PLACES[tool])
    raise Unavailable(f"{tool} was not found, neither on PATH nor in {looked}. It comes with {_SOURCES[tool]}.")


def require_gpu() -> None:
    """Returns if PyTorch can use a GPU.

    Raises:
        Unavailable: it cannot.
    """
    if not torch.cuda.is_available():
        built = "sees none" if torch.version.cuda else "is built without CUDA"
        raise Unavailable(f"An NVIDIA GPU is needed, and this PyTorch ({torch.__version__}) {built}.")


def cuda_driver() -> Any:
    """cuda-python's bindings of the driver. Those of the runtime refuse a driver of an older major version.

    Raises:
        Unavailable: they are not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise Unavailable(
            f"cuda-bindings is needed to start and stop the profiler ({error}): pip install cuda-bindings"
        ) from error
    return driver


def _version(folder: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(folder))]
