"""`sluice bench gpu --compile-table FILE`: each kernel's registers and memory per GPU, compiled without a GPU."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.client.summary import aligned
from bench.gpu.offline.compiling import Binary
from bench.gpu.offline.devices import DEVICES
from bench.gpu.offline.precompile import compiled, refuse_with_cuda

# The bench's checks launch every kernel except recurrent layers' kernels, with every format and head size. Of variants
# that differ only in sizes, only the largest is compiled, because it takes the most registers and shared memory.
JOBS = ("largest", "kernels")


def compile_table(file: Path, capabilities: Sequence[int], jobs: Sequence[str] = JOBS) -> int:
    """Writes the table. Returns 1 if a kernel does not fit one of the GPUs, else 0."""
    refuse_with_cuda("--compile-table")
    binaries: list[Binary] = []
    for capability in capabilities:
        binaries += compiled(capability, jobs)
        file.write_text(page(binaries))  # written after each device, so that a failure keeps earlier ones
    print(file.read_text())
    return any(one.problem for one in binaries)


def page(binaries: Sequence[Binary]) -> str:
    """Returns the table as Markdown: a row per kernel, a column per device. Cells show the maximum of all variants."""
    by_kernel: defaultdict[str, defaultdict[int, list[Binary]]] = defaultdict(lambda: defaultdict(list))
    for one in binaries:
        by_kernel[one.kernel][one.capability].append(one)
    capabilities = sorted({one.capability for one in binaries})
    head = ["kernel", *(f"sm_{capability}" for capability in capabilities)]
    rows = [
        [name.strip("_").removesuffix("_kernel"), *(_cell(devices[capability]) for capability in capabilities)]
        for name, devices in sorted(by_kernel.items())
    ]
    devices = "; ".join(f"sm_{one}: {DEVICES[one].name}, {DEVICES[one].shared >> 10} KiB" for one in capabilities)
    legend = (
        "Each cell: variants; registers a thread; KiB of shared memory; bytes a thread that are spilled, if any; "
        f"tensor-core instructions. The most of all variants. Shared memory that a program may have: {devices}."
    )
    problems = [f"- {one.problem}" for one in binaries if one.problem]
    return "\n".join([legend, "", aligned([head, *rows]), "", f"Problems: {len(problems)}", *problems]) + "\n"


def _cell(variants: Iterable[Binary]) -> str:
    variants = list(variants)
    used = [one.used for one in variants if one.used is not None]
    if not used:
        return "fails" if variants else ""
    spilled = max(one.stack for one in used)
    kinds = "/".join(sorted({kind for one in variants for kind in one.kinds}))
    registers, shared = max(one.registers for one in used), max(one.shared for one in used) / 1024
    parts = [
        f"{len(variants)} variants", f"{registers} r", f"{shared:.0f} K", f"{spilled} B spilled" if spilled else "",
        kinds, "some fail" if len(used) < len(variants) else "",
    ]  # fmt: skip
    return ", ".join(filter(None, parts))
