// Python bindings: `call = ContinuousCall()`, set its fields by name, then `tape = continuous_forward(call)` and
// `continuous_backward(call, tape)`. Both release the GIL and stop at a keyboard interrupt.
#include <nanobind/nanobind.h>
#include <nanobind/stl/unique_ptr.h>

#include "continuous/batch.hpp"
#include "continuous/validate.hpp"

namespace nb = nanobind;
using egru::continuous::ContinuousCall;
using egru::continuous::Tape;

namespace {

bool interrupted() {
    nb::gil_scoped_acquire acquire;
    return PyErr_CheckSignals() != 0;
}

// Translates exceptions: an interrupt into the exception that Python has set, too many events into an OverflowError
// with the arguments (sample, time), unresolved events into an ArithmeticError with the arguments (sample, unit, time).
template <class Work>
auto without_gil(Work work) {
    try {
        nb::gil_scoped_release release;
        return work();
    } catch (const egru::continuous::Interrupted&) {
        throw nb::python_error();
    } catch (const egru::continuous::TooManyEvents& error) {
        PyErr_SetObject(PyExc_OverflowError, nb::make_tuple(error.sample, error.time).ptr());
        throw nb::python_error();
    } catch (const egru::continuous::UnresolvedEvents& error) {
        PyErr_SetObject(PyExc_ArithmeticError, nb::make_tuple(error.sample, error.unit, error.time).ptr());
        throw nb::python_error();
    }
}

using egru::continuous::at;

double largest_magnitude(uintptr_t values, int64_t count, bool single) {
    return single ? egru::continuous::largest_magnitude<float, uint32_t>(at<float>(values), count)
                  : egru::continuous::largest_magnitude<double, uint64_t>(at<double>(values), count);
}

bool are_below(uintptr_t c, uintptr_t theta, int64_t batch, int64_t units, bool single) {
    return single ? egru::continuous::are_below(at<float>(c), at<float>(theta), batch, units)
                  : egru::continuous::are_below(at<double>(c), at<double>(theta), batch, units);
}

bool valid_events(uintptr_t times, uintptr_t channels, uintptr_t offsets, uintptr_t horizons, int64_t batch,
                  int64_t count, int64_t channel_count, bool single) {
    const int64_t* starts = at<int64_t>(offsets);
    if (!egru::continuous::events_exist(starts, at<int64_t>(channels), batch, count, channel_count)) return false;
    return single ? egru::continuous::times_ascend(at<float>(times), starts, at<float>(horizons), batch)
                  : egru::continuous::times_ascend(at<double>(times), starts, at<double>(horizons), batch);
}

}  // namespace

void bind_continuous(nb::module_& m) {
    nb::class_<ContinuousCall> call(m, "ContinuousCall");
    call.def(nb::init<>());
#define FIELD(name) call.def_rw(#name, &ContinuousCall::name);
    FIELD(batch) FIELD(units) FIELD(channels) FIELD(readouts) FIELD(nodes) FIELD(threads) FIELD(max_events)
    FIELD(tau_s) FIELD(tau_m) FIELD(tau_o) FIELD(taus) FIELD(panel) FIELD(tie) FIELD(grazing_floor)
    FIELD(linear) FIELD(beta) FIELD(tau_a)
    FIELD(self_connections) FIELD(receiver_reset) FIELD(unit_amplitude) FIELD(integrate)
    FIELD(checkpoint_every) FIELD(connection_count) FIELD(input_connection_count)
    FIELD(connections) FIELD(input_connections) FIELD(lines) FIELD(line_offsets) FIELD(line_units) FIELD(delays)
    FIELD(V) FIELD(U) FIELD(b) FIELD(theta) FIELD(a0) FIELD(c0) FIELD(mask) FIELD(input_mask)
    FIELD(input_times) FIELD(input_channels) FIELD(input_values) FIELD(input_offsets)
    FIELD(horizons) FIELD(readout_times)
    FIELD(rule_x) FIELD(rule_w) FIELD(rule_A) FIELD(c_read) FIELD(o_read) FIELD(a_last)
    FIELD(event_counts) FIELD(root_solves) FIELD(flow_evaluations) FIELD(min_slope)
    FIELD(cotangent_times) FIELD(cotangent_amplitudes)
    FIELD(cotangent_c_read) FIELD(cotangent_o_read) FIELD(cotangent_a_last) FIELD(cotangent_nodes)
    FIELD(grad_V) FIELD(grad_U) FIELD(grad_b) FIELD(grad_theta) FIELD(grad_tau_s) FIELD(grad_tau_m) FIELD(grad_tau_o)
    FIELD(grad_delays) FIELD(grad_beta) FIELD(grad_tau_a)
    FIELD(grad_a0) FIELD(grad_c0) FIELD(grad_input_times) FIELD(grad_input_values) FIELD(floored)
#undef FIELD
    nb::class_<Tape>(m, "ContinuousTape")
        .def_prop_ro("event_count", &Tape::event_count)
        .def("copy_events", [](const Tape& tape, uintptr_t times, uintptr_t units, uintptr_t offsets) {
            tape.copy_events(at<double>(times), at<int64_t>(units), at<int64_t>(offsets));
        }, nb::arg("times"), nb::arg("units"), nb::arg("offsets"))
        .def_prop_ro("node_count", &Tape::node_count)
        .def("copy_nodes", [](const Tape& tape, uintptr_t times, uintptr_t weights, uintptr_t samples, uintptr_t c,
                              uintptr_t event_c) {
            tape.copy_nodes(reinterpret_cast<double*>(times), reinterpret_cast<double*>(weights),
                            reinterpret_cast<int64_t*>(samples), reinterpret_cast<double*>(c),
                            reinterpret_cast<double*>(event_c));
        }, nb::arg("times"), nb::arg("weights"), nb::arg("samples"), nb::arg("c"), nb::arg("event_c"))
        .def_prop_ro("record_bytes", &Tape::record_bytes);
    m.def("largest_magnitude", largest_magnitude, nb::arg("values"), nb::arg("count"), nb::arg("single"));
    m.def("are_below", are_below, nb::arg("c"), nb::arg("theta"), nb::arg("batch"), nb::arg("units"),
          nb::arg("single"));
    m.def("valid_events", valid_events, nb::arg("times"), nb::arg("channels"), nb::arg("offsets"), nb::arg("horizons"),
          nb::arg("batch"), nb::arg("count"), nb::arg("channel_count"), nb::arg("single"));
    m.def("continuous_forward", [](const ContinuousCall& call) {
        return without_gil([&] { return egru::continuous::forward(call, interrupted); });
    }, nb::arg("call"));
    m.def("continuous_backward", [](const ContinuousCall& call, const Tape& tape) {
        without_gil([&] { egru::continuous::backward(call, tape, interrupted); });
    }, nb::arg("call"), nb::arg("tape"));
}
