"""Figures of NVIDIA GPUs: with them XLA compiles for a card that is not there.

Sources are NVIDIA's data sheets and, for what these leave out, the cards' own answers as XLA
publishes them (its folder target_config). Peaks are those of dense products, in float32
without tensor cores, which would round the factors.
"""

from typing import NamedTuple


class Gpu(NamedTuple):
    """A card, as XLA needs to know it, and its roofs."""

    name: str
    capability: tuple[int, int]
    cores: int  # Streaming multiprocessors.
    lanes: int  # float32 units of each.
    threads: int  # At most resident on each.
    shared: int  # Bytes of shared memory of each.
    block_shared: int  # Bytes of it that a block may use.
    cache: int  # Bytes.
    clock: float  # GHz.
    memory: int  # Bytes.
    bandwidth: float  # Bytes per second.
    half: float  # Operations per second, of products in half precision,
    single: float  # and in float32.

    def description(self) -> str:
        """The text that XLA reads, a GpuTargetConfigProto."""
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
        name="Tesla T4",
        capability=(7, 5),
        cores=40,
        lanes=64,
        threads=1024,
        shared=65_536,
        block_shared=65_536,
        cache=4 * _MIB,
        clock=1.59,
        memory=15_835_660_288,
        bandwidth=320e9,
        half=65e12,
        single=8.1e12,
    ),
    "v100": Gpu(
        name="Tesla V100-SXM2-16GB",
        capability=(7, 0),
        cores=80,
        lanes=64,
        threads=2048,
        shared=98_304,
        block_shared=98_304,
        cache=6 * _MIB,
        clock=1.53,
        memory=16_935_682_048,
        bandwidth=898e9,
        half=125e12,
        single=15.7e12,
    ),
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        cores=108,
        lanes=64,
        threads=2048,
        shared=167_936,
        block_shared=166_912,
        cache=40 * _MIB,
        clock=1.41,
        memory=85_100_068_864,
        bandwidth=2039e9,
        half=312e12,
        single=19.5e12,
    ),
    "l4": Gpu(
        name="NVIDIA L4",
        capability=(8, 9),
        cores=58,
        lanes=128,
        threads=1536,
        shared=102_400,
        block_shared=101_376,
        cache=48 * _MIB,
        clock=2.04,
        memory=23_673_634_816,
        bandwidth=300e9,
        half=121e12,
        single=30.3e12,
    ),
    "h100": Gpu(
        name="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        cores=132,
        lanes=128,
        threads=2048,
        shared=233_472,
        block_shared=232_448,
        cache=50 * _MIB,
        clock=1.98,
        memory=84_942_979_072,
        bandwidth=3352e9,
        half=989e12,
        single=67e12,
    ),
    "b200": Gpu(
        name="NVIDIA B200",
        capability=(10, 0),
        cores=148,
        lanes=128,
        threads=2048,
        shared=233_472,
        block_shared=232_448,
        cache=132_644_864,
        clock=1.965,
        memory=191_514_411_008,
        bandwidth=7672e9,
        half=2250e12,
        single=75e12,
    ),
}
