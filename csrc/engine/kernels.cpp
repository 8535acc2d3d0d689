// Element-wise kernels of the streaming engine, and the table of all kernels of one dispatch level.
#include "engine/kernels.hpp"

#include "common/floats.hpp"
#include "engine/emit.hpp"
#include "engine/float_products.hpp"
#include "engine/gates.hpp"
#include "engine/int8_products.hpp"
#include "engine/lstm_update.hpp"
#include "engine/relax.hpp"
#include "engine/scores.hpp"
#include "engine/sparse_products.hpp"

namespace egru::EGRU_LEVEL {
namespace {

using namespace egru::engine;

int find_nonzero(const float* dense, int n, int32_t* index, float* value) {
    int count = 0, j = 0;
    Ints at = simd::lanes();
#ifdef EGRU_NEON
    // Skip zeros in groups of sixteen: the result of a comparison reaches a general register only after several cycles.
    for (; j + 16 <= n; j += 16, at += 16) {
        Words any = load<Words>(dense + j);
        for (int i = width; i < 16; i += width) any |= load<Words>(dense + j + i);
        if (vmaxvq_u32((uint32x4_t)any) == 0) continue;
        for (int i = 0; i < 16; i += width) {
            const Floats v = loadf(dense + j + i);
            const uint32_t mask = simd::bits(v != 0.0f);
            simd::compress(index + count, at + i, mask);
            simd::compress(value + count, v, mask);
            count += arm::packing.count[mask];
        }
    }
#endif
    for (; j + width <= n; j += width, at += width) {
        const Floats v = loadf(dense + j);
        const uint32_t mask = simd::bits(v != 0.0f);
        simd::compress(index + count, at, mask);
        simd::compress(value + count, v, mask);
        count += __builtin_popcount(mask);
    }
    for (; j < n; ++j) {
        index[count] = j;
        value[count] = dense[j];
        count += dense[j] != 0.0f;
    }
    return count;
}

bool all_finite(const float* values, size_t n) {
    Ints nonfinite{};
    size_t j = 0;
    for (; j + width <= n; j += width) {
        const Floats v = loadf(values + j);
        nonfinite |= (Ints)(v - v != 0.0f);
    }
    bool tail = false;
    for (; j < n; ++j) tail |= values[j] - values[j] != 0.0f;
    return !tail && simd::bits(nonfinite) == 0;
}

void apply_reset_gate(const SparseVector& y, int from, int to, const float* a, float* gated) {
    for (int k = from; k < to; k += width) {
        float part[width] = {}, result[width];
        const int n = to - k < width ? to - k : width;
        for (int i = 0; i < n; ++i) part[i] = a[y.index[k + i]];
        store(result, simd::sigmoid(loadf(part)));
        for (int i = 0; i < n; ++i) gated[k + i] = result[i] * y.value[k + i];
    }
}

template <Events events, Reset reset, bool after>
int update(const Cell& cell, int from, int to, int units, const float* sum, float* c, const float* y_old, float* y_new,
           float* sent) {
    const Floats keep = all(cell.keep);
    Ints nonfinite{};
    int count = 0;
    for (int j = from; j < to; j += width) {
        const Gates gates = gru_gates<after>(sum, units, j);
        const Floats theta = loadf(cell.theta + j), rho = loadf(cell.rho + j);
        const Floats c_old = loadf(c + j), y = loadf(y_old + j);
        Floats memory = c_old;
        if (reset == Reset::hard) memory = simd::fma(-rho, y != 0.0f ? c_old : all(0.0f), c_old);
        Floats next = simd::fma(gates.update, gates.candidate - memory, memory);
        if (reset == Reset::output) next = simd::fma(-rho, y, next);
        if (cell.keep != 0.0f) next = simd::fma(keep, c_old - next, next);
        count += emit<events, reset>(next, next, y, theta, rho, j, y_new, sent, next, nonfinite);
        store(c + j, next);
    }
    return simd::bits(nonfinite) == 0 ? count : -1;
}

template <Events events, bool after>
int update_with(const Cell& cell, int from, int to, int units, const float* sum, float* c, const float* y_old,
                float* y_new, float* sent) {
    switch (cell.reset) {
        case Reset::output:
            return update<events, Reset::output, after>(cell, from, to, units, sum, c, y_old, y_new, sent);
        case Reset::threshold:
            return update<events, Reset::threshold, after>(cell, from, to, units, sum, c, y_old, y_new, sent);
        case Reset::hard:
            return update<events, Reset::hard, after>(cell, from, to, units, sum, c, y_old, y_new, sent);
        case Reset::none: break;
    }
    return update<events, Reset::none, after>(cell, from, to, units, sum, c, y_old, y_new, sent);
}

int update_units(const Cell& cell, int from, int to, int units, const float* sum, float* c, const float* y_old,
                 float* y_new, float* sent) {
    const auto run = [&](auto function) { return function(cell, from, to, units, sum, c, y_old, y_new, sent); };
    if (cell.events == Events::delta) return run(update<Events::delta, Reset::none, true>);
    if (cell.events == Events::two_sided)
        return run(cell.after ? update_with<Events::two_sided, true> : update_with<Events::two_sided, false>);
    return run(cell.after ? update_with<Events::positive, true> : update_with<Events::positive, false>);
}

}  // namespace

const EngineTable engine_table{int8_interleaved, find_nonzero, all_finite,      add_rows, add_rows_int8,
                               quantise,         add_blocks,   add_blocks_int8, project,  project_dense,
                               apply_reset_gate, update_units, update_lstm,     settle,   first_event,
                               relax,            find_due,     emit_relaxed,    log_sum_exp, top};

}  // namespace egru::EGRU_LEVEL
