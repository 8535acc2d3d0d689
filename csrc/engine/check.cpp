// Test program of the streaming engine, built with sanitizers: every dispatch level, weight format and reset, odd
// sizes, several threads and streams, masks. Checks that outputs are bit-identical however the work is divided, and
// that skipped steps have the outputs of ordinary ones.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "engine/engine.hpp"
#include "common/levels.hpp"

using namespace egru;
using namespace egru::engine;

namespace {

// Uniform random numbers in (-1, 1), the same on every platform.
class Random {
public:
    float next() {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        return static_cast<float>(static_cast<int32_t>(state_ >> 32)) / 2147483648.0f;
    }
    std::vector<float> take(size_t count, float size) {
        std::vector<float> values(count);
        for (float& value : values) value = size * next();
        return values;
    }

private:
    uint64_t state_ = 1;
};

struct Problem {
    int inputs, hidden;
    Reset reset;
    bool after;
    bool lstm = false, compare_output = false;  // the lower layer; the upper one is always a GRU
    Events events = Events::positive;

    size_t rows() const { return static_cast<size_t>((lstm ? 4 : 3) * hidden); }
};

struct Parameters {
    std::vector<float> w, v, b_w, b_v, theta, rho;
};

Parameters draw(Random& random, int inputs, int hidden, size_t rows) {
    const size_t H = static_cast<size_t>(hidden);
    Parameters p{random.take(rows * static_cast<size_t>(inputs), 0.7f), random.take(rows * H, 0.4f),
                 random.take(rows, 0.2f), random.take(rows, 0.2f), random.take(H, 0.1f), random.take(H, 0.9f)};
    return p;
}

// Ways to divide the work. Every pair of two values occurs.
struct Division {
    int threads, at_once;
    bool by_steps;
};
constexpr Division divisions[] = {{1, 3, false}, {1, 1, true}, {2, 1, false}, {2, 3, true}, {4, 1, true}, {4, 3, false}};

constexpr int steps = 20, streams = 3, tokens = 7, outputs = 37;

// Set blocks of 16 outputs to zero, a share of `zeros` of them. Some rows of the packed matrix become empty.
void prune(Random& random, std::vector<float>& weights, int inputs, float zeros) {
    const int rows = static_cast<int>(weights.size()) / inputs;
    for (int row = 0; row < rows; row += 16)
        for (int k = 0; k < inputs; ++k) {
            if (0.5f + 0.5f * random.next() >= zeros && k % 7 != 3) continue;
            for (int i = row; i < std::min(rows, row + 16); ++i) weights[static_cast<size_t>(i * inputs + k)] = -0.0f;
        }
}

// One stream after a few steps with input: the outputs of steps without input, computed one by one or skipped. Skipped
// steps are computed in calls of up to `part` steps, and with room for `capacity` rows. A share of `zeros` of the
// weights is zero; if it is large, skipped steps update only the units that something reaches.
std::vector<float> compute_silent(const Problem& problem, WeightFormat weights, Packing packing, float zeros, int part,
                                  int capacity) {
    constexpr int silent = 40;
    Random random;
    Parameters p = draw(random, problem.inputs, problem.hidden, problem.rows());
    for (float& bias : p.b_w) bias *= 5.0f;
    for (float& theta : p.theta) theta = 0.3f + 3.0f * std::fabs(theta);
    if (zeros > 0) {
        prune(random, p.w, problem.inputs, zeros);
        prune(random, p.v, problem.hidden, zeros);
    }
    const LayerSource layer{problem.inputs, problem.hidden, p.w.data(), p.v.data(), p.b_w.data(), p.b_v.data(),
                            p.theta.data(), p.rho.data(), problem.events, problem.reset, problem.after && !problem.lstm,
                            0.1f, problem.lstm, problem.lstm && problem.compare_output};
    EngineOptions options;
    options.weights = weights;
    options.packing = packing;
    options.has_trace = problem.after;
    options.trace = 0.9;
    options.refresh = 7;
    Engine engine({layer}, options);
    const auto readout = random.take(static_cast<size_t>(outputs * problem.hidden), 0.5f);
    engine.set_readout({problem.hidden, outputs, readout.data(), nullptr});
    const size_t width = static_cast<size_t>(outputs), last = (silent - 1) * width;
    std::vector<float> out(silent * width), rows(static_cast<size_t>(capacity) * width);
    const auto x = random.take(static_cast<size_t>(3 * problem.inputs), 1.0f);
    engine.run(x.data(), nullptr, 3, true, out.data());
    std::vector<int64_t> steps_of(static_cast<size_t>(capacity));
    const std::vector<float> empty(static_cast<size_t>(problem.inputs));
    if (part == 0) {
        engine.run(empty.data(), nullptr, 1, true, out.data());
    } else {
        Gap gap{steps_of.data(), rows.data(), capacity};
        engine.skip(0, 1, out.data(), gap);
    }
    const int32_t input = problem.inputs - 1;
    const float value = 0.7f;
    engine.step_sparse(&input, &value, 1, out.data());
    std::fill(out.begin(), out.end(), 0.0f);
    if (part == 0) {
        int64_t events = engine.counters().events[0];
        for (size_t t = 0; t < silent; ++t) {  // outputs of steps with events, and of the last one
            engine.run(empty.data(), nullptr, 1, false, out.data() + t * width);
            const bool sends = engine.counters().events[0] != events;
            events = engine.counters().events[0];
            if (!sends && t + 1 < silent) std::fill_n(out.data() + t * width, width, 0.0f);
        }
        return out;
    }
    for (int64_t done = 0; done < silent;) {
        Gap gap{steps_of.data(), rows.data(), capacity};
        engine.skip(0, std::min<int64_t>(part, silent - done), out.data() + last, gap);
        for (int i = 0; i < gap.count; ++i)
            std::copy_n(rows.data() + static_cast<size_t>(i) * width, width,
                        out.data() + static_cast<size_t>(done + gap.step[i]) * width);
        done += gap.steps;
    }
    return out;
}

// Skipped steps have the outputs of ordinary steps, up to rounding.
int check_skip(Level level, const Problem& problem, WeightFormat weights, float zeros) {
    int failures = 0;
    const auto stepped = compute_silent(problem, weights, Packing::dense, zeros, 0, 1);
    for (const auto& [part, capacity] : {std::pair{40, 64}, std::pair{40, 2}, std::pair{7, 3}}) {
        const auto skipped = compute_silent(problem, weights, Packing::sparse, zeros, part, capacity);
        float difference = 0;
        for (size_t i = 0; i < stepped.size(); ++i)
            difference = std::max(difference, std::fabs(stepped[i] - skipped[i]));
        if (difference < 1e-4f) continue;
        ++failures;
        std::printf("level %s, weights %d, %d units: skipped steps differ by %g\n", level_name(level),
                    static_cast<int>(weights), problem.hidden, static_cast<double>(difference));
    }
    return failures;
}

std::vector<float> compute(const Problem& problem, WeightFormat weights, Packing packing, float zeros, int threads,
                           int at_once, bool by_steps) {
    Random random;
    Parameters lower = draw(random, problem.inputs, problem.hidden, problem.rows());
    Parameters upper = draw(random, problem.hidden, problem.hidden, 3 * static_cast<size_t>(problem.hidden));
    const auto source = [&](int inputs, const Parameters& p, bool lstm) {
        return LayerSource{inputs, problem.hidden, p.w.data(), p.v.data(), p.b_w.data(), p.b_v.data(), p.theta.data(),
                           p.rho.data(), problem.events, problem.reset, problem.after && !lstm, 0.1f, lstm,
                           lstm && problem.compare_output};
    };
    auto readout = random.take(static_cast<size_t>(outputs * problem.hidden), 0.5f);
    if (zeros > 0) {
        prune(random, lower.w, problem.inputs, zeros);
        for (std::vector<float>* matrix : {&lower.v, &upper.w, &upper.v, &readout})
            prune(random, *matrix, problem.hidden, zeros);
    }
    const auto embedding = random.take(static_cast<size_t>(tokens * problem.inputs), 1.0f);
    EngineOptions options;
    options.weights = weights;
    options.packing = packing;
    options.threads = threads;
    options.streams = at_once;
    options.has_trace = problem.after;
    options.mean = problem.inputs == 5;
    options.trace = options.mean ? 1.0 : 0.5;
    options.refresh = 7;
    options.token_table_bytes = 1 << 20;
    auto x = random.take(static_cast<size_t>(steps * streams * problem.inputs), 1.0f);
    for (size_t i = 0; i < x.size() / 2; ++i)
        if (random.next() < 0.5f) x[i] = 0;

    std::vector<float> result(static_cast<size_t>(steps * streams * outputs));
    for (int first = 0; first < streams; first += at_once) {
        Engine engine({source(problem.inputs, lower, problem.lstm), source(problem.hidden, upper, false)}, options);
        engine.team_size().always_divide(true);
        engine.set_readout({problem.hidden, outputs, readout.data(), nullptr});
        engine.set_embedding(embedding.data(), tokens, problem.inputs);
        std::vector<int64_t> ids(static_cast<size_t>(steps * at_once), 3);
        std::vector<float> part, out(static_cast<size_t>(steps * at_once * outputs));
        for (int t = 0; t < steps; ++t)
            for (int s = first; s < first + at_once; ++s) {
                const float* row = x.data() + (t * streams + s) * problem.inputs;
                part.insert(part.end(), row, row + problem.inputs);
            }
        engine.run(nullptr, ids.data(), steps, false, out.data());
        const std::vector<uint8_t> none(static_cast<size_t>(at_once), 0);  // no stream advances: nothing changes
        if (at_once > 1) engine.run(part.data(), nullptr, 3, false, out.data(), none.data());
        if (by_steps)
            for (int t = 0; t < steps; ++t)
                engine.run(part.data() + t * at_once * problem.inputs, nullptr, 1, false,
                           out.data() + t * at_once * outputs);
        else
            engine.run(part.data(), nullptr, steps, false, out.data());
        for (int t = 0; t < steps; ++t)
            std::memcpy(result.data() + (t * streams + first) * outputs, out.data() + t * at_once * outputs,
                        sizeof(float) * static_cast<size_t>(at_once * outputs));
    }
    return result;
}

// Kernels that take a millisecond longer than those of the current level.
void wait() {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
    while (std::chrono::steady_clock::now() < end) {
    }
}
void slow_rows(const Rows&, int, int, const SparseVector&, float*) { wait(); }

// "auto" chooses the layout whose products take less time, and does not try to leave out blocks if almost none is zero.
int check_choice(Level level) {
    Random random;
    const int inputs = 40, width = 64;
    const EngineTable real = EGRU_PICK(engine_table);
    EngineTable slow_dense = real, slow_sparse = real;
    slow_dense.add_rows = slow_rows;
    slow_sparse.add_blocks = slow_rows;
    int failures = 0;
    for (const float zeros : {0.0f, 0.05f, 0.5f, 0.9f}) {
        auto source = random.take(static_cast<size_t>(inputs * width), 1.0f);
        // Every k-th block of the 160 is zero.
        for (int b = 0; zeros > 0 && b < inputs * width / 16; ++b)
            if (static_cast<int>(static_cast<float>(b + 1) * zeros) > static_cast<int>(static_cast<float>(b) * zeros))
                for (int i = 0; i < 16; ++i) source[static_cast<size_t>((b / inputs * 16 + i) * inputs + b % inputs)] = 0;
        const auto chosen = [&](const EngineTable& table, Packing packing) {
            const std::vector<engine::Block> blocks{{0, width, width}};
            const WeightMatrix matrix(WeightFormat::float32, table, source.data(), inputs, blocks, packing, false);
            return matrix.is_sparse();
        };
        const bool expected[4] = {zeros > 0.1f, false, false, true};
        const bool found[4] = {chosen(slow_dense, Packing::automatic), chosen(slow_sparse, Packing::automatic),
                               chosen(slow_dense, Packing::dense), chosen(slow_sparse, Packing::sparse)};
        for (int i = 0; i < 4; ++i)
            if (found[i] != expected[i]) {
                ++failures;
                std::printf("level %s, %g zeros: choice %d is %s\n", level_name(level), static_cast<double>(zeros), i,
                            found[i] ? "sparse" : "dense");
            }
    }
    return failures;
}

// The largest scores and their normaliser, for sizes around those of vectors.
int check_scores() {
    Random random;
    const EngineTable& table = EGRU_PICK(engine_table);
    int failures = 0;
    for (int n = 1; n < 140; n += n < 40 ? 1 : 13) {
        const auto scores = random.take(static_cast<size_t>(n), 20.0f);
        std::vector<float> sorted = scores;
        std::sort(sorted.rbegin(), sorted.rend());
        double total = 0;
        for (const float score : scores) total += std::exp(static_cast<double>(score));
        failures += std::fabs(table.log_sum_exp(scores.data(), n) - std::log(total)) > 1e-5;
        for (const int k : {1, n / 2, n}) {
            if (k == 0) continue;
            std::vector<int64_t> index(static_cast<size_t>(k));
            std::vector<float> value(static_cast<size_t>(k));
            table.top(scores.data(), n, k, index.data(), value.data());
            for (size_t i = 0; i < index.size(); ++i)
                failures += value[i] != sorted[i] || scores[static_cast<size_t>(index[i])] != value[i];
        }
    }
    if (failures) std::printf("%d scores differ\n", failures);
    return failures;
}

}  // namespace

int main() {
    int failures = 0, cases = 0;
    for (int l = 0; l < level_count; ++l) {
        const Level level = static_cast<Level>(l);
        if (!level_available(level)) {
            std::printf("level %s: not available on this machine\n", level_name(level));
            continue;
        }
        force_level(level_name(level));
        for (const WeightFormat weights : {WeightFormat::float32, WeightFormat::bfloat16, WeightFormat::int8})
            for (const Problem& problem : {Problem{1, 1, Reset::output, false}, Problem{17, 31, Reset::threshold, true},
                                           Problem{33, 65, Reset::hard, false}, Problem{5, 130, Reset::none, true},
                                           Problem{17, 31, Reset::threshold, true, true},
                                           Problem{33, 65, Reset::hard, false, true, true},
                                           Problem{17, 31, Reset::threshold, true, false, false, Events::two_sided},
                                           Problem{33, 65, Reset::hard, false, false, false, Events::two_sided},
                                           Problem{33, 65, Reset::none, true, false, false, Events::delta},
                                           Problem{5, 130, Reset::none, true, true, true, Events::delta}}) {
                for (const float zeros : {0.0f, 0.95f}) failures += check_skip(level, problem, weights, zeros);
                for (const float zeros : {0.0f, 0.8f}) {
                    const auto plain = compute(problem, weights, Packing::dense, zeros, 1, 1, false);
                    for (const float value : plain) failures += !std::isfinite(value);
                    const Packing packing = zeros > 0 ? Packing::sparse : Packing::dense;
                    for (const auto& [threads, at_once, by_steps] : divisions) {
                        const auto other = compute(problem, weights, packing, zeros, threads, at_once, by_steps);
                        ++cases;
                        if (std::memcmp(plain.data(), other.data(), sizeof(float) * plain.size()) == 0) continue;
                        ++failures;
                        std::printf("level %s, weights %d, %s, %d units, %d threads, %d streams: output differs\n",
                                    level_name(level), static_cast<int>(weights), zeros > 0 ? "sparse" : "dense",
                                    problem.hidden, threads, at_once);
                    }
                }
            }
        failures += check_choice(level);
        failures += check_scores();
    }
    std::printf("%d cases, %d failures\n", cases, failures);
    return failures != 0;
}
