// The recursion of the backward pass over the steps of a chunk.
#pragma once

#include "sequence/backward.hpp"

namespace egru::EGRU_LEVEL {
namespace {

// Compute the gradients of the pre-activations and of c_{t-1} from those of y_t and c_t, unit by unit.
template <class S>
inline void Backward<S>::cell(int t) {
    const Vector<S> zero = {}, one = zero + 1;
    const Reset reset = call.reset;
    const bool delta = call.events == Events::delta;
    for (int b = first_block; b < last_block; ++b) {
        const S *r_in = gates_at(t, b, R), *u_in = gates_at(t, b, U), *z_in = gates_at(t, b, Z);
        const S* q_in = call.after ? gates_at(t, b, Q) : nullptr;
        S *a_r = a_at(t, b, R), *a_u = a_at(t, b, U), *a_z = a_at(t, b, Z);
        S* a_q = call.after ? a_at(t, b, Q) : nullptr;
        const int64_t state = (int64_t)b * B * block;
        S *dc = space.dc + state, *de = space.de + state, *m = space.m + state;
        S *dy = space.dy[t & 1] + state, *dy_before = space.dy[(t + 1) & 1] + state;
        // Before the first step all units, and with delta events always: what holds an output passes its gradient on.
        uint32_t* needed_rows = needed + (b - first_block) * B;
        for (int s = 0; s < B; ++s) needed_rows[s] = (t == 0 || delta) && layer.real(t, s) ? 0xffffffffu : 0;
        for (int v = layer.units(b); v < block; ++v)  // products read whole blocks, including units that do not exist
            for (int s = 0; s < B; ++s) {
                a_r[s * block + v] = a_u[s * block + v] = a_z[s * block + v] = 0;
                if (a_q) a_q[s * block + v] = 0;
            }
        for (int v = 0; v < layer.units(b); v += lanes<S>) {
            const int unit = b * block + v, count = H - unit;
            const Vector<S> theta = load_part<S>(layer.theta + unit, count), rho = layer.rho(unit, count);
            Vector<S> total[sums_kept] = {};
            for (int s = 0; s < B; ++s) {
                const int i = s * block + v;
                const bool wraps = s + ahead >= B;  // into the next columns
                fetch_cell(t, wraps ? s + ahead - B : s + ahead, wraps ? unit + lanes<S> : unit);
                if (!layer.real(t, s)) {  // a padded step passes the gradients on
                    store<S>(dy_before + i, load<S>(dy + i));
                    store<S>(m + i, zero);
                    store<S>(a_r + i, zero);
                    store<S>(a_u + i, zero);
                    store<S>(a_z + i, zero);
                    if (a_q) store<S>(a_q + i, zero);
                    continue;
                }
                const Vector<S> r = load<S>(r_in + i), u = load<S>(u_in + i), z = load<S>(z_in + i);
                const Vector<S> c = load_part<S>(c_row(t, s) + unit, count);
                Vector<S> c_old = load_part<S>(c_row(t - 1, s) + unit, count);
                const Vector<S> y_old =
                    delta || !t ? load_part<S>(layer.y_prev.at(t - 1, s) + unit, count) : zero;
                const Vector<S> value = layer.compared(c, y_old), size = layer.magnitude(value);
                const auto fired = size > theta;
                const auto fired_old = t ? layer.magnitude(c_old) > theta : y_old != zero;
                if (t) needed_rows[s] |= bits<S>(fired_old || slope(layer.magnitude(c_old), theta) != 0) << v;
                if (reset == Reset::threshold && t) c_old = fired_old ? layer.cleared(c_old, rho * theta) : c_old;

                Vector<S> grad = load<S>(dy + i);
                if (grad_y.base) grad += load_part<S>(grad_y.at(t, s) + unit, count);
                const Vector<S> steep = slope(size, theta), from_c = load<S>(dc + i);
                Vector<S> k = (fired ? one : zero) + size * steep;
                if (call.bounded) k = clamp<S>(k, 0, 1);
                Vector<S> grad_seen = grad * k + from_c;
                Vector<S> grad_theta = grad * value;
                if (reset == Reset::hard) {
                    const Vector<S> from_e = load<S>(de + i);
                    grad_seen += layer.times_sign(from_e * steep, value);
                    grad_theta += from_e;
                }
                grad_theta *= -steep;
                if (reset == Reset::threshold) {
                    grad_seen -= from_c * rho * theta * steep;
                    grad_theta -= layer.times_sign(from_c, value) * rho * ((fired ? one : zero) - theta * steep);
                }
                if (grad_c.base) grad_seen += load_part<S>(grad_c.at(t, s) + unit, count);

                const Vector<S> share = keep.base ? keep.at(t, s, unit, count) : zero;
                const Vector<S> grad_new = keep.base ? (one - share) * grad_seen : grad_seen;
                const Vector<S> memory = reset == Reset::hard ? (fired_old ? c_old * (1 - rho) : c_old) : c_old;
                const Vector<S> grad_u = -(grad_new * (z - memory) * u * (one - u));  // torch's gate is 1 - u
                const Vector<S> grad_z = grad_new * u * (one - z * z);
                Vector<S> grad_old = grad_new * (one - u);
                if (reset == Reset::hard) {
                    store<S>(de + i, -rho * grad_old * c_old);
                    grad_old = fired_old ? grad_old * (1 - rho) : grad_old;
                }
                if (keep.base) grad_old += share * grad_seen;
                store<S>(dc + i, grad_old);
                store<S>(dy_before + i, delta ? grad * (one - k) : reset == Reset::output ? -rho * grad_new : zero);
                store<S>(a_u + i, grad_u);
                store<S>(a_z + i, grad_z);
                total[U] += grad_u;
                total[Z] += grad_z;
                total[4] += grad_theta;
                if (call.after) {
                    const Vector<S> grad_r = grad_z * load<S>(q_in + i) * r * (one - r);
                    const Vector<S> grad_q = r * grad_z;
                    store<S>(a_r + i, grad_r);
                    store<S>(a_q + i, grad_q);
                    total[R] += grad_r;
                    total[Q] += grad_q;
                } else {
                    store<S>(m + i, zero);
                }
            }
            add_totals(unit, count, total);
        }
    }
}

// "before": compute the gradient of r, and the part of dy that passes through r * y, from m = a_z V_z^T.
template <class S>
inline void Backward<S>::reset_gate(int t) {
    const Vector<S> one = Vector<S>{} + 1;
    for (int b = first_block; b < last_block; ++b) {
        const S* r_in = gates_at(t, b, R);
        S* a_r = a_at(t, b, R);
        const S* m = space.m + (int64_t)b * B * block;
        S* dy_before = space.dy[(t + 1) & 1] + (int64_t)b * B * block;
        for (int v = 0; v < layer.units(b); v += lanes<S>) {
            const int unit = b * block + v, count = H - unit;
            const Vector<S> theta = load_part<S>(layer.theta + unit, count);
            Vector<S> total[sums_kept] = {};
            for (int s = 0; s < B; ++s) {
                const int i = s * block + v;
                if (!layer.real(t, s)) {
                    store_part<S>(space.a_r + (int64_t)s * H + unit, Vector<S>{}, count);
                    continue;
                }
                const Vector<S> r = load<S>(r_in + i), through = load<S>(m + i);
                const Vector<S> c_old = load_part<S>(c_row(t - 1, s) + unit, count);  // still in the cache after `cell`
                const Vector<S> y_old = t ? (layer.magnitude(c_old) > theta ? c_old : Vector<S>{})
                                          : load_part<S>(layer.y_prev.at(-1, s) + unit, count);
                const Vector<S> grad_r = through * y_old * r * (one - r);
                store<S>(a_r + i, grad_r);
                store_part<S>(space.a_r + (int64_t)s * H + unit, grad_r, count);
                store<S>(dy_before + i, load<S>(dy_before + i) + r * through);
                total[R] += grad_r;
            }
            add_totals(unit, count, total);
        }
    }
}

// The gradient of r where y_{t-1} is zero.
template <class S>
inline void Backward<S>::clear_reset_gate(int t) {
    for (int b = first_block; b < last_block; ++b)
        __builtin_memset(a_at(t, b, R), 0, (int64_t)B * block * sizeof(S));
}

// Sums over a batch are short and use S; sums over all steps use double.
template <class S>
inline void Backward<S>::add_totals(int unit, int count, const Vector<S>* total) {
    for (int j = 0; j < sums_kept; ++j)
        for (int i = 0; i < lanes<S> && i < count; ++i)
            space.totals[(int64_t)j * blocks * block + unit + i] += (double)total[j][i];
}

// List the gradients of y_{t-1} that are needed, for groups of 16 rows.
template <class S>
inline void Backward<S>::list_requests() {
    for (int s0 = 0, at = 0; s0 < B; s0 += rows_max, at += unit_count) {
        Requests& requests = space.requests[team.index][s0 / rows_max];
        requests.mask = space.masks[team.index] + at;
        requests.order = space.order[team.index] + at;
        const int row_count = requests.rows = B - s0 < rows_max ? B - s0 : rows_max;
        for (int b = first_block; b < last_block; ++b) {
            alignas(64) uint32_t words[rows_max] = {};
            for (int i = 0; i < row_count; ++i) words[i] = needed[(b - first_block) * B + s0 + i];
            for (int n = 0; n < block; ++n)
                requests.mask[(b - first_block) * block + n] = n < layer.units(b) ? (uint16_t)bit_column(words, n) : 0;
        }
        requests.sort(unit_count);
    }
}

// What `cell` reads at step t - 1, for the units of this thread.
template <class S>
inline Upcoming Backward<S>::upcoming(int t) const {
    Upcoming result;
    const int unit = first_block * block;
    const int64_t bytes = (int64_t)unit_count * sizeof(S);
    if (t < 1) return result;
    if (call.gates) result.add(gates_at(t - 1, first_block, 0), 0, bytes * layer.gate_count * B, 1);
    if (grad_y.base) result.add(grad_y.at(t - 1, 0) + unit, grad_y.row * (int64_t)sizeof(S), bytes, B);
    if (t > 1) result.add(c_row(t - 2, 0) + unit, (int64_t)H * sizeof(S), bytes, B);
    return result;
}

// out[b][s][32] += a V^T for the units of this thread, over a range of V's columns.
template <class S>
inline void Backward<S>::recurrent_dots(int t, const PanelGroups& groups, Upcoming upcoming, S* out) {
    S *d = space.d[team.index], *products = space.products[team.index];
    for (int64_t i = 0; i < divide_up(B, rows_max) * unit_count * rows_max; ++i) products[i] = 0;
    for (int from = 0; from < groups.count; from += groups.size_max) {
        const int count = groups.size(from);
        const S* weight = space.V_rows + (groups.first + from) * layer.panel_size(layer.tiles_H);
        // Too large to stay in the cache between two groups of 16 rows.
        const int64_t weight_bytes = (int64_t)unit_count * count * block * sizeof(S);
        const bool fresh = weight_bytes / (call.skip_hh ? zeros_at_least : 1) > cached;
        for (int s0 = 0; s0 < B; s0 += rows_max) {
            const S* panel[block_panels_max];
            for (int j = 0; j < count; ++j) {
                const int p = groups.first + from + j;
                const bool scaled = call.after && p >= 2 * blocks;  // r * a_z is stored after a_z
                panel[j] = a_at(t, 0, 0) + ((int64_t)(p + (scaled ? blocks : 0)) * layer.rows() + s0) * block;
            }
            const int rows = B - s0 < rows_max ? B - s0 : rows_max;
            const S* first = weight + (int64_t)first_block * block * count * block;
            const Requests& requests = space.requests[team.index][s0 / rows_max];
            S* to = products + (int64_t)s0 * unit_count;
            if (call.skip_hh) {
                pack_half_panels<S>(panel, count, rows, d);
                const int64_t weight_row = (groups.first + from) * layer.padded_H() + first_block * block;
                block_dots_all<S>(first, space.V_halves + weight_row, d, count, requests, fresh, upcoming, to);
            } else {
                pack_rows<S>(panel, count, rows, d);
                dots_all<S>(first, d, count, requests, fresh || s0 == 0, upcoming, to);
            }
        }
    }
    for (int s0 = 0; s0 < B; s0 += rows_max)
        for (int b = first_block; b < last_block; ++b)
            add_transposed<S>(products + ((int64_t)s0 * unit_count + (b - first_block) * block * rows_max),
                              B - s0 < rows_max ? B - s0 : rows_max, rows_max, block,
                              out + ((int64_t)b * B + s0) * block);
}

// "before": dy += a_r V_r. a_r is non-zero only where y is.
template <class S>
inline void Backward<S>::gather_reset(int t) {
    const Lists<S>& lists = space.resets[team.index];
    for (int at = 0; at < layer.tiles_H; ++at)
        list_tile(Steps<S>{space.a_r, 0, H}, 0, B, B, H, at, lists);
    for (int b = first_block, count = 0; b < last_block; b += count) {
        count = blocks_together(last_block - b);
        Columns<S> columns;
        for (int j = b; j < b + count; ++j)
            columns.add(space.V_rows + j * layer.panel_size(layer.tiles_H),
                        space.dy[(t + 1) & 1] + (int64_t)j * B * block, layer.units(j));
        gather_all(columns, layer.tiles_H, lists, B);
    }
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
