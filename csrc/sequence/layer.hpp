// A TrainCall with typed pointers, and the computations that the forward and the backward pass share.
//
// Gate g of block b is panel g * blocks + b. Gates are saved as gates[t][b][g][s][32] with g in r, u, z and, in the
// "after" form, q = y V_z + b, which r multiplies.
#pragma once

#include "sequence/direct.hpp"
#include "sequence/dots.hpp"
#include "sequence/gather.hpp"
#include "common/threads.hpp"
#include "sequence/train.hpp"
#include "sequence/zero_blocks.hpp"

namespace egru::EGRU_LEVEL {
namespace {

enum Gate { R, U, Z, Q };

template <class S>
struct Layer {
    const TrainCall& call;
    const int B, I, H;
    const int blocks, tiles_H, tiles_I;
    const bool before;       // a GRU whose reset gate acts before the recurrent product
    const int weight_gates;  // blocks of H rows of the weights
    const int gate_count;    // saved per step
    const S *theta, *bias_ih, *bias_hh;
    const int64_t* lengths;
    S *y, *c;
    const int64_t c_step;    // between the states of two steps
    Steps<S> input, y_prev;  // y_prev.at(t - 1, s) are the events that step t reads

    explicit Layer(const TrainCall& call_)
        : call(call_), B(call_.B), I(call_.I), H(call_.H),
          blocks((int)divide_up(H, block)), tiles_H((int)divide_up(H, tile)), tiles_I((int)divide_up(I, tile)),
          before(!call_.lstm && !call_.after), weight_gates(call_.lstm ? 4 : 3), gate_count(before ? 3 : 4),
          theta(as(call_.theta)), bias_ih(as(call_.bias_ih)), bias_hh(as(call_.bias_hh)),
          lengths(reinterpret_cast<const int64_t*>(call_.lengths)),
          y(as(call_.y)), c(as(call_.c)), c_step(call_.last_c ? 0 : (int64_t)call_.B * call_.H),
          input{as(call_.input), call_.input_t, call_.input_b},
          y_prev{as(call_.y), (int64_t)call_.B * call_.H, call_.H, as(call_.y0), call_.y0_b} {}

    static S* as(uintptr_t address) { return reinterpret_cast<S*>(address); }

    int steps() const { return call.last - call.first; }
    int rows() const { return steps() * B; }  // batch rows of this chunk
    int64_t rows_max() const { return (int64_t)call.chunk * B; }
    int64_t gates_step() const { return (int64_t)blocks * gate_count * B * block; }
    // The number of units in block b; the last block may have fewer than 32.
    int units(int b) const { return H - b * block < block ? H - b * block : block; }
    const S* c0(int s) const { return as(call.c0) + s * call.c0_b; }
    bool real(int t, int s) const { return !lengths || t < lengths[s]; }
    // reset_scale of `count` units from `unit`.
    Vector<S> rho(int unit, int count) const {
        return call.rho_units ? load_part<S>(as(call.rho_units) + unit, count) : broadcast<S>((S)call.rho);
    }
    // What exceeds the threshold at an event, given the state c and, for delta events, the output of the previous step.
    Vector<S> compared(Vector<S> c, Vector<S> y_old) const { return call.events == Events::delta ? c - y_old : c; }
    Vector<S> magnitude(Vector<S> value) const {
        return call.events == Events::positive ? value : absolute<S>(value);
    }
    // The state that Reset::threshold carries on after an event.
    Vector<S> cleared(Vector<S> c, Vector<S> amount) const {
        return c - (call.events == Events::positive ? amount : c < 0 ? -amount : amount);
    }
    // `value` times the sign of what is compared with the threshold: the slope of the magnitude, 0 at 0.
    Vector<S> times_sign(Vector<S> value, Vector<S> compared) const {
        const Vector<S> zero{};
        if (call.events == Events::positive) return value;
        return compared < 0 ? -value : compared > 0 ? value : zero;
    }
    int64_t padded_H() const { return (int64_t)tiles_H * tile; }
    int64_t panel_size(int tiles) const { return (int64_t)tiles * tile * block; }
};

// Zoneout: the share of the previous state that is kept, for `count` units from `unit`. Without zoneout `base` is null.
template <class S>
struct Keep {
    const S* base;
    int64_t t, b, h;

    explicit Keep(const TrainCall& call)
        : base(reinterpret_cast<const S*>(call.keep)), t(call.keep_t), b(call.keep_b), h(call.keep_h) {}
    Vector<S> at(int step, int s, int unit, int count) const {
        const S* from = base + step * t + s * b;
        return h ? load_part<S>(from + unit, count) : broadcast<S>(*from);
    }
};

// Copy panel p of the transpose of weight (gates * H, width), torch's layout, to to[source * stride][32], for the
// sources in [begin, end). Sources and units that do not exist are zero.
template <class S>
void pack_panel(const S* weight, int H, int width, int blocks, int begin, int end, int p, S* to, int64_t stride) {
    const int gate = p / blocks, unit = p % blocks * block;
    const int units = H - unit < block ? H - unit : block;
    const S* from = weight + ((int64_t)gate * H + unit) * width;
    constexpr int L = lanes<S>;
    for (int i0 = 0; i0 < block; i0 += L)
        for (int n0 = begin; n0 < end; n0 += L) {
            Vector<S> v[L];
            for (int i = 0; i < L; ++i)
                v[i] = i0 + i < units && n0 < width
                           ? load_part<S>(from + (int64_t)(i0 + i) * width + n0, width - n0)
                           : Vector<S>{};
            transpose<S>(v);
            for (int n = 0; n < L; ++n) store<S>(to + (n0 + n) * stride + i0, v[n]);
        }
}

// Copy block b of the columns of the first gate of weight (gates * H, H), not transposed, to to[unit][32]; zero past the end.
template <class S>
void pack_sources(const S* weight, int H, int tiles, int b, S* to) {
    const int columns = H - b * block < block ? H - b * block : block;
    for (int n = 0; n < tiles * tile; ++n)
        for (int i = 0; i < block; ++i)
            to[n * block + i] = n < H && i < columns ? weight[(int64_t)n * H + b * block + i] : S(0);
}

// Pack the panels of block b for `gather`, panels[gate * blocks + b]. The thread that reads them packs them.
template <class S>
void pack_block(const S* weight, int H, int width, int gates, int blocks, int tiles, int b, S* panels) {
    for (int p = b; p < gates * blocks; p += blocks)
        pack_panel(weight, H, width, blocks, 0, tiles * tile, p, panels + (int64_t)p * tiles * tile * block, block);
}

// Pack the panels of `groups` for `dots`, in whole rows of a group, for the sources in [begin, end).
template <class S>
void pack_groups(const S* weight, int H, int width, int blocks, int tiles, const PanelGroups& groups, int begin,
                 int end, S* to) {
    for (int within = 0; within < groups.count; ++within) {
        const int from = within / groups.size_max * groups.size_max;
        S* group = to + (int64_t)(groups.first + from) * tiles * tile * block;
        pack_panel(weight, H, width, blocks, begin, end, groups.first + within, group + (within - from) * block,
                   (int64_t)groups.size(from) * block);
    }
}

// Initialise the rows of a product with the bias of a gate (null for zero): out[row][32].
template <class S>
void fill_bias(const S* bias, int H, int gate, int b, int rows, S* out) {
    alignas(64) S padded[block] = {};
    for (int i = 0; bias && i < block && b * block + i < H; ++i) padded[i] = bias[gate * H + b * block + i];
    for (int row = 0; row < rows; ++row)
        for (int i = 0; i < block; i += lanes<S>) store<S>(out + (int64_t)row * block + i, load<S>(padded + i));
}

// The number of a thread's `left` remaining blocks to gather together: three fill the registers, a single one does not.
constexpr int together_max = 4;
inline int blocks_together(int left) { return left <= together_max ? left : 3; }

// p[gate][b][row][32] = x W + bias over the rows of a chunk, for the blocks of this thread. panel(gate, b) is a panel
// of W. Threads divide the listing of the inputs, unless `lists` belong to one thread.
template <class S, class Panel>
void project_input(const Layer<S>& layer, const Team& team, const Lists<S>& lists, bool own_lists, S* p, Panel panel) {
    const int rows = layer.rows(), blocks = layer.blocks;
    const int begin = own_lists ? 0 : team.begin(layer.tiles_I);
    const int end = own_lists ? layer.tiles_I : team.end(layer.tiles_I);
    for (int at = begin; at < end; ++at) list_tile(layer.input, layer.call.first, layer.B, rows, layer.I, at, lists);
    if (!own_lists) team.meet();
    for (int b = team.begin(blocks); b < team.end(blocks); ++b) {
        Columns<S> columns;
        for (int g = 0; g < layer.weight_gates; ++g) {
            S* out = p + (int64_t)(g * blocks + b) * rows * block;
            fill_bias(layer.bias_ih, layer.H, g, b, rows, out);
            columns.add(panel(g, b), out, layer.units(b));
        }
        gather_all(columns, layer.tiles_I, lists, rows);
    }
}

// The same from weights in torch's layout.
template <class S>
void project_input_directly(const Layer<S>& layer, const Team& team, S* p) {
    const int rows = layer.rows();
    const auto at = [&](int row) { return layer.input.at(layer.call.first + row / layer.B, row % layer.B); };
    for (int b = team.begin(layer.blocks); b < team.end(layer.blocks); ++b)
        for (int g = 0; g < layer.weight_gates; ++g) {
            const int64_t unit = (int64_t)g * layer.H + b * block;
            multiply_rows(layer.as(layer.call.weight_ih) + unit * layer.I, layer.I, layer.units(b), at, rows,
                          layer.bias_ih ? layer.bias_ih + unit : nullptr,
                          p + (int64_t)(g * layer.blocks + b) * rows * block);
        }
}

// y V + b of gate g and block b, from weights in torch's layout: out[row][32]. at(row) is the address of a row of y.
template <class S, class At>
void multiply_gate(const Layer<S>& layer, int g, int b, At at, int rows, S* out) {
    const int64_t unit = (int64_t)g * layer.H + b * block;
    multiply_rows(layer.as(layer.call.weight_hh) + unit * layer.H, layer.H, layer.units(b), at, rows,
                  layer.bias_hh ? layer.bias_hh + unit : nullptr, out);
}

// ---- gates of block b at one step, from the input product p and the recurrent product h ------------------------------

// "after": z = tanh(p_z + r * h_z) with h_z = y V_z + b.
template <class S>
inline void gates_after(const Layer<S>& layer, int b, const S* const* p, const S* const* h, S* const* gate) {
    for (int s = 0; s < layer.B; ++s)
        for (int i = s * block; i < s * block + layer.units(b); i += lanes<S>) {
            const Vector<S> r = sigmoid(load<S>(p[R] + i) + load<S>(h[R] + i));
            const Vector<S> q = load<S>(h[Z] + i);
            store<S>(gate[R] + i, r);
            store<S>(gate[U] + i, sigmoid(-(load<S>(p[U] + i) + load<S>(h[U] + i))));
            store<S>(gate[Z] + i, hyperbolic_tangent(load<S>(p[Z] + i) + r * q));
            store<S>(gate[Q] + i, q);
        }
}

// "before": r, u and reset[s] = r * y, which V_z multiplies.
template <class S>
inline void gates_before(const Layer<S>& layer, int t, int b, const S* const* p, const S* const* h, S* const* gate,
                         S* reset) {
    for (int s = 0; s < layer.B; ++s)
        for (int v = 0; v < layer.units(b); v += lanes<S>) {
            const int i = s * block + v, unit = b * block + v, count = layer.H - unit;
            const Vector<S> r = sigmoid(load<S>(p[R] + i) + load<S>(h[R] + i));
            store<S>(gate[R] + i, r);
            store<S>(gate[U] + i, sigmoid(-(load<S>(p[U] + i) + load<S>(h[U] + i))));
            store_part<S>(reset + (int64_t)s * layer.H + unit,
                          r * load_part<S>(layer.y_prev.at(t - 1, s) + unit, count), count);
        }
}
template <class S>
inline void gate_z(const Layer<S>& layer, int b, const S* p, const S* h, S* z) {
    for (int s = 0; s < layer.B; ++s)
        for (int i = s * block; i < s * block + layer.units(b); i += lanes<S>)
            store<S>(z + i, hyperbolic_tangent(load<S>(p + i) + load<S>(h + i)));
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
