// Entry points of the backward pass of all cells: pack the weights, run the chunks, unpack the gradients.
#pragma once

#include "common/flush.hpp"
#include "sequence/backward_space.hpp"

namespace egru::EGRU_LEVEL {
namespace {

template <class S>
void begin(const TrainCall& call) {
    const Layer<S> layer(call);
    const BackwardSpace<S> space(layer);
    const int64_t V_size = layer.panel_size(layer.tiles_H);
    to_blocks<S>(layer, layer.as(call.grad_c_last), space.dc);
    to_blocks<S>(layer, nullptr, space.de);
    to_blocks<S>(layer, layer.as(call.grad_y_last), space.dy[(call.T - 1) & 1]);
    for (int64_t i = 0; i < (int64_t)sums_kept * layer.blocks * block; ++i) space.totals[i] = 0;
    if (call.direct) return;
    run_team(call.threads, [&](const Team& team) {
        const int H = layer.H, I = layer.I, blocks = layer.blocks, panels = layer.weight_gates * blocks;
        const int first = team.begin(blocks), last = team.end(blocks);
        // The weights of this thread's units, which `recurrent_dots` reads in whole rows.
        const int end = last == blocks ? layer.tiles_H * tile : last * block;
        for (const PanelGroups& groups : recurrent_groups(layer)) {
            pack_groups(layer.as(call.weight_hh), H, H, blocks, layer.tiles_H, groups, first * block, end,
                        space.V_rows);
            if (call.skip_hh) list_halves(groups, layer.tiles_H, space.V_rows, first * block, end, space.V_halves);
        }
        for (int b = first; layer.before && !call.skip_hh && b < last; ++b)
            pack_sources(layer.as(call.weight_hh), H, layer.tiles_H, b, space.V_rows + b * V_size);
        const int strips = (int)divide_up(I, block);
        if (call.grad_input && call.skip_ih) {
            const PanelGroups groups(0, panels, block_panels_max);
            const int from = team.begin(layer.tiles_I) * tile, to = team.end(layer.tiles_I) * tile;
            pack_groups(layer.as(call.weight_ih), H, I, blocks, layer.tiles_I, groups, from, to, space.W_rows);
            list_halves(groups, layer.tiles_I, space.W_rows, from, to, space.W_halves);
        } else if (call.grad_input && narrow_input(layer))
            pack_groups(layer.as(call.weight_ih), H, I, blocks, layer.tiles_I, PanelGroups(0, panels),
                        team.begin(layer.tiles_I) * tile, team.end(layer.tiles_I) * tile, space.W_rows);
        else if (call.grad_input)
            for (int q = team.begin(strips); q < team.end(strips); ++q)
                pack_strip(layer.as(call.weight_ih), H, I, blocks, panels, q,
                           space.W_strips + (int64_t)q * panels * block * block);
        for (const GradPanels<S>& grad : {space.grad_V, space.grad_W})
            for (int b = first; b < last; ++b)
                for (int p = b; p < panels; p += blocks) __builtin_memset(grad.panel(p), 0, grad.size() * sizeof(S));
    });
}

// Run one chunk of steps. Pass is the class of a cell's backward pass.
template <template <class> class Pass, class S>
void run_chunk(const TrainCall& call) {
    const Layer<S> layer(call);
    run_team(call.threads, [&](const Team& team) {
        const FlushSubnormals flush;
        Pass<S>(layer, team).run();
    });
}

template <class S>
void finish(const TrainCall& call) {
    const Layer<S> layer(call);
    const BackwardSpace<S> space(layer);
    if (call.grad_c0) {
        from_blocks<S>(layer, space.dc, layer.as(call.grad_c0));
        from_blocks<S>(layer, space.dy[1], layer.as(call.grad_y0));
    }
    for (int n = 0; n < layer.H; ++n) {
        const auto total = [&](int j) { return (S)space.totals[(int64_t)j * layer.blocks * block + n]; };
        for (int g = 0; g < layer.weight_gates; ++g) {
            layer.as(call.grad_bias_ih)[g * layer.H + n] = total(g);
            layer.as(call.grad_bias_hh)[g * layer.H + n] = total(g == Z && call.after ? Q : g);
        }
        layer.as(call.grad_theta)[n] = total(4);
    }
    if (call.direct) return;
    run_team(call.threads, [&](const Team& team) {
        space.grad_V.unpack(team, space.panels[team.index]);
        space.grad_W.unpack(team, space.panels[team.index]);
    });
}

template <class S>
int64_t workspace(const TrainCall& call) {
    TrainCall sizes = call;
    sizes.workspace = 0;
    return BackwardSpace<S>(Layer<S>(sizes)).bytes;
}

template <template <class> class Pass>
constexpr BackwardTable make_backward_table() {
    return {
        [](const TrainCall& call) { return call.float64 ? workspace<double>(call) : workspace<float>(call); },
        [](const TrainCall& call) { call.float64 ? begin<double>(call) : begin<float>(call); },
        [](const TrainCall& call) { call.float64 ? run_chunk<Pass, double>(call) : run_chunk<Pass, float>(call); },
        [](const TrainCall& call) { call.float64 ? finish<double>(call) : finish<float>(call); },
    };
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
