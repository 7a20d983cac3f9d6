"""How fast is a checkpoint loaded, against plainly reading its files, and with how much memory?

    python bench/load.py --gib 8 --shards 64      a synthetic checkpoint of Kimi-K2.5's widths
    python bench/load.py --folder FOLDER          the same files again; written if not there

In turn, in one run: a plain sequential read with one thread and one reused buffer, the same with
several threads (a file each at a time), and `load_target` onto the CPU and, where there is one,
onto the GPU. Each cold (the files' pages dropped from the page cache, which is then looked at) and
warm (right after). The time of `finish_loading` is taken apart. Onto the CPU the experts stay in
the checkpoint's layout (expert dtype float32); `--repack` also measures what bfloat16 experts
cost, which `finish_loading` repacks for the CPU's kernel at many times the price of the reading.
Each load runs in a process of its own; its clock starts after the imports and the GPU's start-up.
Writes bench/results/load_<cpu or the GPU's name>.json.

Memory of a load, in bytes of the process: `extra` is the peak of what is resident less what was
before and less the tensors that stay on the host. `anon` counts allocations alone; `file` counts
mapped pages of the files, which the system may take back at any time.
"""

import argparse
import ctypes
import gc
import json
import mmap
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from common import card, save, spread, table

from minispec.models.checkpoint import K25_FILES
from minispec.models.kimi_k25 import KimiK25
from minispec.models.synthetic import full_width_config, write_target
from minispec.models.weights import load_target

BLOCK = 16 * 2**20  # bytes of one read
CONTEXT = 1024
REPACKED = ", repacked"
GIB = 2**30


def read_file(path: Path, buffer: bytearray) -> int:
    """Every byte of a file through one buffer."""
    total = 0
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            total += count
    return total


def read_all(files: list[Path], threads: int) -> float:
    """Seconds to read all files, each thread with a buffer of its own."""
    local = threading.local()

    def read(path: Path) -> int:
        if not hasattr(local, "buffer"):
            local.buffer = bytearray(BLOCK)
        return read_file(path, local.buffer)

    start = time.perf_counter()
    if threads == 1:
        total = sum(map(read, files))
    else:
        with ThreadPoolExecutor(threads) as pool:
            total = sum(pool.map(read, files))
    seconds = time.perf_counter() - start
    assert total == sum(path.stat().st_size for path in files)
    return seconds


def cached_share(files: list[Path]) -> float | None:
    """The share of the files' pages that is in the page cache; None where mincore cannot tell."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    pages = cached = 0
    for path in files:
        size = path.stat().st_size
        count = -(-size // mmap.PAGESIZE)
        flags = ctypes.create_string_buffer(count)
        with path.open("rb") as file:
            address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if address in (None, ctypes.c_void_p(-1).value):
            return None
        failed = libc.mincore(address, size, flags)
        libc.munmap(address, size)
        if failed:
            return None
        pages += count
        cached += count - flags.raw.count(b"\0")
    return cached / pages


def drop_from_cache(files: list[Path]) -> None:
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages not yet on the disk cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


# one load, in a process of its own


def memory() -> dict[str, int]:
    """This process's resident bytes, by what /proc/self/status calls them."""
    status = Path("/proc/self/status").read_text()
    return {key: int(kib) * 1024 for key, kib in re.findall(r"(\w+):\s+(\d+) kB", status)}


class Sampler(threading.Thread):
    """Peaks of RssAnon, RssFile and VmRSS, looked at every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = memory()
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.005):
            now = memory()
            self.peak = {key: max(value, self.peak.get(key, 0)) for key, value in now.items()}


def host_bytes() -> int:
    """Bytes of all tensors alive on the host, each storage once."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measure_load(folder: Path, what: str) -> dict[str, float]:
    """Seconds and bytes of one `load_target`; `what` is a device, or 'cpu, repacked'."""
    device = torch.device(what.removesuffix(REPACKED))
    expert_dtype = torch.float32 if what == "cpu" else torch.bfloat16
    finish: list[float] = []
    inner = KimiK25.finish_loading

    def sync() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def timed(model: KimiK25, *args: int) -> None:
        start = sync()
        inner(model, *args)
        finish.append(sync() - start)

    setattr(KimiK25, "finish_loading", timed)  # noqa: B010
    torch.zeros(1, device=device)  # the GPU's start-up
    held = host_bytes()
    before = memory()
    sampler = Sampler()
    sampler.start()
    start = sync()
    model = load_target(folder, device, torch.bfloat16, expert_dtype, CONTEXT)
    seconds = sync() - start
    sampler.over.set()
    sampler.join()
    after, peak = memory(), sampler.peak
    stays = host_bytes() - held
    top = max(peak["VmRSS"], after["VmRSS"])
    if after["VmHWM"] > before["VmHWM"]:  # the kernel's own peak, which no sample misses
        top = after["VmHWM"]
    assert model.vocab_size
    return {
        "seconds": seconds,
        "finish_seconds": sum(finish),
        "weights_on_host": stays,
        "extra": top - before["VmRSS"] - stays,
        "extra_anon": max(peak["RssAnon"], after["RssAnon"]) - before["RssAnon"] - stays,
        "peak_file": peak["RssFile"] - before["RssFile"],
    }


def load_in_a_process(folder: Path, what: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--folder", str(folder), "--one-load", what]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# the run


def prepare(args: argparse.Namespace, folder: Path) -> list[Path]:
    """The checkpoint's files, written first if the folder holds none."""
    if not (folder / "config.json").is_file():
        start = time.perf_counter()
        config = full_width_config(args.gib, args.form)
        write_target(folder, config, shards=args.shards, files=K25_FILES)
        print(f"wrote the checkpoint in {time.perf_counter() - start:.1f} s", flush=True)
    return sorted(folder.glob("*.safetensors"))


def run(args: argparse.Namespace, folder: Path, began: float) -> None:
    files = prepare(args, folder)
    size = sum(path.stat().st_size for path in files)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    modes: dict[str, Callable[[], dict[str, float]]] = {
        "read, 1 thread": lambda: {"seconds": read_all(files, 1)},
        f"read, {args.threads} threads": lambda: {"seconds": read_all(files, args.threads)},
    }
    for what in [*devices, *(["cpu" + REPACKED] if args.repack else [])]:
        modes[f"load onto {what}"] = partial(load_in_a_process, folder, what)
    order = list(modes)
    plain = order[0]
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    left_cached: list[float | None] = []
    rounds = 0
    while rounds < args.repeats:
        start = time.perf_counter()
        for mode in order[rounds % len(order) :] + order[: rounds % len(order)]:
            drop_from_cache(files)
            left_cached.append(cached_share(files))
            for state in ("cold", "warm"):
                found.setdefault((mode, state), []).append(modes[mode]())
        rounds += 1
        now = time.perf_counter()
        if now - began + (now - start) > args.budget:
            break
    shares = [share for share in left_cached if share is not None]
    rows, figures = [], []
    for (mode, state), results in sorted(found.items(), key=lambda item: item[0][1]):
        seconds = [result["seconds"] for result in results]
        # of the same round: reading + placing, and the whole, against the plain read
        base = [result["seconds"] for result in found[plain, state]]
        placed = [r["seconds"] - r.get("finish_seconds", 0.0) for r in results]
        entry: dict[str, object] = {
            "mode": mode,
            "state": state,
            "seconds": spread(seconds),
            "gb_per_s": spread([size / 1e9 / value for value in seconds]),
            "ratio_to_plain_read": spread([b / value for b, value in zip(base, seconds)]),
        }
        if mode.startswith("load"):
            entry["finish_seconds"] = spread([r["finish_seconds"] for r in results])
            entry["ratio_without_finish"] = spread([b / p for b, p in zip(base, placed)])
            for key in ("weights_on_host", "extra", "extra_anon", "peak_file"):
                entry[key] = max(result[key] for result in results)
        figures.append(entry)
        rows.append(row(entry))
    header = (
        "state", "what", "s", "min", "max", "GB/s", "ratio", "finish s", "ratio w/o finish",
        "extra GiB", "anon GiB", "file GiB",
    )  # fmt: skip
    print(f"{size / GIB:.2f} GiB in {len(files)} files, {rounds} rounds")
    print(table(header, rows), flush=True)
    dropped = {
        "pages_left_in_cache": max(shares) if shares else None,
        "note": "of this system's page cache; a virtual disk's host may hold a cache of its own",
    }
    print(f"pages still cached after dropping, at most: {dropped['pages_left_in_cache']}")
    device = torch.device(devices[-1])
    machine = card(device)
    name = re.sub(r"\W+", "_", str(machine["device"])).lower() if device.type == "cuda" else "cpu"
    about = {
        "bytes": size,
        "files": len(files),
        "rounds": rounds,
        "cpu": card(torch.device("cpu"))["device"],
        "file_system": file_system(folder),
        "dropping": dropped,
        "rows": figures,
    }
    save(f"load_{name}", machine, about)


def row(entry: dict[str, object]) -> list[object]:
    """One line of the table."""

    def median(key: str) -> object:
        value = entry.get(key)
        return value["median"] if isinstance(value, dict) else ""

    def gib(key: str) -> object:
        value = entry.get(key)
        return value / GIB if isinstance(value, (int, float)) else ""

    seconds = entry["seconds"]
    assert isinstance(seconds, dict)
    return [
        entry["state"],
        entry["mode"],
        seconds["median"],
        seconds["min"],
        seconds["max"],
        *map(median, ("gb_per_s", "ratio_to_plain_read", "finish_seconds", "ratio_without_finish")),
        *map(gib, ("extra", "extra_anon", "peak_file")),
    ]


def file_system(folder: Path) -> str:
    """The kind of file system that holds a folder, by Linux's list of mounts."""
    place = folder.resolve()
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    around = [(mount[1], mount[2]) for mount in mounts if place.is_relative_to(mount[1])]
    return max(around, key=lambda mount: len(mount[0]))[1] if around else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of a checkpoint to write")
    parser.add_argument("--form", default="k2.5", choices=["k2.5", "k2-thinking", "bf16"])
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="kept; by default a temporary one")
    parser.add_argument("--repeats", type=int, default=3, help="rounds at most")
    parser.add_argument(
        "--budget", type=float, default=140.0, help="seconds; no round starts that may pass them"
    )
    parser.add_argument(
        "--threads", type=int, default=min(8, os.cpu_count() or 1), help="of the second plain read"
    )
    parser.add_argument("--repack", action="store_true", help="also bfloat16 experts on the CPU")
    parser.add_argument("--one-load", help=argparse.SUPPRESS)
    args = parser.parse_args()
    began = time.perf_counter()
    if args.one_load:
        print(json.dumps(measure_load(args.folder, args.one_load)))
    elif args.folder:
        run(args, args.folder, began)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run(args, Path(folder), began)


if __name__ == "__main__":
    main()
