// The gates of the LSTM, which the forward and the backward pass share.
//
// The state has a memory cell c and the events y = o * tanh(c). The threshold is compared with c, or with o * tanh(c) if
// call.compare_output; call.c receives what is compared. In the second case the memory cells are kept separately: those
// of the previous step in the workspace, and for the backward pass all of them in call.cells[t][b][s][32].
#pragma once

#include "sequence/layer.hpp"

namespace egru::EGRU_LEVEL {
namespace {

enum LstmGate { In, Forget, Candidate, Out };  // torch's order
constexpr int lstm_gates = 4;
constexpr int lstm_together = Columns<float>::capacity / (2 * lstm_gates);  // blocks that are gathered together

inline int lstm_blocks_together(int left) { return left < lstm_together ? left : lstm_together; }

// The gates of block b at one step, from the input products p and the recurrent products h.
template <class S>
inline void gates_lstm(const Layer<S>& layer, int b, const S* const* p, const S* const* h, S* const* gate) {
    for (int s = 0; s < layer.B; ++s)
        for (int i = s * block; i < s * block + layer.units(b); i += lanes<S>)
            for (int g = 0; g < lstm_gates; ++g) {
                const Vector<S> a = load<S>(p[g] + i) + load<S>(h[g] + i);
                store<S>(gate[g] + i, g == Candidate ? hyperbolic_tangent(a) : sigmoid(a));
            }
}

// The saved memory cells of block b at step t: [s][32].
template <class S>
inline S* saved_cells(const Layer<S>& layer, int t, int b) {
    return layer.as(layer.call.cells) + ((int64_t)t * layer.blocks + b) * layer.B * block;
}

}  // namespace
}  // namespace egru::EGRU_LEVEL
