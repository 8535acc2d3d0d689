// The parts of the backward pass that run once per chunk: gates, weight gradients and the gradient of the input.
#pragma once

#include "sequence/backward.hpp"

namespace egru::EGRU_LEVEL {
namespace {

// Recompute the gates of the chunk from its input and events, for all rows at once.
template <class S>
inline void Backward<S>::recompute_gates() {
    const int rows = layer.rows();
    S* h = space.h[team.index];
    const auto pack = [&](uintptr_t weight, int width, int tiles, int p, int at) {
        S* to = space.panels[team.index] + at * layer.panel_size(tiles);
        pack_panel(layer.as(weight), H, width, blocks, 0, tiles * tile, p, to, block);
        return to;
    };
    if (call.direct_input)
        project_input_directly(layer, team, space.p);
    else
        project_input(layer, team, space.rows, false, space.p,
                      [&](int g, int b) { return pack(call.weight_ih, layer.I, layer.tiles_I, g * blocks + b, g); });
    team.meet();
    list_rows(layer.y_prev, call.first - 1);
    // Products of y, or of r * y in space.reset, with the weights of `gates`.
    const auto recurrent = [&](int b, const int* gates, int count, S* const* out) {
        if (call.direct_gates) {
            const auto at = [&](int row) {
                return gates[0] == Z ? space.reset + (int64_t)row * H
                                     : layer.y_prev.at(call.first - 1 + row / B, row % B);
            };
            for (int j = 0; j < count; ++j)
                multiply_gate(layer, gates[j], b, at, rows, out[j]);
            return;
        }
        Columns<S> columns;
        for (int j = 0; j < count; ++j) {
            fill_bias(layer.bias_hh, H, gates[j], b, rows, out[j]);
            columns.add(pack(call.weight_hh, H, layer.tiles_H, gates[j] * blocks + b, j), out[j], layer.units(b));
        }
        gather_all(columns, layer.tiles_H, space.rows, rows);
    };
    S* out[3] = {h, h + (int64_t)rows * block, h + (int64_t)2 * rows * block};
    constexpr int order[3] = {R, U, Z};
    for (int b = first_block; b < last_block; ++b) {
        recurrent(b, order, call.after ? 3 : 2, out);
        for (int t = call.first; t < call.last; ++t) {
            const int64_t at = (int64_t)(t - call.first) * B * block;
            const S* products[3] = {out[R] + at, out[U] + at, out[Z] + at};
            const S* p[3] = {p_at(t, b, R), p_at(t, b, U), p_at(t, b, Z)};
            S* gates[4];
            for (int g = 0; g < layer.gate_count; ++g) gates[g] = const_cast<S*>(gates_at(t, b, g));
            if (call.after)
                gates_after<S>(layer, b, p, products, gates);
            else
                gates_before<S>(layer, t, b, p, products, gates, space.reset + (int64_t)(t - call.first) * B * H);
        }
    }
    team.meet();
    if (call.after) return;
    list_rows(Steps<S>{space.reset, (int64_t)B * H, H}, 0);
    for (int b = first_block; b < last_block; ++b) {
        recurrent(b, order + Z, 1, out);
        for (int t = call.first; t < call.last; ++t)
            gate_z<S>(layer, b, p_at(t, b, Z), out[0] + (int64_t)(t - call.first) * B * block,
                      const_cast<S*>(gates_at(t, b, Z)));
    }
    team.meet();
}

template <class S>
inline void Backward<S>::list_rows(const Steps<S>& from, int first) {
    if (call.direct_gates) return;
    for (int at = team.begin(layer.tiles_H); at < team.end(layer.tiles_H); ++at)
        list_tile(from, first, B, layer.rows(), H, at, space.rows);
    team.meet();
}

// List the entries of a chunk's rows by column: their values, or the changes between steps.
template <class S>
template <bool changes>
inline void Backward<S>::list_by_column(const Steps<S>& from, int first, int width) {
    const int rows = layer.rows(), tiles = (int)divide_up(rows, tile);
    for (int at = team.begin(tiles); at < team.end(tiles); ++at)
        list_columns<changes>(from, first, B, rows, width, at, space.columns);
    team.meet();
}

// List what the gradients of the recurrent weights multiply with the gradients `a` of the pre-activations of `gates`.
//
// With delta events, the sum over t of y_{t-1} a_t is that of each change of y times the sum of a over all later steps,
// which replaces a.
template <class S>
inline void Backward<S>::list_recurrent_sources(std::initializer_list<int> gates) {
    const int rows = layer.rows();
    if (call.events == Events::delta) {
        list_by_column<true>(layer.y_prev, call.first - 1, H);
        const bool many = space.columns.share((int)divide_up(rows, tile), H, rows) > most_changes;
        team.meet();
        if (!many) {
            const int64_t step = (int64_t)B * block;
            for (int b = first_block; b < last_block; ++b)
                for (const int g : gates) {
                    S* sums = a_at(call.first, b, g);
                    for (int64_t i = (layer.steps() - 1) * step - lanes<S>; i >= 0; i -= lanes<S>)
                        store<S>(sums + i, load<S>(sums + i) + load<S>(sums + i + step));
                }
            return;
        }
    }
    list_by_column<false>(layer.y_prev, call.first - 1, H);
}

// grad[gate][b][source][32] += the sum over the chunk's rows of source value * a.
template <class S>
inline void Backward<S>::weight_gradients() {
    const int rows = layer.rows(), tiles = (int)divide_up(rows, tile);
    // Add the gradients of the weights of `gates` whose sources were listed last.
    const auto collect = [&](const GradPanels<S>& grad, std::initializer_list<Gate> gates) {
        for (int b = first_block, count = 0; b < last_block; b += count) {
            count = blocks_together(last_block - b);
            Columns<S> columns;
            for (int j = b; j < b + count; ++j)
                for (const Gate g : gates)
                    columns.add(a_at(call.first, j, g), grad.panel((g == Q ? Z : g) * blocks + j), layer.units(j));
            gather_all(columns, tiles, space.columns, grad.width);
        }
        team.meet();
    };
    list_by_column<false>(layer.input, call.first, layer.I);
    collect(space.grad_W, {R, U, Z});
    list_recurrent_sources({R, U, Q});
    if (call.after) {
        collect(space.grad_V, {R, U, Q});
        return;
    }
    collect(space.grad_V, {R, U});
    const auto reset_by = [&](int t, int s) { return gates_at(t, 0, R) + s * block; };
    for (int at = team.begin(tiles); at < team.end(tiles); ++at)
        scale_columns<S>(reset_by, (int64_t)layer.gate_count * B * block, call.first, B, rows, H, at, space.columns);
    team.meet();
    collect(space.grad_V, {Z});
}

// The gradient of the input. Threads divide the inputs into strips of 32.
template <class S>
inline void Backward<S>::input_gradient() {
    if (call.skip_ih) return skipping_input_gradient();
    if (narrow_input(layer)) return narrow_input_gradient();
    const int rows = layer.rows(), panels = layer.weight_gates * blocks, I = layer.I;
    const int64_t panel_size = (int64_t)rows * block, strip_size = (int64_t)panels * block * block;
    const int sparse = layer.before ? blocks : 0;  // panels of r, whose gradient is zero where y is
    for (int at = team.begin(layer.tiles_H); sparse && at < team.end(layer.tiles_H); ++at)
        list_panels(space.a, blocks, rows, at, space.reset_rows);
    team.meet();
    const int strips = (int)divide_up(I, block), end = team.end(strips);
    S* out = space.strips[team.index];
    for (int q = team.begin(strips), count = 0; q < end; q += count) {
        count = end - q < strips_max ? end - q : strips_max;
        __builtin_memset(out, 0, count * panel_size * sizeof(S));
        const S* weight = space.W_strips + q * strip_size;
        const auto columns_of = [&](int j) { return I - (q + j) * block < block ? I - (q + j) * block : block; };
        if (sparse) {
            Columns<S> columns;
            for (int j = 0; j < count; ++j) columns.add(weight + j * strip_size, out + j * panel_size, columns_of(j));
            gather_all(columns, layer.tiles_H, space.reset_rows, rows);
        }
        for (int row = 0; row < rows; row += dense_rows)
            for (int p = sparse; p < panels; p += dense_panels)
                for (int j = 0; j < count; ++j)
                    dense_rows_product(space.a + p * panel_size + row * block, panel_size,
                                       panels - p < dense_panels ? panels - p : dense_panels,
                                       weight + j * strip_size + (int64_t)p * block * block,
                                       rows - row < dense_rows ? rows - row : dense_rows,
                                       out + j * panel_size + row * block);
        S* to = layer.as(call.grad_input) + (int64_t)call.first * B * I + q * block;
        for (int row = 0; row < rows; ++row, to += I)
            for (int j = 0; j < count; ++j)
                for (int v = 0; v < columns_of(j); v += lanes<S>)
                    store_part<S>(to + j * block + v, load<S>(out + j * panel_size + row * block + v), columns_of(j) - v);
    }
    team.meet();
}

// The same for few inputs, as dot products. Threads divide the batch rows.
template <class S>
inline void Backward<S>::narrow_input_gradient() {
    const int rows = layer.rows(), row_groups = (int)divide_up(rows, rows_max), panels = layer.weight_gates * blocks;
    const int64_t size = layer.panel_size(layer.tiles_I);
    const int begin = team.begin(row_groups) * rows_max, end = team.end(row_groups) * rows_max;
    const PanelGroups groups(0, panels);
    S *d = space.d[team.index], *products = space.products[team.index];
    Requests all{space.masks[team.index], space.order[team.index], rows_max, {}};
    Upcoming nothing;
    for (int s0 = begin; s0 < end && s0 < rows; s0 += rows_max) {
        const int row_count = all.rows = rows - s0 < rows_max ? rows - s0 : rows_max;
        for (int n = 0; n < layer.I; ++n) all.mask[n] = (uint16_t)((1u << row_count) - 1);
        all.sort(layer.I);
        for (int64_t i = 0; i < (int64_t)layer.tiles_I * tile * rows_max; ++i) products[i] = 0;
        for (int from = 0; from < panels; from += groups.size_max) {
            const int count = groups.size(from);
            const S* panel[panels_max];
            for (int j = 0; j < count; ++j) panel[j] = space.a + ((int64_t)(from + j) * rows + s0) * block;
            pack_rows<S>(panel, count, row_count, d);
            dots_all<S>(space.W_rows + from * size, d, count, all, true, nothing, products);
        }
        for (int i0 = 0; i0 < layer.I; i0 += block) {
            alignas(64) S result[rows_max * block] = {};
            add_transposed<S>(products + (int64_t)i0 * rows_max, row_count, rows_max, block, result);
            const int positions = layer.I - i0 < block ? layer.I - i0 : block;
            for (int i = 0; i < row_count; ++i) {
                S* to = layer.as(call.grad_input) + ((int64_t)call.first * B + s0 + i) * layer.I + i0;
                for (int n = 0; n < positions; ++n) to[n] = result[i * block + n];
            }
        }
    }
}

// The same as dot products that skip zero blocks. The weights of a group of panels stay in the second-level cache.
template <class S>
inline void Backward<S>::skipping_input_gradient() {
    const int rows = layer.rows(), I = layer.I, row_groups = (int)divide_up(rows, rows_max);
    const PanelGroups groups(0, layer.weight_gates * blocks, block_panels_max);
    const int64_t padded = (int64_t)layer.tiles_I * tile;
    const int begin = team.begin(row_groups) * rows_max, end = team.end(row_groups) * rows_max;
    S *d = space.d[team.index], *products = space.products[team.index];
    Requests all{space.masks[team.index], space.order[team.index], rows_max, {}};
    Upcoming nothing;
    for (int from = 0; from < groups.count; from += groups.size_max) {
        const int count = groups.size(from);
        const bool fresh = (int64_t)I * count * block * sizeof(S) / zeros_at_least > cached;
        for (int s0 = begin; s0 < end && s0 < rows; s0 += rows_max) {
            const int row_count = rows - s0 < rows_max ? rows - s0 : rows_max;
            if (s0 == begin || row_count < rows_max) {
                for (int n = 0; n < I; ++n) all.mask[n] = (uint16_t)((1u << row_count) - 1);
                all.sort(I);
            }
            const S* panel[block_panels_max];
            for (int j = 0; j < count; ++j) panel[j] = space.a + ((int64_t)(from + j) * rows + s0) * block;
            pack_half_panels<S>(panel, count, row_count, d);
            for (int64_t i = 0; i < padded * rows_max; ++i) products[i] = 0;
            block_dots_all<S>(space.W_rows + from * padded * block, space.W_halves + from * padded, d, count, all,
                              fresh, nothing, products);
            for (int i0 = 0; i0 < I; i0 += block) {
                alignas(64) S result[rows_max * block] = {};
                add_transposed<S>(products + (int64_t)i0 * rows_max, row_count, rows_max, block, result);
                const int columns = I - i0 < block ? I - i0 : block;
                for (int i = 0; i < row_count; ++i)
                    for (int v = 0; v < columns; v += lanes<S>) {
                        S* to = layer.as(call.grad_input) + ((int64_t)call.first * B + s0 + i) * I + i0 + v;
                        const Vector<S> value = load<S>(result + i * block + v);
                        store_part<S>(to, from ? load_part<S>(to, columns - v) + value : value, columns - v);
                    }
            }
        }
    }
    team.meet();
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
