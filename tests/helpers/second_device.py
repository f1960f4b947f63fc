"""Runs a script with a second device beside the CPU, to try without a GPU what is meant for one.

    python second_device.py LIBRARY SCRIPT [ARGUMENT …]

The script's accelerate takes the device that `second_device.cpp`, built into the library, defines. Not for it: CUDA's
kernels, streams and memory.
"""

import os
import runpy
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension


def build(folder: Path) -> Path:
    """Compile the device into a library; needs g++."""
    library = folder / "second_device.so"
    flags = ["-std=c++20", "-O0", "-w", "-shared", "-fPIC", "-o", str(library)]
    paths = [f"-I{path}" for path in cpp_extension.include_paths()]
    links = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-lc10", "-ltorch_cpu"]
    subprocess.run(["g++", *flags, *paths, str(Path(__file__).with_suffix(".cpp")), *links], check=True)
    return library


def register(library: str | Path) -> None:
    """Make the device known to torch, as "second"."""
    torch.ops.load_library(library)
    module = ModuleType("torch.second")
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.device = lambda device: nullcontext()
    module.manual_seed_all = lambda seed: None  # it draws the CPU's numbers
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    torch.utils.rename_privateuse1_backend("second")
    torch._register_device_module("second", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # As on CUDA, where a module that moves keeps its parameters.
    torch.__future__.set_swap_module_params_on_conversion(True)


if __name__ == "__main__":
    _, library, *sys.argv = sys.argv
    register(library)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "second:0"
    runpy.run_path(sys.argv[0], run_name="__main__")
