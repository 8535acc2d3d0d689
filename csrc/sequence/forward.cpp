// The forward pass: the input product of a chunk of steps, then each step over the events of the previous one.
#include "sequence/layer.hpp"

namespace egru::EGRU_LEVEL {
namespace {

template <class S>
struct ForwardSpace {
    S *V, *W;         // packed weights
    S* p;             // x W + b of a chunk
    S* reset;         // r * y of a step ("before")
    S* gates;         // of one step, if they are not saved
    Lists<S> inputs;  // non-zero inputs of a chunk
    // One per thread: the products of a few blocks, and the events of the previous step.
    S* h[max_team];
    Lists<S> events[max_team];
    int64_t bytes;

    explicit ForwardSpace(const Layer<S>& layer) {
        Arena arena(layer.call.workspace);
        const bool packed = !layer.call.direct;
        V = arena.take<S>(packed ? 3 * layer.blocks * layer.panel_size(layer.tiles_H) : 0);
        W = arena.take<S>(packed ? 3 * layer.blocks * layer.panel_size(layer.tiles_I) : 0);
        p = arena.take<S>(3 * layer.blocks * layer.rows_max() * block);
        reset = arena.take<S>(layer.call.after ? 0 : (int64_t)layer.B * layer.H);
        gates = arena.take<S>(layer.call.gates ? 0 : layer.gates_step());
        if (packed) inputs = Lists<S>(arena, layer.rows_max(), layer.I);
        for (int i = 0; i < layer.call.threads; ++i) {
            h[i] = arena.take<S>((int64_t)3 * together_max * layer.B * block);
            if (packed) events[i] = Lists<S>(arena, layer.B, layer.H);
        }
        bytes = arena.bytes();
    }
};

template <class S>
bool all_finite(const S* values, int64_t count) {
    Vector<S> sum = {};  // x - x is 0 if x is finite, else NaN
    int64_t i = 0;
    for (; i + lanes<S> <= count; i += lanes<S>) sum += load<S>(values + i) - load<S>(values + i);
    if (i < count) sum += load_part<S>(values + i, (int)(count - i)) - load_part<S>(values + i, (int)(count - i));
    for (int lane = 0; lane < lanes<S>; ++lane)
        if (sum[lane] != 0) return false;
    return true;
}

template <class S>
class Forward {
public:
    Forward(const Layer<S>& layer, const Team& team)
        : layer(layer), call(layer.call), team(team), space(layer), keep(call), B(layer.B), H(layer.H),
          first_block(team.begin(layer.blocks)), last_block(team.end(layer.blocks)), h(space.h[team.index]),
          events(space.events[team.index]) {}

    bool finite = true;  // whether the first products with unpacked weights were

    void run() {
        const int64_t size = layer.panel_size(layer.tiles_I);
        if (call.direct)
            project_input_directly(layer, team, space.p);
        else
            project_input(layer, team, space.inputs, space.p,
                          [&](int g, int b) { return space.W + (g * layer.blocks + b) * size; });
        for (int t = call.first; t < call.last; ++t) {
            if (call.after)
                step_after(t);
            else
                step_before(t);
            team.meet();
        }
    }

private:
    const Layer<S>& layer;
    const TrainCall& call;
    const Team& team;
    const ForwardSpace<S> space;
    const Keep<S> keep;
    const int B, H, first_block, last_block;
    S* h;
    Lists<S> events;

    S* gates_at(int t, int b, int g) const {
        S* base = call.gates ? layer.as(call.gates) + t * layer.gates_step() : space.gates;
        return base + ((int64_t)b * layer.gate_count + g) * B * block;
    }
    const S* p_at(int t, int b, int g) const {
        return space.p + ((int64_t)(g * layer.blocks + b) * layer.rows() + (int64_t)(t - call.first) * B) * block;
    }
    const S* panel(int b, int g) const { return space.V + (g * layer.blocks + b) * layer.panel_size(layer.tiles_H); }

    void list_events(const Steps<S>& from, int t) {
        if (call.direct) return;
        for (int at = 0; at < layer.tiles_H; ++at) list_tile(from, t, B, B, H, at, events);
    }

    // Write the recurrent products of `count` gates from `gate`, for `block_count` blocks from b, to product(j, gate).
    // Reads from.at(t, s), which list_events has listed.
    void recur(int b, int block_count, int gate, int count, const Steps<S>& from, int t, bool first_step) {
        if (call.direct) {
            for (int j = 0; j < block_count; ++j)
                for (int g = gate; g < gate + count; ++g)
                    multiply_gate(layer, g, b + j, [&](int s) { return from.at(t, s); }, B, product(j, g));
            if (first_step) check_products(b, block_count, gate, count);
            return;
        }
        Columns<S> columns;
        for (int j = 0; j < block_count; ++j)
            for (int g = gate; g < gate + count; ++g) {
                fill_bias(layer.bias_hh, H, g, b + j, B, product(j, g));
                columns.add(panel(b + j, g), product(j, g), layer.units(b + j));
            }
        gather_all(columns, layer.tiles_H, events, B);
    }
    // The product of a row with the weights of a unit involves all of them: it is not finite if one of them is not.
    void check_products(int b, int block_count, int gate, int count) {
        for (int j = 0; j < block_count; ++j)
            for (int g = gate; g < gate + count; ++g)
                finite = finite && all_finite(product(j, g), layer.units(b + j)) &&
                         all_finite(p_at(0, b + j, g), layer.units(b + j));
    }
    S* product(int j, int gate) const { return h + (int64_t)(j * 3 + gate) * B * block; }

    void step_after(int t) {
        list_events(layer.y_prev, t - 1);
        for (int b = first_block, count = 0; b < last_block; b += count) {
            count = blocks_together(last_block - b);
            recur(b, count, R, 3, layer.y_prev, t - 1, t == 0);
            for (int j = 0; j < count; ++j) {
                const S* p[3] = {p_at(t, b + j, R), p_at(t, b + j, U), p_at(t, b + j, Z)};
                const S* h[3] = {product(j, R), product(j, U), product(j, Z)};
                S* gates[4];
                for (int g = 0; g < 4; ++g) gates[g] = gates_at(t, b + j, g);
                gates_after<S>(layer, b + j, p, h, gates);
                emit(t, b + j);
            }
        }
    }

    // Two products in sequence: the z of each unit depends on the r of all units.
    void step_before(int t) {
        list_events(layer.y_prev, t - 1);
        for (int b = first_block, count = 0; b < last_block; b += count) {
            count = blocks_together(last_block - b);
            recur(b, count, R, 2, layer.y_prev, t - 1, t == 0);
            for (int j = 0; j < count; ++j) {
                const S* p[2] = {p_at(t, b + j, R), p_at(t, b + j, U)};
                const S* h[2] = {product(j, R), product(j, U)};
                S* gates[2] = {gates_at(t, b + j, R), gates_at(t, b + j, U)};
                gates_before<S>(layer, t, b + j, p, h, gates, space.reset);
            }
        }
        team.meet();
        const Steps<S> reset{space.reset, 0, H};
        list_events(reset, 0);
        for (int b = first_block, count = 0; b < last_block; b += count) {
            count = blocks_together(last_block - b);
            recur(b, count, Z, 1, reset, 0, t == 0);
            for (int j = 0; j < count; ++j) {
                gate_z<S>(layer, b + j, p_at(t, b + j, Z), product(j, Z), gates_at(t, b + j, Z));
                emit(t, b + j);
            }
        }
    }

    // Compute the new state and the events of a block from its gates.
    void emit(int t, int b) {
        const S *u_in = gates_at(t, b, U), *z_in = gates_at(t, b, Z);
        for (int s = 0; s < B; ++s) {
            const bool real = layer.real(t, s);
            const S* y_before = layer.y_prev.at(t - 1, s);
            const S* c_before = t ? layer.c + ((int64_t)(t - 1) * B + s) * H : layer.as(call.c0) + (int64_t)s * H;
            const int64_t row = ((int64_t)t * B + s) * H;
            for (int v = 0; v < layer.units(b); v += lanes<S>) {
                const int unit = b * block + v, count = H - unit;
                if (!real) {
                    store_part<S>(layer.y + row + unit, Vector<S>{}, count);
                    store_part<S>(layer.c + row + unit, Vector<S>{}, count);
                    continue;
                }
                const Vector<S> zero = {}, one = zero + 1;
                const Vector<S> u = load<S>(u_in + s * block + v), z = load<S>(z_in + s * block + v);
                const Vector<S> theta = load_part<S>(layer.theta + unit, count), rho = layer.rho(unit, count);
                const Vector<S> y_old = load_part<S>(y_before + unit, count);
                Vector<S> c_old = load_part<S>(c_before + unit, count);
                const auto fired_old = t ? c_old > theta : y_old != zero;
                if (call.reset == Reset::threshold && t) c_old = fired_old ? c_old - rho * theta : c_old;
                const Vector<S> memory = call.reset == Reset::hard ? (fired_old ? c_old * (one - rho) : c_old) : c_old;
                Vector<S> state = u * z + (one - u) * memory;
                if (call.reset == Reset::output) state -= rho * y_old;
                if (keep.base) {
                    const Vector<S> share = keep.at(t, s, unit, count);
                    state = share * c_old + (one - share) * state;
                }
                const auto fired = state > theta;
                const Vector<S> output = fired ? state : zero;
                store_part<S>(layer.y + row + unit, output, count);
                store_part<S>(layer.c + row + unit, state, count);
                if (t == (layer.lengths ? layer.lengths[s] : call.T) - 1) {
                    const int64_t at = (int64_t)s * H + unit;
                    if (call.reset == Reset::threshold) state = fired ? state - rho * theta : state;
                    store_part<S>(layer.as(call.c_last) + at, state, count);
                    store_part<S>(layer.as(call.y_last) + at, output, count);
                }
            }
        }
    }
};

template <class S>
int bad_arguments(const Layer<S>& layer) {
    const TrainCall& call = layer.call;
    const int64_t state = (int64_t)layer.B * layer.H;
    int bad = 0;
    for (int t = 0; t < call.T; ++t)
        for (int s = 0; s < layer.B; ++s)
            if (!all_finite(layer.input.at(t, s), layer.I)) bad |= bad_input;
    if (!all_finite(layer.as(call.c0), state)) bad |= bad_c0;
    if (!all_finite(layer.as(call.y0), state)) bad |= bad_y0;
    if (!all_finite(layer.theta, layer.H)) bad |= bad_theta;
    return bad;
}

template <class S>
int begin(const TrainCall& call) {
    const Layer<S> layer(call);
    const int bad = bad_arguments(layer);
    if (bad || call.direct) return bad;
    const ForwardSpace<S> space(layer);
    bool finite[max_team];
    for (bool& flag : finite) flag = true;
    run_team(call.threads, [&](const Team& team) {
        const int panels = 3 * layer.blocks;
        // Steps skip the weights of inactive units, so NaN there would not reach the state.
        const int64_t size_V = layer.panel_size(layer.tiles_H), size_W = layer.panel_size(layer.tiles_I);
        bool& flag = finite[team.index];
        for (int p = team.begin(panels); p < team.end(panels); ++p) {  // a panel is checked while it is in the cache
            pack_panels(layer.as(call.weight_hh), layer.H, layer.H, layer.blocks, layer.tiles_H, p, p + 1, space.V);
            pack_panels(layer.as(call.weight_ih), layer.H, layer.I, layer.blocks, layer.tiles_I, p, p + 1, space.W);
            flag = flag && all_finite(space.V + p * size_V, size_V) && all_finite(space.W + p * size_W, size_W);
        }
    });
    for (bool flag : finite)
        if (!flag) return bad_weights;
    return 0;
}

template <class S>
int chunk(const TrainCall& call) {
    const Layer<S> layer(call);
    bool finite[max_team];
    for (bool& flag : finite) flag = true;
    run_team(call.threads, [&](const Team& team) {
        Forward<S> forward(layer, team);
        forward.run();
        finite[team.index] = forward.finite;
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

}  // namespace

const ForwardTable forward_table{
    [](const TrainCall& call) { return call.float64 ? gates_size<double>(call) : gates_size<float>(call); },
    [](const TrainCall& call) { return call.float64 ? workspace<double>(call) : workspace<float>(call); },
    [](const TrainCall& call) { return call.float64 ? begin<double>(call) : begin<float>(call); },
    [](const TrainCall& call) { return call.float64 ? chunk<double>(call) : chunk<float>(call); },
    [](const TrainCall& call) { return call.float64 ? finish<double>(call) : finish<float>(call); },
};

}  // namespace egru::EGRU_LEVEL
