// Python: `call = ContinuousCall(); call.batch = ...; tape = continuous_forward(call); continuous_backward(call, tape)`.
// The interpreter is free while they run; an interrupt ends them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/unique_ptr.h>

#include "continuous/batch.hpp"

namespace nb = nanobind;
using egru::continuous::ContinuousCall;
using egru::continuous::Tape;

namespace {

bool interrupted() {
    nb::gil_scoped_acquire acquire;
    return PyErr_CheckSignals() != 0;
}

// What ends a run early becomes the exception Python has set, or an OverflowError that carries sample and time.
template <class Work>
auto run(Work work) {
    try {
        nb::gil_scoped_release release;
        return work();
    } catch (const egru::continuous::Interrupted&) {
        throw nb::python_error();
    } catch (const egru::continuous::TooManyEvents& many) {
        PyErr_SetObject(PyExc_OverflowError, nb::make_tuple(many.sample, many.time).ptr());
        throw nb::python_error();
    }
}

}  // namespace

void bind_continuous(nb::module_& m) {
    nb::class_<ContinuousCall> call(m, "ContinuousCall");
    call.def(nb::init<>());
#define FIELD(name) call.def_rw(#name, &ContinuousCall::name);
    FIELD(batch) FIELD(units) FIELD(channels) FIELD(readouts) FIELD(nodes) FIELD(threads) FIELD(limit)
    FIELD(tau_s) FIELD(tau_m) FIELD(tau_o) FIELD(horizon) FIELD(panel) FIELD(tie) FIELD(floor)
    FIELD(self_connections) FIELD(receiver) FIELD(unit_amplitude)
    FIELD(V) FIELD(U) FIELD(b) FIELD(theta) FIELD(a0) FIELD(c0) FIELD(mask) FIELD(input_mask)
    FIELD(input_times) FIELD(input_channels) FIELD(input_values) FIELD(input_offsets) FIELD(readout_times)
    FIELD(x) FIELD(w) FIELD(A) FIELD(c_read) FIELD(o_read) FIELD(a_last)
    FIELD(by_time) FIELD(by_amplitude) FIELD(by_c_read) FIELD(by_o_read) FIELD(by_a_last)
    FIELD(grad_V) FIELD(grad_U) FIELD(grad_b) FIELD(grad_theta) FIELD(grad_tau) FIELD(grad_a0) FIELD(grad_c0)
    FIELD(grad_input_times) FIELD(grad_input_values) FIELD(floored)
#undef FIELD
    nb::class_<Tape>(m, "ContinuousTape")
        .def_prop_ro("events", &Tape::events)
        .def("events_to", [](const Tape& tape, uintptr_t times, uintptr_t units) {
            tape.events_to(reinterpret_cast<double*>(times), reinterpret_cast<int64_t*>(units));
        })
        .def("counters", [](const Tape& tape) {
            nb::list rows;
            for (const auto& s : tape.samples) rows.append(nb::make_tuple(s.events, s.solves, s.evaluations, s.min_slope));
            return rows;
        });
    m.def("continuous_forward", [](const ContinuousCall& call) {
        return run([&] { return egru::continuous::forward(call, interrupted); });
    });
    m.def("continuous_backward", [](const ContinuousCall& call, const Tape& tape) {
        run([&] { egru::continuous::backward(call, tape, interrupted); });
    });
}
