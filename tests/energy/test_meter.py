"""Energy counters: Linux powercap, NVML and nvidia-smi, on machines with and without them."""

import errno
import os
from pathlib import Path

import pytest
import torch

from egru.bench.energy import measure_energy
from egru.energy import EnergyMeter, nvml, powercap, smi
from egru.energy.unavailable import CounterUnavailable
from tests.energy.machine import FakeNvml, add_zone


@pytest.fixture
def library(tmp_path: Path) -> FakeNvml:
    return FakeNvml(tmp_path)


def test_powercap_adds_packages_and_memory_across_a_wrap_around(tmp_path: Path) -> None:
    package = add_zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    dram = add_zone(tmp_path, "intel-rapl:0:1", "dram", 10)
    for zone, name in (("intel-rapl:0:0", "core"), ("intel-rapl:1", "psys"), ("intel-rapl-mmio:0", "package-0")):
        add_zone(tmp_path, zone, name, 0)  # parts or repetitions of the package
    (tmp_path / "intel-rapl").mkdir()
    with EnergyMeter("cpu", tmp_path) as meter:
        assert meter.sources == {"package-0": "powercap intel-rapl:0", "dram-0": "powercap intel-rapl:0:1"}
        before = meter.read()
        package.write_text("950000")
        assert meter.since(before) == pytest.approx({"package-0": 0.05, "dram-0": 0.0})
        package.write_text("200000")  # started again after 1,000,000
        dram.write_text("30")
        assert meter.since(before) == pytest.approx({"package-0": 0.3, "dram-0": 2e-5})
        assert meter.missing == ()


@pytest.mark.parametrize("exists", [False, True])
def test_machines_without_counters_give_reasons_and_no_number(exists: bool, tmp_path: Path) -> None:
    if exists:
        add_zone(tmp_path / "powercap", "intel-rapl:1", "psys", 5)
    with EnergyMeter("cpu", tmp_path / "powercap") as meter:
        assert meter.since(meter.read()) == {}
        assert meter.missing == (f"CPU: {tmp_path / 'powercap'} has no RAPL counters",)
    if not torch.cuda.is_available():
        assert EnergyMeter("cuda", tmp_path).missing[-1] == "GPU: torch finds no CUDA device"


def test_unreadable_powercap_files_are_named_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = add_zone(tmp_path, "intel-rapl:0", "package-0", 5)

    def refuse(path: Path) -> int:  # root can read every file
        raise PermissionError(errno.EACCES, "Permission denied", str(counter))

    monkeypatch.setattr(powercap, "_read_int", refuse)
    assert EnergyMeter("cpu", tmp_path).missing == (
        f"CPU: cannot read {counter}: Permission denied; run as root, or make it readable",
    )


def test_a_counter_that_fails_later_is_left_out_with_its_reason(tmp_path: Path) -> None:
    add_zone(tmp_path, "intel-rapl:0", "package-0", 5)
    gone = add_zone(tmp_path, "intel-rapl:1", "package-1", 5)
    meter = EnergyMeter("cpu", tmp_path)
    before = meter.read()
    gone.unlink()
    assert meter.since(before) == {"package-0": 0.0}
    assert meter.missing[0].startswith("package-1: powercap intel-rapl:1 failed: ")


def test_nvml_reads_the_gpu_with_the_uuid_in_joules(library: FakeNvml) -> None:
    counter = nvml.open_gpu("1234", "cuda:0", library.path)
    before = counter.joules()
    library.set(millijoules=5_001_500)
    assert (before, counter.joules() - before) == (5000.0, pytest.approx(1.5))
    assert library.users == 1
    counter.close()
    assert library.users == 0


def test_nvml_uses_a_single_gpu_with_another_uuid_but_never_guesses_among_several(library: FakeNvml) -> None:
    nvml.open_gpu("99", "cuda:0", library.path).close()
    library.set(devices=2)
    with pytest.raises(CounterUnavailable, match="nvmlDeviceGetHandleByUUID of NVML failed: Not Found"):
        nvml.open_gpu("99", "cuda:0", library.path)
    library.set(supported=0)
    with pytest.raises(CounterUnavailable, match="nvmlDeviceGetTotalEnergyConsumption of NVML failed: Not Supported"):
        nvml.open_gpu("1234", "cuda:0", library.path)
    assert library.users == 0
    with pytest.raises(CounterUnavailable, match=r"libmissing.so, the NVML library .* is not installed"):
        nvml.open_gpu("1234", "cuda:0", "libmissing.so")


def test_power_samples_are_integrated_over_time() -> None:
    times = iter([0.0, 1.0, 3.0, 3.5, 4.0])
    integral = smi.PowerIntegral(lambda: next(times))
    integral.add(100.0)  # 100 J in the first second
    integral.add(300.0)  # 600 J in the next two
    assert integral.joules() == 700.0 + 150.0
    assert integral.joules() == 700.0 + 300.0


def test_nvidia_smi_is_sampled_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\nwhile test "$4" = --id=GPU-1; do echo 250.5; sleep 0.01; done\necho "[N/A]"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    sampler = smi.PowerSampler(torch.device("cuda", 0), uuid="GPU-1")
    while sampler.joules() <= 0:
        pass
    sampler.close()
    with pytest.raises(CounterUnavailable, match="nvidia-smi ended"):  # no power is assumed from then on
        sampler.joules()
    with pytest.raises(CounterUnavailable, match=r"prints no power, but '\[N/A\]'"):
        smi.PowerSampler(torch.device("cuda", 0), uuid="GPU-2")


def test_benchmarks_report_joules_per_call_or_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = add_zone(tmp_path, "intel-rapl:0", "package-0", 0, wrap=10**12)
    times = iter(range(100))

    def run() -> None:
        package.write_text(str(int(package.read_text()) + 2_000_000))

    with EnergyMeter("cpu", tmp_path) as meter:
        result = measure_energy({"ours": run}, meter, seconds=4.5, clock=lambda: next(times))
    assert result["joules"] == {"ours": {"package-0": 2.0}}
    assert "ours                             package-0 2 J per call" in capsys.readouterr().out
    with EnergyMeter("cpu", tmp_path / "none") as meter:
        result = measure_energy({"ours": run}, meter)
    assert (result["joules"], len(result["missing"])) == ({}, 1)
    assert "energy not measured: CPU: " in capsys.readouterr().out
