#include "continuous/network.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace egru::continuous {
namespace {

constexpr int tile = 16;  // rows and columns that are transposed together

FanOut make_fan(const double* weights, const uint8_t* mask, int units, int sources, bool recurrent, bool diagonal) {
    FanOut fan;
    const size_t H = static_cast<size_t>(units), D = static_cast<size_t>(sources);
    fan.dense = mask == nullptr;
    fan.start.assign(D + 1, 0);
    if (recurrent) fan.self_position.resize(D);
    fan.self_absent.assign(fan.self_position.size(), !diagonal);
    if (fan.dense) {
        for (size_t n = 0; n <= D; ++n) fan.start[n] = static_cast<int64_t>(n * H);
        for (size_t n = 0; n < fan.self_position.size(); ++n) fan.self_position[n] = static_cast<int32_t>(n);
        for (int g = 0; g < 3; ++g) {
            fan.w[g].resize(H * D);
            const double* from = weights + static_cast<size_t>(g) * H * D;
            for (size_t m0 = 0; m0 < H; m0 += tile)
                for (size_t n0 = 0; n0 < D; n0 += tile)
                    for (size_t m = m0; m < std::min(H, m0 + tile); ++m)
                        for (size_t n = n0; n < std::min(D, n0 + tile); ++n) fan.w[g][n * H + m] = from[m * D + n];
            if (recurrent && !diagonal)
                for (size_t n = 0; n < H; ++n) fan.w[g][n * H + n] = 0;
        }
        return fan;
    }
    std::vector<int32_t> post, pre;
    for (size_t m = 0; m < H; ++m) {
        const uint8_t* row = mask + m * D;
        const auto add_connection = [&](size_t n) {
            post.push_back(static_cast<int32_t>(m));
            pre.push_back(static_cast<int32_t>(n));
            ++fan.start[n + 1];
        };
        size_t n = 0;
        for (uint64_t word; n + 8 <= D; n += 8) {  // skip eight absent connections at once
            std::memcpy(&word, row + n, 8);
            if (word == 0 && !(recurrent && m >= n && m < n + 8)) continue;
            for (size_t i = n; i < n + 8; ++i)
                if (row[i] != 0 || (recurrent && i == m)) add_connection(i);
        }
        for (; n < D; ++n)
            if (row[n] != 0 || (recurrent && n == m)) add_connection(n);
    }
    for (size_t n = 0; n < D; ++n) fan.start[n + 1] += fan.start[n];
    fan.index.resize(post.size());
    for (auto& w : fan.w) w.resize(post.size());
    std::vector<int64_t> next(fan.start.begin(), fan.start.end() - 1);
    for (size_t i = 0; i < post.size(); ++i) {
        const size_t m = static_cast<size_t>(post[i]), n = static_cast<size_t>(pre[i]);
        const size_t k = static_cast<size_t>(next[n]++);
        const bool is_self = recurrent && m == n, absent = is_self && (!diagonal || mask[m * D + n] == 0);
        fan.index[k] = post[i];
        if (is_self) fan.self_position[n] = static_cast<int32_t>(static_cast<int64_t>(k) - fan.start[n]);
        if (is_self) fan.self_absent[n] = absent;
        for (size_t g = 0; g < 3; ++g) fan.w[g][k] = absent ? 0 : weights[(g * H + m) * D + n];
    }
    return fan;
}

// As make_fan, from `count` connections that are sorted by source, then receiver.
FanOut make_sparse_fan(const double* weights, const int64_t* connections, int64_t count, int sources, bool recurrent,
                       bool diagonal) {
    FanOut fan;
    fan.dense = false;
    fan.sparse = true;
    fan.connections = count;
    const int64_t *post = connections, *pre = connections + count;
    const size_t room = static_cast<size_t>(count + (recurrent ? sources : 0));
    fan.index.reserve(room);
    fan.origin.reserve(room);
    for (auto& w : fan.w) w.reserve(room);
    if (recurrent) fan.self_position.resize(static_cast<size_t>(sources));
    fan.self_absent.assign(fan.self_position.size(), !diagonal);
    fan.start.assign(1, 0);
    const auto add = [&](int64_t receiver, int64_t from, bool absent) {
        fan.index.push_back(static_cast<int32_t>(receiver));
        fan.origin.push_back(from);
        for (int64_t g = 0; g < 3; ++g)
            fan.w[g].push_back(absent ? 0 : weights[g * count + from]);
    };
    int64_t k = 0;
    for (int64_t n = 0; n < sources; ++n) {
        bool listed = !recurrent;  // whether the source itself is in its list
        const auto add_self = [&](int64_t from) {
            const size_t i = static_cast<size_t>(n);
            fan.self_position[i] = static_cast<int32_t>(static_cast<int64_t>(fan.index.size()) - fan.start[i]);
            fan.self_absent[i] = from < 0 || !diagonal;
            add(n, from, fan.self_absent[i]);
            listed = true;
        };
        for (; k < count && pre[k] == n; ++k) {
            if (!listed && post[k] > n) add_self(-1);
            if (recurrent && post[k] == n)
                add_self(k);
            else
                add(post[k], k, false);
        }
        if (!listed) add_self(-1);
        fan.start.push_back(static_cast<int64_t>(fan.index.size()));
    }
    return fan;
}

FanOut make_recurrent(const ContinuousCall& call) {
    if (call.lines > 0 && call.connection_count >= 0)
        return make_sparse_fan(at<double>(call.V), at<int64_t>(call.connections), call.connection_count, call.lines,
                               false, true);
    if (call.lines > 0)
        return make_fan(at<double>(call.V), at<uint8_t>(call.mask), call.units, call.lines, false, true);
    if (call.connection_count >= 0)
        return make_sparse_fan(at<double>(call.V), at<int64_t>(call.connections), call.connection_count, call.units,
                               true, call.self_connections);
    return make_fan(at<double>(call.V), at<uint8_t>(call.mask), call.units, call.units, true, call.self_connections);
}

FanOut make_input(const ContinuousCall& call) {
    if (call.input_connection_count >= 0)
        return make_sparse_fan(at<double>(call.U), at<int64_t>(call.input_connections), call.input_connection_count,
                               call.channels, false, true);
    return make_fan(at<double>(call.U), at<uint8_t>(call.input_mask), call.units, call.channels, false, true);
}

}  // namespace

Network::Network(const ContinuousCall& call)
    : recurrent_(make_recurrent(call)),
      input_(make_input(call)),
      unit_amplitude_(call.unit_amplitude),
      lines_(call.lines),
      max_events_(call.max_events) {
    const size_t H = static_cast<size_t>(call.units), n = static_cast<size_t>(call.nodes);
    b_.assign(at<double>(call.b), at<double>(call.b) + 3 * H);
    theta_.assign(at<double>(call.theta), at<double>(call.theta) + H);
    for (const double theta : theta_)
        onset_.push_back(call.linear ? theta : theta < 1 ? std::atanh(theta) : std::numeric_limits<double>::infinity());
    if (call.taus != 0)
        taus_.assign(at<double>(call.taus), at<double>(call.taus) + 3 * H);
    else
        for (const double tau : {call.tau_s, call.tau_m, call.tau_o}) taus_.insert(taus_.end(), H, tau);
    const bool adaptive = call.beta != 0;
    if (adaptive) {
        beta_.assign(at<double>(call.beta), at<double>(call.beta) + H);
        tau_a_.assign(at<double>(call.tau_a), at<double>(call.tau_a) + H);
    }
    const double *tau_s = taus_.data(), *tau_m = tau_s + H;
    const double *x = at<double>(call.rule_x), *w = at<double>(call.rule_w), *A = at<double>(call.rule_A);
    rule_.resize(n * (n + 2));
    std::copy_n(x, n, rule_.data());
    std::copy_n(w, n, rule_.data() + n);
    std::copy_n(A, n * n, rule_.data() + 2 * n);
    // Points, weights and columns, padded to whole vectors of the widest level; see Model.
    const size_t stride = (n + 1 + 7) / 8 * 8;
    padded_rule_.assign(stride * (n + 2), 0);
    std::fill_n(padded_rule_.begin(), stride, 1.0);
    std::copy_n(x, n, padded_rule_.data());
    std::copy_n(w, n, padded_rule_.data() + stride);
    for (size_t j = 0; j < n; ++j) {
        double* column = padded_rule_.data() + (2 + j) * stride;
        for (size_t i = 0; i < n; ++i) column[i] = A[i * n + j];
        column[n] = w[j];
    }
    const double min_tau_s = *std::min_element(tau_s, tau_s + H), min_tau_m = *std::min_element(tau_m, tau_m + H);
    model_ = Model{call.units, call.linear, adaptive, call.taus == 0, min_tau_s, min_tau_m, 1 / min_tau_s,
                   1 / min_tau_m, tau_s, tau_m, tau_m + H, adaptive ? tau_a_.data() : tau_s, beta_.data(), b_.data(),
                   b_.data() + H, b_.data() + 2 * H, theta_.data(), onset_.data(),
                   call.receiver_reset && !call.linear, call.nodes, call.panel, rule_.data(),
                   rule_.data() + n, rule_.data() + 2 * n, static_cast<int>(stride), padded_rule_.data(),
                   padded_rule_.data() + stride,
                   padded_rule_.data() + 2 * stride};
    limit_events(call);
}

// The event limit: call.max_events, and that of the refractory times. After a reset a unit needs at least
// tau_m log(1 / (1 - theta)) to reach its threshold again, because u and z are at most 1. Linear units have no such bound.
void Network::limit_events(const ContinuousCall& call) {
    if (model_.linear) return;
    const double* horizons = at<double>(call.horizons);
    const double longest = *std::max_element(horizons, horizons + call.batch);
    double bound = 0;
    for (int n = 0; n < model_.units; ++n)
        if (model_.theta[n] < 1) bound += 1 + longest / (-model_.tau_m_of[n] * std::log1p(-model_.theta[n]));
    if (bound < double(max_events_)) max_events_ = static_cast<int64_t>(bound);
}

void Network::scatter(const FanOut& fan, const double* const gradient[3], double* to) const {
    const size_t H = static_cast<size_t>(model_.units), D = fan.start.size() - 1;
    if (fan.sparse) {
        for (int64_t g = 0; g < 3; ++g) {
            double* target = to + g * fan.connections;
            for (size_t k = 0; k < fan.origin.size(); ++k)
                if (fan.origin[k] >= 0) target[fan.origin[k]] = gradient[g][k];
            for (size_t n = 0; n < fan.self_absent.size(); ++n) {
                const int64_t origin = fan.origin[static_cast<size_t>(fan.start[n] + fan.self_position[n])];
                if (fan.self_absent[n] && origin >= 0) target[origin] = 0;
            }
        }
        return;
    }
    for (size_t g = 0; g < 3; ++g) {
        double* target = to + g * H * D;
        if (fan.dense) {
            for (size_t m0 = 0; m0 < H; m0 += tile)
                for (size_t n0 = 0; n0 < D; n0 += tile)
                    for (size_t m = m0; m < std::min(H, m0 + tile); ++m)
                        for (size_t n = n0; n < std::min(D, n0 + tile); ++n)
                            target[m * D + n] = gradient[g][n * H + m];
        } else {
            for (size_t n = 0; n < D; ++n)
                for (int64_t k = fan.start[n]; k < fan.start[n + 1]; ++k)
                    target[static_cast<size_t>(fan.index[static_cast<size_t>(k)]) * D + n] = gradient[g][k];
        }
        for (size_t n = 0; n < fan.self_absent.size(); ++n)
            if (fan.self_absent[n]) target[n * D + n] = 0;
    }
}

}  // namespace egru::continuous
