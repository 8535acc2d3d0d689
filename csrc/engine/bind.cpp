// EngineCore, the Python binding of the streaming engine.
//
// Arrays are passed as addresses; the caller checks them and keeps them alive. `step_array`, `step_tensor` and
// `step_token` take the objects themselves and check them here, because checks in Python take as long as the step
// itself.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "common/tensor.hpp"
#include "engine/arrays.hpp"
#include "engine/engine.hpp"

namespace nb = nanobind;

namespace {

namespace engine = egru::engine;
using engine::ArrayView;
using engine::Engine;
using engine::SparseReader;

template <class T>
const T* input(uintptr_t address) {
    return reinterpret_cast<const T*>(address);
}

template <class T>
T* output(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

constexpr const char* not_finite =
    "EventEngine: the state became NaN or infinite because the weights or the input are too large; call reset() to "
    "continue";

constexpr int64_t max_time = int64_t(1) << 53;  // powers of the decay are computed for at most this many steps

// The GIL is released while the engine computes, so every method first checks that no other thread uses the engine.
class EngineCore {
public:
    // inputs, hidden, weight_ih, weight_hh, bias_ih, bias_hh, theta, reset_scale, events, reset,
    // reset gate after, zoneout, LSTM, compare the output
    using LayerTuple = std::tuple<int, int, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t,
                                  std::string, std::string, bool, float, bool, bool>;

    // `trace` is the decay per step, or negative if there is no trace.
    EngineCore(const std::vector<LayerTuple>& layers, const std::string& weights, int threads, int streams,
               double trace, bool mean, int refresh, size_t token_table_bytes, const std::string& packing)
        : engine_(sources(layers),
                  options(weights, threads, streams, trace, mean, refresh, token_table_bytes, packing)) {}

    const Engine& engine() const { return engine_; }
    // The last tensor passed as `out`. Its less common properties are checked once, because they cost as much as
    // the checks of the rest.
    bool is_checked(nb::handle out) const { return out.is(checked_); }
    void set_checked(nb::handle out) { checked_ = nb::borrow(out); }
    // Call `work(engine)` unless another thread uses the engine.
    template <class Work>
    auto use(Work work) {
        const Use use(busy_);
        return work(engine_);
    }

    void step(const float* x, float* out) {
        const Use use(busy_);
        check_finite(x, static_cast<size_t>(engine_.inputs() * engine_.streams()), "step", "x");
        finish(released([&] { return engine_.run(x, nullptr, 1, false, out); }));
    }

    // One step of the streams whose mask is not zero. The others must have valid inputs, too.
    void step_masked(uintptr_t x, uintptr_t ids, uintptr_t mask, uintptr_t out) {
        const Use use(busy_);
        if (x != 0)
            check_finite(input<float>(x), static_cast<size_t>(engine_.inputs() * engine_.streams()), "step", "x");
        if (ids != 0) check_tokens(input<int64_t>(ids), static_cast<size_t>(engine_.streams()), "step");
        finish(released([&] {
            return engine_.run(input<float>(x), input<int64_t>(ids), 1, false, output<float>(out),
                               input<uint8_t>(mask));
        }));
    }

    void step_sparse(uintptr_t index, uintptr_t value, int count, uintptr_t out) {
        const Use use(busy_);
        check_finite(input<float>(value), static_cast<size_t>(count), "step", "the values of x");
        finish(released([&] {
            return engine_.step_sparse(input<int32_t>(index), input<float>(value), count, output<float>(out));
        }));
    }

    // Returns the number of steps taken and the number of rows written.
    std::tuple<int64_t, int> skip(int stream, int64_t steps, uintptr_t out, uintptr_t row_steps, uintptr_t rows,
                                  int capacity) {
        const Use use(busy_);
        engine::Gap gap{output<int64_t>(row_steps), output<float>(rows), capacity};
        finish(released([&] {
            engine_.skip(stream, steps, output<float>(out), gap);
            return gap.finite;
        }));
        return {gap.steps, gap.count};
    }

    // What step_at() returns: an object of `type`, a named tuple of the output and `no_events`, three tensors, if the
    // skipped steps have no events of the last layer. Otherwise their steps and outputs go to memory of the caller, for
    // `capacity` rows.
    void set_gap(nb::handle type, nb::handle no_events, uintptr_t row_steps, uintptr_t rows, int capacity) {
        if (!PyType_Check(type.ptr()) || !PyTuple_Check(no_events.ptr()) || PyTuple_GET_SIZE(no_events.ptr()) != 3)
            throw std::invalid_argument("EngineCore.set_gap: expected a type and a tuple of three tensors");
        gap_type_ = nb::borrow(type);
        no_events_ = nb::borrow(no_events);
        row_steps_ = output<int64_t>(row_steps);
        rows_ = output<float>(rows);
        row_capacity_ = capacity;
    }

    nb::object new_gap(nb::handle out) const {
        PyTypeObject* type = reinterpret_cast<PyTypeObject*>(gap_type_.ptr());
        PyObject* gap = type->tp_alloc(type, 4);  // a named tuple has the layout of a tuple
        if (gap == nullptr) throw nb::python_error();
        PyTuple_SET_ITEM(gap, 0, nb::borrow(out).release().ptr());
        for (int i = 0; i < 3; ++i)
            PyTuple_SET_ITEM(gap, i + 1, nb::borrow(PyTuple_GET_ITEM(no_events_.ptr(), i)).release().ptr());
        return nb::steal(gap);
    }

    // Advance to step `t`, which has an input, as skip() does. Returns the number of rows; -2 minus this number if step
    // `t` is not done yet; or -1 if the arguments do not fit, for Python to convert them or to report the error.
    int step_at(nb::handle step, nb::handle indices, nb::handle values, float* out) {
        const Use use(busy_);
        if (!PyLong_CheckExact(step.ptr()) || engine_.streams() != 1 || engine_.tokens() != 0) return -1;
        int overflow = 0;
        const int64_t t = PyLong_AsLongLongAndOverflow(step.ptr(), &overflow);
        if (overflow != 0 || t < engine_.time() || t > max_time) return -1;
        if (!sparse_.read(indices, values, engine_.inputs())) return -1;
        check_finite(sparse_.value(), static_cast<size_t>(sparse_.count()), "step_at", "values");
        const int64_t start = engine_.time();
        engine::Gap gap{row_steps_, rows_, row_capacity_};
        const bool done = [&] {
            nb::gil_scoped_release release;
            if (t > start) engine_.skip(0, t - start, out, gap);
            if (engine_.time() != t || !gap.finite) return false;
            gap.finite = engine_.step_sparse(sparse_.index(), sparse_.value(), sparse_.count(), out);
            return true;
        }();
        finish(gap.finite);
        for (int i = 0; i < gap.count; ++i) gap.step[i] += start;
        return done ? gap.count : -2 - gap.count;
    }

    void step_token(int64_t id, float* out) {
        const Use use(busy_);
        check_tokens(&id, 1, "step");
        finish(released([&] { return engine_.run(nullptr, &id, 1, false, out); }));
    }

    void run(uintptr_t x, uintptr_t ids, int64_t steps, bool last, uintptr_t out) {
        const Use use(busy_);
        const size_t items = static_cast<size_t>(steps) * static_cast<size_t>(engine_.streams());
        if (x != 0) check_finite(input<float>(x), items * static_cast<size_t>(engine_.inputs()), "run", "x");
        if (ids != 0) check_tokens(input<int64_t>(ids), items, "run");
        float* result = output<float>(out);
        for (int64_t from = 0; from < steps; from += engine_.chunk_steps()) {
            const int count = static_cast<int>(std::min<int64_t>(engine_.chunk_steps(), steps - from));
            const size_t offset = static_cast<size_t>(from) * static_cast<size_t>(engine_.streams());
            finish(released([&] {
                return engine_.run(x == 0 ? nullptr : input<float>(x) + offset * static_cast<size_t>(engine_.inputs()),
                                   ids == 0 ? nullptr : input<int64_t>(ids) + offset, count, last,
                                   last ? result : result + offset * static_cast<size_t>(engine_.outputs()));
            }));
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
        }
    }

private:
    class Use {
    public:
        explicit Use(std::atomic<bool>& busy) : busy_(busy) {
            if (busy_.exchange(true, std::memory_order_acquire))
                throw std::runtime_error(
                    "EventEngine: already running in another thread; create one engine per thread");
        }
        ~Use() { busy_.store(false, std::memory_order_release); }

    private:
        std::atomic<bool>& busy_;
    };

    static std::vector<engine::LayerSource> sources(const std::vector<LayerTuple>& layers) {
        std::vector<engine::LayerSource> result;
        for (const auto& [inputs, hidden, w, v, b_w, b_v, theta, rho, events, reset, after, keep, lstm, output] : layers)
            result.push_back({inputs, hidden, input<float>(w), input<float>(v), input<float>(b_w), input<float>(b_v),
                              input<float>(theta), input<float>(rho), egru::parse_events(events.c_str()),
                              egru::parse_reset(reset.c_str()), after, keep, lstm, output});
        return result;
    }

    static engine::EngineOptions options(const std::string& weights, int threads, int streams, double trace, bool mean,
                                         int refresh, size_t bytes, const std::string& packing) {
        engine::EngineOptions result;
        result.packing = engine::parse_packing(packing.c_str());
        result.weights = engine::parse_weight_format(weights.c_str());
        result.threads = threads;
        result.streams = streams;
        result.has_trace = trace >= 0;
        result.trace = trace;
        result.mean = mean;
        result.refresh = refresh;
        result.token_table_bytes = bytes;
        return result;
    }

    void check_finite(const float* values, size_t count, const char* method, const char* name) const {
        const int64_t position = engine_.first_nonfinite(values, count);
        if (position < 0) return;
        const float value = values[position];
        const std::string shown = std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
        throw nb::value_error(("EventEngine." + std::string(method) + ": " + name + " contains " + shown +
                               " at flat index " + std::to_string(position) + "; expected finite values")
                                  .c_str());
    }

    void check_tokens(const int64_t* ids, size_t count, const char* method) const {
        for (size_t i = 0; i < count; ++i)
            if (ids[i] < 0 || ids[i] >= engine_.tokens())
                throw nb::value_error(("EventEngine." + std::string(method) + ": token id " + std::to_string(ids[i]) +
                                       " is outside the embedding; expected 0 to " +
                                       std::to_string(engine_.tokens() - 1))
                                          .c_str());
    }

    template <class Work>
    static bool released(Work work) {
        nb::gil_scoped_release release;
        return work();
    }

    static void finish(bool fine) {
        if (!fine) throw nb::value_error(not_finite);
    }

    Engine engine_;
    std::atomic<bool> busy_{false};
    SparseReader sparse_;
    nb::object checked_, gap_type_, no_events_;
    int64_t* row_steps_ = nullptr;
    float* rows_ = nullptr;
    int row_capacity_ = 0;
};

// Return the memory of `out`, or null if step() cannot write to it. Tensors that the engine created (`is_new`) fit.
float* output_tensor(EngineCore& core, nb::handle out, bool is_new) {
    const int streams = core.engine().streams();
    float* data = egru::read_floats(out.ptr(), streams == 1 ? 1 : 2, streams, core.engine().outputs());
    if (data == nullptr || is_new || core.is_checked(out)) return data;
    if (egru::is_negated(out.ptr()) || egru::requires_gradient(out.ptr())) return nullptr;
    core.set_checked(out);
    return data;
}

}  // namespace

// Signatures name the arguments for the type stub. nb::arg would too, but it makes every call slower.
void bind_engine(nb::module_& m) {
    egru::TensorType::get();  // here, where no other thread can wait for it
    nb::class_<engine::TeamSize>(m, "TeamSize", "The choice of the number of threads, for tests with simulated times.")
        .def(nb::init<int>(), nb::sig("def __init__(self, threads: int, /) -> None"))
        .def("choose", &engine::TeamSize::choose, nb::sig("def choose(self, steps: int, gap: float, /) -> int"))
        .def("record", &engine::TeamSize::record,
             nb::sig("def record(self, work: float, steps: int, seconds: float, /) -> None"));
    nb::class_<EngineCore>(m, "EngineCore", "The streaming engine. Arrays are passed as addresses of checked data.")
        .def(nb::init<const std::vector<EngineCore::LayerTuple>&, const std::string&, int, int, double, bool, int,
                      size_t, const std::string&>(),
             nb::sig("def __init__(self, "
                     "layers: list[tuple[int, int, int, int, int, int, int, int, str, str, bool, float, bool, bool]], "
                     "weights: str, threads: int, streams: int, trace: float, mean: bool, refresh: int, "
                     "token_table_bytes: int, packing: str, /) -> None"))
        .def("set_embedding",
             [](EngineCore& core, uintptr_t table, int tokens, int width) {
                 core.use([&](Engine& e) { e.set_embedding(input<float>(table), tokens, width); });
             },
             nb::sig("def set_embedding(self, table: int, tokens: int, width: int, /) -> None"))
        .def("set_readout",
             [](EngineCore& core, uintptr_t weight, uintptr_t bias, int inputs, int outputs) {
                 const engine::ReadoutSource source{inputs, outputs, input<float>(weight), input<float>(bias)};
                 core.use([&](Engine& e) { e.set_readout(source); });
             },
             nb::sig("def set_readout(self, weight: int, bias: int, inputs: int, outputs: int, /) -> None"))
        // These return false if an array or tensor does not fit; Python then converts it or reports the error.
        .def("step_array",
             [](EngineCore& core, nb::handle x, nb::handle out) {
                 const Engine& engine = core.engine();
                 const ArrayView from(x, false, engine.streams(), engine.inputs());
                 const ArrayView to(out, true, engine.streams(), engine.outputs());
                 if (from.data() == nullptr || to.data() == nullptr) return false;
                 core.step(from.data(), to.data());
                 return true;
             },
             nb::sig("def step_array(self, x: object, out: object, /) -> bool"))
        .def("step_tensor",
             [](EngineCore& core, nb::handle x, nb::handle out, bool is_new) {
                 const int streams = core.engine().streams();
                 const float* from =
                     egru::read_floats(x.ptr(), streams == 1 ? 1 : 2, streams, core.engine().inputs());
                 float* to = from == nullptr || egru::is_negated(x.ptr()) ? nullptr : output_tensor(core, out, is_new);
                 if (to == nullptr) return false;
                 core.step(from, to);
                 return true;
             },
             nb::sig("def step_tensor(self, x: object, out: object, is_new: bool, /) -> bool"))
        .def("step_masked", &EngineCore::step_masked,
             nb::sig("def step_masked(self, x: int, ids: int, mask: int, out: int, /) -> None"))
        .def("step_sparse", &EngineCore::step_sparse,
             nb::sig("def step_sparse(self, index: int, value: int, count: int, out: int, /) -> None"))
        .def("skip", &EngineCore::skip,
             nb::sig("def skip(self, stream: int, steps: int, out: int, row_steps: int, rows: int, capacity: int, /) "
                     "-> tuple[int, int]"))
        .def("set_gap", &EngineCore::set_gap,
             nb::sig("def set_gap(self, type: type, no_events: tuple[object, object, object], row_steps: int, "
                     "rows: int, capacity: int, /) -> None"))
        .def("step_at",
             [](EngineCore& core, nb::handle t, nb::handle indices, nb::handle values, nb::handle out,
                bool is_new) -> nb::object {
                 float* to = output_tensor(core, out, is_new);
                 const int count = to == nullptr ? -1 : core.step_at(t, indices, values, to);
                 return count == 0 ? core.new_gap(out) : nb::int_(count);
             },
             nb::sig("def step_at(self, t: object, indices: object, values: object, out: object, is_new: bool, /) "
                     "-> object"))
        // The same with the address of the output; returns the number of rows also if it is zero.
        .def("step_at_address",
             [](EngineCore& core, nb::handle t, nb::handle indices, nb::handle values, uintptr_t out) {
                 return core.step_at(t, indices, values, output<float>(out));
             },
             nb::sig("def step_at_address(self, t: object, indices: object, values: object, out: int, /) -> int"))
        .def_prop_rw("time", [](EngineCore& core) { return core.use([](Engine& e) { return e.time(); }); },
                     [](EngineCore& core, int64_t time) { core.use([&](Engine& e) { e.set_time(time); }); })
        .def("step_token",
             [](EngineCore& core, int64_t id, nb::handle out, bool is_new) {
                 float* to = output_tensor(core, out, is_new);
                 if (to == nullptr) return false;
                 core.step_token(id, to);
                 return true;
             },
             nb::sig("def step_token(self, id: int, out: object, is_new: bool, /) -> bool"))
        .def("run", &EngineCore::run,
             nb::sig("def run(self, x: int, ids: int, steps: int, last: bool, out: int, /) -> None"))
        // `mask` is the address of one byte per stream, or 0 for all streams.
        .def("reset",
             [](EngineCore& core, uintptr_t mask) { core.use([&](Engine& e) { e.reset(input<uint8_t>(mask)); }); },
             nb::sig("def reset(self, mask: int, /) -> None"))
        .def("sparse_matrices",
             [](EngineCore& core) { return core.use([](Engine& e) { return e.sparse_matrices(); }); },
             nb::sig("def sparse_matrices(self, /) -> list[bool]"))
        // Scores of one stream; the caller has checked 1 <= k <= outputs.
        .def("log_sum_exp",
             [](EngineCore& core, uintptr_t scores) { return core.engine().log_sum_exp(input<float>(scores)); },
             nb::sig("def log_sum_exp(self, scores: int, /) -> float"))
        .def("top",
             [](EngineCore& core, uintptr_t scores, int k, uintptr_t index, uintptr_t value) {
                 core.engine().top(input<float>(scores), k, output<int64_t>(index), output<float>(value));
             },
             nb::sig("def top(self, scores: int, k: int, index: int, value: int, /) -> None"))
        .def("reset_counters", [](EngineCore& core) { core.use([](Engine& e) { e.reset_counters(); }); })
        .def("counters",
             [](EngineCore& core) {
                 const engine::Counters c = core.use([](Engine& e) { return e.counters(); });
                 return std::make_tuple(c.steps, c.macs, c.events);
             })
        .def("get_state",
             [](EngineCore& core, int layer, uintptr_t c, uintptr_t y) {
                 core.use([&](Engine& e) { e.get_state(layer, output<float>(c), output<float>(y)); });
             },
             nb::sig("def get_state(self, layer: int, c: int, y: int, /) -> None"))
        .def("set_state",
             [](EngineCore& core, int layer, uintptr_t c, uintptr_t y) {
                 core.use([&](Engine& e) { e.set_state(layer, input<float>(c), input<float>(y)); });
             },
             nb::sig("def set_state(self, layer: int, c: int, y: int, /) -> None"))
        .def("get_trace",
             [](EngineCore& core, uintptr_t trace, uintptr_t steps) {
                 core.use([&](Engine& e) { e.get_trace(output<double>(trace), output<int64_t>(steps)); });
             },
             nb::sig("def get_trace(self, trace: int, steps: int, /) -> None"))
        .def("set_trace",
             [](EngineCore& core, uintptr_t trace, uintptr_t steps) {
                 core.use([&](Engine& e) { e.set_trace(input<double>(trace), input<int64_t>(steps)); });
             },
             nb::sig("def set_trace(self, trace: int, steps: int, /) -> None"))
        // For tests: use all threads, however small the work.
        .def("always_divide",
             [](EngineCore& core, bool value) { core.use([&](Engine& e) { e.team_size().always_divide(value); }); },
             nb::sig("def always_divide(self, value: bool, /) -> None"))
        .def_prop_ro("team_size",
                     [](EngineCore& core) { return core.use([](Engine& e) { return e.team_size().last(); }); })
        .def_prop_ro("level", [](EngineCore& core) { return std::string(core.engine().level()); })
        .def_prop_ro("weight_bytes", [](EngineCore& core) { return core.engine().weight_bytes(); });
}
