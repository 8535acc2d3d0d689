// Memory layouts that the training kernels share.
//
// Units are divided into blocks of 32, and the rows that multiply them into tiles of 64. A matrix is stored as panels
// of 32 columns, panel[block][row][32]. The tiles of three panels (24 KB of float32) stay in the first-level cache
// while all batch rows pass over them.
#pragma once

#include "common/simd.hpp"

namespace egru::EGRU_LEVEL {
namespace {

constexpr int block = 32;       // units per block, columns per panel
constexpr int tile = 64;        // rows of a panel that are processed together
constexpr int panels_max = 12;  // panels per dot product: 16 rows of them fill the first-level cache
constexpr int rows_max = 16;    // rows per dot product
constexpr int dots_max = registers / 2;  // accumulators that leave room for operands

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Divides a workspace into arrays that start on cache lines. With base 0 it only counts bytes.
class Arena {
public:
    explicit Arena(uintptr_t base) : base_(base), at_(base) {}
    template <class E>
    E* take(int64_t count) {
        at_ = (at_ + 63) / 64 * 64;
        E* result = reinterpret_cast<E*>(at_);
        at_ += (uintptr_t)count * sizeof(E);
        return result;
    }
    int64_t bytes() const { return (int64_t)(at_ - base_) + 64; }
    // Reserve what `other`, a copy of this arena, took as well: the two sets of arrays are never used at the same time.
    void cover(const Arena& other) { at_ = at_ > other.at_ ? at_ : other.at_; }

private:
    uintptr_t base_, at_;
};

// Addresses of the batch rows of a (T, B, width) tensor. Step -1 is the initial state, if there is one.
template <class S>
struct Steps {
    const S* base;
    int64_t step, row;
    const S* before = nullptr;
    int64_t before_row = 0;

    const S* at(int t, int s) const { return t < 0 ? before + s * before_row : base + t * step + s * row; }
};

}  // namespace
}  // namespace egru::EGRU_LEVEL
