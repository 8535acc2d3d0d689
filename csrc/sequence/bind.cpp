// Bindings of the sequence operation. All functions release the GIL.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "common/tensor.hpp"
#include "sequence/run.hpp"

namespace nb = nanobind;
using egru::TrainCall;

namespace {

template <class Function>
void define(nb::module_& m, const char* name, Function function, const char* doc) {
    m.def(name, function, nb::arg("call"), nb::call_guard<nb::gil_scoped_release>(), doc);
}

// Let Python handle interrupts.
void check_signals() {
    nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// A tensor on the CPU as it is stored. `valid` if it could be read and its last stride is 1.
struct View {
    egru::DLTensor tensor{};
    bool valid = false;

    explicit View(nb::handle object) {
        const egru::TensorType& torch = egru::TensorType::get();
        if (torch.type == nullptr || !PyObject_TypeCheck(object.ptr(), torch.type)) return;
        if (torch.exchange->from_object(object.ptr(), &tensor) != 0) {
            PyErr_Clear();
            return;
        }
        constexpr int cpu = 1;
        const int last = tensor.ndim - 1;
        valid = tensor.device_type == cpu && last >= 0 && (tensor.shape[last] == 1 || tensor.strides[last] == 1);
    }
    std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset; }
    std::int64_t stride(int dimension) const { return tensor.shape[dimension] == 1 ? 0 : tensor.strides[dimension]; }
    bool contiguous() const {
        std::int64_t expected = 1;
        for (int i = tensor.ndim - 1; i >= 0; --i) {
            if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
            expected *= tensor.shape[i];
        }
        return valid;
    }
};

bool set_contiguous(nb::handle object, std::uintptr_t& address) {
    if (object.is_none()) return true;
    const View view(object);
    address = view.address();
    return view.contiguous();
}

// Read the addresses and strides of the arguments. Returns whether all of them can be used as they are stored.
bool set_arguments(TrainCall& call, nb::handle input, nb::handle c0, nb::handle y0, nb::handle weight_ih,
                   nb::handle weight_hh, nb::handle bias_ih, nb::handle bias_hh, nb::handle theta) {
    const View x(input), c(c0), y(y0);
    if (!x.valid || !c.valid || !y.valid) return false;
    call.input = x.address(), call.input_t = x.stride(0), call.input_b = x.stride(1);
    call.c0 = c.address(), call.c0_b = c.stride(0);
    call.y0 = y.address(), call.y0_b = y.stride(0);
    return set_contiguous(weight_ih, call.weight_ih) && set_contiguous(weight_hh, call.weight_hh) &&
           set_contiguous(bias_ih, call.bias_ih) && set_contiguous(bias_hh, call.bias_hh) &&
           set_contiguous(theta, call.theta);
}

// Whether an object is a torch.Tensor or torch.nn.Parameter. Other subclasses may behave differently.
bool is_ordinary(nb::handle object) {
    static PyTypeObject* const parameter = [] {
        const nb::object type = nb::module_::import_("torch.nn").attr("Parameter");
        return reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());  // kept as long as the process
    }();
    return Py_TYPE(object.ptr()) == egru::TensorType::get().type || Py_TYPE(object.ptr()) == parameter;
}

// An argument of a checked call: an ordinary tensor of a floating type on the CPU.
struct Checked : View {
    bool fits = false;

    // `like`: another argument with the required type, or null.
    Checked(nb::handle object, const Checked* like) : View(is_ordinary(object) ? object : nb::handle(Py_None)) {
        constexpr int floating = 2;
        const bool known = tensor.code == floating && tensor.lanes == 1 && (tensor.bits == 32 || tensor.bits == 64);
        fits = valid && known && (like == nullptr || tensor.bits == like->tensor.bits);
    }
    bool is(std::initializer_list<std::int64_t> sizes) const {
        if (!fits || tensor.ndim != (int)sizes.size()) return false;
        int i = 0;
        for (const std::int64_t size : sizes)
            if (tensor.shape[i++] != size) return false;
        return true;
    }
};

// Check the arguments of a GRU and set sizes, type, addresses and strides. Returns false if one of them has to be
// converted or is not acceptable. States are (H,), (B, H) or (1, B, H). With `single`, the input is (B, I), one step.
bool set_problem(TrainCall& call, nb::handle input, nb::handle c0, nb::handle y0, nb::handle weight_ih,
                 nb::handle weight_hh, nb::handle bias_ih, nb::handle bias_hh, nb::handle theta, nb::handle reset_scale,
                 bool single) {
    const Checked w(weight_hh, nullptr);
    if (!w.fits || w.tensor.ndim != 2 || !w.contiguous()) return false;
    const std::int64_t rows = w.tensor.shape[0], H = w.tensor.shape[1];
    const Checked x(input, &w);
    if (!x.fits || x.tensor.ndim != (single ? 2 : 3)) return false;
    const std::int64_t T = single ? 1 : x.tensor.shape[0], B = x.tensor.shape[single ? 0 : 1];
    const std::int64_t I = x.tensor.shape[single ? 1 : 2];
    constexpr std::int64_t largest = INT32_MAX;
    if (rows != 3 * H || T < 1 || B < 1 || I < 1 || T > largest || B > largest || I > largest || rows > largest)
        return false;
    call.T = (int)T, call.B = (int)B, call.I = (int)I, call.H = (int)H;
    call.float64 = w.tensor.bits == 64;
    call.weight_hh = w.address();
    call.input = x.address(), call.input_t = single ? 0 : x.stride(0), call.input_b = x.stride(single ? 0 : 1);
    const auto state = [&](nb::handle object, std::uintptr_t& address, std::int64_t& stride) {
        const Checked s(object, &w);
        address = s.address();
        if (s.is({H})) return stride = 0, true;
        if (s.is({B, H})) return stride = s.stride(0), true;
        if (s.is({1, B, H})) return stride = s.stride(1), true;
        return false;
    };
    const auto whole = [&](nb::handle object, std::initializer_list<std::int64_t> sizes, std::uintptr_t& address) {
        const Checked array(object, &w);
        address = array.address();
        return array.is(sizes) && array.contiguous();
    };
    const auto optional = [&](nb::handle object, std::uintptr_t& address) {
        return object.is_none() || whole(object, {rows}, address);
    };
    if (!state(c0, call.c0, call.c0_b) || !state(y0, call.y0, call.y0_b)) return false;
    if (!whole(weight_ih, {rows, I}, call.weight_ih) || !whole(theta, {H}, call.theta)) return false;
    if (!optional(bias_ih, call.bias_ih) || !optional(bias_hh, call.bias_hh)) return false;
    const Checked scale(reset_scale, nullptr);
    if (scale.tensor.bits != w.tensor.bits || scale.tensor.data == nullptr) return false;
    if (scale.tensor.ndim == 1) return whole(reset_scale, {H}, call.rho_units);
    if (scale.tensor.ndim != 0 || scale.tensor.device_type != 1) return false;
    const void* value = reinterpret_cast<const void*>(scale.address());
    call.rho = call.float64 ? *static_cast<const double*>(value) : *static_cast<const float*>(value);
    return true;
}

// Divide a call into chunks, and choose how its products are computed. `rows`: most batch rows per chunk; `work`: most
// multiplications per chunk; `direct_rows` and `direct_forward`: rows up to which weights are not packed.
void set_work(TrainCall& call, std::int64_t rows, double work, std::int64_t direct_rows, std::int64_t direct_forward,
              std::int64_t one_thread, int threads) {
    const std::int64_t all = std::int64_t(call.T) * call.B, gates = call.lstm ? 4 : 3;
    const std::int64_t most = std::int64_t(work / double(gates * call.H * (std::int64_t(call.H) + call.I)));
    const std::int64_t steps = std::max<std::int64_t>(1, std::min(rows, most) / call.B);
    call.chunk = static_cast<int>(std::min<std::int64_t>(call.T, steps));
    call.direct = all <= direct_rows;
    call.direct_gates = call.direct_input = all <= direct_forward;
    call.one_thread = one_thread;
    call.threads = threads;
}

void set_options(TrainCall& call, bool after, const char* events, const char* reset, bool bounded, double width,
                 double height) {
    call.after = after;
    call.events = egru::parse_events(events);
    call.reset = egru::parse_reset(reset);
    call.bounded = bounded, call.width = width, call.height = height;
}

}  // namespace

void bind_sequence(nb::module_& m) {
    nb::class_<TrainCall> call(m, "TrainCall", "Arguments of one call; csrc/sequence/train.hpp documents the fields.");
    call.def(nb::init<>());
#define FIELD(name) call.def_rw(#name, &TrainCall::name)
    FIELD(T), FIELD(B), FIELD(I), FIELD(H), FIELD(first), FIELD(last), FIELD(chunk), FIELD(threads);
    FIELD(one_thread), FIELD(float64), FIELD(direct), FIELD(direct_input), FIELD(direct_gates), FIELD(lstm);
    FIELD(zero_blocks), FIELD(skip_hh), FIELD(skip_ih);
    FIELD(compare_output), FIELD(after), FIELD(bounded), FIELD(width), FIELD(height), FIELD(rho), FIELD(cells);
    FIELD(input), FIELD(c0), FIELD(y0), FIELD(weight_ih), FIELD(weight_hh), FIELD(bias_ih), FIELD(bias_hh);
    FIELD(theta), FIELD(rho_units), FIELD(keep), FIELD(lengths), FIELD(input_t), FIELD(input_b), FIELD(c0_b);
    FIELD(y0_b), FIELD(keep_t), FIELD(keep_b), FIELD(keep_h), FIELD(y), FIELD(c), FIELD(c_last), FIELD(y_last);
    FIELD(last_c), FIELD(gates), FIELD(workspace);
    FIELD(grad_y), FIELD(grad_c), FIELD(grad_y_t), FIELD(grad_y_b), FIELD(grad_c_t), FIELD(grad_c_b);
    FIELD(grad_c_last), FIELD(grad_y_last), FIELD(grad_c0), FIELD(grad_y0), FIELD(grad_input);
    FIELD(grad_weight_ih), FIELD(grad_weight_hh), FIELD(grad_bias_ih), FIELD(grad_bias_hh), FIELD(grad_theta);
#undef FIELD
    call.def("set_arguments", set_arguments, nb::arg("input"), nb::arg("c0"), nb::arg("y0"), nb::arg("weight_ih"),
             nb::arg("weight_hh"), nb::arg("bias_ih").none(), nb::arg("bias_hh").none(), nb::arg("theta"),
             "Set the addresses and strides of tensors. Return False if one of them cannot be used as it is stored.");
    call.def("set_problem", set_problem, nb::arg("input"), nb::arg("c0"), nb::arg("y0"), nb::arg("weight_ih"),
             nb::arg("weight_hh"), nb::arg("bias_ih").none(), nb::arg("bias_hh").none(), nb::arg("theta"),
             nb::arg("reset_scale"), nb::arg("single"),
             "Check the tensors of a GRU and set sizes, type, addresses and strides. Return False if one of them has to "
             "be converted or is not acceptable. With single=True, the input is (B, I), one step.");
    call.def("set_work", set_work, nb::arg("rows"), nb::arg("work"), nb::arg("direct_rows"), nb::arg("direct_forward"),
             nb::arg("one_thread"), nb::arg("threads"),
             "Divide the call into chunks, and choose how its products are computed.");
    call.def("set_options", set_options, nb::arg("after"), nb::arg("events"), nb::arg("reset"), nb::arg("bounded"),
             nb::arg("width"), nb::arg("height"), "Set the options of a GRU.");
    call.def_prop_rw(
        "events", [](const TrainCall& self) { return egru::events_name(self.events); },
        [](TrainCall& self, const char* events) { self.events = egru::parse_events(events); });
    call.def_prop_rw(
        "reset", [](const TrainCall& self) { return egru::reset_name(self.reset); },
        [](TrainCall& self, const char* reset) { self.reset = egru::parse_reset(reset); });

    define(m, "train_forward", [](TrainCall& c) { return egru::run_forward(c, check_signals); },
           "Run the forward pass. Return the flags of the values that are not finite (csrc/sequence/train.hpp).");
    define(m, "train_backward", [](TrainCall& c) { egru::run_backward(c, check_signals); }, "Run the backward pass.");
}
