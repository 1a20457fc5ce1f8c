"""GPUs and their driver are part of a machine, and need no package to be asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpml.components.export import stage as export
from hpml.core import hardware
from hpml.measuring.machine import gpu
from hpml.measuring.machine.energy import gpu_counter
from hpml.pipelines.engine.cache_keys import CacheKeyInputs, RuntimeEnvironment, cache_key_inputs, explain
from hpml.pipelines.plan import Node
from hpml.targets import TensorRT
from tests.components.fake_nvml import LIBRARY_AND_DRIVER_DIFFER, FakeNvml

Install = Callable[..., FakeNvml]


def test_a_gpu_is_known_by_its_name_its_capability_its_memory_and_its_driver(nvidia_driver: Install) -> None:
    library = nvidia_driver()
    assert hardware.gpu_names() == ("NVIDIA H200", "NVIDIA T500")
    identity = hardware.identity()
    assert identity["gpus"] == (
        "NVIDIA H200, compute capability 9.0, 143771 MiB; NVIDIA T500, compute capability 7.5, 4096 MiB"
    )
    assert identity["gpu_driver"] == "570.86.15"
    assert not library.opened


def test_after_an_update_of_the_driver_an_engine_is_exported_again(nvidia_driver: Install) -> None:
    """A plan of TensorRT is bound to the driver, and is refused under another one."""

    def material(driver: str) -> CacheKeyInputs:
        nvidia_driver(driver=driver)
        here = RuntimeEnvironment("3.11", hardware.identity(), lambda _: "")
        node = Node("export", export.run, TensorRT(), {}, ())
        return cache_key_inputs(
            node, {}, ancestors=(), import_paths=(), registry="", runtime_environment=here, threads=1
        )

    before, again, after = (material(driver) for driver in ("570.86", "570.86", "580.12"))
    assert before.key == again.key != after.key
    assert explain(after, before) == ['hardware: gpu_driver changed: "570.86" -> "580.12"']


@pytest.mark.parametrize("given", [{}, {"init": LIBRARY_AND_DRIVER_DIFFER}])
def test_where_nvml_is_out_of_reach_the_kernel_module_says_what_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvidia_driver: Install, given: dict[str, int]
) -> None:
    if given:
        nvidia_driver(**given)
    else:
        monkeypatch.setattr(hardware.nvml, "_LIBRARY", "no-such-library.so")
        hardware._gpus.cache_clear()
    monkeypatch.setattr(hardware, "_PROC_NVIDIA", tmp_path)
    assert hardware.gpu_names() == () and hardware.identity()["gpu_driver"] == ""

    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (tmp_path / "gpus" / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA L4\nIRQ: 31\n")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb\n")
    hardware._gpus.cache_clear()
    identity = hardware.identity()
    assert (identity["gpus"], identity["gpu_driver"]) == ("NVIDIA L4", "550.54.14")


def test_clocks_power_and_energy_need_no_package(nvidia_driver: Install) -> None:
    """Of the GPU that tells all, and of the one that does not."""
    library = nvidia_driver()
    full, sparse = gpu.read()
    assert full == gpu.GpuState(1410, 1980, 650.4, 61, True)
    assert sparse == gpu.GpuState(1410, 1980, None, 61, None)
    told = gpu.describe((sparse,), (sparse,))["gpu 0"]
    assert told == "SM clock 1410 to 1410 of 1980 MHz, power ? to ? W, 61 to 61 °C"
    assert (gpu.memory_bytes(4711), gpu.memory_bytes(4712), gpu.memory_bytes(1)) == (6 * 2**30, None, None)
    counter, why = gpu_counter()
    assert counter is None and "Volta" in why
    library.nvmlDeviceGetCount_v2 = only_the_first  # type: ignore[method-assign]
    assert gpu.energy_mj() == 5e9
    assert not library.opened


def only_the_first(count: Any) -> int:
    count._obj.value = 1
    return 0
