// Backward, chunk by chunk from the end: the gates again where they were not kept, the recursion over the steps of the
// chunk, then the weight gradients of all its rows at once.
//
// The gradient of y_{t-1} is formed only where it is used: where the unit fired or stood inside the surrogate's window.
// Gradients of pre-activations are panels, a[gate][b][row][32] with gates r, u, z and, in the "after" form, r * z, which
// is what the recurrent product sees.
#include "sequence/grad_panels.hpp"
#include "sequence/layer.hpp"

namespace egru::EGRU_LEVEL {
namespace {

constexpr int cached = 700 << 10;  // bytes of weights that stay in the second-level cache
constexpr int ahead = 8;           // rows: how early `cell` asks for what lies in memory
constexpr int sums_kept = 5;       // per unit: bias gradients of r, u, z, r*z, and the threshold's

template <class S>
struct BackwardSpace {
    S *V_rows, *W_rows;       // weights for dot products; W only for the gradient of the input
    GradPanels<S> grad_V, grad_W;
    double* totals;           // [sums_kept][H]
    S* a;                     // gradients of pre-activations of a chunk
    // Of a chunk, where gates were not kept: they, x W + b (no longer needed when `a` is made, and in its place), and r * y.
    S *gates, *p, *reset;
    S* panels[max_team];      // of a block: its weights, to compute gates again; or gradients on their way out
    S* h[max_team];           // y V + b of a block
    S *dc, *de, *m;           // [b][s][32]
    S* dy[2];                 // of this step and of the one before it
    S* a_r;                     // "before": gradients of r at a step, row by row
    Lists<S> resets[max_team];  // and those that are not zero, one per thread
    Lists<S> rows, columns;   // non-zero entries of a chunk's matrices, row by row and column by column
    // One per thread: which gradients of y are used (a bit for each unit of a block, row by row), the same for each 16 rows
    // by unit, packed rows of a, and the products by 16 rows: of a step's gradients of y, or of 16 gradients of the input.
    uint32_t* open[max_team];
    Wanted* wanted[max_team];
    uint16_t* masks[max_team];
    uint32_t* order[max_team];
    S *d[max_team], *products[max_team];
    int64_t bytes;

    explicit BackwardSpace(const Layer<S>& layer) {
        const TrainCall& call = layer.call;
        Arena arena(call.workspace);
        const bool recompute = !call.gates;
        const int64_t count = layer.rows_max(), state = (int64_t)layer.blocks * layer.B * block;
        const int64_t V_size = 3 * layer.blocks * layer.panel_size(layer.tiles_H);
        const int64_t W_size = 3 * layer.blocks * layer.panel_size(layer.tiles_I);
        V_rows = arena.take<S>(V_size);
        W_rows = arena.take<S>(call.grad_input ? W_size : 0);
        grad_V = GradPanels<S>(arena, layer, call.grad_weight_hh, layer.H);
        grad_W = GradPanels<S>(arena, layer, call.grad_weight_ih, layer.I);
        totals = arena.take<double>((int64_t)sums_kept * layer.blocks * block);
        a = arena.take<S>((call.after ? 4 : 3) * layer.blocks * count * block);
        gates = arena.take<S>(recompute ? call.chunk * layer.gates_step() : 0);
        p = a;
        a_r = arena.take<S>(call.after ? 0 : (int64_t)layer.B * layer.H);
        dc = arena.take<S>(state);
        de = arena.take<S>(state);
        m = arena.take<S>(state);
        for (S*& each : dy) each = arena.take<S>(state);
        const int widest = layer.H > layer.I ? layer.H : layer.I;
        reset = arena.take<S>(recompute && !call.after ? count * layer.H : 0);
        Arena early = arena;
        if (recompute) rows = Lists<S>(early, count, widest);
        columns = Lists<S>(arena, widest, count);
        arena.cover(early);
        const int64_t groups = divide_up(layer.B, rows_max), wide_H = layer.blocks * block, wide_I = layer.tiles_I * tile;
        const int64_t positions = call.grad_input && wide_I > groups * wide_H ? wide_I : groups * wide_H;
        for (int i = 0; i < call.threads; ++i) {
            open[i] = arena.take<uint32_t>((int64_t)layer.B * layer.blocks);
            wanted[i] = arena.take<Wanted>(groups);
            masks[i] = arena.take<uint16_t>(positions);
            order[i] = arena.take<uint32_t>(positions);
            if (!call.after) resets[i] = Lists<S>(arena, layer.B, layer.H);
            d[i] = arena.take<S>(rows_max * d_width);
            products[i] = arena.take<S>(positions * rows_max);
            h[i] = arena.take<S>(recompute ? 3 * count * block : 0);
            panels[i] = arena.take<S>(3 * layer.panel_size(layer.tiles_H > layer.tiles_I ? layer.tiles_H : layer.tiles_I));
        }
        bytes = arena.bytes();
    }
};

// The ranges of panels whose dot products with `a` are wanted one by one: all at once ("after"), or that of z and that of
// u ("before"). There the gradient of r is zero wherever y was, and its product is gathered row by row instead.
template <class S>
struct RecurrentPieces {
    Pieces first, second;
    const Pieces* begin() const { return &first; }
    const Pieces* end() const { return second.count ? &second + 1 : &second; }
};
template <class S>
RecurrentPieces<S> recurrent_pieces(const Layer<S>& layer) {
    const int blocks = layer.blocks;
    if (layer.call.after) return {Pieces(0, 3 * blocks), Pieces(0, 0)};
    return {Pieces(2 * blocks, blocks), Pieces(blocks, blocks)};
}

template <class S>
class Backward {
public:
    Backward(const Layer<S>& layer, const Team& team)
        : layer(layer), call(layer.call), team(team), space(layer), keep(call), B(layer.B), H(layer.H),
          blocks(layer.blocks), first_block(team.begin(blocks)), last_block(team.end(blocks)),
          own((last_block - first_block) * block), open(space.open[team.index]), grad_y{layer.as(call.grad_y), call.grad_y_t, call.grad_y_b},
          grad_c{layer.as(call.grad_c), call.grad_c_t, call.grad_c_b} {}

    void run() {
        if (!call.gates) recompute_gates();
        for (int t = call.last - 1; t >= call.first; --t) {
            cell(t);
            if (call.after) {
                team.meet();
                list_open();
                recurrent_dots(t, Pieces(0, 3 * blocks), space.dy[(t + 1) & 1]);
            } else {
                team.meet();
                list_open();
                recurrent_dots(t, Pieces(2 * blocks, blocks), space.m);
                recurrent_dots(t, Pieces(blocks, blocks), space.dy[(t + 1) & 1]);
                reset_gate(t);
                team.meet();
                gather_reset(t);
            }
        }
        team.meet();
        weight_gradients();
        if (call.grad_input) input_gradient();
    }

private:
    const Layer<S>& layer;
    const TrainCall& call;
    const Team& team;
    BackwardSpace<S> space;
    const Keep<S> keep;
    const int B, H, blocks, first_block, last_block, own;  // own: this member's units
    uint32_t* open;
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
        return t < 0 ? layer.as(call.c0) + (int64_t)s * H : layer.c + ((int64_t)t * B + s) * H;
    }
    static void fetch(const S* from) { __builtin_prefetch(from, 0, 3); }
    // What `cell` reads from memory for batch row s.
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

    // ---- the recursion -------------------------------------------------------------------------------------------

    // From the gradients of y_t and c_t to those of the pre-activations and of c_{t-1}, unit by unit.
    void cell(int t) {
        const Vector<S> zero = {}, one = zero + 1;
        const Reset reset = call.reset;
        for (int b = first_block; b < last_block; ++b) {
            const S *r_in = gates_at(t, b, R), *u_in = gates_at(t, b, U), *z_in = gates_at(t, b, Z);
            const S* q_in = call.after ? gates_at(t, b, Q) : nullptr;
            S *a_r = a_at(t, b, R), *a_u = a_at(t, b, U), *a_z = a_at(t, b, Z);
            S* a_q = call.after ? a_at(t, b, Q) : nullptr;
            const int64_t state = (int64_t)b * B * block;
            S *dc = space.dc + state, *de = space.de + state, *m = space.m + state;
            S *dy = space.dy[t & 1] + state, *dy_before = space.dy[(t + 1) & 1] + state;
            uint32_t* opened = open + (b - first_block) * B;  // at the seam, all of them
            for (int s = 0; s < B; ++s) opened[s] = t == 0 && layer.real(t, s) ? 0xffffffffu : 0;
            for (int v = layer.units(b); v < block; ++v)  // products read whole blocks
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
                    const bool wraps = s + ahead >= B;  // to the columns that come next
                    fetch_cell(t, wraps ? s + ahead - B : s + ahead, wraps ? unit + lanes<S> : unit);
                    if (!layer.real(t, s)) {  // the state of a finished row passes through
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
                    const auto fired = c > theta;
                    const auto fired_old =
                        t ? c_old > theta : load_part<S>(layer.y_prev.at(-1, s) + unit, count) != zero;
                    if (t) opened[s] |= bits<S>(fired_old || slope(c_old, theta) != 0) << v;
                    if (reset == Reset::threshold && t) c_old = fired_old ? c_old - rho * theta : c_old;

                    Vector<S> grad = load<S>(dy + i);
                    if (grad_y.base) grad += load_part<S>(grad_y.at(t, s) + unit, count);
                    const Vector<S> steep = slope(c, theta), from_c = load<S>(dc + i);
                    Vector<S> k = (fired ? one : zero) + c * steep;
                    if (call.bounded) k = clamp<S>(k, 0, 1);
                    Vector<S> grad_seen = grad * k + from_c;
                    Vector<S> grad_theta = grad * c;
                    if (reset == Reset::hard) {
                        const Vector<S> from_e = load<S>(de + i);
                        grad_seen += from_e * steep;
                        grad_theta += from_e;
                    }
                    grad_theta *= -steep;
                    if (reset == Reset::threshold) {
                        grad_seen -= from_c * rho * theta * steep;
                        grad_theta -= from_c * rho * ((fired ? one : zero) - theta * steep);
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
                    store<S>(dy_before + i, reset == Reset::output ? -rho * grad_new : zero);
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

    // "before": with m = a_z V_z^T known, the gradient of r and the part of dy that passes through r * y.
    void reset_gate(int t) {
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
                    const Vector<S> c_old = load_part<S>(c_row(t - 1, s) + unit, count);  // at hand since `cell`
                    const Vector<S> y_old = t ? (c_old > theta ? c_old : Vector<S>{})
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

    // A step's sums are short and in S; the sum over steps is long and in double.
    void add_totals(int unit, int count, const Vector<S>* total) {
        for (int j = 0; j < sums_kept; ++j)
            for (int i = 0; i < lanes<S> && i < count; ++i)
                space.totals[(int64_t)j * blocks * block + unit + i] += (double)total[j][i];
    }

    // Which gradients of y_{t-1} are used, for each 16 rows.
    void list_open() {
        for (int s0 = 0, at = 0; s0 < B; s0 += rows_max, at += own) {
            Wanted& wanted = space.wanted[team.index][s0 / rows_max];
            wanted.mask = space.masks[team.index] + at;
            wanted.order = space.order[team.index] + at;
            const int some = B - s0 < rows_max ? B - s0 : rows_max;
            for (int b = first_block; b < last_block; ++b) {
                alignas(64) uint32_t words[rows_max] = {};
                for (int i = 0; i < some; ++i) words[i] = open[(b - first_block) * B + s0 + i];
                for (int n = 0; n < block; ++n)
                    wanted.mask[(b - first_block) * block + n] = n < layer.units(b) ? (uint16_t)bit_column(words, n) : 0;
            }
            wanted.sort(own);
        }
    }

    // out[b][s][32] += a V^T for this member's units, over a range of V's columns.
    void recurrent_dots(int t, const Pieces& pieces, S* out) {
        S *d = space.d[team.index], *products = space.products[team.index];
        for (int64_t i = 0; i < divide_up(B, rows_max) * own * rows_max; ++i) products[i] = 0;
        for (int from = 0; from < pieces.count; from += pieces.most) {
            const int some = pieces.size(from);
            const S* weight = space.V_rows + (pieces.first + from) * layer.panel_size(layer.tiles_H);
            const bool fresh = (int64_t)own * some * block * sizeof(S) > cached;  // for every 16 rows, that is
            for (int s0 = 0; s0 < B; s0 += rows_max) {
                const S* panel[panels_max];
                for (int j = 0; j < some; ++j) {
                    const int p = pieces.first + from + j;
                    const bool scaled = call.after && p >= 2 * blocks;  // r * a_z lies behind a_z
                    panel[j] = a_at(t, 0, 0) + ((int64_t)(p + (scaled ? blocks : 0)) * layer.rows() + s0) * block;
                }
                pack_rows<S>(panel, some, B - s0 < rows_max ? B - s0 : rows_max, d);
                dots_all<S>(weight + (int64_t)first_block * block * some * block, d, some,
                            space.wanted[team.index][s0 / rows_max], fresh || s0 == 0, products + (int64_t)s0 * own);
            }
        }
        for (int s0 = 0; s0 < B; s0 += rows_max)
            for (int b = first_block; b < last_block; ++b)
                add_transposed<S>(products + ((int64_t)s0 * own + (b - first_block) * block * rows_max),
                                  B - s0 < rows_max ? B - s0 : rows_max, out + ((int64_t)b * B + s0) * block);
    }

    // "before": dy += a_r V_r, where a_r is not zero: where y was not.
    void gather_reset(int t) {
        const Lists<S>& lists = space.resets[team.index];
        for (int at = 0; at < layer.tiles_H; ++at)
            list_tile(Steps<S>{space.a_r, 0, H}, 0, B, B, H, at, lists);
        for (int b = first_block, some = 0; b < last_block; b += some) {
            some = blocks_together(last_block - b);
            Columns<S> columns;
            for (int j = b; j < b + some; ++j)
                columns.add(space.V_rows + j * layer.panel_size(layer.tiles_H),
                            space.dy[(t + 1) & 1] + (int64_t)j * B * block, layer.units(j));
            gather_all(columns, layer.tiles_H, lists, B);
        }
    }

    // ---- once per chunk ------------------------------------------------------------------------------------------

    // The gates of the chunk from its input and events, as forward computed them, but all rows at once.
    void recompute_gates() {
        const int rows = layer.rows();
        S* h = space.h[team.index];
        const auto pack = [&](uintptr_t weight, int width, int tiles, int p, int at) {
            S* to = space.panels[team.index] + at * layer.panel_size(tiles);
            pack_panel(layer.as(weight), H, width, blocks, tiles, p, to, block);
            return to;
        };
        project_input(layer, team, space.rows, space.p,
                      [&](int g, int b) { return pack(call.weight_ih, layer.I, layer.tiles_I, g * blocks + b, g); });
        team.meet();
        list_rows(layer.y_prev, call.first - 1);
        const auto recurrent = [&](int b, const int* gates, int count, S* const* out) {
            Columns<S> columns;
            for (int j = 0; j < count; ++j) {
                fill_bias(layer.bias_hh, H, gates[j], b, rows, out[j]);
                columns.add(pack(call.weight_hh, H, layer.tiles_H, gates[j] * blocks + b, j), out[j], layer.units(b));
            }
            gather_all(columns, layer.tiles_H, space.rows, rows);
        };
        S* out[3] = {h, h + (int64_t)rows * block, h + (int64_t)2 * rows * block};
        constexpr int order[3] = {R, U, Z};
        for (int b = first_block; b < last_block; ++b) {
            recurrent(b, order, call.after ? 3 : 2, out);
            for (int t = call.first; t < call.last; ++t) {
                const int64_t at = (int64_t)(t - call.first) * B * block;
                const S* here[3] = {out[R] + at, out[U] + at, out[Z] + at};
                const S* p[3] = {p_at(t, b, R), p_at(t, b, U), p_at(t, b, Z)};
                S* gates[4];
                for (int g = 0; g < layer.gate_count; ++g) gates[g] = const_cast<S*>(gates_at(t, b, g));
                if (call.after)
                    gates_after<S>(layer, b, p, here, gates);
                else
                    gates_before<S>(layer, t, b, p, here, gates, space.reset + (int64_t)(t - call.first) * B * H);
            }
        }
        team.meet();
        if (call.after) return;
        list_rows(Steps<S>{space.reset, (int64_t)B * H, H}, 0);
        for (int b = first_block; b < last_block; ++b) {
            recurrent(b, order + Z, 1, out);
            for (int t = call.first; t < call.last; ++t)
                gate_z<S>(layer, b, p_at(t, b, Z), out[0] + (int64_t)(t - call.first) * B * block,
                          const_cast<S*>(gates_at(t, b, Z)));
        }
        team.meet();
    }

    void list_rows(const Steps<S>& from, int first) {
        for (int at = team.begin(layer.tiles_H); at < team.end(layer.tiles_H); ++at)
            list_tile(from, first, B, layer.rows(), H, at, space.rows);
        team.meet();
    }

    // grad[gate][b][source][32] += sum over the chunk's rows of source value * a.
    void weight_gradients() {
        const int rows = layer.rows(), tiles = (int)divide_up(rows, tile);
        const auto list = [&](const Steps<S>& from, int first, int width) {
            for (int at = team.begin(tiles); at < team.end(tiles); ++at)
                list_columns(from, first, B, rows, width, at, space.columns);
            team.meet();
        };
        // The gradients of the weights of `gates`, which saw the sources just listed.
        const auto collect = [&](const GradPanels<S>& grad, std::initializer_list<Gate> gates) {
            for (int b = first_block, some = 0; b < last_block; b += some) {
                some = blocks_together(last_block - b);
                Columns<S> columns;
                for (int j = b; j < b + some; ++j)
                    for (const Gate g : gates)
                        columns.add(a_at(call.first, j, g), grad.panel((g == Q ? Z : g) * blocks + j), layer.units(j));
                gather_all(columns, tiles, space.columns, grad.width);
            }
            team.meet();
        };
        list(layer.input, call.first, layer.I);
        collect(space.grad_W, {R, U, Z});
        list(layer.y_prev, call.first - 1, H);
        if (call.after) {
            collect(space.grad_V, {R, U, Q});
            return;
        }
        collect(space.grad_V, {R, U});
        const auto reset_by = [&](int t, int s) { return gates_at(t, 0, R) + s * block; };
        for (int at = team.begin(tiles); at < team.end(tiles); ++at)
            scale_columns<S>(reset_by, (int64_t)layer.gate_count * B * block, call.first, B, rows, H, at, space.columns);
        team.meet();
        collect(space.grad_V, {Z});
    }

    // x has no window: every entry of its gradient is wanted. Shared out by batch rows.
    void input_gradient() {
        const int rows = layer.rows(), groups = (int)divide_up(rows, rows_max), panels = 3 * blocks;
        const int64_t size = layer.panel_size(layer.tiles_I);
        const int begin = team.begin(groups) * rows_max, end = team.end(groups) * rows_max;
        const Pieces pieces(0, panels);
        S *d = space.d[team.index], *products = space.products[team.index];
        Wanted all{space.masks[team.index], space.order[team.index], {}};
        for (int s0 = begin; s0 < end && s0 < rows; s0 += rows_max) {
            const int some_rows = rows - s0 < rows_max ? rows - s0 : rows_max;
            for (int n = 0; n < layer.I; ++n) all.mask[n] = (uint16_t)((1u << some_rows) - 1);
            all.sort(layer.I);
            for (int64_t i = 0; i < (int64_t)layer.tiles_I * tile * rows_max; ++i) products[i] = 0;
            for (int from = 0; from < panels; from += pieces.most) {
                const int some = pieces.size(from);
                const S* panel[panels_max];
                for (int j = 0; j < some; ++j) panel[j] = space.a + ((int64_t)(from + j) * rows + s0) * block;
                pack_rows<S>(panel, some, some_rows, d);
                dots_all<S>(space.W_rows + from * size, d, some, all, true, products);
            }
            for (int i0 = 0; i0 < layer.I; i0 += block) {
                alignas(64) S result[rows_max * block] = {};
                add_transposed<S>(products + (int64_t)i0 * rows_max, some_rows, result);
                const int positions = layer.I - i0 < block ? layer.I - i0 : block;
                for (int i = 0; i < some_rows; ++i) {
                    S* to = layer.as(call.grad_input) + ((int64_t)call.first * B + s0 + i) * layer.I + i0;
                    for (int n = 0; n < positions; ++n) to[n] = result[i * block + n];
                }
            }
        }
    }
};

// ---- entry points --------------------------------------------------------------------------------------------------

// [b][s][32] from (B, H) and back; null is zero.
template <class S>
void to_blocks(const Layer<S>& layer, const S* from, S* to) {
    for (int b = 0; b < layer.blocks; ++b)
        for (int s = 0; s < layer.B; ++s)
            for (int i = 0; i < block; ++i)
                to[((int64_t)b * layer.B + s) * block + i] =
                    from && i < layer.units(b) ? from[(int64_t)s * layer.H + b * block + i] : S(0);
}
template <class S>
void from_blocks(const Layer<S>& layer, const S* from, S* to) {
    for (int b = 0; b < layer.blocks; ++b)
        for (int s = 0; s < layer.B; ++s)
            for (int i = 0; i < layer.units(b); ++i)
                to[(int64_t)s * layer.H + b * block + i] = from[((int64_t)b * layer.B + s) * block + i];
}

template <class S>
void begin(const TrainCall& call) {
    const Layer<S> layer(call);
    const BackwardSpace<S> space(layer);
    const int64_t V_size = layer.panel_size(layer.tiles_H);
    to_blocks<S>(layer, layer.as(call.grad_c0), space.dc);
    to_blocks<S>(layer, nullptr, space.de);
    to_blocks<S>(layer, layer.as(call.grad_y0), space.dy[(call.T - 1) & 1]);
    for (int64_t i = 0; i < (int64_t)sums_kept * layer.blocks * block; ++i) space.totals[i] = 0;
    run_team(call.threads, [&](const Team& team) {
        const int panels = 3 * layer.blocks, from = team.begin(panels), to = team.end(panels);
        const int H = layer.H, I = layer.I, blocks = layer.blocks;
        for (const Pieces& each : recurrent_pieces(layer))
            pack_pieces(layer.as(call.weight_hh), H, H, blocks, layer.tiles_H, each, from, to, space.V_rows);
        for (int b = from; !call.after && b < to && b < blocks; ++b)
            pack_sources(layer.as(call.weight_hh), H, layer.tiles_H, b, space.V_rows + b * V_size);
        if (call.grad_input)
            pack_pieces(layer.as(call.weight_ih), H, I, blocks, layer.tiles_I, Pieces(0, panels), from, to, space.W_rows);
        for (const GradPanels<S>& grad : {space.grad_V, space.grad_W})
            for (int p = from; p < to; ++p) __builtin_memset(grad.panel(p), 0, grad.size() * sizeof(S));
    });
}

template <class S>
void chunk(const TrainCall& call) {
    const Layer<S> layer(call);
    run_team(call.threads, [&](const Team& team) { Backward<S>(layer, team).run(); });
}

template <class S>
void finish(const TrainCall& call) {
    const Layer<S> layer(call);
    const BackwardSpace<S> space(layer);
    from_blocks<S>(layer, space.dc, layer.as(call.grad_c0));
    from_blocks<S>(layer, space.dy[1], layer.as(call.grad_y0));
    for (int n = 0; n < layer.H; ++n) {
        const auto total = [&](int j) { return (S)space.totals[(int64_t)j * layer.blocks * block + n]; };
        for (int g = 0; g < 3; ++g) {
            layer.as(call.grad_bias_ih)[g * layer.H + n] = total(g);
            layer.as(call.grad_bias_hh)[g * layer.H + n] = total(g == Z && call.after ? Q : g);
        }
        layer.as(call.grad_theta)[n] = total(4);
    }
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

}  // namespace

const BackwardTable backward_table{
    [](const TrainCall& call) { return call.float64 ? workspace<double>(call) : workspace<float>(call); },
    [](const TrainCall& call) { call.float64 ? begin<double>(call) : begin<float>(call); },
    [](const TrainCall& call) { call.float64 ? chunk<double>(call) : chunk<float>(call); },
    [](const TrainCall& call) { call.float64 ? finish<double>(call) : finish<float>(call); },
};

}  // namespace egru::EGRU_LEVEL
