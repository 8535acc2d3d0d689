// Test program for the sanitizers: all levels of this machine, both types, all cells, all resets, saved and recomputed
// gates, products that skip zero blocks, odd sizes, one to three threads. Buffers have the exact size, so that a
// sanitizer detects any access past their end. Results must be finite and bitwise equal for all numbers of threads.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "sequence/train.hpp"

namespace {

using egru::Events;
using egru::Reset;
using egru::TrainCall;

struct Shape {
    int T, B, I, H;
};

struct Cell {
    const char* name;
    bool after = false, lstm = false, output = false;
    Events events = Events::positive;
};
constexpr Cell cells[] = {
    {"GRU before"},
    {"GRU after", true},
    {"GRU before, signed events", false, false, false, Events::two_sided},
    {"GRU after, signed events", true, false, false, Events::two_sided},
    {"GRU after, delta events", true, false, false, Events::delta},
    {"LSTM", false, true},
    {"LSTM compare output", false, true, true},
    {"LSTM, signed events", false, true, false, Events::two_sided},
    {"LSTM compare output, signed events", false, true, true, Events::two_sided},
    {"LSTM compare output, delta events", false, true, true, Events::delta},
};

template <class S>
class Buffers {
public:
    Buffers(const Shape& shape, unsigned seed) : random_(seed), shape_(shape) {}

    std::uintptr_t random(std::int64_t count, double scale) {
        std::normal_distribution<double> normal(0, scale);
        S* values = fresh(count);
        for (std::int64_t i = 0; i < count; ++i) values[i] = static_cast<S>(normal(random_));
        return address(values);
    }
    // Set two thirds of the blocks of 16 units and one source to zero.
    void clear_blocks(std::uintptr_t weight, std::int64_t rows, int width, int H) {
        S* values = reinterpret_cast<S*>(weight);
        for (std::int64_t row = 0; row < rows; ++row)
            for (int n = 0; n < width; ++n)
                if ((row / H + row % H / 16 + n) % 3) values[row * width + n] = 0;
    }
    std::uintptr_t zeros(std::int64_t count) {
        S* values = fresh(count);
        std::memset(values, 0, static_cast<std::size_t>(count) * sizeof(S));
        return address(values);
    }
    std::uintptr_t output(std::int64_t count) {  // NaN where nothing is written
        S* values = fresh(count);
        std::memset(values, 0xff, static_cast<std::size_t>(count) * sizeof(S));
        outputs_.push_back({values, count});
        return address(values);
    }
    std::uintptr_t bytes(std::int64_t count) {
        char* values = static_cast<char*>(std::malloc(static_cast<std::size_t>(count)));
        std::memset(values, 0xff, static_cast<std::size_t>(count));
        owned_.push_back(values);
        return reinterpret_cast<std::uintptr_t>(values);
    }
    std::vector<S> result() const {
        std::vector<S> all;
        for (const auto& [values, count] : outputs_) all.insert(all.end(), values, values + count);
        return all;
    }
    ~Buffers() {
        for (void* buffer : owned_) std::free(buffer);
    }

private:
    S* fresh(std::int64_t count) {
        S* values = static_cast<S*>(std::malloc(static_cast<std::size_t>(count ? count : 1) * sizeof(S)));
        owned_.push_back(values);
        return values;
    }
    static std::uintptr_t address(S* values) { return reinterpret_cast<std::uintptr_t>(values); }

    std::mt19937 random_;
    Shape shape_;
    std::vector<void*> owned_;
    std::vector<std::pair<S*, std::int64_t>> outputs_;
};

// How a call multiplies the weights: packed, packed without zero blocks, or as they are stored.
enum class Products { packed, skipping, direct };

template <class S>
std::vector<S> run(const Shape& shape, int threads, Products products, const Cell& cell, Reset reset, bool lean) {
    const auto [T, B, I, H] = shape;
    Buffers<S> make(shape, 7);
    std::vector<std::int64_t> lengths(static_cast<std::size_t>(B));
    for (int s = 0; s < B; ++s) lengths[static_cast<std::size_t>(s)] = s % T + 1;

    TrainCall call;
    call.T = T, call.B = B, call.I = I, call.H = H;
    call.chunk = T > 2 ? 2 : T;  // several chunks, the last one short
    const bool direct = products == Products::direct, skip = products == Products::skipping;
    call.threads = threads, call.direct = direct, call.direct_gates = !direct, call.direct_input = lean && !skip;
    if (skip) call.zero_blocks = 0, call.skip_hh = call.skip_ih = true;
    call.lstm = cell.lstm, call.compare_output = cell.output, call.events = cell.events;
    call.after = cell.after, call.reset = reset, call.rho = 0.8;
    call.float64 = std::is_same_v<S, double>;
    call.width = 0.5, call.height = 0.7;
    const std::int64_t state = std::int64_t(B) * H, all = T * state, rows = (call.lstm ? 4 : 3) * std::int64_t(H);
    call.input = make.random(std::int64_t(T) * B * I, 1), call.input_t = std::int64_t(B) * I, call.input_b = I;
    call.weight_ih = make.random(rows * I, 0.5);
    call.weight_hh = make.random(rows * H, 0.3);
    if (skip) make.clear_blocks(call.weight_ih, rows, I, H), make.clear_blocks(call.weight_hh, rows, H, H);
    call.bias_ih = make.random(rows, 0.3), call.bias_hh = make.random(rows, 0.3);
    call.theta = make.random(H, 0.1);
    if (lean) call.rho_units = make.random(H, 0.5);
    call.c0 = make.random(state, 0.3), call.y0 = make.zeros(H);
    call.c0_b = H, call.rest = lean;  // all rows of y0 are the same
    call.keep = make.random(1, 0.2);  // the same share for all units: strides are zero
    call.lengths = reinterpret_cast<std::uintptr_t>(lengths.data());
    call.y = make.output(all), call.c = make.output(all);
    call.c_last = make.output(state), call.y_last = make.output(state);

    const egru::ForwardTable& forward = call.lstm ? EGRU_PICK(lstm_forward_table) : EGRU_PICK(forward_table);
    if (!lean) call.gates = make.bytes(forward.gates_size(call) * std::int64_t(sizeof(S)));
    const std::int64_t padded = (H + 31) / 32 * 32;
    if (call.compare_output) call.cells = make.bytes(padded * T * B * std::int64_t(sizeof(S)));
    const auto run_forward = [&forward, &make](TrainCall& call) {
        call.workspace = make.bytes(forward.workspace(call));
        forward.begin(call);
        for (call.first = 0; call.first < call.T; call.first = call.last) {
            call.last = call.first + call.chunk < call.T ? call.first + call.chunk : call.T;
            forward.chunk(call);
        }
    };
    run_forward(call);
    if (!call.lstm) {  // without a backward pass: states of one step
        TrainCall last = call;
        last.last_c = true, last.gates = 0;
        last.y = make.output(all), last.c = last.c_last = make.output(state), last.y_last = make.output(state);
        run_forward(last);
    }

    call.grad_y = make.random(all, 1), call.grad_y_t = state, call.grad_y_b = H;
    call.grad_c = make.random(all, 1), call.grad_c_t = state, call.grad_c_b = H;
    call.grad_c_last = make.random(state, 1), call.grad_y_last = make.random(state, 1);
    if (shape.T < 4) call.grad_c0 = make.output(state), call.grad_y0 = make.output(state);
    call.grad_input = make.output(std::int64_t(T) * B * I);
    call.grad_weight_ih = make.output(rows * I);
    call.grad_weight_hh = make.output(rows * H);
    call.grad_bias_ih = make.output(rows), call.grad_bias_hh = make.output(rows), call.grad_theta = make.output(H);
    const egru::BackwardTable& backward = call.lstm ? EGRU_PICK(lstm_backward_table) : EGRU_PICK(backward_table);
    call.workspace = make.bytes(backward.workspace(call));
    backward.begin(call);
    for (call.first = (T - 1) / call.chunk * call.chunk; call.first >= 0; call.first -= call.chunk) {
        call.last = call.first + call.chunk < T ? call.first + call.chunk : T;
        backward.chunk(call);
    }
    backward.finish(call);
    return make.result();
}

template <class S>
int check(const char* level) {
    const Shape shapes[] = {{1, 1, 1, 1}, {3, 2, 5, 7}, {5, 17, 64, 33}, {4, 3, 70, 100}};
    // Which memory is accessed depends on everything but the kind of reset: resets and numbers of threads take turns.
    const Reset resets[] = {Reset::output, Reset::threshold, Reset::hard, Reset::none};
    int wrong = 0, turn = 0;
    for (const Shape& shape : shapes)
        for (const Products products : {Products::packed, Products::skipping, Products::direct})
            for (const Cell& cell : cells)
                for (bool lean : {false, true}) {
                    const Reset reset = cell.events == Events::delta ? Reset::none : resets[turn / 2 % 4];
                    const int threads = 2 + turn++ % 2;
                    const auto one = run<S>(shape, 1, products, cell, reset, lean);
                    const auto other = run<S>(shape, threads, products, cell, reset, lean);
                    bool finite = true;
                    for (S value : one) finite = finite && std::isfinite(value);
                    if (finite && std::memcmp(one.data(), other.data(), one.size() * sizeof(S)) == 0) continue;
                    std::printf("%s: T%d B%d I%d H%d, products %d, %s, reset %s, lean %d, %d threads: %s\n", level,
                                shape.T, shape.B, shape.I, shape.H, static_cast<int>(products), cell.name,
                                egru::reset_name(reset), lean, threads,
                                finite ? "different bits" : "not finite");
                    ++wrong;
                }
    return wrong;
}

}  // namespace

int main() {
    int wrong = 0;
    for (int i = 0; i < egru::level_count; ++i) {
        const auto level = static_cast<egru::Level>(i);
        if (!egru::level_available(level)) {
            std::printf("%s: not available on this machine\n", egru::level_name(level));
            continue;
        }
        egru::force_level(egru::level_name(level));
        const int failures = check<float>(egru::level_name(level)) + check<double>(egru::level_name(level));
        std::printf("%s: %s\n", egru::level_name(level), failures ? "wrong" : "ok");
        wrong += failures;
    }
    return wrong ? EXIT_FAILURE : EXIT_SUCCESS;
}
