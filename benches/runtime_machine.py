"""The machine a run was made on, in words."""

import os
import pathlib
import platform
import re
import sys


def described() -> dict[str, str]:
    """Processor, cores, memory, kernel, interpreter, and how busy the machine was before the run."""
    info = pathlib.Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.+)", info)
    memory = re.search(r"MemTotal:\s+(\d+)", pathlib.Path("/proc/meminfo").read_text())
    return {
        "processor": model[1] if model else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{int(memory[1]) / 1e6:.0f} GB" if memory else "unknown",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "compiler": platform.python_compiler(),
        "allocator": os.environ.get("PYTHONMALLOC", "pymalloc"),
        "load": " ".join(f"{value:.2f}" for value in os.getloadavg()),
        "platform": sys.platform,
    }


def steal() -> tuple[float, float]:
    """Ticks the hypervisor took from this machine, and all ticks, since the boot."""
    fields = [int(word) for word in pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return float(fields[7]), float(sum(fields))
