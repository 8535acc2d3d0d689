// The workspace of the backward pass.
#pragma once

#include "sequence/grad_panels.hpp"
#include "sequence/input_gradient.hpp"
#include "sequence/layer.hpp"

namespace egru::EGRU_LEVEL {
namespace {

constexpr int cached = 700 << 10;  // bytes of weights that stay in the second-level cache
constexpr int zeros_at_least = 3;  // times as many weights as non-zero ones, where zero blocks are skipped
constexpr int ahead = 8;           // rows between a prefetch in `cell` and its use
constexpr int sums_kept = 5;       // per unit: bias gradients (r, u, z, r * z, or four gates), and the threshold's

template <class S>
struct BackwardSpace {
    // Weights for the gradients of y and, if requested, of the input: rows for dot products, or strips of 32 inputs.
    S *V_rows, *W_rows, *W_strips;
    uint64_t *V_halves, *W_halves;  // the non-zero half panels of each row of a group of V_rows and W_rows, if listed
    GradPanels<S> grad_V, grad_W;
    double* totals;           // [sums_kept][H]
    S* a;                     // gradients of pre-activations of a chunk
    // Only if the gates were not saved: the gates of a chunk; x W + b, which shares memory with `a` because it is no
    // longer needed when `a` is written; and r * y (always if call.direct).
    S *gates, *p, *reset;
    const S** sources;        // only if call.direct: addresses of the rows that a weight gradient reads
    S* panels[max_team];      // the weights of a block, to recompute gates; later the gradients to unpack
    S* h[max_team];           // y V + b of a block
    S *dc, *de, *m;           // [b][s][32]
    S* dy[2];                 // of this step and of the previous one
    S* a_r;                     // "before": gradients of r at a step, row by row
    Lists<S> resets[max_team];  // their non-zero entries, one list per thread
    Lists<S> rows, columns;   // non-zero entries of a chunk's matrices, by row and by column
    Lists<S> reset_rows;      // those of the gradients of r, by row ("before", gradient of the input)
    S* strips[max_team];      // the gradient of a few strips of inputs, one per thread
    // One per thread: which gradients of y are needed (one bit per unit of a block, row by row); the same by unit for
    // groups of 16 rows; packed rows of `a`; and the products of 16 rows (gradients of y or of the input).
    uint32_t* needed[max_team];
    Requests* requests[max_team];
    uint16_t* masks[max_team];
    uint32_t* order[max_team];
    S *d[max_team], *products[max_team];
    int64_t bytes;

    explicit BackwardSpace(const Layer<S>& layer) {
        const TrainCall& call = layer.call;
        Arena arena(call.workspace);
        const bool recompute = !call.gates;
        const int64_t count = layer.rows_max(), state = (int64_t)layer.blocks * layer.B * block;
        const int64_t V_size = layer.weight_gates * layer.blocks * layer.panel_size(layer.tiles_H);
        const int64_t W_size = layer.weight_gates * layer.blocks * layer.panel_size(layer.tiles_I);
        const bool packed = !call.direct;
        V_rows = arena.take<S>(packed ? V_size : 0);
        V_halves = arena.take<uint64_t>(call.skip_hh ? layer.weight_gates * layer.blocks * layer.padded_H() : 0);
        const bool skip_ih = call.skip_ih && call.grad_input;
        const int64_t padded_I = (int64_t)layer.tiles_I * tile;
        W_halves = arena.take<uint64_t>(skip_ih ? layer.weight_gates * layer.blocks * padded_I : 0);
        W_rows = W_strips = arena.take<S>(packed && call.grad_input ? W_size : 0);
        if (packed) {
            grad_V = GradPanels<S>(arena, layer, call.grad_weight_hh, layer.H);
            grad_W = GradPanels<S>(arena, layer, call.grad_weight_ih, layer.I);
        }
        totals = arena.take<double>((int64_t)sums_kept * layer.blocks * block);
        a = arena.take<S>(layer.gate_count * layer.blocks * count * block);
        gates = arena.take<S>(recompute ? call.chunk * layer.gates_step() : 0);
        p = a;
        a_r = arena.take<S>(layer.before ? (int64_t)layer.B * layer.H : 0);
        dc = arena.take<S>(state);
        de = arena.take<S>(state);
        m = arena.take<S>(state);
        for (S*& gradient : dy) gradient = arena.take<S>(state);
        const int widest = layer.H > layer.I ? layer.H : layer.I;
        const int tiles_widest = layer.tiles_H > layer.tiles_I ? layer.tiles_H : layer.tiles_I;
        reset = arena.take<S>((recompute || call.direct) && layer.before ? count * layer.H : 0);
        sources = arena.take<const S*>(call.direct ? count : 0);
        Arena early = arena;
        const bool pack_gates = recompute && !(call.direct_gates && call.direct_input);
        if (pack_gates) rows = Lists<S>(early, count, widest);
        const bool wide = packed && call.grad_input && !skip_ih && !narrow_input(layer);
        Arena late = arena;
        if (wide && layer.before) reset_rows = Lists<S>(late, count, layer.H);
        if (packed) columns = Lists<S>(arena, widest, count);
        arena.cover(early);
        arena.cover(late);
        const int64_t groups = divide_up(layer.B, rows_max);
        const int64_t wide_H = layer.blocks * block, narrow_I = skip_ih ? padded_I : tile;
        const int64_t positions = narrow_I > groups * wide_H ? narrow_I : groups * wide_H;
        for (int i = 0; i < call.threads; ++i) {
            needed[i] = arena.take<uint32_t>((int64_t)layer.B * layer.blocks);
            h[i] = arena.take<S>(recompute ? layer.weight_gates * count * block : 0);
            panels[i] = arena.take<S>(packed || pack_gates ? layer.weight_gates * layer.panel_size(tiles_widest) : 0);
            strips[i] = arena.take<S>(wide ? strips_max * count * block : 0);
            if (!packed) continue;
            requests[i] = arena.take<Requests>(groups);
            masks[i] = arena.take<uint16_t>(positions);
            order[i] = arena.take<uint32_t>(positions);
            if (layer.before) resets[i] = Lists<S>(arena, layer.B, layer.H);
            d[i] = arena.take<S>(rows_max * (call.skip_hh || skip_ih ? block_panels_max * block : d_width));
            products[i] = arena.take<S>(positions * rows_max);
        }
        bytes = arena.bytes();
    }
};

// Copy (B, H) to [b][s][32] and back; a null pointer means zeros.
template <class S>
void to_blocks(const Layer<S>& layer, const S* from, S* to) {
    for (int b = 0; b < layer.blocks; ++b)
        for (int s = 0; s < layer.B; ++s)
            for (int i = 0; i < block; ++i)
                to[((int64_t)b * layer.B + s) * block + i] =
                    from && i < layer.units(b) ? from[(int64_t)s * layer.H + b * block + i] : S(0);
}
template <class S>
void from_blocks(const Layer<S>& layer, const S* from, S* to) {
    for (int b = 0; b < layer.blocks; ++b)
        for (int s = 0; s < layer.B; ++s)
            for (int i = 0; i < layer.units(b); ++i)
                to[(int64_t)s * layer.H + b * block + i] = from[((int64_t)b * layer.B + s) * block + i];
}

// A range of panels of V_rows for dot products with `a`.
template <class S>
PanelGroups recurrent_group(const Layer<S>& layer, int gate, int gates) {
    return {gate * layer.blocks, gates * layer.blocks, layer.call.skip_hh ? block_panels_max : panels_max};
}

// All ranges: one of all gates ("after", LSTM), or one for each of z and u ("before"). In the "before" form the
// gradient of r is zero wherever y is, so `gather_reset` computes its product, unless zero blocks are skipped.
struct RecurrentGroups {
    PanelGroups groups[3];
    int count;
    const PanelGroups* begin() const { return groups; }
    const PanelGroups* end() const { return groups + count; }
};
template <class S>
RecurrentGroups recurrent_groups(const Layer<S>& layer) {
    if (!layer.before) {
        const PanelGroups all = recurrent_group(layer, 0, layer.weight_gates);
        return {{all, all, all}, 1};
    }
    return {{recurrent_group(layer, Z, 1), recurrent_group(layer, U, 1), recurrent_group(layer, R, 1)},
            layer.call.skip_hh ? 3 : 2};
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
