"""Measured energy in the record of a run."""

import pytest
import torch

from egru.energy import EnergyMeter
from egru.training import Run
from egru.training import energy as energy_module
from egru.training.records import EpochEnergy, RunEnergy
from tests.energy.machine import add_zone
from tests.training.tiny import classifier_run


@pytest.fixture(autouse=True)
def single_precision(defaults):
    torch.set_default_dtype(torch.float32)


def epochs(run: Run) -> list[int]:
    energy = run.energy()
    assert energy is not None
    return [entry.epoch for entry in energy.epochs]


def test_epochs_have_joules_and_a_resumed_run_keeps_them(tmp_path, monkeypatch):
    package = add_zone(tmp_path / "powercap", "intel-rapl:0", "package-0", 0, wrap=10**12)
    meter = EnergyMeter("cpu", tmp_path / "powercap")
    readings, read = [0], meter.read

    def use_energy():
        readings[0] += 1
        package.write_text(str(readings[0] * 3_000_000))  # 3 J between two readings
        return read()

    monkeypatch.setattr(meter, "read", use_energy)
    monkeypatch.setattr(energy_module, "EnergyMeter", lambda device: meter)
    classifier_run(tmp_path / "run", epochs=2)
    run = Run.open(tmp_path / "run")
    energy = run.energy()
    assert energy is not None
    assert energy.counters == {"package-0": "powercap intel-rapl:0"}
    assert [entry.epoch for entry in energy.epochs] == [1, 2]
    assert [entry.joules["package-0"] for entry in energy.epochs] == pytest.approx([3.0, 3.0])
    assert str(energy) == "measured energy per epoch, median: package-0 3 J (powercap intel-rapl:0)"

    (run.folder / "result.json").unlink()
    classifier_run(run.folder, epochs=3)
    assert epochs(run) == [1, 2, 3]
    run.write_energy(RunEnergy(energy.counters, (), (*energy.epochs, EpochEnergy(9, {"package-0": 1.0}))))
    classifier_run(run.folder, epochs=4)
    assert epochs(run) == [1, 2, 4]  # epoch 9 was never saved


def test_runs_without_counters_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(energy_module, "EnergyMeter", lambda device: EnergyMeter(device, tmp_path / "none"))
    classifier_run(tmp_path / "run", epochs=1)
    energy = Run.open(tmp_path / "run").energy()
    assert energy == RunEnergy({}, (f"CPU: {tmp_path / 'none'} has no RAPL counters",), ())
    assert str(energy) == f"energy per epoch not measured: CPU: {tmp_path / 'none'} has no RAPL counters"
    (tmp_path / "run" / "energy.json").write_text("{")
    (tmp_path / "run" / "result.json").unlink()
    messages: list[str] = []
    classifier_run(tmp_path / "run", epochs=2, log=messages.append)
    assert [message[:38] for message in messages] == ["the energy of earlier epochs is lost: "]
