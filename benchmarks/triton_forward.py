"""Compare a Triton prototype of the persistent forward step with the CUDA C++ kernel; see docs/results/gpu-notes.md.

    python benchmarks/triton_forward.py --out result.json

Reset gate "after", reset "output", one input feature, bfloat16 products, float32 state, H a multiple of 64. Every
variant is checked against the float64 reference, then timed as a CUDA graph, which removes host overhead.

Each block computes some units of some batch rows. Variants:

* "resident": the weights are loaded into shared memory persistent, before the loop over time.
* "streamed": the weights are read from L2 in every step, through Triton's software pipeline.
* "launches": streamed, with one launch per step.

The first two run a sequence in one launch, with a barrier among the blocks of a group in every step.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import statistics
from collections.abc import Callable
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from egru.bench import gpu_check
from egru.events import Surrogate
from egru.kernels.problem import Problem
from egru.kernels.registry import get

MAX_POLLS = 1 << 20  # of the barriers in one sequence, about a second; the kernel then continues and sets `failed`


@triton.jit
def sigmoid(a):
    return 1 / (1 + tl.exp(-a))


@triton.jit(do_not_specialize=["first", "steps"])
def step_kernel(
    x, w, v, b, theta, state, exchange, counter, failed, y_out, c_out, first, steps,
    B: tl.constexpr, H: tl.constexpr, R: tl.constexpr, U: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    RESIDENT: tl.constexpr, MAX_POLLS: tl.constexpr,
):  # fmt: skip
    block, group = tl.program_id(0), tl.program_id(1)
    rows, units, k = group * R + tl.arange(0, R), block * U + tl.arange(0, U), tl.arange(0, K)
    here = rows[:, None] * H + units[None, :]
    limit = tl.load(theta + units)[None, :]
    w_r, w_u, w_z = tl.load(w + units)[None, :], tl.load(w + H + units)[None, :], tl.load(w + 2 * H + units)[None, :]
    b_r, b_u, b_z = tl.load(b + units)[None, :], tl.load(b + H + units)[None, :], tl.load(b + 2 * H + units)[None, :]
    b_q = tl.load(b + 3 * H + units)[None, :]
    c = tl.load(state + here)
    y = tl.where(c > limit, c, 0.0)
    v_at = v + block * H * 4 * U + k[:, None] * 4 * U + tl.arange(0, 4 * U)[None, :]
    weights = ()
    if RESIDENT:
        for i in tl.static_range(H // K):
            weights = weights + (tl.load(v_at + i * K * 4 * U),)
    polls_left = MAX_POLLS
    for t in range(first, first + steps):
        x_t = tl.load(x + t * B + rows)[:, None]
        y_at = exchange + (t % 2) * B * H + rows[:, None] * H + k[None, :]
        sums = tl.zeros((R, 4 * U), tl.float32)
        if RESIDENT:  # unrolled, since a tuple has no run-time index; loads run STAGES - 1 products ahead
            parts = ()
            for i in tl.static_range(H // K):
                if i == 0:
                    for j in tl.static_range(STAGES):
                        parts = parts + (tl.load(y_at + j * K, cache_modifier=".cg"),)
                elif i + STAGES <= H // K:
                    parts = parts + (tl.load(y_at + (i + STAGES - 1) * K, cache_modifier=".cg"),)
                sums = tl.dot(parts[i], weights[i], sums)
        else:
            for i in tl.range(0, H // K, num_stages=STAGES):
                part = tl.load(y_at + i * K, cache_modifier=".cg")
                sums = tl.dot(part, tl.load(v_at + i * K * 4 * U), sums)
        left, right = tl.split(sums.reshape(R, 2, 2, U).permute(0, 3, 1, 2))
        a_r, a_z = tl.split(left)
        a_u, _ = tl.split(right)
        r = sigmoid(a_r + x_t * w_r + b_r)
        u = sigmoid(-(a_u + x_t * w_u + b_u))
        z = 2 * sigmoid(2 * (x_t * w_z + b_z + r * (a_z + b_q))) - 1
        c = u * z + (1 - u) * c - y
        y = tl.where(c > limit, c, 0.0)
        tl.store(exchange + ((t + 1) % 2) * B * H + here, y.to(tl.bfloat16))
        if MAX_POLLS:
            tl.debug_barrier()  # all threads must have stored before one of them releases
            tl.atomic_add(counter + group, 1, sem="release", scope="gpu")
        tl.store(y_out + t * B * H + here, y)
        tl.store(c_out + t * B * H + here, c)
        if MAX_POLLS:
            target = (t - first + 1) * tl.num_programs(0)
            while (tl.atomic_add(counter + group, 0, sem="acquire", scope="gpu") < target) & (polls_left > 0):
                polls_left -= 1
    tl.store(state + here, c)
    if MAX_POLLS:
        tl.store(failed, 1, mask=polls_left <= 0)


@dataclasses.dataclass(frozen=True)
class Variant:
    """The layout of the step: place of the weights, rows, units and warps per block, stages of loads."""

    weights: Literal["resident", "streamed", "launches"]
    rows: int
    units: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.weights} {self.rows} rows x {self.units} units, {self.warps} warps, {self.stages} stages"


def variants(B: int, H: int) -> list[Variant]:
    """Return all variants that fit the device. Sizes are powers of two, as Triton requires."""
    properties = torch.cuda.get_device_properties(0)
    shared = properties.shared_memory_per_block_optin
    fitting: list[Variant] = []
    for rows, units, warps in ((64, 16, 4), (64, 32, 4), (128, 32, 8)):
        if B % rows or H % units:
            continue
        grid = (B // rows) * (H // units)
        weights = H * 4 * units * 2  # bytes
        if grid <= properties.multi_processor_count and weights + 2 * rows * 64 * 2 <= shared:
            fitting.append(Variant("resident", rows, units, warps, 2))
        for stages in (4, 6, 8, 12):
            ring = stages * (rows + 4 * units) * 64 * 2
            if ring > shared:
                continue
            if grid <= properties.multi_processor_count * min(2, shared // ring):
                fitting.append(Variant("streamed", rows, units, warps, stages))
            if stages in (4, 6):
                fitting.append(Variant("launches", rows, units, warps, stages))
    return fitting


def make_problem(T: int, B: int, H: int) -> Problem:
    """Return a problem that starts at zero. Inputs and their weights are rounded here, the same for all kernels."""
    generator = torch.Generator("cuda").manual_seed(H + B)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator) * scale

    return Problem(
        random(T, B, 1).bfloat16().float(), torch.zeros(B, H, device="cuda"), torch.zeros(B, H, device="cuda"),
        random(3 * H, 1).bfloat16().float(), random(3 * H, H, scale=1.5 / H**0.5), random(3 * H, scale=0.3),
        random(3 * H, scale=0.3), 0.1 + 0.1 * random(H).abs(), torch.ones((), device="cuda"), None, None,
        "output", "after", Surrogate(), "bfloat16",
    )  # fmt: skip


def prepare(problem: Problem, variant: Variant) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that runs ``variant`` and returns ``y`` and ``c``."""
    (T, B, _), H = problem.input.shape, problem.theta.shape[0]
    assert problem.bias_ih is not None
    assert problem.bias_hh is not None
    blocks = H // variant.units
    # Per block of units: (H, 4 blocks of columns: r, u, z and zeros, since three is not a power of two).
    gates = problem.weight_hh.view(3, blocks, variant.units, H)
    v = torch.cat([gates, torch.zeros_like(gates[:1])]).permute(1, 3, 0, 2).bfloat16().contiguous()
    bias = problem.bias_ih + torch.cat([problem.bias_hh[: 2 * H], problem.bias_hh.new_zeros(H)])
    bias = torch.cat([bias, problem.bias_hh[2 * H :]])
    x, w = problem.input.flatten(), problem.weight_ih.flatten()
    state, exchange = torch.empty_like(problem.c0), torch.empty(2, B, H, device="cuda", dtype=torch.bfloat16)
    counter = torch.zeros(B // variant.rows, device="cuda", dtype=torch.int32)
    failed = torch.zeros(1, device="cuda", dtype=torch.int32)
    y, c = (torch.full((T, B, H), float("nan"), device="cuda") for _ in range(2))
    persistent = variant.weights != "launches"

    def run() -> tuple[Tensor, Tensor]:
        state.zero_()
        exchange.zero_()
        counter.zero_()
        for first in (0,) if persistent else range(T):
            step_kernel[(blocks, B // variant.rows)](
                x, w, v, bias, problem.theta, state, exchange, counter, failed, y, c, first, T if persistent else 1,
                B=B, H=H, R=variant.rows, U=variant.units, K=64, STAGES=variant.stages,
                RESIDENT=variant.weights == "resident", MAX_POLLS=MAX_POLLS if persistent else 0,
                num_warps=variant.warps, launch_cooperative_grid=persistent,
            )  # fmt: skip
        return y, c

    run()
    if failed.item():
        raise gpu_check.Wrong("a barrier timed out")
    return run


def capture(run: Callable[[], object]) -> Callable[[], None]:
    """Record ``run`` in a CUDA graph and return a function that replays it."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(owner: object = run) -> None:  # the default keeps the tensors of the graph alive
        graph.replay()

    return replay


def microseconds(runs: dict[str, Callable[[], None]], T: int, repeats: int) -> dict[str, float]:
    """Return the median time per step of each function. They run in turn, after two rounds of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 2):
        for name, run in runs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            if turn >= 2:
                times[name].append(start.elapsed_time(end) * 1000 / T)
    return {name: statistics.median(values) for name, values in times.items()}


def run_shape(T: int, B: int, H: int, repeats: int) -> dict[str, object]:
    """Check all variants and the CUDA kernel, then time those that are correct."""
    problem = make_problem(T, B, H)
    assert problem.bias_ih is not None
    assert problem.bias_hh is not None
    weights = gpu_check.Weights(
        problem.weight_ih.double(), problem.weight_hh.bfloat16().double(), problem.bias_ih.double(),
        problem.bias_hh.double(), problem.theta.double(),
    )  # fmt: skip
    runs: dict[str, Callable[[], None]] = {}
    errors: dict[str, float | str] = {}

    def ours() -> tuple[Tensor, Tensor]:
        out = get("cuda").forward(problem, save=False)
        return out.y, out.c

    for variant in (None, *variants(B, H)):
        name = "ours (CUDA C++)" if variant is None else str(variant)
        try:
            run = ours if variant is None else prepare(problem, variant)
            y, c = run()
            exact, _ = gpu_check.each_step(problem.input, y, c, weights, "after", torch.bfloat16)
            errors[name] = gpu_check.check_forward(y, c, exact, weights.theta, "bfloat16")["state"]
            runs[name] = capture(run)
        except (gpu_check.Wrong, triton.runtime.errors.OutOfResources, RuntimeError) as error:
            errors[name] = f"left out: {error}"
    times = microseconds(runs, T, repeats)
    print(f"T {T}, B {B}, H {H}: microseconds per step, largest error of the state")
    for name, error in errors.items():
        print(f"  {name:55s} " + (error if isinstance(error, str) else f"{times[name]:8.2f}  {error:.1e}"), flush=True)
    return {"T": T, "B": B, "H": H, "microseconds": times, "state_error": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=256, help="steps per sequence (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timed replays of each kernel (default: %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, help="write the results to this JSON file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark requires a CUDA device")
    record = {
        "command": f"python benchmarks/triton_forward.py --steps {options.steps} --repeats {options.repeats}",
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "shapes": [run_shape(options.steps, B, H, options.repeats) for B, H in ((64, 1344), (512, 640))],
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
