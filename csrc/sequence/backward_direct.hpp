// The products of the backward pass with weights that are not packed: dense, for calls with few rows.
#pragma once

#include "sequence/backward.hpp"

namespace egru::EGRU_LEVEL {
namespace {

// out[b][s][32] += a V for the units of this thread, summed over the rows of V that belong to `gates`.
template <class S>
inline void Backward<S>::combine_gates(int t, std::initializer_list<Gate> gates, S* out) {
    for (int b = first_block; b < last_block; ++b)
        for (const Gate g : gates)
            combine<S>(a_at(t, 0, g), (int64_t)layer.rows() * block,
                       layer.as(call.weight_hh) + (int64_t)(g == Q ? Z : g) * H * H + b * block, H, H, layer.units(b),
                       B, out + (int64_t)b * B * block, block);
}

// The gradient of y_{t-1}. The values where it is not used are multiplied by zero in `cell`.
template <class S>
inline void Backward<S>::recur_directly(int t) {
    S* dy = space.dy[(t + 1) & 1];
    if (call.after) {
        combine_gates(t, {R, U, Q}, dy);
        team.meet();
        return;
    }
    combine_gates(t, {Z}, space.m);
    combine_gates(t, {U}, dy);
    reset_gate(t);
    team.meet();
    combine_gates(t, {R}, dy);
    team.meet();
}

// Gradients of the weights and of the input, over all rows of the chunk.
template <class S>
inline void Backward<S>::chunk_directly() {
    const int rows = layer.rows();
    const bool add = call.last < call.T;  // chunks are processed from the end
    const auto set_sources = [&](auto at) {
        team.meet();
        for (int row = team.begin(rows); row < team.end(rows); ++row)
            space.sources[row] = at(call.first + row / B, row % B);
        team.meet();
    };
    const int skip = rows_at_rest();
    const auto collect = [&](uintptr_t grad, int64_t width, int from, std::initializer_list<Gate> gates) {
        for (int b = first_block; b < last_block; ++b)
            for (const Gate g : gates)
                outer_sum<S>(a_at(call.first, b, g) + from * block, space.sources + from, rows - from, layer.units(b), add,
                             layer.as(grad) + ((int64_t)(g == Q ? Z : g) * H + b * block) * width, width);
    };
    set_sources([&](int t, int s) { return layer.input.at(t, s); });
    collect(call.grad_weight_ih, layer.I, 0, {R, U, Z});
    if (!call.after)
        for (int row = team.begin(rows); row < team.end(rows); ++row) {
            const int t = call.first + row / B, s = row % B;
            const S* y = layer.y_prev.at(t - 1, s);
            for (int n = 0; n < H; ++n)
                space.reset[(int64_t)row * H + n] =
                    layer.real(t, s) ? gates_at(t, n / block, R)[s * block + n % block] * y[n] : S(0);
        }
    set_sources([&](int t, int s) { return layer.y_prev.at(t - 1, s); });
    if (call.after) {
        collect(call.grad_weight_hh, H, skip, {R, U, Q});
    } else {
        collect(call.grad_weight_hh, H, skip, {R, U});
        set_sources([&](int t, int s) { return space.reset + ((int64_t)(t - call.first) * B + s) * H; });
        collect(call.grad_weight_hh, H, skip, {Z});
    }
    if (!call.grad_input) return;
    const int I = layer.I, pieces = (int)divide_up(I, block);
    for (int b = team.begin(pieces); b < team.end(pieces); ++b) {
        S* out = layer.as(call.grad_input) + (int64_t)call.first * B * I + b * block;
        const int columns = I - b * block < block ? I - b * block : block;
        for (int row = 0; row < rows; ++row)
            for (int n = 0; n < columns; ++n) out[(int64_t)row * I + n] = 0;
        for (const Gate g : {R, U, Z})
            combine<S>(a_at(call.first, 0, g), (int64_t)rows * block,
                       layer.as(call.weight_ih) + (int64_t)g * H * I + b * block, H, I, columns, rows, out, I);
    }
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
