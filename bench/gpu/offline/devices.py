"""The real GPUs that the fake GPU can stand for, with the properties that decide which kernels are compiled."""

from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU.

    shared: maximum bytes of shared memory per thread block.
    multiprocessors: number of multiprocessors of the card `name`. memory, l2: bytes of the card's memory and L2 cache.
    """

    capability: int
    name: str
    shared: int
    multiprocessors: int
    memory: int
    l2: int

    @property
    def version(self) -> tuple[int, int]:
        """The compute capability as a pair, as torch returns it: (9, 0) for 90."""
        return divmod(self.capability, 10)


DEVICES = {
    device.capability: device
    for device in (
        Device(80, "NVIDIA A100-SXM4-80GB", 163 * KIB, 108, 80 * GIB, 40 * MIB),
        Device(86, "NVIDIA GeForce RTX 3090", 99 * KIB, 82, 24 * GIB, 6 * MIB),
        Device(89, "NVIDIA GeForce RTX 4090", 99 * KIB, 128, 24 * GIB, 72 * MIB),
        Device(90, "NVIDIA H200", 227 * KIB, 132, 139 * GIB, 60 * MIB),
        Device(100, "NVIDIA B200", 227 * KIB, 148, 180 * GIB, 126 * MIB),
        Device(120, "NVIDIA GeForce RTX 5090", 99 * KIB, 170, 32 * GIB, 96 * MIB),
    )
}
H200 = DEVICES[90]
