"""Compiles a Triton kernel for a GPU that this machine need not have, and reads the compiled code."""

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.gpu.offline.devices import DEVICES

GLOBAL = r"prefetch\.global\S*|\b(?:ld|st|atom|red)\.global|\bcp\.async\.(?:c[ag]|bulk)"
# compute capability → maximum bytes of shared memory per thread block
SHARED = {capability: device.shared for capability, device in DEVICES.items()}
DIVISION_FFMA = 11  # instructions FFMA of a float32 division that rounds to nearest
TENSOR_CORE = {"HGMMA": "wgmma", "QGMMA": "wgmma", "IGMMA": "wgmma", "HMMA": "mma", "QMMA": "mma", "IMMA": "mma"}


@dataclass(frozen=True)
class Variant:
    """One specialization of a kernel. types: types of the arguments that are not constants, in order."""

    kernel: Any
    types: list[str]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    odd: tuple[str, ...] = ()  # arguments whose values are not multiples of 16
    product: bool = False  # whether the kernel must use wgmma (Hopper) and copy 16 bytes at a time
    capability: int = 90  # compute capability of the GPU: 80 for an A100, 89 for Ada, 90 for Hopper

    def compiled(self) -> Any:
        names, types = self.kernel.arg_names, iter(self.types)
        constants = {name: 0 for name in names if name in ("PDL", "PREFETCH")} | self.constants
        signature = {name: "constexpr" if name in constants else next(types) for name in names}
        sixteens = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if name not in self.odd and (signature[name][0] == "*" or signature[name] in ("i32", "i64"))
        }
        source = ASTSource(self.kernel, signature, constants, sixteens)
        return triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=self.options)


@dataclass(frozen=True)
class Usage:
    registers: int
    stack: int  # bytes per thread, including spilled registers
    shared: int  # bytes per thread block


def disassembled(compiled: Any, what: str) -> str:
    """Returns the output of cuobjdump for the compiled code. what: `-res-usage` or `-sass`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        return subprocess.run([tool, what, cubin.name], check=True, capture_output=True, text=True).stdout


def contracted(compiled: Any) -> int:
    """Returns how many products and sums the compiler turned into one instruction of the machine code (FFMA).

    Divisions that round to nearest, and functions of CUDA's library, consist of such instructions; these do not count.
    """
    explicit = len(re.findall(r"\bfma\.rn\.ftz\.f32", compiled.asm["ptx"]))
    divisions = len(re.findall(r"\bdiv\.rn\.f32", compiled.asm["ptx"]))
    found = len(re.findall(r"\bFFMA\b", disassembled(compiled, "-sass")))
    return max(0, found - explicit - DIVISION_FFMA * divisions)


def tensor_core_kinds(compiled: Any) -> set[str]:
    """Returns which tensor-core instructions the machine code has: wgmma (Hopper), mma, tcgen05 (Blackwell)."""
    found = set(re.findall(r"\b(UTC[A-Z]*MMA|[HIQ]G?MMA)\b", disassembled(compiled, "-sass")))
    return {TENSOR_CORE.get(name, "tcgen05") for name in found}


def usage(compiled: Any) -> Usage:
    usage = disassembled(compiled, "-res-usage")
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    return Usage(int(found["REG"]), int(found["STACK"]) + int(found["LOCAL"]), compiled.metadata.shared)


def _product_loop(compiled: Any) -> list[str]:
    """Returns the instructions of the innermost loop with a matrix product."""
    listing = disassembled(compiled, "-sass")
    code = [(int(at, 16), step) for at, step in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(\S[^;]*);", listing)]
    jumps = [(int(to[1], 16), at) for at, step in code if (to := re.search(r"\bBRA\b.* (0x[0-9a-f]+)", step))]
    loops = [[step for at, step in code if begin <= at <= end] for begin, end in jumps if begin < end]
    return min((steps for steps in loops if any(re.search(r"\b\w*MMA", step) for step in steps)), key=len)


def spilled_in_loop(compiled: Any) -> int:
    """Returns how many instructions of the innermost loop with a matrix product move spilled registers."""
    return sum(bool(re.search(r"\b(LDL|STL)\b", step)) for step in _product_loop(compiled))


def exponentials_in_flight(compiled: Any) -> int:
    """Returns how many exponentials a loop computes between the start of its last product and the wait for this
    product."""
    loop = " ".join(_product_loop(compiled))
    around_the_end = loop.rpartition("GMMA")[2] + loop.partition("GMMA")[0]
    return around_the_end.partition("WARPGROUP.DEPBAR")[0].count("MUFU.EX2")


def tensor_core_steps(compiled: Any) -> set[str]:
    """Returns the shapes and types of the tensor cores' instructions, such as m64n16k16.f32.bf16.bf16."""
    return set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", compiled.asm["ptx"]))


def from_zero(compiled: Any) -> bool:
    """Whether every group of wgmma instructions starts with a zero accumulator, and is waited for before any
    addition."""
    groups = [after.partition("wgmma.wait_group")[0] for after in compiled.asm["ptx"].split("wgmma.fence")[1:]]
    begun = [len(re.findall(r"wgmma\.mma_async[^;]*, 0, 1, 1;", group)) for group in groups]
    return begun == [1] * len(groups) != [] and not any(re.search(r"\badd\S*\.f32", group) for group in groups)


def copies(compiled: Any) -> set[int]:
    """Returns the different sizes in bytes of asynchronous copies to shared memory."""
    return {
        int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\S+ [^;]*?\], (0x[0-9a-f]+|\d+)", compiled.asm["ptx"])
    }


def through_shared_memory(compiled: Any) -> bool:
    """Whether a loop moves a value from registers to shared memory."""
    loops = compiled.asm["ttgir"].split("scf.for")[1:]
    return any(re.search(r"ttg\.local_alloc %|ttg\.local_store", loop.split("scf.yield")[0]) for loop in loops)


def accesses(compiled: Any) -> set[str]:
    """Returns the loads and stores of global memory, such as ld.global.v4.b32."""
    return set(re.findall(r"\b((?:ld|st)\.global\S*)", compiled.asm["ptx"]))


def global_accesses(compiled: Any) -> list[str]:
    """Returns the accesses to global memory in the compiled code, in code order."""
    return re.findall(GLOBAL, compiled.asm["ptx"])


def waits_for_kernels_first(compiled: Any) -> bool:
    """Whether a kernel lets the next kernel start, and waits for earlier kernels before any access but prefetches."""
    used = re.findall(rf"griddepcontrol\.\w+|{GLOBAL}|\bbra\b", compiled.asm["ptx"])
    before, after = used[: (at := used.index("griddepcontrol.wait"))], used[at + 1 :]
    allowed = before[:1] == ["griddepcontrol.launch_dependents"] and {*before[1:]} <= {"prefetch.global.L2"}
    return allowed and not any("griddepcontrol" in one for one in after) and any("global" in one for one in after)


def sums(compiled: Any) -> list[str]:
    """Returns the thread layout of each sum. The layout decides the order of the additions."""
    graph = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"(#blocked\d*) = (#ttg\.blocked<[^\n]*)", graph))
    found = re.findall(r'"tt\.reduce"\(.*?\}\)\s*:\s*\(tensor<([^,>]*), (#\w+)', graph, re.DOTALL)
    return [f"{shape} {layouts.get(layout, layout)}" for shape, layout in found]
