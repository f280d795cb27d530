"""Our CUDA sources, compiled for the CPU: their arithmetic, their barriers and their bookkeeping without a GPU.

The code that binds a kernel is the real one, ``cuda_launch.Launcher``: only its library and its launch are others. The 16-bit
types are emulated, too. What no GPU is needed for is tested here; that the compiler of CUDA takes the sources, and warps, is not.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from types import SimpleNamespace

import numpy as np

from minidnn.kernels import cuda_blocks, cuda_launch

HEADER = cuda_launch.SOURCES.parents[2] / "tests" / "backend" / "cuda_on_cpu.h"
KERNEL = re.compile(r"__global__ void\s+(?:__launch_bounds__\(\w+\)\s+)?(\w+)\(")
COMPILE = (
    "g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off", "-fno-gnu-unique", "-U_FORTIFY_SOURCE",
)  # fmt: skip


def source(name):
    """The text of a source as a part of a C++ file: without CUDA's headers, and without names of C, which know no namespace."""
    text = (cuda_launch.SOURCES / name).read_text(encoding="utf-8").replace('extern "C" ', "")
    return re.sub(r"^#include .*$", "", text, flags=re.MULTILINE)


def kernels(name):
    """The kernels of ``cuda/<name>.cu``."""
    return KERNEL.findall(source(f"{name}.cu"))


class Library:
    """Takes the place of ``cuda_launch.Library``: compiles whatever was asked for since, in one go, when first it is launched."""

    def __init__(self, folder):
        self.folder, self.seed, self.launched = folder, 0, set()
        self._variants, self._entries, self._compiled, self._files = {}, {}, {}, 0

    def function(self, name, kernel, dtype, by, options=()):
        """A number for ``launch``."""
        flags = (f"-DKIND={cuda_launch.KINDS[dtype]}", f"-DWIDTH={by.width}", *(("-DNARROW",) * by.narrow), *options)
        number = self._variants.setdefault((name, flags), len(self._variants))
        return self._entries.setdefault((number, kernel), len(self._entries))

    def compile(self):
        """Compile what was asked for and is not compiled."""
        waiting = [entry for entry in self._entries if entry not in self._compiled]
        if not waiting:
            return
        pieces, common = [f'#include "{HEADER}"'], source("common.cuh")
        for (name, flags), number in self._variants.items():
            entries = [kernel for of, kernel in waiting if of == number]
            if entries:
                pairs = [flag.removeprefix("-D").partition("=")[::2] for flag in flags]
                pieces += [f"#define {macro} {value}" for macro, value in pairs]
                pieces += [f"namespace v{number} {{", common, source(f"{name}.cu"), "}"]
                pieces += [f"#undef {macro}" for macro, _ in pairs]
                pieces += [
                    f'extern "C" void v{number}_{kernel}(void** a, const unsigned* s, unsigned seed) '
                    f"{{ launch(Entry<v{number}::{kernel}>::call, a, s, seed); }}"
                    for kernel in entries
                ]
        stem = self.folder / f"sources{self._files}"
        self._files += 1
        stem.with_suffix(".cpp").write_text("\n".join(pieces), encoding="utf-8")
        subprocess.run([*COMPILE, "-o", f"{stem}.so", f"{stem}.cpp"], check=True, timeout=300)
        found = ctypes.CDLL(f"{stem}.so")
        self._compiled |= {(of, kernel): found[f"v{of}_{kernel}"] for of, kernel in waiting}

    def launch(self, number, *rest):
        """As ``cupy.cuda.driver.launchKernel``."""
        self.compile()
        variant, kernel = list(self._entries)[number]
        self.launched.add((list(self._variants)[variant][0], kernel))
        assert all(extent > 0 for extent in rest[:6]) and rest[3] * rest[4] * rest[5] <= 1024, "no such launch"
        assert rest[1] <= cuda_blocks.LONGEST_GRID and rest[2] <= cuda_blocks.LONGEST_GRID, "no such grid"
        self._compiled[variant, kernel](
            ctypes.c_void_p(rest[8]), (ctypes.c_uint * 6)(*rest[:6]), ctypes.c_uint(self.seed)
        )


class Array:
    """A device array: a copy of a NumPy array between canaries, ``shift`` bytes off a multiple of 512.

    A canary is no NaN and not that of another array, so that neither arithmetic on it nor a copy leaves it as it is.
    """

    def __init__(self, values, shift=0, canary=0x7B):
        values, self._canary = np.asarray(values), canary
        self._raw = np.full(values.nbytes + 2048, canary, np.uint8)
        self._first = -self._raw.ctypes.data % 512 + 512 + shift
        self._end = self._first + values.nbytes
        self.host = self._raw[self._first : self._end].view(values.dtype).reshape(values.shape)
        self.host[...] = values
        self.shape, self.dtype, self.size, self.nbytes = values.shape, values.dtype, values.size, values.nbytes
        self.data = SimpleNamespace(ptr=self.host.ctypes.data)

    def check(self):
        """Nothing around it was written."""
        assert (self._raw[: self._first] == self._canary).all(), "written before an array"
        assert (self._raw[self._end :] == self._canary).all(), "written behind an array"


def launcher(folder):
    """(the real launcher over the CPU, its library, its scratch)."""
    library, scratch = Library(folder), Array(np.zeros(cuda_blocks.SCRATCH_BYTES, np.uint8))
    return cuda_launch.Launcher(library, library.launch, 0, scratch.data.ptr, None), library, scratch
