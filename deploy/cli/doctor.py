"""`sluice doctor`: what this machine is, which kernels will serve and why, and what is missing, with its remedy.

`sluice env` lists facts for a bug report and judges none of them; this command judges. Each check is a function that
returns a finding and fails for nothing: what cannot be found out is no finding against the machine.
"""

import argparse
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from deploy.cli.machine_speed import Modules, Speed, kept_speed, measured_speed, memory_modules, processor
from deploy.cli.main import WORKER_PACKAGES
from shared.config.flags import Parser
from shared.machine import memory, usable_cores, visible_gpus
from shared.private_files import cache_folder, private_cache
from worker.ops.native_build import ON_ARM, TIERS, VARIABLE, existing, sets_in_use, sets_of_processor

GIB = 1 << 30
Verdict = Literal["ok", "note", "bad"]  # note: it works, but slower or with less than it could; bad: it does not work
FEW_FILES = 4096  # open files of a process: a frontend needs one for each connection
LOW_MEMORY = 1 << 30  # bytes: the demo model and its processes fit, and hardly any other
LOW_DISK = 5 << 30  # bytes: about a model of eight billion weights in four bits
SLOW = 0.5  # a measured speed below this share of what the modules allow is a finding
INSTALL_COMPILER = "apt install gcc libc6-dev" + (" libsimde-dev" if ON_ARM else "")


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. remedy: a command or setting that mends it; empty if there is nothing to mend."""

    verdict: Verdict
    text: str
    remedy: str = ""


def parser() -> Parser:
    parser = Parser(
        prog="sluice doctor",
        description="Say what this machine is, which kernels will serve and why, how fast its memory is, and what is "
        "missing, each with the command that mends it. Exits with 1 if something must be mended before a server works.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--measure", action="store_true", help="measure the memory again; otherwise it is done once")
    parser.add_argument("--quick", action="store_true", help="measure nothing")
    return parser


def doctor(words: list[str]) -> int:
    args = parser().read(words)
    found = {name: check() for name, check in CHECKS.items()}
    found["memory speed"] = _memory_speed(args)
    if args.json:
        print(json.dumps({name: asdict(finding) for name, finding in found.items()}, indent=2))
    else:
        print("\n".join(report(found)))
    return int(any(finding.verdict == "bad" for finding in found.values()))


def report(found: dict[str, Finding]) -> list[str]:
    """Returns the lines for a terminal: a line for each finding, with its remedy below it, and the sum at the end."""
    width = max(map(len, found))
    lines = []
    for name, finding in found.items():
        lines.append(f"{finding.verdict:<4}  {name:<{width}}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':<4}  {'':<{width}}  → {finding.remedy}")
    bad, notes = (sum(finding.verdict == verdict for finding in found.values()) for verdict in ("bad", "note"))
    if bad:
        return [*lines, "", f"{bad} to mend before a server works" + (f", {notes} to make it better" if notes else "")]
    return [*lines, "", f"a server works here; {notes} to make it better" if notes else "a server works here"]


def _packages() -> Finding:
    missing = [name for name in WORKER_PACKAGES if find_spec(name) is None]
    if missing:
        what = f"a worker needs {', '.join(missing)}, which this Python lacks"
        return Finding("bad", what, f"{sys.executable} -m pip install {' '.join(missing)}")
    version = metadata.version("torch")
    if visible_gpus() and version.endswith("+cpu"):
        remedy = f"{sys.executable} -m pip install --force-reinstall torch"
        return Finding("bad", f"torch {version} cannot use this machine's GPU", remedy)
    return Finding("ok", f"torch {version}, Python {sys.version.split()[0]}")


def _processor() -> Finding:
    cores, threads = usable_cores(), _quota()
    text = f"{processor()}, {cores} cores for this process"
    if threads and threads < cores:
        what = f"{text}, but its control group allows the time of {threads:g}"
        return Finding("note", what, f"sluice serve --threads {max(1, int(threads))}")
    governor = _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor == "powersave" and not Path("/sys/devices/system/cpu/intel_pstate").exists():
        return Finding("note", f"{text}, which keep their lowest clock", "cpupower frequency-set -g performance")
    return Finding("ok", text)


def _quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Returns how many cores' time the control group may use; 0: no limit."""
    with suppress(ValueError):
        quota, period = _text(str(root / "cpu.max")).split()
        return int(quota) / int(period)
    return 0.0


def _kernels() -> Finding:
    """Says which kernels a worker uses, and why none that are faster."""
    if visible_gpus():
        if find_spec("triton") is None:
            return Finding(
                "bad", "plain PyTorch on the GPU: there is no triton", f"{sys.executable} -m pip install triton"
            )
        return Finding("ok", "Triton on the GPU, if its test steps are right")
    if os.environ.get("SLUICE_NATIVE") == "0":
        return Finding("note", "plain PyTorch, several times slower: SLUICE_NATIVE=0 says so", "unset SLUICE_NATIVE")
    had = sets_of_processor()
    try:
        used = sets_in_use(os.environ, had)
        file = existing(used)
    except ValueError as error:
        return Finding("bad", str(error), f"unset {VARIABLE}")
    except OSError as error:
        return Finding("bad", f"the library cannot be used: {error}", f"chmod go-w {cache_folder()}")
    if not used:
        least = TIERS[1]
        return Finding("note", f"plain PyTorch, several times slower: this processor has no {least}")
    best, why = used[-1], "the best this processor has"
    if had and had[-1] != best:
        why = f"{VARIABLE} says so, though this processor has {had[-1]}"
    if file is not None:
        remedy = f"unset {VARIABLE}" if had and had[-1] != best else ""
        return Finding("note" if remedy else "ok", f"C with {best}: {why} ({file.name})", remedy)
    if (compiler := shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")) is None:
        what = (
            f"plain PyTorch, several times slower: {best} would do, but the C kernels are not built, and there is no "
        )
        return Finding("note", f"{what}C compiler", INSTALL_COMPILER)
    what = f"C with {best}: {why}; not built yet, so the first start takes up to a minute longer ({compiler})"
    return Finding("note", what, "sluice env --build")


def _memory() -> Finding:
    try:
        found = memory()
    except (OSError, KeyError, ValueError):
        return Finding("ok", "unknown: this system does not say")
    text = f"{found.available / GIB:.1f} of {found.total / GIB:.1f} GiB are available"
    if found.available < LOW_MEMORY:
        return Finding("note", f"{text}, enough for small models only", "end other processes")
    return Finding("ok", text)


def _huge_pages() -> Finding:
    setting = _text("/sys/kernel/mm/transparent_hugepage/enabled")
    if "[never]" in setting:
        remedy = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        return Finding("note", "switched off, which makes weights slower to read", remedy)
    return Finding("ok", setting.partition("[")[2].partition("]")[0] or "unknown: this system does not say")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        allowed = FEW_FILES if hard == resource.RLIM_INFINITY else min(hard, FEW_FILES)
        return Finding("note", f"at most {soft}, and each connection needs one", f"ulimit -n {allowed}")
    return Finding("ok", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")


def _cache() -> Finding:
    try:
        folder = private_cache()
    except OSError as error:
        remedy = "set XDG_CACHE_HOME to a folder that only you can write to"
        return Finding("bad", f"{error.filename} cannot be used: {error.strerror}", remedy)
    if not os.access(folder, os.W_OK):
        return Finding(
            "note", f"{folder} cannot be written: models are translated at each start", f"chmod u+w {folder}"
        )
    return Finding("ok", str(folder))


def hub_cache() -> Path:
    """Returns where the Hugging Face hub's files are kept, without an import of its library."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")


def free_disk(folder: Path) -> int:
    """Returns the free bytes of the disk that has the folder, or will have it."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def _disk() -> Finding:
    folder = hub_cache()
    try:
        free = free_disk(folder)
    except OSError as error:
        return Finding(
            "bad", f"{folder} cannot be used: {error.strerror}", "set HF_HOME to a folder that can be written"
        )
    text = f"{free / GIB:.1f} GiB are free for models in {folder}"
    return (
        Finding("note", text, "sluice models, then sluice models --rm NAME") if free < LOW_DISK else Finding("ok", text)
    )


def _hub() -> Finding:
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return Finding("note", "HF_HUB_OFFLINE is set: only models in the cache can be served", "unset HF_HUB_OFFLINE")
    token = os.environ.get("HF_TOKEN") or _text(str(hub_cache().parent / "token"))
    return Finding("ok", "with a token" if token else "without a token: gated models need one in HF_TOKEN")


def _memory_speed(args: argparse.Namespace) -> Finding:
    if visible_gpus():
        return Finding("ok", "not measured: the model is on the GPU")
    speed = kept_speed() if args.quick else measured_speed(again=args.measure)
    return judged_speed(speed, memory_modules())


def judged_speed(speed: Speed | None, modules: Modules | None) -> Finding:
    """Compares what was measured with what the memory modules allow."""
    should = (
        f"its {modules.count} modules allow at most {modules.gb_s:.0f} GB/s ({modules.mega_transfers} MT/s)"
        if modules
        else "what it should be is unknown, because the firmware's tables cannot be read here"
    )
    if speed is None:
        return Finding("ok", f"not measured; {should}")
    text = f"{speed.read_gb_s:.1f} GB/s with {usable_cores()} threads; {should}"
    if speed.busy:
        remedy = "sluice doctor --measure, when less runs here"
        return Finding("note", f"{text}; other processes had the cores meanwhile, which lowers it", remedy)
    if modules and speed.read_gb_s < SLOW * modules.gb_s:
        return Finding(
            "note", f"{text}; few cores cannot read it all, or a channel has no module", "dmidecode -t memory"
        )
    return Finding("ok", text)


def _text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""


CHECKS: dict[str, Callable[[], Finding]] = {
    "packages": _packages,
    "processor": _processor,
    "kernels": _kernels,
    "memory": _memory,
    "huge pages": _huge_pages,
    "open files": _open_files,
    "cache": _cache,
    "disk": _disk,
    "hub": _hub,
}
