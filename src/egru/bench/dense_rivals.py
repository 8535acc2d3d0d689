"""Dense GRUs for streaming on the CPU with one thread: torch, ONNX Runtime and ncnn, in float32 and int8, and EvNN.

Each is compared with ``torch.nn.GRU`` in float64. Those that are not installed are left out, with a message.
"""

import dataclasses
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from egru.bench.evnn import find_evnn
from egru.environment import version


@dataclasses.dataclass
class Rival:
    """A dense GRU. ``step(i)`` advances by row i and returns the new state; ``sequence()`` runs all rows.

    ``wrong`` says what is wrong with the output, or is empty.
    """

    name: str
    step: Callable[[int], Any] | None
    sequence: Callable[[], Any] | None
    wrong: str = ""


def rivals(gru: nn.GRU, x: Tensor) -> Iterator[Rival]:
    """Yield the installed rivals with the weights of ``gru`` and the input ``x`` of shape ``(T, I)``, checked."""
    with torch.no_grad():
        expected = _double(gru)(x.double())[0].float().numpy()
    for make, tolerance in (
        (_torch, 1e-5),
        # 8-bit weights and activations have errors of about 1e-2
        (_torch_int8, 0.1),
        (_onnx, 1e-5),
        (_onnx_int8, 0.1),
        (_ncnn, 1e-5),
        (_ncnn_int8, 0.1),
    ):
        try:
            rival = make(gru, x)
        except (ImportError, AttributeError, RuntimeError) as error:
            print(f"left out: {make.__name__.strip('_')}: {error}")
            continue
        rival.wrong = _check(rival, expected, tolerance)
        yield rival
    make_evnn = find_evnn(cuda=False)
    if isinstance(make_evnn, str):
        print(f"left out: {make_evnn}")
    else:  # its products are dense; its weights differ from those of `gru`, so there is nothing to compare with
        layer, batched = make_evnn(gru.input_size, gru.hidden_size), x[:, None]
        yield Rival("EvNN", None, lambda: layer(batched))


def _double(gru: nn.GRU) -> nn.GRU:
    copy = nn.GRU(gru.input_size, gru.hidden_size).double()
    copy.load_state_dict(gru.state_dict())
    return copy


def _check(rival: Rival, expected: np.ndarray, tolerance: float) -> str:
    with torch.inference_mode():
        if rival.step is not None:
            for i in range(len(expected)):
                error = float(np.abs(np.asarray(rival.step(i)).reshape(-1) - expected[i]).max())
                if not error < tolerance:
                    return f"step {i} off by {error:.1e}"
        if rival.sequence is not None:
            error = float(np.abs(np.asarray(rival.sequence()).reshape(expected.shape) - expected).max())
            if not error < tolerance:
                return f"sequence off by {error:.1e}"
    return ""


def _stepper(advance: Callable[[int, Any], Any], start: Callable[[], Any]) -> Callable[[int], Any]:
    """Return a step that carries its state and resets it at row 0."""
    state: list[Any] = [None]

    def step(i: int) -> Any:
        state[0] = advance(i, start() if i == 0 else state[0])
        return state[0]

    return step


def _torch_like(name: str, gru: Any, x: Tensor) -> Rival:
    rows = [row.reshape(1, 1, -1) for row in x]
    zeros = torch.zeros(1, 1, gru.hidden_size)
    batched = x[:, None]
    return Rival(name, _stepper(lambda i, h: gru(rows[i], h)[1], lambda: zeros), lambda: gru(batched, zeros)[0])


def _torch(gru: nn.GRU, x: Tensor) -> Rival:
    return _torch_like("torch.nn.GRU", gru, x)


def _torch_int8(gru: nn.GRU, x: Tensor) -> Rival:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.quantization.quantize_dynamic(nn.Sequential(gru), {nn.GRU}, dtype=torch.qint8)[0]
    return _torch_like("torch dynamic int8", quantised, x)


# ---- ONNX Runtime ----------------------------------------------------------------------------------------------------


def _session(model: Any) -> Any:
    import onnxruntime  # pyright: ignore[reportMissingImports]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def _numpy(gru: nn.GRU) -> tuple[np.ndarray, ...]:
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    return tuple(gru.get_parameter(name).detach().numpy() for name in names)


def _blocks(weight: np.ndarray, H: int) -> np.ndarray:
    """Reorder torch's gates r, z, n to ONNX's z, r, h."""
    return np.concatenate([weight[H : 2 * H], weight[:H], weight[2 * H :]])


def _model(nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: dict[str, np.ndarray]) -> Any:
    from onnx import helper, numpy_helper  # pyright: ignore[reportMissingImports]

    graph = helper.make_graph(
        nodes, "gru", inputs, outputs, [numpy_helper.from_array(v, name) for name, v in constants.items()]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


class _Bound:
    """A step with bound buffers, between which the state alternates: the fastest call, without copies."""

    def __init__(self, session: Any, x: list[np.ndarray], state_shape: tuple[int, ...], names: tuple[str, str, str]):
        import onnxruntime  # pyright: ignore[reportMissingImports]

        value = onnxruntime.OrtValue.ortvalue_from_numpy
        self.session, self.x_name = session, names[0]
        self.x = [value(np.ascontiguousarray(row)) for row in x]
        self.states = [np.zeros(state_shape, np.float32) for _ in range(2)]
        self.bindings = []
        for source, target in ((0, 1), (1, 0)):
            binding = session.io_binding()
            binding.bind_input(names[1], "cpu", 0, np.float32, state_shape, self.states[source].ctypes.data)
            binding.bind_output(names[2], "cpu", 0, np.float32, state_shape, self.states[target].ctypes.data)
            self.bindings.append(binding)

    def step(self, i: int) -> np.ndarray:
        if i == 0:
            self.states[0][:] = 0
        binding = self.bindings[i % 2]
        binding.bind_ortvalue_input(self.x_name, self.x[i])
        self.session.run_with_iobinding(binding)
        return self.states[1 - i % 2]


def _onnx(gru: nn.GRU, x: Tensor) -> Rival:
    from onnx import TensorProto, helper  # pyright: ignore[reportMissingImports]

    inputs, H = gru.input_size, gru.hidden_size
    w, r, b_w, b_r = (_blocks(p, H) for p in _numpy(gru))
    constants = {"W": w[None], "R": r[None], "B": np.concatenate([b_w, b_r])[None]}
    node = helper.make_node("GRU", ["x", "W", "R", "B", "", "h"], ["y", "last"], hidden_size=H, linear_before_reset=1)

    def value(name: str, *shape: int | str) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    entries = [value("x", "T", 1, inputs), value("h", 1, 1, H)]
    session = _session(_model([node], entries, [value("y", "T", 1, 1, H), value("last", 1, 1, H)], constants))
    bound = _Bound(session, [row.reshape(1, 1, -1).numpy() for row in x], (1, 1, H), ("x", "h", "last"))
    whole = {"x": x[:, None].numpy(), "h": np.zeros((1, 1, H), np.float32)}
    return Rival("ONNX Runtime float32", bound.step, lambda: session.run(["y"], whole)[0])


def _onnx_int8(gru: nn.GRU, x: Tensor) -> Rival:
    """One step as a graph with two dynamically quantised products, since ONNX Runtime has no quantised GRU."""
    from onnx import TensorProto, helper, save  # pyright: ignore[reportMissingImports]
    from onnxruntime.quantization import QuantType, quantize_dynamic  # pyright: ignore[reportMissingImports]

    inputs, H = gru.input_size, gru.hidden_size
    w, r, b_w, b_r = _numpy(gru)
    constants = {"W": w.T.copy(), "R": r.T.copy(), "bw": b_w, "br": b_r, "one": np.ones(1, np.float32)}
    constants["thirds"] = np.array([H, H, H], np.int64)
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "W"], ["xw"]),
        node("Add", ["xw", "bw"], ["p"]),
        node("MatMul", ["h", "R"], ["hr"]),
        node("Add", ["hr", "br"], ["v"]),
        node("Split", ["p", "thirds"], ["p_r", "p_z", "p_n"], axis=1),
        node("Split", ["v", "thirds"], ["v_r", "v_z", "v_n"], axis=1),
        node("Add", ["p_r", "v_r"], ["a_r"]),
        node("Sigmoid", ["a_r"], ["r"]),
        node("Add", ["p_z", "v_z"], ["a_z"]),
        node("Sigmoid", ["a_z"], ["z"]),
        node("Mul", ["r", "v_n"], ["rv"]),
        node("Add", ["p_n", "rv"], ["a_n"]),
        node("Tanh", ["a_n"], ["n"]),
        node("Sub", ["h", "n"], ["difference"]),
        node("Mul", ["z", "difference"], ["kept"]),
        node("Add", ["n", "kept"], ["last"]),
    ]

    def value(name: str, *shape: int) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    model = _model(nodes, [value("x", 1, inputs), value("h", 1, H)], [value("last", 1, H)], constants)
    logging.getLogger().setLevel(logging.ERROR)  # hides the advice to pre-process the graph
    with tempfile.TemporaryDirectory() as folder:
        dense, quantised = Path(folder) / "dense.onnx", Path(folder) / "int8.onnx"
        save(model, dense)
        quantize_dynamic(dense, quantised, weight_type=QuantType.QInt8)
        session = _session(quantised)
    bound = _Bound(session, [row.reshape(1, -1).numpy() for row in x], (1, H), ("x", "h", "last"))
    return Rival("ONNX Runtime int8", bound.step, None)


# ---- ncnn ------------------------------------------------------------------------------------------------------------


def _ncnn(gru: nn.GRU, x: Tensor) -> Rival:
    return _ncnn_rival("ncnn float32", gru, x, int8=False)


def _ncnn_int8(gru: nn.GRU, x: Tensor) -> Rival:
    """Weights in int8 with one scale per output. ncnn quantises the input of the products at every step."""
    return _ncnn_rival("ncnn int8", gru, x, int8=True)


def _ncnn_rival(name: str, gru: nn.GRU, x: Tensor, int8: bool) -> Rival:
    """Write the two files of a model with one GRU layer, as the tools of ncnn do, and load them."""
    import importlib

    ncnn: Any = importlib.import_module("ncnn")
    H, (w, r, b_w, b_r) = gru.hidden_size, _numpy(gru)
    bias = np.concatenate([b_w[: 2 * H] + b_r[: 2 * H], b_w[2 * H :], b_r[2 * H :]])
    layer = f"GRU gru 2 2 x h y last 0={H} 1={w.size} 2=0" + (" 8=2" if int8 else "")
    text = f"7767517\n3 4\nInput x 0 1 x\nInput h 0 1 h\n{layer}\n"
    float_tag, int8_tag = (np.array([tag], np.uint32).tobytes() for tag in (0, 0x000D4B38))
    scales = [127 / np.abs(weight).max(1) for weight in (w, r)]
    if int8:
        parts = [
            np.rint(weight * scale[:, None]).astype(np.int8).tobytes()
            for weight, scale in zip((w, r), scales, strict=True)
        ]
        parts = [int8_tag + part + bytes(-len(part) % 4) for part in parts]
    else:
        parts = [float_tag + weight.tobytes() for weight in (w, r)]
    data = parts[0] + float_tag + bias.tobytes() + parts[1]
    if int8:
        data += b"".join(scale.astype(np.float32).tobytes() for scale in scales)
    net = ncnn.Net()
    net.opt.num_threads = 1
    for option in ("use_vulkan_compute", "use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic"):
        setattr(net.opt, option, False)
    net.opt.use_bf16_storage = False
    with tempfile.TemporaryDirectory() as folder:
        param, model = Path(folder) / "gru.param", Path(folder) / "gru.bin"
        param.write_text(text)
        model.write_bytes(data)
        if net.load_param(str(param)) != 0 or net.load_model(str(model)) != 0:
            raise RuntimeError(f"ncnn does not load the model of {name}")

    def run(rows: Any, state: Any, output: str) -> Any:
        extractor = net.create_extractor()
        extractor.input("x", rows)
        extractor.input("h", state)
        status, result = extractor.extract(output)
        if status != 0:
            raise RuntimeError(f"{name} returned {status}")
        return result.clone()  # the extractor owns the memory

    def mat(values: np.ndarray) -> Any:
        return ncnn.Mat(values).clone()  # a Mat does not keep its array alive

    single, whole = [mat(row.reshape(1, -1).numpy()) for row in x], mat(x.numpy())
    zeros = mat(np.zeros((1, H), np.float32))
    return Rival(name, _stepper(lambda i, h: run(single[i], h, "last"), lambda: zeros), lambda: run(whole, zeros, "y"))


# ---- versions --------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    installed = {name: version(name) for name in ("torch", "onnxruntime", "ncnn", "numpy")}
    return {name: number for name, number in installed.items() if number is not None}
