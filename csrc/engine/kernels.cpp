// See engine_kernels.hpp for what each function does, and for the order of summation they all keep.
#include "engine/kernels.hpp"

#include "common/floats.hpp"

namespace egru::EGRU_LEVEL {
namespace {

using namespace egru::engine;

using simd::all;
using simd::Floats;
using simd::Ints;
using simd::load;
using simd::loadf;
using simd::store;
using simd::width;
using simd::Words;

constexpr int sum_block = 4096;  // columns whose sums stay in the first-level cache while rows stream past

// ---- rows of float weights ------------------------------------------------------------------------------------------

// Whole rows are streamed into sums held in L1: once weights leave the caches, this is twice as fast as gathering
// column segments into registers, and the hardware prefetchers need no help. Twelve rows at a time is the best of
// 4 to 24: enough to amortise the sums' traffic, few enough to be followed as streams.
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
int stream(const Rows& rows, int first, int columns, const List& list, int k, float* sum) {
    for (; k + R <= list.count; k += R) {
        if (rows.kind == Weights::float32) {
            const float* row[R];
            for (int r = 0; r < R; ++r)
                row[r] = reinterpret_cast<const float*>(rows.base + list.index[k + r] * rows.stride) + first;
            stream_float32<R>(row, list.value + k, columns, sum);
        } else {
            const uint32_t* row[R];
            for (int r = 0; r < R; ++r)
                row[r] = reinterpret_cast<const uint32_t*>(rows.base + list.index[k + r] * rows.stride) + first / 2;
            stream_bfloat16<R>(row, list.value + k, columns, sum);
        }
    }
    return k;
}

void add_rows(const Rows& rows, int first, int columns, const List& list, float* sum) {
    for (int j = 0; j < columns; j += sum_block) {
        const int n = columns - j < sum_block ? columns - j : sum_block;
        int k = stream<rows_at_once>(rows, first + j, n, list, 0, sum + j);
        k = stream<4>(rows, first + j, n, list, k, sum + j);
        stream<1>(rows, first + j, n, list, k, sum + j);
    }
}

// ---- several lists at once ------------------------------------------------------------------------------------------

template <Weights kind>
constexpr int element = kind == Weights::float32 ? 4 : 2;  // bytes

// N vectors of weights as floats, from an address at the beginning of a block.
template <Weights kind, int N>
inline void weights_at(const unsigned char* from, Floats* w) {
    if constexpr (kind == Weights::float32) {
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

// A product of several inputs with the columns [first, first + columns): what each panel needs to know.
struct Projection {
    const Rows& rows;
    int first, columns;
    const List* lists;      // active inputs of every item,
    const float* const* x;  // or all of them
    int items;
    const float* start;
    float* out;
    size_t stride;
};

// Tiles of weights that stay in L1 while every item takes what it needs from them, its sums in registers meanwhile.
constexpr int tile_rows = 64;
constexpr int items_at_once = 64;

template <Weights kind, int N>
void list_panel(const Projection& p, int j) {
    const unsigned char* base = p.rows.base + (p.first + j) * element<kind>;
    for (int first = 0; first < p.items; first += items_at_once) {
        const int items = p.items - first < items_at_once ? p.items - first : items_at_once;
        const List* lists = p.lists + first;
        float* out = p.out + first * p.stride + j;
        int at[items_at_once] = {};  // how far each list has come
        for (int m = 0; m < items; ++m)
            for (int i = 0; i < N; ++i) store(out + m * p.stride + i * width, loadf(p.start + j + i * width));
        for (int end = tile_rows; end - tile_rows < p.rows.count; end += tile_rows)
            for (int m = 0; m < items; ++m) {
                const List& list = lists[m];
                int k = at[m];
                if (m < tile_rows && end + m < p.rows.count) {  // a row of the next tile
                    const unsigned char* next = base + (end + m) * p.rows.stride;
                    for (int i = 0; i < N * width * element<kind>; i += 64) __builtin_prefetch(next + i, 0, 2);
                }
                if (k == list.count || list.index[k] >= end) continue;
                Floats s[N], w[N];
                for (int i = 0; i < N; ++i) s[i] = loadf(out + m * p.stride + i * width);
                do {
                    weights_at<kind, N>(base + list.index[k] * p.rows.stride, w);
                    const Floats v = all(list.value[k]);
#pragma GCC unroll 8
                    for (int i = 0; i < N; ++i) s[i] = simd::fma(v, w[i], s[i]);
                } while (++k < list.count && list.index[k] < end);
                for (int i = 0; i < N; ++i) store(out + m * p.stride + i * width, s[i]);
                at[m] = k;
            }
    }
}

template <Weights kind, int M, int N>
void dense_tile(const Projection& p, int item, int j) {
    Floats s[M][N], w[N];
    for (int m = 0; m < M; ++m)
        for (int i = 0; i < N; ++i) s[m][i] = loadf(p.start + j + i * width);
    const unsigned char* row = p.rows.base + (p.first + j) * element<kind>;
    for (int k = 0; k < p.rows.count; ++k, row += p.rows.stride) {
        weights_at<kind, N>(row, w);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
            const Floats v = all(p.x[item + m][k]);
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) s[m][i] = simd::fma(v, w[i], s[m][i]);
        }
    }
    for (int m = 0; m < M; ++m)
        for (int i = 0; i < N; ++i) store(p.out + (item + m) * p.stride + j + i * width, s[m][i]);
}

template <Weights kind, int N>
void dense_panel(const Projection& p, int j) {
    int m = 0;
    for (; m + 4 <= p.items; m += 4) dense_tile<kind, 4, N>(p, m, j);
    for (; m < p.items; ++m) dense_tile<kind, 1, N>(p, m, j);
}

// Panels as wide as registers allow, then as narrow as one block of the packed form.
template <Weights kind>
void over_panels(const Projection& p) {
    constexpr int narrow = granule(kind) / width;
    constexpr int wide = 8, wide_dense = narrow > 4 ? narrow : 4;
    int j = 0;
    if (p.lists != nullptr) {
        for (; j + wide * width <= p.columns; j += wide * width) list_panel<kind, wide>(p, j);
        for (; j < p.columns; j += narrow * width) list_panel<kind, narrow>(p, j);
    } else {
        for (; j + wide_dense * width <= p.columns; j += wide_dense * width) dense_panel<kind, wide_dense>(p, j);
        for (; j < p.columns; j += narrow * width) dense_panel<kind, narrow>(p, j);
    }
}

void project_any(const Projection& p) {
    if (p.rows.kind == Weights::float32)
        over_panels<Weights::float32>(p);
    else
        over_panels<Weights::bfloat16>(p);
}

void project(const Rows& rows, int first, int columns, const List* lists, int items, const float* start, float* out,
             size_t stride) {
    project_any(Projection{rows, first, columns, lists, nullptr, items, start, out, stride});
}

void project_dense(const Rows& rows, int first, int columns, const float* const* x, int items, const float* start,
                   float* out, size_t stride) {
    project_any(Projection{rows, first, columns, nullptr, x, items, start, out, stride});
}

// ---- rows of int8 weights -------------------------------------------------------------------------------------------

#ifdef __AVX512VNNI__
// Four rows at a time: their bytes are transposed in registers into the order the dot product wants.
template <int quads>
void stream_int8(const int8_t* const* row, const uint8_t* q, int columns, int32_t* sum) {
    __m512i v[quads];
    for (int i = 0; i < quads; ++i) v[i] = _mm512_set1_epi32(load<int32_t>(q + 4 * i));
    for (int j = 0; j < columns; j += 64) {
        __m512i s[4];
        for (int i = 0; i < 4; ++i) s[i] = _mm512_loadu_si512(sum + j + 16 * i);
#pragma GCC unroll 4
        for (int i = 0; i < quads; ++i) {
            const __m512i a = _mm512_loadu_si512(row[4 * i] + j), b = _mm512_loadu_si512(row[4 * i + 1] + j);
            const __m512i c = _mm512_loadu_si512(row[4 * i + 2] + j), d = _mm512_loadu_si512(row[4 * i + 3] + j);
            const __m512i ab = _mm512_unpacklo_epi8(a, b), ab2 = _mm512_unpackhi_epi8(a, b);
            const __m512i cd = _mm512_unpacklo_epi8(c, d), cd2 = _mm512_unpackhi_epi8(c, d);
            s[0] = _mm512_dpbusd_epi32(s[0], v[i], _mm512_unpacklo_epi16(ab, cd));
            s[1] = _mm512_dpbusd_epi32(s[1], v[i], _mm512_unpackhi_epi16(ab, cd));
            s[2] = _mm512_dpbusd_epi32(s[2], v[i], _mm512_unpacklo_epi16(ab2, cd2));
            s[3] = _mm512_dpbusd_epi32(s[3], v[i], _mm512_unpackhi_epi16(ab2, cd2));
        }
        for (int i = 0; i < 4; ++i) _mm512_storeu_si512(sum + j + 16 * i, s[i]);
    }
}
constexpr bool interleaved = true;
#else
template <int quads>
void stream_int8(const int8_t* const* row, const uint8_t* q, int columns, int32_t* sum) {
    for (int r = 0; r < 4 * quads; r += 4) {
        const int8_t *a = row[r], *b = row[r + 1], *c = row[r + 2], *d = row[r + 3];
        const int16_t qa = q[r], qb = q[r + 1], qc = q[r + 2], qd = q[r + 3];
        // one product fits sixteen bits: 255 * 127 < 2^15
        for (int j = 0; j < columns; ++j)
            sum[j] += static_cast<int16_t>(qa * a[j]) + static_cast<int16_t>(qb * b[j]) +
                      static_cast<int16_t>(qc * c[j]) + static_cast<int16_t>(qd * d[j]);
    }
}
constexpr bool interleaved = false;
#endif

template <int quads>
int stream_quads(const Rows& rows, int first, int columns, const int32_t* index, const uint8_t* q, int k, int n,
                 int32_t* sum) {
    for (; k + 4 * quads <= n; k += 4 * quads) {
        const int8_t* row[4 * quads];
        for (int r = 0; r < 4 * quads; ++r)
            row[r] = reinterpret_cast<const int8_t*>(rows.base + index[k + r] * rows.stride) + first;
        stream_int8<quads>(row, q + k, columns, sum);
    }
    return k;
}

void add_magnitudes(const Rows& rows, int first, int columns, const int32_t* index, const uint8_t* q, int n,
                    int32_t* sum) {
    const int k = stream_quads<4>(rows, first, columns, index, q, 0, n, sum);
    stream_quads<1>(rows, first, columns, index, q, k, n, sum);
}

void add_rows_int8(const Rows& rows, int first, int columns, const Rounded& list, int32_t* integers, float* sum) {
    for (int j = 0; j < columns; j += sum_block) {
        const int n = columns - j < sum_block ? columns - j : sum_block;
        std::memset(integers, 0, sizeof(int32_t) * static_cast<size_t>(n));
        if (list.negative > 0) {
            add_magnitudes(rows, first + j, n, list.index, list.q, list.negative, integers);
            for (int i = 0; i < n; ++i) integers[i] = -integers[i];
        }
        add_magnitudes(rows, first + j, n, list.index + list.negative, list.q + list.negative, list.positive, integers);
        const Floats unit = all(list.unit);
        for (int i = 0; i < n; i += width) {
            const Floats product = __builtin_convertvector(load<Ints>(integers + i), Floats);
            store(sum + j + i, simd::fma(product, unit * loadf(rows.scale + first + j + i), loadf(sum + j + i)));
        }
    }
}

void round(const List& list, Rounded* rounded) {
    typedef uint8_t Bytes __attribute__((vector_size(width)));
    Floats high{}, low{};
    int k = 0;
    for (; k + width <= list.count; k += width) {
        const Floats v = loadf(list.value + k);
        high = v > high ? v : high;
        low = v < low ? v : low;
    }
    float largest = 0, least = 0;
    const auto extend = [&](float top, float bottom) {
        largest = top > largest ? top : largest;
        least = bottom < least ? bottom : least;
    };
    for (int i = 0; i < width; ++i) extend(high[i], low[i]);
    for (; k < list.count; ++k) extend(list.value[k], list.value[k]);
    const float magnitude = largest > -least ? largest : -least;
    const float per_unit = magnitude > 0 ? 255.0f / magnitude : 0.0f;
    rounded->unit = magnitude / 255.0f;

    int n = 0;
    const auto append = [&](float value, int32_t index) {
        rounded->index[n] = index;
        rounded->q[n++] = static_cast<uint8_t>(static_cast<int>(value * per_unit + 0.5f));
    };
    const auto pad = [&] {
        for (; n % 4 != 0; ++n) {
            rounded->index[n] = rounded->index[n - 1];
            rounded->q[n] = 0;
        }
    };
    if (least < 0) {
        for (k = 0; k < list.count; ++k)
            if (list.value[k] < 0) append(-list.value[k], list.index[k]);
        pad();
        rounded->negative = n;
        for (k = 0; k < list.count; ++k)
            if (list.value[k] > 0) append(list.value[k], list.index[k]);
    } else {
        rounded->negative = 0;
        for (k = 0; k + width <= list.count; k += width) {
            const Floats scaled = loadf(list.value + k) * per_unit + 0.5f;
            store(rounded->q + k, __builtin_convertvector(__builtin_convertvector(scaled, Ints), Bytes));
        }
        std::memcpy(rounded->index, list.index, sizeof(int32_t) * static_cast<size_t>(k));
        for (n = k; k < list.count; ++k) append(list.value[k], list.index[k]);
    }
    pad();
    rounded->positive = n - rounded->negative;
}

// ---- element-wise ---------------------------------------------------------------------------------------------------

int scan(const float* dense, int n, int32_t* index, float* value) {
    int count = 0, j = 0;
    Ints at = simd::lanes();
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

bool finite(const float* values, size_t n) {
    Ints bad{};
    size_t j = 0;
    for (; j + width <= n; j += width) {
        const Floats v = loadf(values + j);
        bad |= (Ints)(v - v != 0.0f);
    }
    bool tail = false;
    for (; j < n; ++j) tail |= values[j] - values[j] != 0.0f;
    return !tail && simd::bits(bad) == 0;
}

void gate(const List& list, int from, int to, const float* a, float* gated) {
    for (int k = from; k < to; k += width) {
        float part[width] = {}, result[width];
        const int n = to - k < width ? to - k : width;
        for (int i = 0; i < n; ++i) part[i] = a[list.index[k + i]];
        store(result, simd::sigmoid(loadf(part)));
        for (int i = 0; i < n; ++i) gated[k + i] = result[i] * list.value[k + i];
    }
}

template <Reset reset, bool after>
int update_units(const Cell& cell, int from, int to, int units, const float* sum, float* c, const float* y_old,
                  float* y_new) {
    const float *q = sum, *r = sum + units, *u = sum + 2 * units, *z = sum + 3 * units;
    const Floats keep = all(cell.keep);
    Ints bad{};
    int events = 0;
    for (int j = from; j < to; j += width) {
        Floats a = loadf(z + j);
        if (after) a = simd::fma(simd::sigmoid(loadf(r + j)), loadf(q + j), a);
        const Floats theta = loadf(cell.theta + j), rho = loadf(cell.rho + j);
        const Floats c_old = loadf(c + j), y = loadf(y_old + j);
        Floats memory = c_old;
        if (reset == Reset::hard) memory = simd::fma(-rho, y != 0.0f ? c_old : all(0.0f), c_old);
        // u = 1 / (1 + exp(pre)), z = tanh(a), with one division for both
        const Floats eu = 1.0f + simd::exp(loadf(u + j)), ez = simd::exp(-2.0f * a);
        const Floats both = 1.0f / (eu * (1.0f + ez));
        const Floats update = (1.0f + ez) * both, candidate = (1.0f - ez) * eu * both;
        Floats now = simd::fma(update, candidate - memory, memory);
        if (reset == Reset::output) now = simd::fma(-rho, y, now);
        if (cell.keep != 0.0f) now = simd::fma(keep, c_old - now, now);
        const Ints event = now > theta;
        events += __builtin_popcount(simd::bits(event));
        bad |= (Ints)(now - now != 0.0f);
        store(y_new + j, event ? now : all(0.0f));
        if (reset == Reset::threshold) now = simd::fma(-rho, event ? theta : all(0.0f), now);
        store(c + j, now);
    }
    return simd::bits(bad) == 0 ? events : -1;
}

template <bool after>
int update_form(const Cell& cell, int from, int to, int units, const float* sum, float* c, const float* y_old,
                 float* y_new) {
    switch (cell.reset) {
        case Reset::output: return update_units<Reset::output, after>(cell, from, to, units, sum, c, y_old, y_new);
        case Reset::threshold:
            return update_units<Reset::threshold, after>(cell, from, to, units, sum, c, y_old, y_new);
        case Reset::hard: return update_units<Reset::hard, after>(cell, from, to, units, sum, c, y_old, y_new);
        case Reset::none: break;
    }
    return update_units<Reset::none, after>(cell, from, to, units, sum, c, y_old, y_new);
}

int update(const Cell& cell, int from, int to, int units, const float* sum, float* c, const float* y_old,
            float* y_new) {
    return cell.after ? update_form<true>(cell, from, to, units, sum, c, y_old, y_new)
                      : update_form<false>(cell, from, to, units, sum, c, y_old, y_new);
}

}  // namespace

const EngineTable engine_table{interleaved, scan,  finite,        add_rows, add_rows_int8,
                               round,       project, project_dense, gate,     update};

}  // namespace egru::EGRU_LEVEL
