"""Devices that are absent, for which XLA compiles: NVIDIA's cards, and slices of TPUs.

Sources are NVIDIA's data sheets and XLA's folder target_config, which publishes what the cards
report. Peaks are for dense products; in float32 without tensor cores, which would round factors.
"""

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from hypjax.errors import UserError, installation


class Gpu(NamedTuple):
    """A card: what XLA needs to compile for it, and the peaks of a roofline model."""

    name: str
    capability: tuple[int, int]
    cores: int  # Streaming multiprocessors.
    lanes: int  # float32 units of a multiprocessor.
    threads: int  # Most threads that a multiprocessor holds.
    shared: int  # Bytes of shared memory of a multiprocessor.
    block_shared: int  # Bytes of shared memory that a block may use.
    cache: int  # Bytes of the L2 cache.
    clock: float  # GHz.
    memory: int  # Bytes.
    bandwidth: float  # Bytes per second.
    half: float  # Operations per second of products in half precision,
    single: float  # and in float32.

    def description(self) -> str:
        """The card as text of a GpuTargetConfigProto, for XLA."""
        major, minor = self.capability
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared}
  threads_per_core_limit: {self.threads}
  core_count: {self.cores}
  fpus_per_core: {self.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth:.0f}
  l2_cache_size: {self.cache}
  clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory}
  shared_memory_per_block_optin: {self.block_shared}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.name}"
"""


_MIB = 2**20
GPUS = {
    "t4": Gpu(
        *("Tesla T4", (7, 5), 40, 64, 1024, 65_536, 65_536, 4 * _MIB),
        *(1.59, 15_835_660_288, 320e9, 65e12, 8.1e12),
    ),
    "v100": Gpu(
        *("Tesla V100-SXM2-16GB", (7, 0), 80, 64, 2048, 98_304, 98_304, 6 * _MIB),
        *(1.53, 16_935_682_048, 898e9, 125e12, 15.7e12),
    ),
    "a100": Gpu(
        *("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 167_936, 166_912, 40 * _MIB),
        *(1.41, 85_100_068_864, 2039e9, 312e12, 19.5e12),
    ),
    "l4": Gpu(
        *("NVIDIA L4", (8, 9), 58, 128, 1536, 102_400, 101_376, 48 * _MIB),
        *(2.04, 23_673_634_816, 300e9, 121e12, 30.3e12),
    ),
    "h100": Gpu(
        *("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 233_472, 232_448, 50 * _MIB),
        *(1.98, 84_942_979_072, 3352e9, 989e12, 67e12),
    ),
    "b200": Gpu(
        *("NVIDIA B200", (10, 0), 148, 128, 2048, 233_472, 232_448, 132_644_864),
        *(1.965, 191_514_411_008, 7672e9, 2250e12, 75e12),
    ),
}


def devices_of(target: str) -> Sequence[jax.Device]:
    """The devices of a target: a card in `GPUS`, several such as h100:8, or a slice of TPUs.

    Raises a `UserError` if the target is unknown, or a package is not installed.
    """
    from jax.experimental import topologies

    options: dict[str, Any]
    if gpu := gpu_of(target):
        count = int(target.partition(":")[2] or 1)
        needed = f"needs JAX's plugin for CUDA, but no GPU: {installation('hypjax[cuda12]')}"
        options = {"platform": "cuda", "topology": f"1x{count}x1"}
        options["target_config"] = gpu.description()
    elif re.fullmatch(r"v\w+:\d+x\d+(x\d+)?", target):
        needed = "needs libtpu, but no TPU: pip install libtpu"
        options = {"platform": "tpu", "topology_name": target}
        # Keeps libtpu from asking for a TPU's metadata, and from locking the chips.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    else:
        known = f"one of {', '.join(GPUS)}, several such as h100:8, or TPUs such as v5e:2x4"
        raise UserError(f"cannot compile for {target}, which must be {known}")
    try:
        return topologies.get_topology_desc(**options).devices
    except Exception as error:  # Plugins raise errors of several types, or none is installed.
        cause = str(error).splitlines()[0]
        raise UserError(f"compiling for {target} {needed} ({cause})") from error


def gpu_of(target: str) -> Gpu | None:
    """The card of a target such as h100 or h100:8; None for TPUs and anything else."""
    name, colon, count = target.lower().partition(":")
    return GPUS.get(name) if not colon or re.fullmatch("[1-9][0-9]*", count) else None


def is_absent_gpu(device: jax.Device) -> bool:
    """Whether a device is a GPU that this process does not have."""
    return device.platform in ("cuda", "gpu") and jax.default_backend() != "gpu"
