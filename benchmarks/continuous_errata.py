"""Measure the effect of the errors in the paper's printed continuous-time adjoint on the gradient.

    python benchmarks/continuous_errata.py

The adjoint is written in the scaling of the paper, ``lambda_c = -p_c / tau_m`` and ``lambda_a = -p_a / tau_s``, and
integrated backward by a Runge-Kutta method along the exact forward run. One formula at a time is replaced by the
printed one. The table lists the relative error and the cosine of the gradient, as medians over five random networks.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from egru.continuous import engines
from egru.continuous.options import Options
from egru.continuous.problem import Cotangents, Events, Problem
from egru.continuous.quadrature import gauss_legendre
from egru.continuous.reference.flow import FlowSettings, flow, relax, sigmoid, slope
from egru.continuous.reference.running_loss import evaluate, state_gradient

PRINTED = {
    "E1": "the reset gate scales V_r instead of V_z",
    "E2": "as E1, and V_u, V_z scaled by 0",
    "E3": "V_u, V_r scaled by 0",
    "E4": "the emitter's lambda_r receives from V_r instead of V_z",
    "E5": "opposite sign of the bias gradient (gradient of b)",
    "E7": "opposite sign of dF in both adjoint equations",
    "E7c": "opposite sign of dF for lambda_c only",
    "E7a": "opposite sign of dF for lambda_a only",
    "E8": "no source term of the integral loss",
    "E9": "dF / tau_m in place of dF",
    "E11": "opposite sign of the jump of the integral loss",
    "E14": "weight gradient with the whole vector c, not only the emitter",
    "E15": "weight gradient transposed",
}


def gradient(
    problem: Problem,
    events: Events,
    weights: Cotangents,
    loss: Any = None,
    erratum: str | None = None,
    step: float = 2e-3,
) -> dict[str, np.ndarray]:
    """Return the gradients of V, U and b of one sample.

    Args:
        problem: A problem with one sample and default options.
        events: The forward result of the reference engine.
        weights: The cotangents of the outputs.
        loss: The running loss, if any.
        erratum: The key in :data:`PRINTED` of the printed formula to use. If None, all formulas are correct.
        step: The step of the Runge-Kutta method.
    """
    V, U, b = problem.V.numpy() * (1 - np.eye(len(problem.theta))), problem.U.numpy(), problem.b.numpy()
    theta, tau_s, tau_m = problem.theta.numpy(), float(problem.tau_s), float(problem.tau_m)
    settings = FlowSettings(tau_s, tau_m, gauss_legendre(12), 1.0)
    H = len(theta)
    weight = 0.0 if weights.integral is None else float(weights.integral[0])
    lam_c, lam_a = np.zeros(H), np.zeros((3, H))
    gV, gU, gb = np.zeros_like(V), np.zeros_like(U), np.zeros_like(b)

    def trajectory(a: np.ndarray, c: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        k = len(times)
        wide_a, wide_b = np.repeat(a[:, None], k, 1).reshape(3, -1), np.repeat(b[:, None], k, 1).reshape(3, -1)
        when = np.repeat(times, H)
        late = relax(wide_a, wide_b, when, settings)
        return late.reshape(3, k, H), flow(wide_a, wide_b, np.tile(c, k), when, settings).reshape(k, H)

    sign_c = -1 if erratum in ("E7", "E7c") else 1
    sign_a = -1 if erratum in ("E7", "E7a") else 1
    scale = 1 / tau_m if erratum == "E9" else 1.0

    def field(lam: np.ndarray, a: np.ndarray, c: np.ndarray, source: np.ndarray) -> np.ndarray:
        u, z = sigmoid(a[0]), np.tanh(a[2])
        F_a = np.stack([u * (1 - u) * (z - c), np.zeros(H), u * (1 - z * z)]) * scale
        d_c = (source + sign_c * scale * u * lam[3]) / tau_m
        d_a = (lam[:3] - sign_a * F_a * lam[3]) / tau_s
        return np.concatenate([d_a, d_c[None], -lam[:3]])  # the last three rows integrate lambda_a

    steps, event = events.tape[0], int(events.offsets[-1])
    for k in reversed(range(len(steps))):
        now = steps[k]
        if now.kind == "readout":
            lam_c = lam_c - weights.c_read[0, now.index].numpy() / tau_m
        elif now.kind == "input":
            i, x = int(problem.input_channels[now.index]), float(problem.input_values[now.index])
            gU[:, :, i] -= tau_s * x * lam_a
        elif now.kind == "internal":
            n, event = now.index, event - 1
            others = np.arange(H) != n
            r = sigmoid(now.a_minus[1])
            rdot = r * (1 - r) * (b[1] - now.a_minus[1]) / tau_s
            one, zero = np.ones(H), np.zeros(H)
            rho, rhodot = np.stack([one, one, r]), np.stack([zero, zero, rdot])
            if erratum in ("E1", "E2"):
                neutral = one if erratum == "E1" else zero
                rho, rhodot = np.stack([neutral, r, neutral]), np.stack([zero, rdot, zero])
            elif erratum == "E3":
                rho = np.stack([zero, zero, r])
            if erratum == "E14":
                sent = rho * now.c_minus
                gV -= tau_s * lam_a[:, :, None] * sent[:, None, :] * (1 - np.eye(H))
            else:
                gV[:, :, n] -= tau_s * (rho[:, n] * theta[n])[:, None] * lam_a * others
            minus, plus = slope(now.a_minus, now.c_minus, settings), slope(now.a_plus, now.c_plus, settings)
            sums = (V[:, :, n] * lam_a).sum(1)
            right = (
                tau_m * plus[n] * lam_c[n]
                - tau_m * (lam_c * (minus - plus))[others].sum()
                - tau_s * theta[n] * ((rhodot[:, n] + rho[:, n] / tau_s) * sums).sum()
                + float(weights.times[event])
            )
            if loss is not None:
                density = evaluate(loss, np.stack([now.c_minus, now.c_plus]), np.full(2, now.time), 0)
                right += weight * (density[0] - density[1]) * (-1 if erratum == "E11" else 1)
            gate = 1 if erratum in ("E1", "E2", "E4") else 2
            lam_a[1, n] += theta[n] * r[n] * (1 - r[n]) * sums[gate]
            lam_c[n] = right / (tau_m * minus[n])
        start = steps[k - 1] if k else None
        a, c = (start.a_plus, start.c_plus) if start else (problem.a0[0].numpy(), problem.c0[0].numpy())
        t0 = start.time if start else 0.0
        dt = now.time - t0
        if dt <= 0:
            continue
        count = int(np.ceil(dt / step))
        h, times = dt / count, np.linspace(0, dt, 2 * count + 1)
        at, ct = trajectory(a, c, times)
        source = np.zeros_like(ct)
        if loss is not None and erratum != "E8":
            source = weight * state_gradient(loss, ct, t0 + times, 0)
        lam = np.concatenate([lam_a, lam_c[None], np.zeros((3, H))])
        for j in reversed(range(count)):
            first, middle, last = ((at[:, i], ct[i], source[i]) for i in (2 * j + 2, 2 * j + 1, 2 * j))
            k1 = field(lam, *first)
            k2 = field(lam - h / 2 * k1, *middle)
            k3 = field(lam - h / 2 * k2, *middle)
            k4 = field(lam - h * k3, *last)
            lam = lam - h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        lam_a, lam_c = lam[:3], lam[3]
        gb -= lam[4:]
    if erratum == "E15":
        gV = gV.transpose(0, 2, 1)
    return {"V": gV, "U": gU, "b": -gb if erratum == "E5" else gb}


def network(seed: int) -> Problem:
    """Return a random network of five units that emit a few dozen events."""
    g = torch.Generator().manual_seed(seed)
    H, K, T = 5, 8, 8.0
    theta = 0.15 + 0.45 * torch.rand(H, generator=g)
    shift = torch.tensor([[0.5], [0.0], [1.0]])
    return Problem(
        V=torch.randn(3, H, H, generator=g) * 2 / H**0.5,
        U=torch.randn(3, H, 3, generator=g),
        b=torch.randn(3, H, generator=g) * 0.5 + shift,
        theta=theta,
        tau_s=0.5 + 1.5 * torch.rand((), generator=g),
        tau_m=0.5 + 1.5 * torch.rand((), generator=g),
        tau_o=torch.ones(()),
        a0=torch.randn(1, 3, H, generator=g),
        c0=theta - 0.05 - torch.rand(1, H, generator=g),
        input_times=(torch.rand(K, generator=g) * T).sort().values,
        input_channels=torch.randint(3, (K,), generator=g),
        input_values=torch.randn(K, generator=g),
        input_offsets=torch.tensor([0, K]),
        readout_times=torch.tensor([T / 2, T]),
        horizon=T,
        options=Options(nodes=12, panel=1.0, grazing_floor=0.0),
    )


def density(c: torch.Tensor, t: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    return (c * c).sum(-1)


def weights_for(events: Events, seed: int) -> Cotangents:
    g = torch.Generator().manual_seed(seed)
    return Cotangents(
        torch.randn(events.times.shape, generator=g),
        torch.zeros_like(events.times),
        torch.randn(events.c_read.shape, generator=g),
        torch.zeros_like(events.o_read),
        integral=torch.ones(1),
    )


@dataclasses.dataclass
class Row:
    name: str
    error: float
    cosine: float


def measure(seeds: range, step: float = 2e-3, log: Callable[[str], None] = print) -> list[Row]:
    """Return the median effect of each erratum over the networks with the given seeds."""
    engine = engines.get("reference")
    effects: dict[str, list[tuple[float, float]]] = {name: [] for name in PRINTED}
    for seed in seeds:
        problem = network(seed)
        events = engine.forward(problem, density)
        weights = weights_for(events, seed)
        exact = engine.backward(problem, events, weights, density)
        correct = gradient(problem, events, weights, density, step=step)
        distance = max(
            float(np.abs(correct[k] - getattr(exact, k).numpy()).max() / np.abs(correct[k]).max()) for k in correct
        )
        log(f"network {seed}: {len(events.times)} events; without errata, {distance:.0e} from the engine's gradient")
        for name in PRINTED:
            key = "b" if name == "E5" else "V"
            printed = gradient(problem, events, weights, density, name, step)[key].ravel()
            expected = correct[key].ravel()
            size = np.linalg.norm(expected)
            error = float(np.linalg.norm(printed - expected) / size)
            effects[name].append((error, float(printed @ expected / size / max(np.linalg.norm(printed), 1e-300))))
    return [Row(name, *(float(m) for m in np.median(effects[name], axis=0))) for name in PRINTED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=5, help="the number of random networks")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    rows = measure(range(parser.parse_args().networks))
    print(f"\n{'':4} {'relative error':>14} {'cosine':>7}  printed")
    for row in rows:
        print(f"{row.name:4} {row.error:14.2f} {row.cosine:7.2f}  {PRINTED[row.name]}")


if __name__ == "__main__":
    main()
