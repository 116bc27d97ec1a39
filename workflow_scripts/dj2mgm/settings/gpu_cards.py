"""GPUs that `snakemake plan` can plan for: memory, rates, and whether trainings were measured on them.

This is the only place that lists them. Rates are those of NVIDIA's data sheets, for dense matrices in bf16 with sums in
float32. Memory is what CUDA reports as a whole, which is less than the data sheet's number.
"""

from dataclasses import dataclass

DESKTOP_GIB = 1.0  # GPU memory that a desktop with a browser takes; an assumption, not a measurement


@dataclass(frozen=True)
class GpuCard:
    """A GPU.

    Attributes:
        title: name for messages.
        devices: names that CUDA reports.
        memory_gib: memory that CUDA reports.
        bf16_tflops: TFLOP/s of the data sheet.
        memory_gb_per_s: bandwidth of the data sheet.
        pcie_gb_per_s: bandwidth in one direction.
        has_display: whether the card usually shows a desktop.
        is_measured: whether the workflow's trainings were measured on it (docs/measurements/training.md).
    """

    title: str
    devices: tuple[str, ...]
    memory_gib: float
    bf16_tflops: float
    memory_gb_per_s: float
    pcie_gb_per_s: float
    has_display: bool = False
    is_measured: bool = False

    @property
    def free_gib(self) -> float:
        """Memory that a desktop leaves, if the card shows one."""
        return self.memory_gib - (DESKTOP_GIB if self.has_display else 0)

    def describe(self) -> str:
        """Return the numbers, and where they come from."""
        source = "trainings measured, rates of the data sheet" if self.is_measured else "data sheet, not measured"
        return (
            f"{self.memory_gib:g} GiB, {self.bf16_tflops:g} TFLOP/s in bf16, {self.memory_gb_per_s:g} GB/s, "
            f"PCIe {self.pcie_gb_per_s:g} GB/s ({source})"
        )


CARDS = {
    "rtx-3090": GpuCard("RTX 3090", ("NVIDIA GeForce RTX 3090",), 23.68, 71, 936, 32, has_display=True),
    "rtx-4090": GpuCard("RTX 4090", ("NVIDIA GeForce RTX 4090",), 23.64, 165, 1008, 32, has_display=True),
    "rtx-5090": GpuCard("RTX 5090", ("NVIDIA GeForce RTX 5090",), 31.36, 209, 1792, 64, has_display=True),
    "a10": GpuCard("A10", ("NVIDIA A10",), 22.06, 125, 600, 32),
    "l4": GpuCard("L4", ("NVIDIA L4",), 22.03, 121, 300, 32),
    "a100": GpuCard("A100 80 GB", ("NVIDIA A100-SXM4-80GB",), 79.2, 312, 2039, 32),
    "h100": GpuCard("H100", ("NVIDIA H100 80GB HBM3",), 79.1, 989, 3350, 64, is_measured=True),
    "h200": GpuCard("H200", ("NVIDIA H200",), 139.8, 989, 4800, 64, is_measured=True),
}


def find_card(device: str) -> GpuCard | None:
    """Return the card that CUDA calls `device`, or None for one that is not in the table."""
    return next((card for card in CARDS.values() if device in card.devices), None)
