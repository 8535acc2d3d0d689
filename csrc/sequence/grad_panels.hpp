// Accumulators of the weight gradients.
#pragma once

#include "sequence/layer.hpp"

namespace egru::EGRU_LEVEL {
namespace {

// A weight gradient is accumulated in panels, panel(gate * blocks + b)[source][32], inside the memory of the result. A
// panel is as large as the rows of the result that it becomes, except for a last block with fewer units. That block is
// stored in `spare`, which leaves room for the others to start on a cache line.
template <class S>
struct GradPanels {
    S *result, *spare;
    int H, width, blocks, gates;

    GradPanels() = default;
    GradPanels(Arena& arena, const Layer<S>& layer, uintptr_t result_, int width_)
        : result(layer.as(result_)), H(layer.H), width(width_), blocks(layer.blocks), gates(layer.weight_gates) {
        spare = arena.take<S>(gates * (narrow() ? blocks : 1) * size());
    }
    int64_t size() const { return (int64_t)width * block; }
    S* panel(int p) const {
        const int gate = p / blocks, b = p % blocks;
        if (narrow()) return spare + p * size();
        if ((b + 1) * block > H) return spare + gate * size();
        const uintptr_t start = reinterpret_cast<uintptr_t>(result + (int64_t)gate * H * width);
        return reinterpret_cast<S*>(H % block ? (start + 63) / 64 * 64 : start) + b * size();
    }
    // Convert the panels to torch's (gates * H, width) in place. `buffer` has room for two panels.
    void unpack(const Team& team, S* buffer) const {
        const int from = team.begin(gates * blocks), to = team.end(gates * blocks);
        S *current = buffer, *last = buffer + size();
        if (from < to) __builtin_memcpy(last, panel(to - 1), size() * sizeof(S));  // the next thread may overwrite it
        team.meet();
        for (int p = from; p < to; ++p) {
            const int gate = p / blocks, b = p % blocks, units = H - b * block < block ? H - b * block : block;
            if (p < to - 1) __builtin_memcpy(current, panel(p), size() * sizeof(S));
            const S* values = p < to - 1 ? current : last;
            for (int n0 = 0; n0 < width; n0 += tile)
                for (int i = 0; i < units; ++i) {
                    S* row = result + ((int64_t)gate * H + b * block + i) * width;
                    for (int n = n0; n < n0 + tile && n < width; ++n) row[n] = values[(int64_t)n * block + i];
                }
        }
        team.meet();
    }

private:
    bool narrow() const { return width < 2 * block; }
};

}  // namespace
}  // namespace egru::EGRU_LEVEL
