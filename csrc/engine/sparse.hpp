// Packed matrices without their zero blocks, for pruned weights.
//
// A block is `sparse_block` consecutive columns of one row. The blocks of a row are stored one after the other, in the
// order of their columns, so that an active input reads only its non-zero blocks. Results have the same bits as those of
// the dense layout: a zero weight does not change a sum.
#pragma once

#include "engine/packed.hpp"

namespace egru::engine {

enum class Packing : int { automatic, dense, sparse };
Packing parse_packing(const char* name);  // throws std::invalid_argument if there is no such packing

// A matrix that is packed densely, without zero blocks, or in the way that is faster for this matrix.
class WeightMatrix {
public:
    WeightMatrix() = default;
    // As PackedRows. If `shared`, products with several inputs at once are measured too.
    WeightMatrix(WeightFormat format, const EngineTable& table, const float* source, int inputs,
                 const std::vector<Block>& blocks, Packing packing, bool shared);
    Rows view() const;
    size_t bytes() const;
    bool is_sparse() const { return block_.size() != 0; }
    // Number of multiply-adds with a non-zero weight of the product with `x`.
    int64_t macs(const SparseVector& x) const;
    // Which groups of `sparse_block` outputs a row has non-zero weights to, in any section: one bit per group, in
    // `words` words. Null if no weight is zero.
    const uint64_t* reach(int row) const {
        return reach_.empty() ? nullptr : reach_.data() + static_cast<size_t>(row) * words_;
    }
    // The mean fraction of groups that a row has non-zero weights to.
    double mean_reach() const { return mean_reach_; }

private:
    bool count_nonzero(const float* source, int inputs, const std::vector<Block>& blocks);
    bool is_faster_sparse(const EngineTable& table, bool shared) const;
    Rows sparse_view() const;

    PackedRows dense_;
    int sections_ = 0;               // blocks of columns, such as gates
    Buffer<uint32_t> start_;         // (inputs * sections + 1): first block of each section of each row
    Buffer<uint16_t> block_;         // column of each block / sparse_block
    Buffer<unsigned char> values_;   // sparse_block values per block
    std::vector<int32_t> nonzero_;   // per row, empty if no weight is zero
    std::vector<uint64_t> reach_;    // (inputs, words_), empty if no weight is zero
    size_t words_ = 0;
    double mean_reach_ = 1;
    int weights_per_row_ = 0;
};

}  // namespace egru::engine
