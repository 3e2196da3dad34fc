"""Where and with what a bench ran: enough to know whether two reports may be compared."""

import os
import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..models.base import ModelInfo
from .options import BenchOptions

_PACKAGES = ("pilotfish", "torch", "transformers", "numpy")


def describe(info: ModelInfo, options: BenchOptions, *, num_prompts: int, interrupted: bool) -> dict[str, Any]:
    """The ``environment`` of a report; all values are JSON."""
    return {
        "model": info.name,
        "architecture": info.architecture,
        "implementation": info.implementation,
        "quantization": info.quantization,
        "dtype": str(info.dtype).removeprefix("torch."),
        "bitwise": info.bitwise,
        "weights": info.quantization if info.quantization != "none" else str(info.dtype).removeprefix("torch."),
        "device": str(info.device),
        "gpu": torch.cuda.get_device_name(info.device) if info.device.type == "cuda" else None,
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": _usable_cores(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": options.seed,
        "settings": asdict(options),
        "num_prompts": num_prompts,
        "interrupted": interrupted,
    }


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def commit(folder: Path | None = None) -> str | None:
    """The commit of the checkout this package lies in, ``+`` behind it if files were changed; None if it is none."""
    folder = folder or Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    head = _git(folder, "rev-parse", "HEAD")
    return None if head is None else head + ("+" if _git(folder, "status", "--porcelain", "-uno") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git here
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
