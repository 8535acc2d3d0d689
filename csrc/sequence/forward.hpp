// What the forward passes of all cells share: workspace, products with the weights, checks and entry points.
#pragma once

#include "sequence/layer.hpp"

namespace egru::EGRU_LEVEL {
namespace {

constexpr int refresh = 64;  // steps of a layer with delta events after which its recurrent products are computed anew

template <class S>
struct ForwardSpace {
    S *V, *W;         // packed weights
    S* p;             // x W + b of a chunk
    S* reset;         // r * y of the current step ("before")
    S* gates;         // of one step, if they are not saved
    S* cells;         // memory cells of the previous step, [b][s][32] (LSTM that compares its output)
    // Delta events, null otherwise: the recurrent products of the current step, [b][gate][s][32], and the changes of y
    // at the latest even and odd step.
    S *totals = nullptr, *changes[2] = {};
    // Non-zero inputs of a chunk. With few inputs there is one list per thread: to list them again takes less time than
    // to read what another core has written.
    bool own_inputs;
    Lists<S> inputs[max_team];
    // One per thread: the products of a few blocks, and the products with V and, if call.skip_ih, W.
    S* h[max_team];
    SkippingProduct<S> V_product[max_team], W_product[max_team];
    BlockSources V_blocks, W_blocks;  // the non-zero blocks, if they are listed
    int64_t bytes;

    explicit ForwardSpace(const Layer<S>& layer) {
        Arena arena(layer.call.workspace);
        const bool packed = !layer.call.direct, packed_W = !layer.call.direct_input;
        V = arena.take<S>(packed ? layer.weight_gates * layer.blocks * layer.panel_size(layer.tiles_H) : 0);
        W = arena.take<S>(packed_W ? layer.weight_gates * layer.blocks * layer.panel_size(layer.tiles_I) : 0);
        p = arena.take<S>(layer.weight_gates * layer.blocks * layer.rows_max() * block);
        reset = arena.take<S>(layer.before ? (int64_t)layer.B * layer.H : 0);
        gates = arena.take<S>(layer.call.gates ? 0 : layer.gates_step());
        cells = arena.take<S>(layer.call.compare_output ? (int64_t)layer.blocks * layer.B * block : 0);
        if (layer.call.events == Events::delta && packed) {
            totals = arena.take<S>((int64_t)layer.weight_gates * layer.blocks * layer.B * block);
            for (S*& change : changes) change = arena.take<S>((int64_t)layer.B * layer.H);
        }
        own_inputs = layer.tiles_I == 1;
        for (int i = 0; i < layer.call.threads; ++i) {
            if (layer.call.skip_ih)
                W_product[i] = SkippingProduct<S>(arena, layer.B, layer.I, layer.blocks, W, true);
            else if (packed_W)
                inputs[i] = i == 0 || own_inputs ? Lists<S>(arena, layer.rows_max(), layer.I) : inputs[0];
            h[i] = arena.take<S>(totals ? 0 : (int64_t)layer.weight_gates * together_max * layer.B * block);
            if (packed)
                V_product[i] = SkippingProduct<S>(arena, layer.B, layer.H, layer.blocks, V, layer.call.skip_hh);
        }
        const int64_t panels = layer.weight_gates * layer.blocks;
        if (layer.call.skip_hh) V_blocks = BlockSources(arena, panels, layer.H);
        if (layer.call.skip_ih) W_blocks = BlockSources(arena, panels, layer.I);
        bytes = arena.bytes();
    }
};

template <class S>
bool all_finite(const S* values, int64_t count) {
    constexpr int L = lanes<S>;
    Vector<S> sums[4] = {};  // x - x is 0 if x is finite, else NaN
    int64_t i = 0;
    for (; i + 4 * L <= count; i += 4 * L)
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) sums[k] += load<S>(values + i + k * L) - load<S>(values + i + k * L);
    Vector<S> sum = sums[0] + sums[1] + sums[2] + sums[3];
    for (; i + L <= count; i += L) sum += load<S>(values + i) - load<S>(values + i);
    if (i < count) sum += load_part<S>(values + i, (int)(count - i)) - load_part<S>(values + i, (int)(count - i));
    for (int lane = 0; lane < lanes<S>; ++lane)
        if (sum[lane] != 0) return false;
    return true;
}

// What the forward passes of all cells share: memory, and the products with the weights.
template <class S>
class ForwardPass {
public:
    bool finite = true;  // whether the first products with unpacked weights were

protected:
    ForwardPass(const Layer<S>& layer, const Team& team)
        : layer(layer), call(layer.call), team(team), space(layer), keep(call), B(layer.B), H(layer.H),
          first_block(team.begin(layer.blocks)), last_block(team.end(layer.blocks)), h(space.h[team.index]),
          recurrent(space.V_product[team.index]) {}

    // x W + b of the chunk, for the blocks of this thread.
    void project() {
        const int64_t size = layer.panel_size(layer.tiles_I);
        if (call.direct_input)
            project_input_directly(layer, team, space.p);
        else if (call.skip_ih)
            project_skipping();
        else
            project_input(layer, team, space.inputs[team.index], space.own_inputs, space.p,
                          [&](int g, int b) { return space.W + (g * layer.blocks + b) * size; });
    }

    // The same step by step, because the choice of what to skip must not depend on the length of chunks.
    void project_skipping() {
        SkippingProduct<S> product = space.W_product[team.index];
        const auto at = [&](int t, int b, int g) { return const_cast<S*>(p_at(t, b, g)); };
        for (int b = first_block; b < last_block; ++b)
            for (int g = 0; g < layer.weight_gates; ++g)
                fill_bias(layer.bias_ih, H, g, b, layer.rows(), at(call.first, b, g));
        for (int t = call.first; t < call.last; ++t) {
            product.prepare(layer.input, t, 0, layer.weight_gates, space.W_blocks, call.zero_blocks == 0);
            for (int b = first_block; b < last_block; ++b)
                product.add(b, 1, 0, layer.weight_gates, space.W_blocks, [&](int, int g) { return at(t, b, g); },
                            [&](int i) { return layer.units(i); });
        }
    }

    const Layer<S>& layer;
    const TrainCall& call;
    const Team& team;
    const ForwardSpace<S> space;
    const Keep<S> keep;
    const int B, H, first_block, last_block;
    S* h;
    SkippingProduct<S> recurrent;
    bool anew = true;  // whether the recurrent products of this step start from the bias

    S* gates_at(int t, int b, int g) const {
        S* base = call.gates ? layer.as(call.gates) + t * layer.gates_step() : space.gates;
        return base + ((int64_t)b * layer.gate_count + g) * B * block;
    }
    const S* p_at(int t, int b, int g) const {
        return space.p + ((int64_t)(g * layer.blocks + b) * layer.rows() + (int64_t)(t - call.first) * B) * block;
    }
    const S* panel(int b, int g) const { return space.V + (g * layer.blocks + b) * layer.panel_size(layer.tiles_H); }

    // Prepare from.at(t, s) for the recurrent products of `count` gates from `gate`. With delta events, most steps add the
    // products with the changes to those of the previous step. The others limit the rounding errors that add up.
    void list_events(const Steps<S>& from, int t, int gate, int count) {
        if (call.direct) return;
        const bool always = call.zero_blocks == 0;
        anew = !space.totals || (t + 1) % refresh == 0;
        if (!anew) {
            recurrent.prepare(Steps<S>{space.changes[t & 1], 0, H}, 0, gate, count, space.V_blocks, always);
            anew = recurrent.listed() > most_changes;
        }
        if (anew) recurrent.prepare(from, t, gate, count, space.V_blocks, always);
    }

    // Write the recurrent products of `count` gates from `gate`, for `block_count` blocks from b, to product(b, j, gate).
    // Reads from.at(t, s), which list_events has listed.
    void recur(int b, int block_count, int gate, int count, const Steps<S>& from, int t, bool first_step) {
        if (call.direct) {
            const bool skip = first_step && call.rest;
            for (int j = 0; j < block_count; ++j)
                for (int g = gate; g < gate + count; ++g)
                    if (skip)
                        skip_product(b + j, g, product(b, j, g));
                    else
                        multiply_gate(layer, g, b + j, [&](int s) { return from.at(t, s); }, B, product(b, j, g));
            if (first_step) check_products(b, block_count, gate, count);
            return;
        }
        for (int j = 0; j < block_count && anew; ++j)
            for (int g = gate; g < gate + count; ++g) fill_bias(layer.bias_hh, H, g, b + j, B, product(b, j, g));
        recurrent.add(b, block_count, gate, count, space.V_blocks, [&](int j, int g) { return product(b, j, g); },
                      [&](int at) { return layer.units(at); });
    }
    // The product of a gate with a state at rest, which is its bias. Weights that are not used here are still checked.
    void skip_product(int b, int gate, S* out) {
        const int units = layer.units(b);
        fill_bias(layer.bias_hh, H, gate, b, B, out);
        finite = finite && all_finite(layer.as(call.weight_hh) + ((int64_t)gate * H + b * block) * H, (int64_t)units * H);
    }
    // The product of a row with the weights of a unit involves all of them: it is not finite if one of them is not.
    void check_products(int b, int block_count, int gate, int count) {
        for (int j = 0; j < block_count; ++j)
            for (int g = gate; g < gate + count; ++g)
                finite = finite && all_finite(product(b, j, g), layer.units(b + j)) &&
                         all_finite(p_at(0, b + j, g), layer.units(b + j));
    }
    S* product(int b, int j, int gate) const {
        const int64_t at = space.totals ? b + j : j;
        return (space.totals ? space.totals : h) + (at * layer.weight_gates + gate) * B * block;
    }
    // Where to write the changes of y_t, or null if they are not used.
    S* changes_of(int t) const { return space.changes[t & 1]; }
};

template <class S>
int bad_arguments(const Layer<S>& layer) {
    const TrainCall& call = layer.call;
    int bad = 0;
    for (int t = 0; t < call.T; ++t)
        for (int s = 0; s < layer.B; ++s)
            if (!all_finite(layer.input.at(t, s), layer.I)) bad |= bad_input;
    for (int s = 0; s < layer.B; ++s) {
        if ((s == 0 || call.c0_b) && !all_finite(layer.c0(s), layer.H)) bad |= bad_c0;
        if ((s == 0 || call.y0_b) && !all_finite(layer.y_prev.at(-1, s), layer.H)) bad |= bad_y0;
    }
    if (!all_finite(layer.theta, layer.H)) bad |= bad_theta;
    const int64_t biases = (int64_t)layer.weight_gates * layer.H;  // infinite ones would only saturate the gates
    if (layer.bias_ih && !all_finite(layer.bias_ih, biases)) bad |= bad_biases;
    if (layer.bias_hh && !all_finite(layer.bias_hh, biases)) bad |= bad_biases;
    return bad;
}

template <class S>
int begin(const TrainCall& call) {
    const Layer<S> layer(call);
    const int bad = bad_arguments(layer);
    if (bad || (call.direct && call.direct_input)) return bad;
    const ForwardSpace<S> space(layer);
    bool finite[max_team];
    for (bool& flag : finite) flag = true;
    run_team(call.threads, [&](const Team& team) {
        // Steps skip the weights of inactive units, so NaN there would not reach the state.
        const int gates = layer.weight_gates, blocks = layer.blocks;
        bool& flag = finite[team.index];
        for (int b = team.begin(blocks); b < team.end(blocks); ++b) {
            const auto pack = [&](uintptr_t weight, int width, int tiles, S* to, bool skip,
                                  const BlockSources& listed) {
                pack_block(layer.as(weight), layer.H, width, gates, blocks, tiles, b, to);
                const int64_t size = layer.panel_size(tiles);
                for (int p = b; p < gates * blocks; p += blocks) {  // while they are in the cache
                    flag = flag && all_finite(to + p * size, size);
                    if (skip) listed.list(to + p * size, p);
                }
            };
            if (!call.direct) pack(call.weight_hh, layer.H, layer.tiles_H, space.V, call.skip_hh, space.V_blocks);
            if (!call.direct_input)
                pack(call.weight_ih, layer.I, layer.tiles_I, space.W, call.skip_ih, space.W_blocks);
        }
    });
    for (bool flag : finite)
        if (!flag) return bad_weights;
    return 0;
}

// Run one chunk of steps. Pass is the class of a cell's forward pass.
template <template <class> class Pass, class S>
int run_chunk(const TrainCall& call) {
    const Layer<S> layer(call);
    bool finite[max_team];
    for (bool& flag : finite) flag = true;
    run_team(call.threads, [&](const Team& team) {
        Pass<S> pass(layer, team);
        pass.run();
        finite[team.index] = pass.finite;
    });
    for (bool flag : finite)
        if (!flag) return bad_weights;
    return 0;
}

template <class S>
int finish(const TrainCall& call) {
    const Layer<S> layer(call);
    return all_finite(layer.as(call.c_last), (int64_t)layer.B * layer.H) ? 0 : bad_result;
}

template <class S>
int64_t workspace(const TrainCall& call) {
    TrainCall sizes = call;
    sizes.workspace = 0;
    return ForwardSpace<S>(Layer<S>(sizes)).bytes;
}

template <class S>
int64_t gates_size(const TrainCall& call) {
    return call.T * Layer<S>(call).gates_step();
}

template <template <class> class Pass>
constexpr ForwardTable make_forward_table() {
    return {
        [](const TrainCall& call) { return call.float64 ? gates_size<double>(call) : gates_size<float>(call); },
        [](const TrainCall& call) { return call.float64 ? workspace<double>(call) : workspace<float>(call); },
        [](const TrainCall& call) { return call.float64 ? begin<double>(call) : begin<float>(call); },
        [](const TrainCall& call) {
            return call.float64 ? run_chunk<Pass, double>(call) : run_chunk<Pass, float>(call);
        },
        [](const TrainCall& call) { return call.float64 ? finish<double>(call) : finish<float>(call); },
    };
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
