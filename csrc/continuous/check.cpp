// A test program for the continuous-time engine, to be run under the sanitizers: all dispatch levels and options, odd
// sizes, long and empty intervals, several threads. Levels must agree up to rounding. The number of threads must not
// change a bit.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "common/levels.hpp"
#include "continuous/batch.hpp"

using namespace egru;
using namespace egru::continuous;

namespace {

using Values = std::vector<double>;

class RandomNumbers {
public:
    double next() {  // uniform in (-1, 1), the same on all platforms
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        return static_cast<double>(static_cast<int32_t>(state_ >> 32)) / 2147483648.0;
    }
    Values take(size_t count, double spread, double mean = 0) {
        Values values(count);
        for (double& value : values) value = mean + spread * next();
        return values;
    }

private:
    uint64_t state_ = 7;
};

// Gauss-Legendre quadrature on [0, 1]: Newton's method on the Legendre polynomial, and A by the same rule on [0, x_i].
struct Rule {
    Values x, w, A;
    explicit Rule(int n) {
        for (int i = 0; i < n; ++i) {
            double t = std::cos(std::acos(-1.0) * (n - i - 0.25) / (n + 0.5)), slope = 1;
            for (int step = 0; step < 50; ++step) {
                double p = 1, q = 0;
                for (int k = 1; k <= n; ++k) {
                    const double next = ((2 * k - 1) * t * p - (k - 1) * q) / k;
                    q = p;
                    p = next;
                }
                slope = n * (t * p - q) / (t * t - 1);
                t -= p / slope;
            }
            x.push_back((t + 1) / 2);
            w.push_back(1 / ((1 - t * t) * slope * slope));
        }
        for (int i = 0; i < n; ++i)
            for (int j = 0; j < n; ++j) {
                double sum = 0;
                for (int k = 0; k < n; ++k) {
                    double basis = 1;
                    for (int l = 0; l < n; ++l)
                        if (l != j) basis *= (x[i] * x[k] - x[l]) / (x[j] - x[l]);
                    sum += w[k] * basis;
                }
                A.push_back(x[i] * sum);
            }
    }
};

struct Case {
    int units, nodes;
    bool sparse, self_connections, receiver_reset, unit_amplitude;
    double pause;  // between input events
    bool linear = false, delayed = false, unit_taus = false;
    int checkpoint_every = 0;
    bool adaptive = false, connections = false, integrate = false;  // connections: a list instead of a matrix
};

constexpr int batch = 5, channels = 3, inputs = 4, readouts = 3;

// Runs a case and returns all outputs and gradients, concatenated.
Values run_case(const Case& c, int threads) {
    RandomNumbers numbers;
    const size_t H = static_cast<size_t>(c.units), B = batch;
    const Rule rule(c.nodes);
    // With delays, unit n has n % 3 lines: 0, 1 or 2.
    std::vector<int64_t> line_offsets{0}, line_units;
    for (size_t n = 0; n < H; ++n) {
        line_units.insert(line_units.end(), n % 3, static_cast<int64_t>(n));
        line_offsets.push_back(static_cast<int64_t>(line_units.size()));
    }
    const size_t lines = line_units.size(), sources = c.delayed ? lines : H;
    Values V = numbers.take(3 * H * sources, (c.linear ? 0.3 : 3) / std::sqrt(double(H))), U = numbers.take(3 * H * channels, 1.5);
    Values b = numbers.take(3 * H, 0.8, 0.4), theta = numbers.take(H, 0.2, 0.35);
    Values a0 = numbers.take(3 * H * B, 1), c0 = numbers.take(H * B, 0.3, -0.3);
    for (size_t i = 0; i < B; ++i) c0[i * H] = 1;  // emits at once, or decays
    theta[H / 2] = 1.2;                             // never emits
    Values delays = numbers.take(lines, 0.3, 0.3), taus = numbers.take(3 * H, 0.5, 0.9);
    Values beta = numbers.take(H, 0.35, 0.4), tau_a = numbers.take(H, 2, 2.5);
    tau_a[0] = 0.7;  // that of the currents
    std::vector<uint8_t> mask(H * sources), input_mask(H * channels);
    for (auto& entry : mask) entry = numbers.next() > 0.5;
    for (auto& entry : input_mask) entry = numbers.next() > 0;
    Values times, values = numbers.take(B * inputs, 1), reads;
    std::vector<int64_t> which, offsets{0};
    for (size_t i = 0; i < B * inputs; ++i) {
        times.push_back(c.pause * double(i % inputs));
        which.push_back(static_cast<int64_t>(i % channels));
    }
    for (size_t i = 0; i < B; ++i) offsets.push_back(static_cast<int64_t>((i + 1) * inputs));
    const double horizon = c.pause * inputs;
    const Values horizons(B, horizon);
    for (size_t s = 0; s < B; ++s)
        for (int i = 1; i <= readouts; ++i) reads.push_back(horizon * i / readouts);

    ContinuousCall call;
    const auto address = [](auto& vector) { return reinterpret_cast<uintptr_t>(vector.data()); };
    call.batch = batch, call.units = c.units, call.channels = channels, call.readouts = readouts, call.nodes = c.nodes;
    call.threads = threads, call.max_events = 100000;
    call.tau_s = 0.7, call.tau_m = 0.9, call.tau_o = 1.3;
    call.panel = 0.5, call.tie = 1e-13, call.grazing_floor = 1e-3;
    call.self_connections = c.self_connections, call.receiver_reset = c.receiver_reset;
    call.unit_amplitude = c.unit_amplitude, call.linear = c.linear, call.checkpoint_every = c.checkpoint_every;
    if (c.delayed) {
        call.lines = static_cast<int>(lines), call.line_offsets = address(line_offsets);
        call.line_units = address(line_units), call.delays = address(delays);
    }
    if (c.unit_taus) call.taus = address(taus);
    if (c.adaptive) call.beta = address(beta), call.tau_a = address(tau_a);
    std::vector<int64_t> pairs[2];  // every third connection: receivers, then sources
    for (size_t i = 0; i < H * sources; i += 3) {
        pairs[0].push_back(static_cast<int64_t>(i % H));
        pairs[1].push_back(static_cast<int64_t>(i / H));
    }
    const size_t pair_count = pairs[0].size();
    pairs[0].insert(pairs[0].end(), pairs[1].begin(), pairs[1].end());
    if (c.connections) {
        V.resize(3 * pair_count);
        call.connections = address(pairs[0]), call.connection_count = static_cast<int64_t>(pair_count);
    }
    call.integrate = c.integrate;
    call.V = address(V), call.U = address(U), call.b = address(b), call.theta = address(theta);
    call.a0 = address(a0), call.c0 = address(c0);
    if (c.sparse) call.mask = address(mask), call.input_mask = address(input_mask);
    call.input_times = address(times), call.input_channels = address(which), call.input_values = address(values);
    call.input_offsets = address(offsets), call.horizons = address(horizons), call.readout_times = address(reads);
    Values x = rule.x, w = rule.w, A = rule.A;
    call.rule_x = address(x), call.rule_w = address(w), call.rule_A = address(A);
    Values c_read(B * readouts * H), o_read(B * readouts * H), a_last(B * 3 * H);
    call.c_read = address(c_read), call.o_read = address(o_read), call.a_last = address(a_last);
    Values min_slope(B);
    std::vector<int64_t> event_counts(B), root_solves(B), flow_evaluations(B);
    call.event_counts = address(event_counts), call.root_solves = address(root_solves);
    call.flow_evaluations = address(flow_evaluations), call.min_slope = address(min_slope);
    const auto tape = forward(call, nullptr);

    const size_t N = static_cast<size_t>(tape->event_count());
    Values event_times(N), by_time(N, 0.3), by_amplitude(N, 0.2), by_c(c_read.size(), 1), by_o(o_read.size(), 0.5);
    Values by_a(a_last.size(), 0.1);
    std::vector<int64_t> units(N), event_offsets(B + 1), floored(B);
    tape->copy_events(event_times.data(), units.data(), event_offsets.data());
    call.cotangent_times = address(by_time), call.cotangent_amplitudes = address(by_amplitude);
    call.cotangent_c_read = address(by_c), call.cotangent_o_read = address(by_o), call.cotangent_a_last = address(by_a);
    const size_t nodes = static_cast<size_t>(tape->node_count());
    Values by_node(nodes * H, 0.01), node_times(nodes), node_weights(nodes), node_c(nodes * H), before_events(N * H);
    std::vector<int64_t> node_samples(nodes);
    if (c.integrate) {
        tape->copy_nodes(node_times.data(), node_weights.data(), node_samples.data(), node_c.data(),
                         before_events.data());
        call.cotangent_nodes = address(by_node);
    }
    Values g_beta(c.adaptive ? H : 0), g_tau_a(c.adaptive ? H : 0);
    call.grad_beta = address(g_beta), call.grad_tau_a = address(g_tau_a);
    Values g_V(V.size()), g_U(U.size()), g_b(b.size()), g_theta(H), g_delays(c.delayed ? lines : 0);
    const size_t tau_count = c.unit_taus ? H : 1;
    Values g_tau_s(tau_count), g_tau_m(tau_count), g_tau_o(tau_count);
    Values g_a0(a0.size()), g_c0(c0.size());
    Values g_times(times.size()), g_values(values.size());
    call.grad_V = address(g_V), call.grad_U = address(g_U), call.grad_b = address(g_b);
    call.grad_theta = address(g_theta), call.grad_delays = address(g_delays);
    call.grad_tau_s = address(g_tau_s), call.grad_tau_m = address(g_tau_m), call.grad_tau_o = address(g_tau_o);
    call.grad_a0 = address(g_a0), call.grad_c0 = address(g_c0);
    call.grad_input_times = address(g_times), call.grad_input_values = address(g_values);
    call.floored = address(floored);
    backward(call, *tape, nullptr);

    Values all;
    for (const Values* part : {&event_times, &c_read, &o_read, &a_last, &g_V, &g_U, &g_b, &g_theta, &g_tau_s, &g_tau_m,
                               &g_tau_o, &g_delays, &g_a0, &g_c0, &g_times, &g_values, &g_beta, &g_tau_a, &node_c,
                               &before_events})
        all.insert(all.end(), part->begin(), part->end());
    for (const int64_t unit : units) all.push_back(double(unit));
    return all;
}

}  // namespace

int main() {
    int failures = 0, cases = 0;
    size_t numbers = 0;
    for (const Case& c : {Case{1, 6, false, true, false, false, 0.7}, Case{7, 3, false, false, true, false, 0.4},
                          Case{17, 4, true, false, false, true, 0.3}, Case{65, 6, false, false, false, false, 0.1},
                          Case{70, 6, true, true, true, false, 0.2}, Case{5, 12, false, true, false, true, 9.0},
                          Case{300, 6, true, false, false, false, 0.05}, Case{9, 6, true, false, true, true, 0.0},
                          Case{17, 6, true, false, false, false, 40.0},
                          // LIF units, delays, and time constants per unit
                          Case{17, 6, false, true, false, true, 0.3, true},
                          Case{70, 5, true, false, false, true, 0.2, true, true, true},
                          Case{9, 6, false, false, false, false, 0.4, false, true, false, 5},
                          Case{66, 6, true, false, true, false, 0.2, false, true, true, 3},
                          Case{66, 6, false, false, false, false, 0.1, false, false, true},
                          Case{7, 4, false, true, true, false, 60.0, false, false, true, 4},
                          // adaptive LIF units, lists of connections, and integrals over time
                          Case{17, 6, false, true, false, true, 0.3, true, false, false, 0, true},
                          Case{70, 6, true, false, false, true, 0.2, true, true, true, 3, true},
                          Case{66, 6, false, false, false, true, 0.2, true, false, true, 5, true, true},
                          Case{9, 4, false, true, false, false, 40.0, true, false, false, 0, true, false, true},
                          Case{70, 6, false, true, false, true, 0.3, true, true, false, 4, true, true, true},
                          Case{17, 6, false, false, true, false, 0.4, false, false, true, 0, false, true, true}}) {
        Values first;
        for (int l = 0; l < level_count; ++l) {
            const Level level = static_cast<Level>(l);
            if (!level_available(level)) continue;
            force_level(level_name(level));
            const Values single = run_case(c, 1), parallel = run_case(c, 3);
            ++cases;
            const size_t bytes = sizeof(double) * single.size();
            if (single.size() != parallel.size() || std::memcmp(single.data(), parallel.data(), bytes) != 0) {
                ++failures;
                std::printf("%d units, level %s: results depend on the number of threads\n", c.units,
                            level_name(level));
            }
            if (first.empty()) first = single;
            double worst = first.size() == single.size() ? 0 : 1;
            for (size_t i = 0; i < single.size() && worst < 1; ++i)
                worst = std::max(worst, std::abs(single[i] - first[i]) / (1 + std::abs(first[i])));
            for (const double value : single) worst = std::isfinite(value) ? worst : 1;
            if (!(worst < 1e-8)) {
                ++failures;
                std::printf("%d units, level %s: differs by %g from the first level\n", c.units, level_name(level),
                            worst);
            }
            numbers += single.size();
        }
    }
    std::printf("%d cases, %zu numbers, %d failures\n", cases, numbers, failures);
    return failures != 0;
}
