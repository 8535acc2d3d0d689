// The forward pass of the LSTM.
#include "sequence/forward.hpp"
#include "sequence/lstm.hpp"

namespace egru::EGRU_LEVEL {
namespace {

template <class S>
class LstmForward : public ForwardPass<S> {
public:
    LstmForward(const Layer<S>& layer, const Team& team) : Base(layer, team) {}

    void run() {
        Base::project();
        for (int t = call.first; t < call.last; ++t) {
            step(t);
            team.meet();
        }
    }

private:
    using Base = ForwardPass<S>;
    using Base::layer, Base::call, Base::team, Base::space, Base::keep, Base::B, Base::H;
    using Base::first_block, Base::last_block, Base::list_events, Base::recur, Base::product, Base::p_at;
    using Base::gates_at, Base::changes_of;

    void step(int t) {
        list_events(layer.y_prev, t - 1, In, lstm_gates);
        for (int b = first_block, count = 0; b < last_block; b += count) {
            count = lstm_blocks_together(last_block - b);
            recur(b, count, In, lstm_gates, layer.y_prev, t - 1, t == 0);
            for (int j = 0; j < count; ++j) {
                const S *p[lstm_gates], *h[lstm_gates];
                S* gates[lstm_gates];
                for (int g = 0; g < lstm_gates; ++g)
                    p[g] = p_at(t, b + j, g), h[g] = product(b, j, g), gates[g] = gates_at(t, b + j, g);
                gates_lstm<S>(layer, b + j, p, h, gates);
                emit(t, b + j);
            }
        }
    }

    // The memory cells of block b before step t, for batch row s, as far as they are stored: before the reset
    // "threshold".
    const S* cells_before(int t, int b, int s) const {
        if (t == 0) return layer.c0(s) + b * block;
        if (call.compare_output) return space.cells + ((int64_t)b * B + s) * block;
        return layer.c + ((int64_t)(t - 1) * B + s) * H + b * block;
    }

    // Compute the new memory cells and the events of a block from its gates.
    void emit(int t, int b) {
        const S *in = gates_at(t, b, In), *forget = gates_at(t, b, Forget);
        const S *candidate = gates_at(t, b, Candidate), *out = gates_at(t, b, Out);
        const bool reads_events = call.reset == Reset::threshold || call.reset == Reset::hard;
        for (int s = 0; s < B; ++s) {
            const int64_t row = ((int64_t)t * B + s) * H;
            const S *y_before = layer.y_prev.at(t - 1, s), *c_before = cells_before(t, b, s);
            const bool real = layer.real(t, s);
            S* changes = changes_of(t) ? changes_of(t) + (int64_t)s * H : nullptr;
            for (int v = 0; v < layer.units(b); v += lanes<S>) {
                const int unit = b * block + v, count = H - unit, i = s * block + v;
                const Vector<S> zero = {}, one = zero + 1;
                if (!real) {
                    store_part<S>(layer.y + row + unit, zero, count);
                    if (changes) store_part<S>(changes + unit, zero, count);
                    store_part<S>(layer.c + row + unit, zero, count);
                    if (call.cells) store<S>(saved_cells(layer, t, b) + i, zero);
                    continue;
                }
                const Vector<S> theta = load_part<S>(layer.theta + unit, count), rho = layer.rho(unit, count);
                const Vector<S> y_old = load_part<S>(y_before + unit, count);
                Vector<S> c_old = load_part<S>(c_before + v, count);
                auto fired_old = y_old != zero;
                if (t && reads_events) fired_old =
                    layer.magnitude(load_part<S>(layer.c + row - (int64_t)B * H + unit, count)) > theta;
                if (call.reset == Reset::threshold && t) c_old = fired_old ? layer.cleared(c_old, rho * theta) : c_old;
                const Vector<S> memory = call.reset == Reset::hard ? (fired_old ? c_old * (one - rho) : c_old) : c_old;
                Vector<S> c = load<S>(forget + i) * memory + load<S>(in + i) * load<S>(candidate + i);
                if (call.reset == Reset::output) c -= rho * y_old;
                if (keep.base) {
                    const Vector<S> share = keep.at(t, s, unit, count);
                    c = share * c_old + (one - share) * c;
                }
                const Vector<S> value = load<S>(out + i) * hyperbolic_tangent(c);
                const Vector<S> seen = call.compare_output ? value : c;
                const auto fired = layer.magnitude(layer.compared(seen, y_old)) > theta;
                const Vector<S> output = fired ? value : call.events == Events::delta ? y_old : zero;
                store_part<S>(layer.y + row + unit, output, count);
                if (changes) store_part<S>(changes + unit, output - y_old, count);
                store_part<S>(layer.c + row + unit, seen, count);
                if (call.compare_output) store<S>(space.cells + (int64_t)b * B * block + i, c);
                if (call.cells) store<S>(saved_cells(layer, t, b) + i, c);
                if (t == (layer.lengths ? layer.lengths[s] : call.T) - 1) {
                    const int64_t at = (int64_t)s * H + unit;
                    if (call.reset == Reset::threshold) c = fired ? layer.cleared(c, rho * theta) : c;
                    store_part<S>(layer.as(call.c_last) + at, c, count);
                    store_part<S>(layer.as(call.y_last) + at, output, count);
                }
            }
        }
    }
};

}  // namespace

const ForwardTable lstm_forward_table = make_forward_table<LstmForward>();

}  // namespace egru::EGRU_LEVEL
