"""Measured energy: counters of the CPU (Linux powercap, RAPL) and of NVIDIA GPUs (NVML).

Figures that are computed from operation counts are estimates and live in :mod:`egru.activity`.
"""

from egru.energy.meter import Counter, EnergyMeter

__all__ = ["Counter", "EnergyMeter"]
