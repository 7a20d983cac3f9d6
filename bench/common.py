"""What every bench shares: the card (machine, versions, date, command), a table, a results file."""

import json
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parent / "results"


def cpu_name() -> str:
    """The processor's own name, where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def card(device: torch.device) -> dict[str, object]:
    """What the figures were measured on."""
    on_gpu = device.type == "cuda"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if on_gpu:
        import triton

        versions |= {"triton": triton.__version__, "cuda": str(torch.version.cuda)}
    script = Path(sys.argv[0])
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "versions": versions,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", f"bench/{script.name}", *sys.argv[1:]]),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if values[1:] else values * 3
    low, middle, high = quartiles
    return {
        "median": middle,
        "quartile_1": low,
        "quartile_3": high,
        "min": min(values),
        "max": max(values),
        "count": len(values),
    }


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their widest cell, numbers to the right."""

    def show(cell: object) -> str:
        return f"{cell:.2f}" if isinstance(cell, float) else str(cell)

    cells = [list(header), *([show(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths)) for row in cells)


def save(name: str, machine: dict[str, object], figures: dict[str, object]) -> None:
    """Write bench/results/<name>.json and print the same object as the last line."""
    result = {**machine, **figures}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
