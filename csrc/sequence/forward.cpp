// The forward pass of the GRU: each step over the events of the previous one.
#include "sequence/forward.hpp"

namespace egru::EGRU_LEVEL {
namespace {

template <class S>
class Forward : public ForwardPass<S> {
public:
    Forward(const Layer<S>& layer, const Team& team) : Base(layer, team) {}

    void run() {
        Base::project();
        for (int t = call.first; t < call.last; ++t) {
            if (call.after)
                step_after(t);
            else
                step_before(t);
            team.meet();
        }
    }

private:
    using Base = ForwardPass<S>;
    using Base::layer, Base::call, Base::team, Base::space, Base::keep, Base::B, Base::H;
    using Base::first_block, Base::last_block, Base::list_events, Base::recur, Base::product, Base::p_at;
    using Base::gates_at, Base::changes_of;

    void step_after(int t) {
        list_events(layer.y_prev, t - 1, R, 3);
        for (int b = first_block, count = 0; b < last_block; b += count) {
            count = blocks_together(last_block - b);
            recur(b, count, R, 3, layer.y_prev, t - 1, t == 0);
            for (int j = 0; j < count; ++j) {
                const S* p[3] = {p_at(t, b + j, R), p_at(t, b + j, U), p_at(t, b + j, Z)};
                const S* h[3] = {product(b, j, R), product(b, j, U), product(b, j, Z)};
                S* gates[4];
                for (int g = 0; g < 4; ++g) gates[g] = gates_at(t, b + j, g);
                gates_after<S>(layer, b + j, p, h, gates);
                emit(t, b + j);
            }
        }
    }

    // Two products in sequence: the z of each unit depends on the r of all units.
    void step_before(int t) {
        list_events(layer.y_prev, t - 1, R, 2);
        for (int b = first_block, count = 0; b < last_block; b += count) {
            count = blocks_together(last_block - b);
            recur(b, count, R, 2, layer.y_prev, t - 1, t == 0);
            for (int j = 0; j < count; ++j) {
                const S* p[2] = {p_at(t, b + j, R), p_at(t, b + j, U)};
                const S* h[2] = {product(b, j, R), product(b, j, U)};
                S* gates[2] = {gates_at(t, b + j, R), gates_at(t, b + j, U)};
                gates_before<S>(layer, t, b + j, p, h, gates, space.reset);
            }
        }
        team.meet();
        const Steps<S> reset{space.reset, 0, H};
        list_events(reset, 0, Z, 1);
        for (int b = first_block, count = 0; b < last_block; b += count) {
            count = blocks_together(last_block - b);
            recur(b, count, Z, 1, reset, 0, t == 0);
            for (int j = 0; j < count; ++j) {
                gate_z<S>(layer, b + j, p_at(t, b + j, Z), product(b, j, Z), gates_at(t, b + j, Z));
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
            const S* c_before = t ? layer.c + (t - 1) * layer.c_step + (int64_t)s * H : layer.c0(s);
            S* c_now = layer.c + t * layer.c_step + (int64_t)s * H;
            const int64_t row = ((int64_t)t * B + s) * H;
            S* changes = changes_of(t) ? changes_of(t) + (int64_t)s * H : nullptr;
            for (int v = 0; v < layer.units(b); v += lanes<S>) {
                const int unit = b * block + v, count = H - unit;
                if (!real) {
                    store_part<S>(layer.y + row + unit, Vector<S>{}, count);
                    if (changes) store_part<S>(changes + unit, Vector<S>{}, count);
                    store_part<S>(c_now + unit, Vector<S>{}, count);
                    continue;
                }
                const Vector<S> zero = {}, one = zero + 1;
                const Vector<S> u = load<S>(u_in + s * block + v), z = load<S>(z_in + s * block + v);
                const Vector<S> theta = load_part<S>(layer.theta + unit, count), rho = layer.rho(unit, count);
                const Vector<S> y_old = load_part<S>(y_before + unit, count);
                Vector<S> c_old = load_part<S>(c_before + unit, count);
                const auto fired_old = t ? layer.magnitude(c_old) > theta : y_old != zero;
                if (call.reset == Reset::threshold && t) c_old = fired_old ? layer.cleared(c_old, rho * theta) : c_old;
                const Vector<S> memory = call.reset == Reset::hard ? (fired_old ? c_old * (one - rho) : c_old) : c_old;
                Vector<S> state = u * z + (one - u) * memory;
                if (call.reset == Reset::output) state -= rho * y_old;
                if (keep.base) {
                    const Vector<S> share = keep.at(t, s, unit, count);
                    state = share * c_old + (one - share) * state;
                }
                const auto fired = layer.magnitude(layer.compared(state, y_old)) > theta;
                const Vector<S> output = fired ? state : call.events == Events::delta ? y_old : zero;
                store_part<S>(layer.y + row + unit, output, count);
                if (changes) store_part<S>(changes + unit, output - y_old, count);
                store_part<S>(c_now + unit, state, count);
                if (t == (layer.lengths ? layer.lengths[s] : call.T) - 1) {
                    const int64_t at = (int64_t)s * H + unit;
                    if (call.reset == Reset::threshold) state = fired ? layer.cleared(state, rho * theta) : state;
                    store_part<S>(layer.as(call.c_last) + at, state, count);
                    store_part<S>(layer.as(call.y_last) + at, output, count);
                }
            }
        }
    }
};

}  // namespace

const ForwardTable forward_table = make_forward_table<Forward>();

}  // namespace egru::EGRU_LEVEL
