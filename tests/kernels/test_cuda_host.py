"""Host side of the CUDA kernels: partition, shared memory, packing, source, unsupported problems. Needs no device."""

import contextlib
import dataclasses

import pytest
import torch

from egru.events import Surrogate
from egru.kernels import begin_sequence, registry
from egru.kernels.cuda import (
    arguments,
    cluster,
    pack,
    persistent,
    prepare,
    products,
    small_batch,
    steps,
    stepwise,
    tensors,
)
from egru.kernels.cuda import kernel as kernel_module
from egru.kernels.cuda.plan import MAX_TILES, ROWS, Chip, Direction, Plan, candidates, choose_plan
from egru.kernels.cuda.structs import PackedArguments
from egru.kernels.problem import Forward, Problem
from egru.types import RESETS, Reset, ResetGate

H200 = Chip(132, 232448)
GATES = ("after", "before")
SIZES = [1, 7, 8, 9, 64, 130, 590, 1024, 1350, 2048]


@pytest.fixture(autouse=True)
def single_precision(defaults: None) -> None:
    torch.set_default_dtype(torch.float32)  # the kernels' state is float32


def make_problem(H: int = 4, **changes: object) -> Problem:
    values: dict[str, object] = {
        "input": torch.zeros(2, 3, 5),
        "c0": torch.zeros(3, H),
        "y0": torch.zeros(3, H),
        "weight_ih": torch.zeros(3 * H, 5),
        "weight_hh": torch.zeros(3 * H, H),
        "bias_ih": None,
        "bias_hh": None,
        "theta": torch.zeros(H),
        "reset_scale": torch.tensor(1.0),
        "keep": None,
        "lengths": None,
        "reset": "output",
        "reset_gate": "after",
        "surrogate": Surrogate(),
        "precision": "bfloat16",
    }
    return Problem(**{**values, **changes})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize("batch", [1, 5, 64, 500, 3000])
@pytest.mark.parametrize("units", SIZES)
def test_every_plan_covers_the_problem_and_fits_the_chip(units: int, batch: int, reset_gate: ResetGate) -> None:
    plans = candidates(units, batch, H200, reset_gate)
    assert plans, "every size up to 2048 must fit"
    for plan in plans:
        assert plan.blocks * plan.tiles * 8 >= units
        assert plan.waves * plan.groups * plan.rows >= batch
        assert plan.rows in ROWS
        assert (plan.groups - 1) * plan.rows < batch or plan.groups == 1, "no group is idle"
        assert plan.tiles <= MAX_TILES
        assert plan.grid <= H200.multiprocessors
        for shape in (plan.forward, plan.backward):
            assert shape.bytes <= H200.shared_bytes
            assert shape.slots % 2 == 0
    assert choose_plan(units, batch, H200, reset_gate) == min(plans, key=lambda plan: plan.microseconds)


def test_only_large_batches_are_split_into_groups() -> None:
    single, large = choose_plan(1350, 1, H200), choose_plan(590, 500, H200)
    assert single is not None
    assert large is not None
    assert (single.groups, single.rows) == (1, 8)
    assert (large.groups, large.rows, large.waves) == (8, 64, 1)


def test_layers_that_do_not_fit_have_no_plan() -> None:
    assert choose_plan(3000, 8, H200) is None
    assert choose_plan(590, 8, Chip(16, 100_000)) is None


@pytest.mark.parametrize("precision", ["", "bfloat16"])
@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize("batch", range(1, small_batch.MAX_BATCH + 1))
@pytest.mark.parametrize("units", SIZES)
def test_small_batch_plans_cover_the_problem_and_fit_the_chip(
    units: int, batch: int, reset_gate: ResetGate, precision: str
) -> None:
    plan = small_batch.choose_plan(units, batch, H200, reset_gate, precision)
    if plan is None:
        assert units > (1000 if precision else 700), "small layers must always fit"
        return
    assert plan.block_units * plan.blocks >= units > plan.block_units * (plan.blocks - 1)
    assert plan.rows * plan.groups >= batch > plan.rows * (plan.groups - 1), "no group is idle"
    assert plan.grid <= H200.multiprocessors
    assert plan.bytes <= H200.shared_bytes
    assert plan.block_units * plan.words <= 32 * plan.warps, "one thread per unit and word"
    assert plan.words * (3 if precision else 1) >= plan.rows
    assert plan.workspace % 16 == 0, "cleared in words of 16 bytes"


def test_small_batch_kernel_rejects_large_batches_and_layers() -> None:
    assert small_batch.choose_plan(64, small_batch.MAX_BATCH + 1, H200, "after", "bfloat16") is None
    assert small_batch.choose_plan(1350, 1, H200, "after", "") is not None
    assert small_batch.choose_plan(2048, 1, H200, "after", "bfloat16") is not None
    assert small_batch.choose_plan(3000, 1, H200, "after", "bfloat16") is None


@pytest.mark.parametrize("precision", ["", "bfloat16", "float16"])
def test_small_batch_source_defines_every_constant(precision: str) -> None:
    plan = small_batch.choose_plan(130, 5, H200, "before", precision)
    assert plan is not None
    text = small_batch.kernel_source(plan, "hard", "before", precision, inline=True, keep=False, ragged=True)
    assert f"#define R {plan.rows}\n" in text
    assert f"#define STRIDE {136 if precision else 130}\n" in text, "float32 is not padded"
    assert f"#define ACCURATE {int(not precision)}\n" in text
    names = {word for line in text.splitlines() if line.startswith("#define") for word in line.split()[1:2]}
    assert {"H", "UNITS", "BLOCKS", "LOW", "RESET", "AFTER", "INLINE", "KEEP", "RAGGED"} <= names


def as_operand(packed: torch.Tensor, plan: Plan, columns: int) -> torch.Tensor:
    """Unpack [k / 8][column][8] to (block, k, column)."""
    return packed.view(plan.blocks, -1, columns, 8).transpose(2, 3).flatten(1, 2)


@pytest.mark.parametrize(("units", "batch"), [(7, 2), (40, 20), (130, 3), (590, 500)])
def test_packed_forward_weights_give_the_product(units: int, batch: int) -> None:
    plan = choose_plan(units, batch, H200)
    assert plan is not None
    weight, y = torch.randn(3 * units, units), torch.randn(2, units)
    operand = as_operand(pack.pack_forward(weight, plan, "after", torch.float32), plan, plan.tiles * 24)
    padded = torch.zeros(2, operand.shape[1])
    padded[:, :units] = y
    columns = (padded @ operand).view(plan.blocks, 2, plan.tiles, 3, 8).permute(1, 3, 0, 2, 4)  # (row, gate, ..., unit)
    got = columns.reshape(2, 3, -1)[:, :, :units].reshape(2, -1)
    torch.testing.assert_close(got, y @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("units", "batch"), [(7, 2), (40, 20), (130, 3), (590, 500)])
def test_packed_backward_weights_give_the_product(units: int, batch: int) -> None:
    plan = choose_plan(units, batch, H200)
    assert plan is not None
    weight, a = torch.randn(3 * units, units), torch.randn(2, 3, units)
    operand = as_operand(pack.pack_backward(weight, plan, "after", torch.float32), plan, plan.tiles * 8)
    padded = torch.zeros(2, operand.shape[1])
    padded[:, : 3 * plan.k_tiles * 16].view(2, 3, -1)[..., :units] = a
    got = (padded @ operand).permute(1, 0, 2).reshape(2, -1)[:, :units]
    torch.testing.assert_close(got, a.flatten(1) @ weight, rtol=1e-4, atol=1e-4)


def test_packing_for_before_has_the_announced_size() -> None:
    plan = choose_plan(40, 20, H200, "before")
    assert plan is not None
    weight = torch.randn(120, 40)
    forward = pack.pack_forward(weight, plan, "before", torch.bfloat16)
    backward = pack.pack_backward(weight, plan, "before", torch.bfloat16)
    assert forward.numel() * 2 == prepare.packed_bytes(plan, "before", "forward")
    assert backward.numel() * 2 == prepare.packed_bytes(plan, "before", "backward")


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize("reset", RESETS)
def test_persistent_source_defines_every_constant(reset: Reset, reset_gate: ResetGate, direction: Direction) -> None:
    plan = choose_plan(590, 500, H200, reset_gate)
    assert plan is not None
    text = persistent.kernel_source(plan, persistent.Variant(direction, reset, reset_gate, "bfloat16", True))
    assert f"#define RESET {RESETS.index(reset)}\n" in text
    assert f"#define AFTER {int(reset_gate == 'after')}\n" in text
    assert text.count("void wgmma(float") == (2 if (direction, reset_gate) == ("forward", "before") else 1)


def test_wgmma_overload_names_every_register() -> None:
    text = persistent.wgmma_overload(24, "float16")
    assert "m64n24k16.f32.f16.f16" in text
    assert text.count('"+f"') == 12


LSTM_OPTIONS: dict[str, dict[str, object]] = {
    "cell": {},
    "output": {"compare": "output"},
    "delta": {"compare": "output", "events": "delta", "reset": "none"},
}


def test_reserve_size_depends_on_reset_gate_and_precision() -> None:
    assert tensors.reserve_shape(make_problem(H=9)) == (2, 3, 15)
    assert tensors.reserve_shape(make_problem(H=9, reset_gate="before")) == (2, 3, 10)
    assert tensors.reserve_shape(make_problem(H=9, precision="")) == (2, 3, 9, 4)


def test_reserve_size_of_the_lstm_depends_on_its_options() -> None:
    sizes = {name: make_problem(9, cell="lstm", precision="", **options) for name, options in LSTM_OPTIONS.items()}
    assert {name: tensors.lstm_reserve_shape(problem)[0] for name, problem in sizes.items()} == {
        "cell": 4, "output": 5, "delta": 6
    }  # fmt: skip
    assert tensors.lstm_reserve_shape(make_problem(9, cell="lstm")) == (2, 2, 3, 9)
    assert registry.get("cuda").reserve_shape(make_problem(9, cell="lstm", lean=True)) == (0,)


def test_cpu_tensors_are_rejected_with_a_reason() -> None:
    assert registry.unsupported("cuda", make_problem()) == "it requires CUDA tensors, got cpu"
    assert registry.choose("auto", make_problem()) != "cuda"
    with pytest.raises(ValueError, match="backend='cuda' cannot run this"):
        registry.choose("cuda", make_problem())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"surrogate": Surrogate(shape="rectangle")}, "triangle"),
        ({"precision": "float8_e4m3fn"}, "float8"),
        ({"recurrent_clip": 0.1}, "does not support recurrent_clip"),
        ({"weight_hh": torch.zeros(12, 4, dtype=torch.float64)}, "float64"),
    ],
)
def test_unsupported_problems_are_rejected_with_a_reason(
    change: dict[str, object], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = torch.zeros(2, 3, 5, device="meta")
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    problem = make_problem(**{**change, "input": _PretendCuda(fake)})
    reason = registry.unsupported("cuda", problem)
    assert reason is not None
    assert word in reason


class _PretendCuda:
    """A stand-in for a CUDA tensor: the checks read only device and shape."""

    device = torch.device("cuda", 0)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape


# ---- the host side of a call, without the launches -------------------------------------------------------------------


def random_problem(reset_gate: ResetGate, H: int = 6, inputs: int = 5) -> Problem:
    return make_problem(
        H,
        input=torch.randn(4, 3, inputs),
        weight_ih=torch.randn(3 * H, inputs),
        weight_hh=torch.randn(3 * H, H),
        reset_gate=reset_gate,
        precision="",
    )


@pytest.mark.parametrize("reset_gate", GATES)
def test_products_over_time_ignore_padding(reset_gate: ResetGate) -> None:
    """Compares x W, dW, dx and dV on padded operands with the unpadded products."""
    problem = random_problem(reset_gate)
    H, HP = 6, 8
    x, W = problem.input.flatten(0, 1), problem.weight_ih
    projected = products.project(problem, HP).view(-1, 3, HP)
    assert not projected[..., H:].any(), "padding must be zero"
    torch.testing.assert_close(projected[..., :H].flatten(1), x @ W.T)
    # blocks of the gates' gradient: the one that multiplies V_z, a_r, a_u, a_z
    hh_z, a_r, a_u, a_z = (torch.nn.functional.pad(torch.randn(12, H), (0, HP - H)) for _ in range(4))
    gates = torch.cat([hh_z, a_r, a_u, a_z], 1)
    a = torch.cat([a_r[:, :H], a_u[:, :H], a_z[:, :H]], 1)
    torch.testing.assert_close(products.input_weight_gradient(problem, gates), a.T @ x)
    torch.testing.assert_close(products.input_gradient(problem, gates).flatten(0, 1), a @ W)
    source, source_z = (torch.nn.functional.pad(torch.randn(12, H), (0, HP - H)) for _ in range(2))
    if reset_gate == "after":
        source_z = source
    expected = torch.cat([b[:, :H].T @ s[:, :H] for b, s in ((a_r, source), (a_u, source), (hh_z, source_z))])
    torch.testing.assert_close(products.recurrent_gradient(problem, gates, source, source_z), expected)


@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize("keep", [None, 0.25])
def test_fused_steps_launch_in_order(
    reset_gate: ResetGate, keep: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the order of steps and kernels, and the number of threads."""
    launches: list[tuple[str, int, int]] = []
    shapes: list[int] = []

    def launch(name: str, threads: int, args: PackedArguments) -> None:
        struct = arguments.STEP_FORWARD if name.startswith("forward") else arguments.STEP_BACKWARD
        values = struct.unpack(bytes(args.data))
        launches.append((name, values["t"], threads))
        shapes.append(values["HP"])
        assert (values["keep"]["p"] == 0) == (keep is None)

    names = ("forward_gates", "forward_state", "backward_state", "backward_reset")
    monkeypatch.setattr(stepwise, "_functions", lambda *_: {name: name for name in names})
    monkeypatch.setattr(steps, "launch", launch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    problem = dataclasses.replace(
        random_problem(reset_gate, H=100), keep=None if keep is None else torch.full((1, 1, 1), keep)
    )
    T, B, H = 4, 3, 100
    result = stepwise.forward(problem, save=True)
    kernels = ["forward_state"] if reset_gate == "after" else ["forward_gates", "forward_state"]
    assert launches == [(name, t, B * H) for t in range(T) for name in kernels]
    assert result.y.shape == result.c.shape == (T, B, H)
    assert result.reserve.shape == tensors.reserve_shape(problem)
    assert stepwise.forward(problem, save=False).reserve.numel() == 0
    launches.clear()
    forward = (torch.zeros(T, B, H), torch.zeros(tensors.reserve_shape(problem)))
    grads = stepwise.backward(problem, *forward, torch.randn(T, B, H), None, torch.ones(B, H), None, True)
    kernels = ["backward_state"] if reset_gate == "after" else ["backward_state", "backward_reset"]
    assert launches == [(name, t, B * 104) for t in reversed(range(T)) for name in kernels]
    assert set(shapes) == {104}, "units padded to a multiple of eight"
    for name, grad in grads._asdict().items():
        parameter = getattr(problem, name)
        assert grad.shape == ((3 * H,) if parameter is None else parameter.shape), name
    assert stepwise.backward(problem, *forward, None, None, None, None, False).input is None


def test_addresses_are_aligned_and_contiguous() -> None:
    base = torch.arange(40.0)
    temporaries: list[torch.Tensor] = []
    assert tensors.address(None, temporaries) == 0
    assert tensors.address(base, temporaries) == base.data_ptr()
    assert temporaries == []
    for view in (base[1:9], base.view(8, 5)[:, ::2]):
        pointer = tensors.address(view, temporaries)
        for tensor in (temporaries[-1], tensors.aligned(view)):
            assert torch.equal(tensor, view)
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 16 == 0
        assert pointer == temporaries[-1].data_ptr()
    assert len(temporaries) == 2


def test_begin_sequence_does_nothing_without_a_gpu() -> None:
    problem = random_problem("after")
    assert begin_sequence(problem.input, problem.weight_ih, problem.weight_hh, "after", "bfloat16", "auto") is None


def test_padded_inputs_are_recovered_and_others_are_not() -> None:
    operand = torch.randn(6, 16).bfloat16()
    kept = prepare.view_unpadded(operand, torch.Size((2, 3, 13)))
    assert torch.equal(kept, operand.view(2, 3, 16)[..., :13])
    recovered = prepare.recover_padded(kept, torch.bfloat16)
    assert recovered is not None
    assert recovered.data_ptr() == operand.data_ptr()
    assert torch.equal(recovered, operand)
    assert prepare.recover_padded(kept, torch.float16) is None, "another dtype"
    assert prepare.recover_padded(kept.contiguous(), torch.bfloat16) is None, "no padding"
    assert prepare.recover_padded(torch.randn(2, 3, 13), torch.bfloat16) is None, "an ordinary input"


def test_a_shared_start_state_is_not_copied() -> None:
    rest = torch.zeros(8)
    problem = make_problem(8, c0=rest.expand(3, 8), y0=rest.expand(3, 8))
    c0, y0, stride = tensors.start_state(problem)
    assert (c0.data_ptr(), y0.data_ptr(), stride) == (rest.data_ptr(), rest.data_ptr(), 0)
    mixed = make_problem(8, c0=torch.ones(3, 8), y0=rest.expand(3, 8))
    c0, y0, stride = tensors.start_state(mixed)
    assert stride == 8
    assert c0.is_contiguous()
    assert y0.is_contiguous()


def test_lean_saves_nothing_and_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = registry.get("cuda")
    lean = dataclasses.replace(random_problem("after"), lean=True)
    saves: list[bool] = []
    full = torch.ones(tensors.reserve_shape(dataclasses.replace(lean, lean=False)))

    def forward(problem: Problem, save: bool) -> Forward:
        saves.append(save)
        zero = torch.zeros(())
        return Forward(zero, zero, zero, zero, full if save else torch.empty(0))

    reserves: list[torch.Tensor] = []
    monkeypatch.setattr(cluster, "find_plan", lambda *_, **__: None)
    monkeypatch.setattr(small_batch, "find_plan", lambda *_: None)
    monkeypatch.setattr(persistent, "find_plan", lambda *_: None)
    monkeypatch.setattr(kernel_module, "on_device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(stepwise, "forward", forward)
    monkeypatch.setattr(stepwise, "backward", lambda problem, c, reserve, *rest: reserves.append(reserve))
    assert kernel.reserve_shape(lean) == (0,)
    assert kernel.forward(lean, True).reserve.numel() == 0
    kernel.backward(lean, full, full, torch.empty(0), None, None, None, None, True)
    assert saves == [False, True]
    assert reserves[0] is full


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize(("batch", "inputs"), [(1, 1), (7, 64), (128, 65), (500, 3)])
@pytest.mark.parametrize("units", [1, 7, 32, 33, 100, 128, 129, 256, 500, 512])
@pytest.mark.parametrize("steps", [1, 64])
def test_cluster_plans_cover_the_problem_and_fit_the_chip(
    units: int, batch: int, inputs: int, steps: int, reset_gate: ResetGate, direction: Direction
) -> None:
    plan = cluster.choose_plan(units, batch, inputs, steps, H200, reset_gate, direction)
    if plan is None:
        assert units * batch > 100_000, "small layers must always fit"
        return
    assert plan.blocks in cluster.BLOCKS
    assert plan.lanes == 1 or (direction == "forward" and plan.blocks == 1)
    assert plan.block_units <= (cluster.BLOCK_UNITS if plan.lanes == 1 else cluster.REGISTER_UNITS)
    assert plan.threads * (1 if plan.lanes == 1 else 3 * units // plan.lanes) <= 65536 * 3 // 4, "registers of a block"
    assert plan.block_units * plan.blocks >= units
    assert plan.rows * plan.clusters(batch) >= batch > plan.rows * (plan.clusters(batch) - 1), "no cluster is idle"
    assert plan.bytes <= H200.shared_bytes
    assert plan.inputs in (0, inputs)
    assert plan.microseconds < cluster.FUSED_STEP


def test_cluster_kernels_leave_large_layers_to_others() -> None:
    assert cluster.choose_plan(513, 1, 1, 64, H200, "after", "forward") is None
    assert cluster.choose_plan(512, 4000, 1, 64, H200, "after", "forward") is None, "fused steps are faster"
    assert cluster.find_plan(torch.zeros(2, 3, 5), 32, "after", "bfloat16") is None
    assert cluster.choose_plan(512, 1, 1, 64, Chip(15, 232448), "after", "forward") is None, "a cluster needs 16"
    long, short = (cluster.choose_plan(512, 32, 64, steps, H200, "after", "forward") for steps in (64, 1))
    assert long is not None
    assert long.inputs == 0, "more rows per cluster are worth more than one launch less"
    assert short is not None
    assert short.inputs == 64, "one launch less is worth more than one step with more rows per cluster"
    wide = cluster.choose_plan(512, 128, 64, 1, H200, "after", "forward")
    assert wide is not None
    assert wide.inputs == 0, "one launch less is not worth filling the device 16 times"


@pytest.mark.parametrize(("inputs", "computed"), [(64, 64), (65, 0)])
def test_cluster_kernels_compute_products_of_few_inputs(inputs: int, computed: int) -> None:
    plan = cluster.choose_plan(32, 1, inputs, 64, H200, "after", "forward")
    assert plan is not None
    assert plan.inputs == computed


def test_batches_with_one_cluster_partition_share_compiled_kernels() -> None:
    small, large = (cluster.choose_plan(200, batch, 3, 64, H200, "after", "forward") for batch in (400, 700))
    assert small is not None
    assert large is not None
    assert small.microseconds != large.microseconds
    assert (small, hash(small)) == (large, hash(large))
