// Products with float32 and bfloat16 weights: one sparse input, or many inputs that share a pass over the weights.
//
// Included by kernels.cpp, which is compiled once per dispatch level. kernels.hpp states the order of summation.
#pragma once

#include "common/floats.hpp"
#include "engine/kernels.hpp"

namespace egru::EGRU_LEVEL {
namespace {

using namespace egru::engine;

using simd::all;
using simd::Floats;
using simd::load;
using simd::loadf;
using simd::store;
using simd::width;
using simd::Words;

constexpr int sum_block = 4096;  // columns whose sums stay in the L1 cache while rows stream past

// ---- one input ------------------------------------------------------------------------------------------------------

// Whole rows are streamed into sums that stay in L1. For weights outside the caches this is twice as fast as gathering
// column segments into registers, and the hardware prefetchers follow it without help. Of 4 to 24 rows at a time,
// twelve is fastest: more rows amortise the traffic of the sums, and fewer are easier to prefetch.
constexpr int rows_at_once = 12;

template <int R>
void stream_float32(const float* const* row, const float* value, int columns, float* sum) {
    Floats v[R];
    for (int r = 0; r < R; ++r) v[r] = all(value[r]);
    for (int j = 0; j < columns; j += width) {
        Floats s = loadf(sum + j);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) s = simd::fma(v[r], loadf(row[r] + j), s);
        store(sum + j, s);
    }
}

template <int R>
void stream_bfloat16(const uint32_t* const* row, const float* value, int columns, float* sum) {
    Floats v[R];
    for (int r = 0; r < R; ++r) v[r] = all(value[r]);
    for (int j = 0; j < columns; j += 32)
        for (int half = 0; half < 16; half += width) {
            Floats low = loadf(sum + j + half), high = loadf(sum + j + 16 + half);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                const Words w = load<Words>(row[r] + j / 2 + half);
                low = simd::fma(v[r], (Floats)(w << 16), low);
                high = simd::fma(v[r], (Floats)(w & 0xffff0000u), high);
            }
            store(sum + j + half, low);
            store(sum + j + 16 + half, high);
        }
}

template <int R>
int stream(const Rows& rows, int first, int columns, const SparseVector& x, int k, float* sum) {
    for (; k + R <= x.count; k += R) {
        if (rows.format == WeightFormat::float32) {
            const float* row[R];
            for (int r = 0; r < R; ++r)
                row[r] = reinterpret_cast<const float*>(rows.base + x.index[k + r] * rows.stride) + first;
            stream_float32<R>(row, x.value + k, columns, sum);
        } else {
            const uint32_t* row[R];
            for (int r = 0; r < R; ++r)
                row[r] = reinterpret_cast<const uint32_t*>(rows.base + x.index[k + r] * rows.stride) + first / 2;
            stream_bfloat16<R>(row, x.value + k, columns, sum);
        }
    }
    return k;
}

void add_rows(const Rows& rows, int first, int columns, const SparseVector& x, float* sum) {
    for (int j = 0; j < columns; j += sum_block) {
        const int n = columns - j < sum_block ? columns - j : sum_block;
        int k = stream<rows_at_once>(rows, first + j, n, x, 0, sum + j);
        k = stream<4>(rows, first + j, n, x, k, sum + j);
        stream<1>(rows, first + j, n, x, k, sum + j);
    }
}

// ---- several inputs -------------------------------------------------------------------------------------------------

template <WeightFormat format>
constexpr int element = format == WeightFormat::float32 ? 4 : 2;  // bytes

// Load N vectors of weights as floats. `from` is the beginning of a column block.
template <WeightFormat format, int N>
inline void weights_at(const unsigned char* from, Floats* w) {
    if constexpr (format == WeightFormat::float32) {
        for (int i = 0; i < N; ++i) w[i] = load<Floats>(from + 4 * width * i);
    } else {
        constexpr int per_half = 16 / width;  // vectors in half a block
        for (int i = 0; i < N; ++i) {
            const int block = i / (2 * per_half), within = i % (2 * per_half), half = within % per_half;
            const Words x = load<Words>(from + 4 * (block * 16 + half * width));
            w[i] = (Floats)(within < per_half ? x << 16 : x & 0xffff0000u);
        }
    }
}

// Arguments of `project` and `project_dense`: the product of several inputs with columns [first, first + columns).
struct Projection {
    const Rows& rows;
    int first, columns;
    const SparseVector* sparse;  // one per input, or null
    const float* const* dense;   // one address per input, or null
    int inputs;
    const float* bias;
    float* out;
    size_t stride;
};

// A tile of weights stays in L1 while every input uses it. The sums of the current input are in registers.
constexpr int tile_rows = 64;
constexpr int inputs_at_once = 64;

template <WeightFormat format, int N>
void sparse_panel(const Projection& p, int j) {
    const unsigned char* base = p.rows.base + (p.first + j) * element<format>;
    for (int first = 0; first < p.inputs; first += inputs_at_once) {
        const int inputs = p.inputs - first < inputs_at_once ? p.inputs - first : inputs_at_once;
        const SparseVector* sparse = p.sparse + first;
        float* out = p.out + first * p.stride + j;
        int next[inputs_at_once] = {};  // the next entry of each input
        for (int m = 0; m < inputs; ++m)
            for (int i = 0; i < N; ++i) store(out + m * p.stride + i * width, loadf(p.bias + j + i * width));
        for (int end = tile_rows; end - tile_rows < p.rows.count; end += tile_rows)
            for (int m = 0; m < inputs; ++m) {
                const SparseVector& x = sparse[m];
                int k = next[m];
                if (m < tile_rows && end + m < p.rows.count) {  // prefetch a row of the next tile
                    const unsigned char* ahead = base + (end + m) * p.rows.stride;
                    for (int i = 0; i < N * width * element<format>; i += 64) __builtin_prefetch(ahead + i, 0, 2);
                }
                if (k == x.count || x.index[k] >= end) continue;
                Floats s[N], w[N];
                for (int i = 0; i < N; ++i) s[i] = loadf(out + m * p.stride + i * width);
                do {
                    weights_at<format, N>(base + x.index[k] * p.rows.stride, w);
                    const Floats v = all(x.value[k]);
#pragma GCC unroll 8
                    for (int i = 0; i < N; ++i) s[i] = simd::fma(v, w[i], s[i]);
                } while (++k < x.count && x.index[k] < end);
                for (int i = 0; i < N; ++i) store(out + m * p.stride + i * width, s[i]);
                next[m] = k;
            }
    }
}

template <WeightFormat format, int M, int N>
void dense_tile(const Projection& p, int first, int j) {
    Floats s[M][N], w[N];
    for (int m = 0; m < M; ++m)
        for (int i = 0; i < N; ++i) s[m][i] = loadf(p.bias + j + i * width);
    const unsigned char* row = p.rows.base + (p.first + j) * element<format>;
    for (int k = 0; k < p.rows.count; ++k, row += p.rows.stride) {
        weights_at<format, N>(row, w);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
            const Floats v = all(p.dense[first + m][k]);
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) s[m][i] = simd::fma(v, w[i], s[m][i]);
        }
    }
    for (int m = 0; m < M; ++m)
        for (int i = 0; i < N; ++i) store(p.out + (first + m) * p.stride + j + i * width, s[m][i]);
}

template <WeightFormat format, int N>
void dense_panel(const Projection& p, int j) {
    int m = 0;
    for (; m + 4 <= p.inputs; m += 4) dense_tile<format, 4, N>(p, m, j);
    for (; m < p.inputs; ++m) dense_tile<format, 1, N>(p, m, j);
}

// Use the widest panels that fit into registers, then panels of one column block.
template <WeightFormat format>
void project_panels(const Projection& p) {
    constexpr int narrow = column_block(format) / width;
    constexpr int wide = 8, wide_dense = narrow > 4 ? narrow : 4;
    int j = 0;
    if (p.sparse != nullptr) {
        for (; j + wide * width <= p.columns; j += wide * width) sparse_panel<format, wide>(p, j);
        for (; j < p.columns; j += narrow * width) sparse_panel<format, narrow>(p, j);
    } else {
        for (; j + wide_dense * width <= p.columns; j += wide_dense * width) dense_panel<format, wide_dense>(p, j);
        for (; j < p.columns; j += narrow * width) dense_panel<format, narrow>(p, j);
    }
}

void project_any(const Projection& p) {
    if (p.rows.format == WeightFormat::float32)
        project_panels<WeightFormat::float32>(p);
    else
        project_panels<WeightFormat::bfloat16>(p);
}

void project(const Rows& rows, int first, int columns, const SparseVector* inputs, int count, const float* bias,
             float* out, size_t stride) {
    project_any(Projection{rows, first, columns, inputs, nullptr, count, bias, out, stride});
}

void project_dense(const Rows& rows, int first, int columns, const float* const* inputs, int count, const float* bias,
                   float* out, size_t stride) {
    project_any(Projection{rows, first, columns, nullptr, inputs, count, bias, out, stride});
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
