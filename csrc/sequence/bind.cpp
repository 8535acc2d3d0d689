// Bindings of the sequence operation. All functions release the GIL.
#include <nanobind/nanobind.h>

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

}  // namespace

void bind_sequence(nb::module_& m) {
    nb::class_<TrainCall> call(m, "TrainCall", "Arguments of one call; csrc/sequence/train.hpp documents the fields.");
    call.def(nb::init<>());
#define FIELD(name) call.def_rw(#name, &TrainCall::name)
    FIELD(T), FIELD(B), FIELD(I), FIELD(H), FIELD(first), FIELD(last), FIELD(chunk), FIELD(threads);
    FIELD(float64), FIELD(direct), FIELD(direct_gates), FIELD(lstm), FIELD(compare_output), FIELD(after);
    FIELD(bounded), FIELD(width), FIELD(height), FIELD(rho), FIELD(cells);
    FIELD(input), FIELD(c0), FIELD(y0), FIELD(weight_ih), FIELD(weight_hh), FIELD(bias_ih), FIELD(bias_hh);
    FIELD(theta), FIELD(rho_units), FIELD(keep), FIELD(lengths), FIELD(input_t), FIELD(input_b), FIELD(keep_t);
    FIELD(keep_b), FIELD(keep_h), FIELD(y), FIELD(c), FIELD(c_last), FIELD(y_last), FIELD(gates), FIELD(workspace);
    FIELD(grad_y), FIELD(grad_c), FIELD(grad_y_t), FIELD(grad_y_b), FIELD(grad_c_t), FIELD(grad_c_b);
    FIELD(grad_c0), FIELD(grad_y0), FIELD(grad_input), FIELD(grad_weight_ih), FIELD(grad_weight_hh);
    FIELD(grad_bias_ih), FIELD(grad_bias_hh), FIELD(grad_theta);
#undef FIELD
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
