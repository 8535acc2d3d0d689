// The backward pass over one chunk of steps, as one thread of a team runs it.
//
// Chunks are processed from the end of the sequence. For each: recompute the gates if they were not saved, run the
// recursion over the steps, then compute the gradients of the input and of the weights for all rows at once.
//
// The gradient of y_{t-1} is computed only where it is used: where the unit emitted an event or its state lay inside
// the surrogate's window. Gradients of pre-activations are panels, a[gate][b][row][32], with the gates r, u, z and, in
// the "after" form, r * z, which is what the recurrent product sees.
#pragma once

#include <initializer_list>

#include "sequence/backward_space.hpp"

namespace egru::EGRU_LEVEL {
namespace {

template <class S>
class Backward {
public:
    Backward(const Layer<S>& layer, const Team& team)
        : layer(layer), call(layer.call), team(team), space(layer), keep(call), B(layer.B), H(layer.H),
          blocks(layer.blocks), first_block(team.begin(blocks)), last_block(team.end(blocks)),
          unit_count((last_block - first_block) * block), needed(space.needed[team.index]),
          grad_y{layer.as(call.grad_y), call.grad_y_t, call.grad_y_b},
          grad_c{layer.as(call.grad_c), call.grad_c_t, call.grad_c_b} {}

    void run() {
        if (!call.gates) recompute_gates();
        for (int t = call.last - 1; t >= call.first; --t) {
            cell(t);
            if (t == 0 && ends_here()) {
                if (layer.before) clear_reset_gate(t);
            } else if (call.direct) {
                team.meet();
                recur_directly(t);
            } else if (call.after) {
                team.meet();
                list_requests();
                recurrent_dots(t, recurrent_group(layer, R, 3), upcoming(t), space.dy[(t + 1) & 1]);
            } else {
                team.meet();
                list_requests();
                recurrent_dots(t, recurrent_group(layer, Z, 1), {}, space.m);
                recurrent_dots(t, recurrent_group(layer, U, 1), upcoming(t), space.dy[(t + 1) & 1]);
                reset_gate(t);
                team.meet();
                if (call.skip_hh)
                    recurrent_dots(t, recurrent_group(layer, R, 1), {}, space.dy[(t + 1) & 1]);
                else
                    gather_reset(t);
            }
        }
        team.meet();
        if (call.direct) {
            chunk_directly();
            return;
        }
        if (call.grad_input) input_gradient();
        weight_gradients();  // may overwrite the gradients of the pre-activations
    }

protected:  // the LSTM's pass shares the products
    const Layer<S>& layer;
    const TrainCall& call;
    const Team& team;
    BackwardSpace<S> space;
    const Keep<S> keep;
    const int B, H, blocks, first_block, last_block, unit_count;  // unit_count: units of this thread
    uint32_t* needed;
    const Steps<S> grad_y, grad_c;
    const S narrowness = 1 / (S)call.width;

    const S* gates_at(int t, int b, int g) const {
        const S* base = call.gates ? layer.as(call.gates) + t * layer.gates_step()
                                   : space.gates + (t - call.first) * layer.gates_step();
        return base + ((int64_t)b * layer.gate_count + g) * B * block;
    }
    S* a_at(int t, int b, int g) const {
        return space.a + ((int64_t)(g * blocks + b) * layer.rows() + (int64_t)(t - call.first) * B) * block;
    }
    const S* p_at(int t, int b, int g) const {
        return space.p + ((int64_t)(g * blocks + b) * layer.rows() + (int64_t)(t - call.first) * B) * block;
    }
    const S* c_row(int t, int s) const {
        return t < 0 ? layer.c0(s) : layer.c + ((int64_t)t * B + s) * H;
    }
    static void fetch(const S* from) { __builtin_prefetch(from, 0, 3); }
    // Prefetch what `cell` reads for batch row s.
    void fetch_cell(int t, int s, int unit) const {
        if (s >= B || unit >= H) return;
        fetch(c_row(t - 1, s) + unit);
        if (grad_y.base) fetch(grad_y.at(t, s) + unit);
        const S* gates = gates_at(t, unit / block, 0) + s * block + unit % block;
        for (int g = 0; g < layer.gate_count; ++g) fetch(gates + (int64_t)g * B * block);
    }
    Vector<S> slope(Vector<S> c, Vector<S> theta) const {
        const Vector<S> x = 1 - absolute<S>((c - theta) * narrowness);
        return (S)call.height * (x > 0 ? x : Vector<S>{});
    }

    // Whether the first step needs no product with V: nothing reads the gradient of y0, and neither does that of r.
    bool ends_here() const { return !call.grad_c0 && (!layer.before || call.rest); }
    // The first rows of the chunk that read no events.
    int rows_at_rest() const { return call.first == 0 && call.rest ? B : 0; }

    // The recursion over the steps of a chunk (backward_recursion.hpp).
    void cell(int t);
    void reset_gate(int t);
    void clear_reset_gate(int t);
    void add_totals(int unit, int count, const Vector<S>* total);
    void list_requests();
    Upcoming upcoming(int t) const;
    void recurrent_dots(int t, const PanelGroups& groups, Upcoming upcoming, S* out);
    void gather_reset(int t);

    // The products if the weights are not packed (backward_direct.hpp).
    void combine_gates(int t, std::initializer_list<Gate> gates, S* out);
    void recur_directly(int t);
    void chunk_directly();

    // Products over all rows of a chunk at once (backward_chunk.hpp).
    void recompute_gates();
    void list_rows(const Steps<S>& from, int first);
    template <bool changes>
    void list_by_column(const Steps<S>& from, int first, int width);
    void list_recurrent_sources(std::initializer_list<int> gates);
    void weight_gradients();
    void input_gradient();
    void narrow_input_gradient();
    void skipping_input_gradient();
};

}  // namespace
}  // namespace egru::EGRU_LEVEL
