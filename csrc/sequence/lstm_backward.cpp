// The backward pass of the LSTM. It shares memory and the sparse products with the GRU's; see sequence/backward.hpp.
//
// Gradients of pre-activations are panels, a[gate][b][row][32], with the gates of sequence/lstm.hpp. The input product
// and the recurrent product have the same gradient.
#include "sequence/backward_chunk.hpp"
#include "sequence/backward_entry.hpp"
#include "sequence/backward_recursion.hpp"
#include "sequence/lstm.hpp"

namespace egru::EGRU_LEVEL {
namespace {

template <class S>
class LstmBackward : public Backward<S> {
public:
    LstmBackward(const Layer<S>& layer, const Team& team) : Base(layer, team) {}

    void run() {
        if (!call.gates) recompute_gates();
        for (int t = call.last - 1; t >= call.first; --t) {
            cell(t);
            team.meet();
            if (t == 0 && Base::ends_here()) break;
            S* dy_before = space.dy[(t + 1) & 1];
            if (call.direct) {
                recur_directly(t, dy_before);
            } else {
                Base::list_requests();
                Base::recurrent_dots(t, recurrent_group(layer, In, lstm_gates), {}, dy_before);
            }
        }
        team.meet();
        if (call.direct) {
            chunk_directly();
            return;
        }
        if (call.grad_input) Base::input_gradient();
        weight_gradients();  // may overwrite the gradients of the pre-activations
    }

private:
    using Base = Backward<S>;
    using Base::layer, Base::call, Base::team, Base::space, Base::keep, Base::B, Base::H, Base::blocks;
    using Base::first_block, Base::last_block, Base::needed, Base::grad_y, Base::grad_c;
    using Base::gates_at, Base::a_at, Base::p_at, Base::c_row, Base::slope;

    // Recompute the gates of the chunk from its input and events, for all rows at once.
    void recompute_gates() {
        const int rows = layer.rows();
        const auto pack = [&](uintptr_t weight, int width, int tiles, int g, int b) {
            S* to = space.panels[team.index] + g * layer.panel_size(tiles);
            pack_panel(layer.as(weight), H, width, blocks, 0, tiles * tile, g * blocks + b, to, block);
            return to;
        };
        if (call.direct_input)
            project_input_directly(layer, team, space.p);
        else
            project_input(layer, team, space.rows, false, space.p,
                          [&](int g, int b) { return pack(call.weight_ih, layer.I, layer.tiles_I, g, b); });
        team.meet();
        Base::list_rows(layer.y_prev, call.first - 1);
        for (int b = first_block; b < last_block; ++b) {
            S* out[lstm_gates];
            Columns<S> columns;
            for (int g = 0; g < lstm_gates; ++g) {
                out[g] = space.h[team.index] + (int64_t)g * rows * block;
                if (call.direct_gates) {
                    const auto at = [&](int row) { return layer.y_prev.at(call.first - 1 + row / B, row % B); };
                    multiply_gate(layer, g, b, at, rows, out[g]);
                } else {
                    fill_bias(layer.bias_hh, H, g, b, rows, out[g]);
                    columns.add(pack(call.weight_hh, H, layer.tiles_H, g, b), out[g], layer.units(b));
                }
            }
            if (!call.direct_gates) gather_all(columns, layer.tiles_H, space.rows, rows);
            for (int t = call.first; t < call.last; ++t) {
                const int64_t at = (int64_t)(t - call.first) * B * block;
                const S *p[lstm_gates], *h[lstm_gates];
                S* gates[lstm_gates];
                for (int g = 0; g < lstm_gates; ++g)
                    p[g] = p_at(t, b, g), h[g] = out[g] + at, gates[g] = const_cast<S*>(gates_at(t, b, g));
                gates_lstm<S>(layer, b, p, h, gates);
            }
        }
        team.meet();  // `a`, which is written next, shares memory with p
    }

    // Compute the gradients of the pre-activations and of the previous memory cells, unit by unit.
    void cell(int t) {
        const Vector<S> zero = {}, one = zero + 1;
        const Reset reset = call.reset;
        const bool from_output = call.compare_output;
        const bool delta = call.events == Events::delta;
        for (int b = first_block; b < last_block; ++b) {
            const S* gate[lstm_gates];
            S* a[lstm_gates];
            for (int g = 0; g < lstm_gates; ++g) gate[g] = gates_at(t, b, g), a[g] = a_at(t, b, g);
            const int64_t state = (int64_t)b * B * block;
            S *dc = space.dc + state, *de = space.de + state;
            S *dy = space.dy[t & 1] + state, *dy_before = space.dy[(t + 1) & 1] + state;
            // Before the first step all units, and with delta events always: held outputs pass their gradients on.
            uint32_t* needed_rows = needed + (b - first_block) * B;
            for (int s = 0; s < B; ++s) needed_rows[s] = (t == 0 || delta) && layer.real(t, s) ? 0xffffffffu : 0;
            for (int v = layer.units(b); v < block; ++v)  // products read whole blocks
                for (int s = 0; s < B; ++s)
                    for (S* values : a) values[s * block + v] = 0;
            for (int v = 0; v < layer.units(b); v += lanes<S>) {
                const int unit = b * block + v, count = H - unit;
                const Vector<S> theta = load_part<S>(layer.theta + unit, count), rho = layer.rho(unit, count);
                Vector<S> total[sums_kept] = {};
                for (int s = 0; s < B; ++s) {
                    const int i = s * block + v;
                    const bool wraps = s + ahead >= B;  // into the next columns
                    Base::fetch_cell(t, wraps ? s + ahead - B : s + ahead, wraps ? unit + lanes<S> : unit);
                    if (!layer.real(t, s)) {  // a padded step passes the gradients on
                        store<S>(dy_before + i, load<S>(dy + i));
                        for (S* values : a) store<S>(values + i, zero);
                        continue;
                    }
                    const Vector<S> seen = load_part<S>(c_row(t, s) + unit, count);
                    const Vector<S> seen_old = load_part<S>(c_row(t - 1, s) + unit, count);  // c0 before the first step
                    const Vector<S> c = from_output ? load<S>(saved_cells(layer, t, b) + i) : seen;
                    Vector<S> c_old = from_output && t ? load<S>(saved_cells(layer, t - 1, b) + i) : seen_old;
                    const Vector<S> y_old =
                        delta || !t ? load_part<S>(layer.y_prev.at(t - 1, s) + unit, count) : zero;
                    const Vector<S> compared = layer.compared(seen, y_old), size = layer.magnitude(compared);
                    const auto fired = size > theta;
                    const auto fired_old = t ? layer.magnitude(seen_old) > theta : y_old != zero;
                    if (t) needed_rows[s] |= bits<S>(fired_old || slope(layer.magnitude(seen_old), theta) != 0) << v;
                    if (reset == Reset::threshold && t) c_old = fired_old ? layer.cleared(c_old, rho * theta) : c_old;

                    // From y and the carried state to o * tanh(c) and c.
                    const Vector<S> o = load<S>(gate[Out] + i), tanh_c = hyperbolic_tangent(c), value = o * tanh_c;
                    const Vector<S> steep = slope(size, theta), e = fired ? one : zero, from_c = load<S>(dc + i);
                    Vector<S> grad = load<S>(dy + i);
                    if (grad_y.base) grad += load_part<S>(grad_y.at(t, s) + unit, count);
                    const Vector<S> jump = layer.compared(value, y_old);  // how much an event changes the output
                    Vector<S> through = layer.magnitude(jump) * steep;    // the slope of y through the comparison
                    if (call.bounded) through = clamp<S>(e + through, 0, 1) - e;
                    Vector<S> grad_seen = grad * through, grad_theta = grad * jump;
                    if (reset == Reset::hard) {
                        const Vector<S> from_e = load<S>(de + i);
                        grad_seen += layer.times_sign(from_e * steep, compared);
                        grad_theta += from_e;
                    }
                    grad_theta *= -steep;
                    if (reset == Reset::threshold) {
                        grad_seen -= from_c * rho * theta * steep;
                        grad_theta -= layer.times_sign(from_c, compared) * rho * (e - theta * steep);
                    }
                    if (grad_c.base) grad_seen += load_part<S>(grad_c.at(t, s) + unit, count);
                    const Vector<S> grad_value = grad * e + (from_output ? grad_seen : zero);
                    const Vector<S> grad_cell =
                        from_c + (from_output ? zero : grad_seen) + grad_value * o * (one - tanh_c * tanh_c);

                    // From c to the gates and the previous state.
                    const Vector<S> share = keep.base ? keep.at(t, s, unit, count) : zero;
                    const Vector<S> grad_new = keep.base ? (one - share) * grad_cell : grad_cell;
                    const Vector<S> memory = reset == Reset::hard ? (fired_old ? c_old * (1 - rho) : c_old) : c_old;
                    const Vector<S> in = load<S>(gate[In] + i), forget = load<S>(gate[Forget] + i);
                    const Vector<S> candidate = load<S>(gate[Candidate] + i);
                    const Vector<S> gradients[lstm_gates] = {
                        grad_new * candidate * in * (one - in), grad_new * memory * forget * (one - forget),
                        grad_new * in * (one - candidate * candidate), grad_value * tanh_c * o * (one - o)};
                    for (int g = 0; g < lstm_gates; ++g) {
                        store<S>(a[g] + i, gradients[g]);
                        total[g] += gradients[g];
                    }
                    total[lstm_gates] += grad_theta;
                    Vector<S> grad_old = grad_new * forget;
                    if (reset == Reset::hard) {
                        store<S>(de + i, -rho * grad_old * c_old);
                        grad_old = fired_old ? grad_old * (1 - rho) : grad_old;
                    }
                    if (keep.base) grad_old += share * grad_cell;
                    store<S>(dc + i, grad_old);
                    store<S>(dy_before + i, delta                    ? grad * (one - e - through)
                                            : reset == Reset::output ? -rho * grad_new
                                                                     : zero);
                }
                Base::add_totals(unit, count, total);
            }
        }
    }

    // grad[gate][b][source][32] += the sum over the chunk's rows of source value * a.
    void weight_gradients() {
        const int rows = layer.rows(), tiles = (int)divide_up(rows, tile);
        const auto collect = [&](const GradPanels<S>& grad) {
            for (int b = first_block, count = 0; b < last_block; b += count) {
                count = lstm_blocks_together(last_block - b);
                Columns<S> columns;
                for (int j = b; j < b + count; ++j)
                    for (int g = 0; g < lstm_gates; ++g)
                        columns.add(a_at(call.first, j, g), grad.panel(g * blocks + j), layer.units(j));
                gather_all(columns, tiles, space.columns, grad.width);
            }
            team.meet();
        };
        Base::template list_by_column<false>(layer.input, call.first, layer.I);
        collect(space.grad_W);
        Base::list_recurrent_sources({In, Forget, Candidate, Out});
        collect(space.grad_V);
    }

    // The products with weights that are not packed: dense, for calls with few rows.
    void recur_directly(int t, S* out) {
        for (int b = first_block; b < last_block; ++b)
            for (int g = 0; g < lstm_gates; ++g)
                combine<S>(a_at(t, 0, g), (int64_t)layer.rows() * block,
                           layer.as(call.weight_hh) + (int64_t)g * H * H + b * block, H, H, layer.units(b), B,
                           out + (int64_t)b * B * block, block);
    }
    void chunk_directly() {
        const int rows = layer.rows(), I = layer.I;
        const bool add = call.last < call.T;  // chunks are processed from the end
        const auto collect = [&](const Steps<S>& from, int first, int skip, uintptr_t grad, int64_t width) {
            team.meet();
            for (int row = team.begin(rows); row < team.end(rows); ++row)
                space.sources[row] = from.at(first + row / B, row % B);
            team.meet();
            for (int b = first_block; b < last_block; ++b)
                for (int g = 0; g < lstm_gates; ++g)
                    outer_sum<S>(a_at(call.first, b, g) + skip * block, space.sources + skip, rows - skip,
                                 layer.units(b), add,
                                 layer.as(grad) + ((int64_t)g * H + b * block) * width, width);
        };
        collect(layer.input, call.first, 0, call.grad_weight_ih, I);
        collect(layer.y_prev, call.first - 1, Base::rows_at_rest(), call.grad_weight_hh, H);
        if (!call.grad_input) return;
        const int pieces = (int)divide_up(I, block);
        for (int b = team.begin(pieces); b < team.end(pieces); ++b) {
            S* out = layer.as(call.grad_input) + (int64_t)call.first * B * I + b * block;
            const int columns = I - b * block < block ? I - b * block : block;
            for (int row = 0; row < rows; ++row)
                for (int n = 0; n < columns; ++n) out[(int64_t)row * I + n] = 0;
            for (int g = 0; g < lstm_gates; ++g)
                combine<S>(a_at(call.first, 0, g), (int64_t)rows * block,
                           layer.as(call.weight_ih) + (int64_t)g * H * I + b * block, H, I, columns, rows, out, I);
        }
    }
};

}  // namespace

const BackwardTable lstm_backward_table = make_backward_table<LstmBackward>();

}  // namespace egru::EGRU_LEVEL
