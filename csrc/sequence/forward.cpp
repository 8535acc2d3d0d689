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
        V = arena.take<S>(3 * layer.blocks * layer.panel_size(layer.tiles_H));
        W = arena.take<S>(3 * layer.blocks * layer.panel_size(layer.tiles_I));
        p = arena.take<S>(3 * layer.blocks * layer.rows_max() * block);
        reset = arena.take<S>(layer.call.after ? 0 : (int64_t)layer.B * layer.H);
        gates = arena.take<S>(layer.call.gates ? 0 : layer.gates_step());
        inputs = Lists<S>(arena, layer.rows_max(), layer.I);
        for (int i = 0; i < layer.call.threads; ++i) {
            h[i] = arena.take<S>((int64_t)3 * together_max * layer.B * block);
            events[i] = Lists<S>(arena, layer.B, layer.H);
        }
        bytes = arena.bytes();
    }
};

template <class S>
class Forward {
public:
    Forward(const Layer<S>& layer, const Team& team)
        : layer(layer), call(layer.call), team(team), space(layer), keep(call), B(layer.B), H(layer.H),
          first_block(team.begin(layer.blocks)), last_block(team.end(layer.blocks)), h(space.h[team.index]),
          events(space.events[team.index]) {}

    void run() {
        const int64_t size = layer.panel_size(layer.tiles_I);
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
        for (int at = 0; at < layer.tiles_H; ++at) list_tile(from, t, B, B, H, at, events);
    }

    // Write the recurrent products of `count` gates from `gate`, for `block_count` blocks from b, to product(j, gate).
    void recur(int b, int block_count, int gate, int count) {
        Columns<S> columns;
        for (int j = 0; j < block_count; ++j)
            for (int g = gate; g < gate + count; ++g) {
                fill_bias(layer.bias_hh, H, g, b + j, B, product(j, g));
                columns.add(panel(b + j, g), product(j, g), layer.units(b + j));
            }
        gather_all(columns, layer.tiles_H, events, B);
    }
    S* product(int j, int gate) const { return h + (int64_t)(j * 3 + gate) * B * block; }

    void step_after(int t) {
        list_events(layer.y_prev, t - 1);
        for (int b = first_block, count = 0; b < last_block; b += count) {
            count = blocks_together(last_block - b);
            recur(b, count, R, 3);
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
            recur(b, count, R, 2);
            for (int j = 0; j < count; ++j) {
                const S* p[2] = {p_at(t, b + j, R), p_at(t, b + j, U)};
                const S* h[2] = {product(j, R), product(j, U)};
                S* gates[2] = {gates_at(t, b + j, R), gates_at(t, b + j, U)};
                gates_before<S>(layer, t, b + j, p, h, gates, space.reset);
            }
        }
        team.meet();
        list_events(Steps<S>{space.reset, 0, H}, 0);
        for (int b = first_block, count = 0; b < last_block; b += count) {
            count = blocks_together(last_block - b);
            recur(b, count, Z, 1);
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

// Steps skip the weights of inactive units, so NaN there would not reach the state.
template <class S>
bool all_finite(const S* values, int64_t count) {
    Vector<S> sum = {};  // x - x is 0 if x is finite, else NaN
    for (int64_t i = 0; i < count; i += lanes<S>) sum += load<S>(values + i) - load<S>(values + i);
    for (int i = 0; i < lanes<S>; ++i)
        if (sum[i] != 0) return false;
    return true;
}

template <class S>
bool begin(const TrainCall& call) {
    const Layer<S> layer(call);
    const ForwardSpace<S> space(layer);
    bool finite[max_team];
    for (bool& flag : finite) flag = true;
    run_team(call.threads, [&](const Team& team) {
        const int panels = 3 * layer.blocks;
        const int64_t size_V = layer.panel_size(layer.tiles_H), size_W = layer.panel_size(layer.tiles_I);
        bool& flag = finite[team.index];
        for (int p = team.begin(panels); p < team.end(panels); ++p) {  // a panel is checked while it is in the cache
            pack_panels(layer.as(call.weight_hh), layer.H, layer.H, layer.blocks, layer.tiles_H, p, p + 1, space.V);
            pack_panels(layer.as(call.weight_ih), layer.H, layer.I, layer.blocks, layer.tiles_I, p, p + 1, space.W);
            flag = flag && all_finite(space.V + p * size_V, size_V) && all_finite(space.W + p * size_W, size_W);
        }
    });
    for (bool flag : finite)
        if (!flag) return false;
    return true;
}

template <class S>
void chunk(const TrainCall& call) {
    const Layer<S> layer(call);
    run_team(call.threads, [&](const Team& team) { Forward<S>(layer, team).run(); });
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
    [](const TrainCall& call) { call.float64 ? chunk<double>(call) : chunk<float>(call); },
};

}  // namespace egru::EGRU_LEVEL
