// Bindings of the sequence operation. All functions release the GIL.
#include <nanobind/nanobind.h>

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

}  // namespace

void bind_sequence(nb::module_& m) {
    nb::class_<TrainCall> call(m, "TrainCall", "Arguments of one call; csrc/sequence/train.hpp documents the fields.");
    call.def(nb::init<>());
#define FIELD(name) call.def_rw(#name, &TrainCall::name)
    FIELD(T), FIELD(B), FIELD(I), FIELD(H), FIELD(first), FIELD(last), FIELD(chunk), FIELD(threads);
    FIELD(one_thread), FIELD(float64), FIELD(direct), FIELD(direct_input), FIELD(direct_gates), FIELD(lstm);
    FIELD(compare_output), FIELD(after), FIELD(bounded), FIELD(width), FIELD(height), FIELD(rho), FIELD(cells);
    FIELD(input), FIELD(c0), FIELD(y0), FIELD(weight_ih), FIELD(weight_hh), FIELD(bias_ih), FIELD(bias_hh);
    FIELD(theta), FIELD(rho_units), FIELD(keep), FIELD(lengths), FIELD(input_t), FIELD(input_b), FIELD(c0_b);
    FIELD(y0_b), FIELD(keep_t), FIELD(keep_b), FIELD(keep_h), FIELD(y), FIELD(c), FIELD(c_last), FIELD(y_last);
    FIELD(gates), FIELD(workspace);
    FIELD(grad_y), FIELD(grad_c), FIELD(grad_y_t), FIELD(grad_y_b), FIELD(grad_c_t), FIELD(grad_c_b);
    FIELD(grad_c_last), FIELD(grad_y_last), FIELD(grad_c0), FIELD(grad_y0), FIELD(grad_input);
    FIELD(grad_weight_ih), FIELD(grad_weight_hh), FIELD(grad_bias_ih), FIELD(grad_bias_hh), FIELD(grad_theta);
#undef FIELD
    call.def("set_arguments", set_arguments, nb::arg("input"), nb::arg("c0"), nb::arg("y0"), nb::arg("weight_ih"),
             nb::arg("weight_hh"), nb::arg("bias_ih").none(), nb::arg("bias_hh").none(), nb::arg("theta"),
             "Set the addresses and strides of tensors. Return False if one of them cannot be used as it is stored.");
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
