#include "engine/sparse.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

namespace egru::engine {
namespace {

constexpr double least_gain = 1.2;      // how much faster a sparse product must be; less may be noise
constexpr double fewest_zeros = 0.1;    // share of zero blocks below which sparse packing is not tried
constexpr int most_blocks = 1 << 16;    // columns are stored in 16 bits
constexpr int trials = 8;
constexpr int shared_inputs = 16;

size_t element_bytes(WeightFormat format) {
    return format == WeightFormat::float32 ? 4 : format == WeightFormat::bfloat16 ? 2 : 1;
}

// Copy the columns of a block in their natural order; the dense layout permutes bfloat16 and int8 columns.
void copy_block(const Rows& rows, bool interleaved, int row, int column, unsigned char* to) {
    const unsigned char* from = rows.base + static_cast<size_t>(row) * rows.stride;
    for (int i = 0; i < sparse_block; ++i) {
        const int position = dense_position(rows.format, interleaved, column + i);
        const size_t size = element_bytes(rows.format);
        std::memcpy(to + i * size, from + position * size, size);
    }
}

// Whether all values of a block are zero. Weights times a mask may be -0.
bool is_zero(WeightFormat format, const std::vector<unsigned char>& block) {
    const size_t size = element_bytes(format);
    for (size_t i = 0; i < block.size(); ++i)
        if ((size > 1 && i % size == size - 1 ? block[i] & 0x7f : block[i]) != 0) return false;
    return true;
}

}  // namespace

Packing parse_packing(const char* name) {
    if (std::strcmp(name, "auto") == 0) return Packing::automatic;
    if (std::strcmp(name, "dense") == 0) return Packing::dense;
    if (std::strcmp(name, "sparse") == 0) return Packing::sparse;
    throw std::invalid_argument("packing must be auto, dense or sparse, got " + std::string(name));
}

WeightMatrix::WeightMatrix(WeightFormat format, const EngineTable& table, const float* source, int inputs,
                           const std::vector<Block>& blocks, Packing packing, bool shared)
    : dense_(format, table.int8_interleaved, source, inputs, blocks) {
    const bool has_zeros = count_nonzero(source, inputs, blocks);
    if (packing == Packing::dense || dense_.view().columns / sparse_block > most_blocks) return;
    if (!has_zeros && packing != Packing::sparse) return;

    const Rows rows = dense_.view();
    sections_ = static_cast<int>(blocks.size());
    const size_t bytes = sparse_block * element_bytes(format);
    std::vector<uint16_t> ids;
    std::vector<unsigned char> values, one(bytes);
    start_ = Buffer<uint32_t>(static_cast<size_t>(inputs) * blocks.size() + 1);
    for (int k = 0; k < inputs; ++k) {
        int column = 0;
        for (size_t s = 0; s < blocks.size(); ++s) {
            start_[static_cast<size_t>(k) * blocks.size() + s] = static_cast<uint32_t>(ids.size());
            for (const int end = column + blocks[s].padded; column < end; column += sparse_block) {
                copy_block(rows, table.int8_interleaved, k, column, one.data());
                if (is_zero(format, one)) continue;
                ids.push_back(static_cast<uint16_t>(column / sparse_block));
                values.insert(values.end(), one.begin(), one.end());
            }
        }
    }
    start_[static_cast<size_t>(inputs) * blocks.size()] = static_cast<uint32_t>(ids.size());
    const double all = static_cast<double>(inputs) * rows.columns / sparse_block;
    if (packing == Packing::automatic && static_cast<double>(ids.size()) > (1 - fewest_zeros) * all) return;
    block_ = Buffer<uint16_t>(ids.size() + 1);  // never empty, so that an empty matrix counts as sparse
    std::copy(ids.begin(), ids.end(), block_.data());
    values_ = Buffer<unsigned char>(values.size() + 1);
    std::copy(values.begin(), values.end(), values_.data());
    if (packing == Packing::automatic && !is_faster_sparse(table, shared))
        block_ = Buffer<uint16_t>();
    else
        dense_.release();
    if (!is_sparse()) {
        values_ = Buffer<unsigned char>();
        start_ = Buffer<uint32_t>();
    }
}

// Count the non-zero weights of each row and find which groups of outputs they belong to. Returns whether a weight is
// zero.
bool WeightMatrix::count_nonzero(const float* source, int inputs, const std::vector<Block>& blocks) {
    const size_t rows = static_cast<size_t>(inputs);
    const int groups = blocks.front().padded / sparse_block;
    words_ = (static_cast<size_t>(groups) + 63) / 64;
    nonzero_.assign(rows, 0);
    reach_.assign(rows * words_, 0);
    for (const Block& block : blocks) {
        weights_per_row_ += block.width;
        for (int i = 0; i < block.width; ++i) {
            const float* weights = source + static_cast<size_t>(block.row + i) * rows;
            const size_t word = static_cast<size_t>(i / sparse_block / 64);
            const int bit = i / sparse_block % 64;
            for (size_t k = 0; k < rows; ++k) {
                nonzero_[k] += weights[k] != 0;
                reach_[k * words_ + word] |= static_cast<uint64_t>(weights[k] != 0) << bit;
            }
        }
    }
    if (std::all_of(nonzero_.begin(), nonzero_.end(), [&](int count) { return count == weights_per_row_; })) {
        nonzero_.clear();
        reach_.clear();
        return false;
    }
    int64_t reached = 0;
    for (const uint64_t word : reach_) reached += __builtin_popcountll(word);
    mean_reach_ = static_cast<double>(reached) / (static_cast<double>(inputs) * groups);
    return true;
}

Rows WeightMatrix::view() const { return is_sparse() ? sparse_view() : dense_.view(); }

Rows WeightMatrix::sparse_view() const {
    Rows rows = dense_.view();
    rows.sections = sections_;
    rows.start = start_.data();
    rows.block = block_.data();
    rows.values = values_.data();
    return rows;
}

size_t WeightMatrix::bytes() const {
    return is_sparse() ? start_.size() * sizeof(uint32_t) + block_.size() * sizeof(uint16_t) + values_.size()
                       : dense_.bytes();
}

int64_t WeightMatrix::macs(const SparseVector& x) const {
    if (nonzero_.empty()) return static_cast<int64_t>(x.count) * weights_per_row_;
    int64_t total = 0;
    for (int k = 0; k < x.count; ++k) total += nonzero_[static_cast<size_t>(x.index[k])];
    return total;
}

// Time both layouts with a tenth of the inputs active, 16 vectors in turn as in a sequence, and compare the fastest
// trials.
bool WeightMatrix::is_faster_sparse(const EngineTable& table, bool shared) const {
    const Rows dense = dense_.view(), sparse = sparse_view();
    const int inputs = dense.count, columns = dense.columns;
    const int stride = std::max(1, std::min(10, inputs / 4)), count = inputs / stride;
    const size_t entries = static_cast<size_t>(count) + 16;
    Buffer<int32_t> index(entries * shared_inputs), integers(static_cast<size_t>(columns)), quantised_index(entries);
    Buffer<uint8_t> q(entries);
    Buffer<float> value(entries * shared_inputs), sum(static_cast<size_t>(columns) * shared_inputs);
    std::vector<SparseVector> x;
    for (int m = 0; m < shared_inputs; ++m) {
        x.push_back(SparseVector{index.data() + m * entries, value.data() + m * entries, count});
        for (int i = 0; i < count; ++i) {
            x[m].index[i] = std::min(inputs - 1, i * stride + (i * 7 + m * 3) % stride);
            x[m].value[i] = 1;
        }
    }
    QuantisedVector quantised{quantised_index.data(), q.data(), 0, 0, 0};
    const auto product = [&](const Rows& rows, const SparseVector& input, float* to) {
        if (rows.format == WeightFormat::int8) {
            table.quantise(input, &quantised);
            (rows.sections ? table.add_blocks_int8 : table.add_rows_int8)(rows, 0, columns, quantised, integers.data(), to);
        } else {
            (rows.sections ? table.add_blocks : table.add_rows)(rows, 0, columns, input, to);
        }
    };
    const auto seconds = [](auto work) {
        const auto start = std::chrono::steady_clock::now();
        work();
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    const auto compare = [&](auto run_dense, auto run_sparse) {
        double times[2] = {1e9, 1e9};
        for (int trial = 0; trial < trials; ++trial) {
            times[0] = std::min(times[0], seconds(run_dense));
            times[1] = std::min(times[1], seconds(run_sparse));
        }
        return times[0] > least_gain * times[1];
    };
    const bool alone = compare(
        [&] {
            for (const SparseVector& input : x) product(dense, input, sum.data());
        },
        [&] {
            for (const SparseVector& input : x) product(sparse, input, sum.data());
        });
    if (!alone || !shared || dense.format == WeightFormat::int8) return alone;
    return compare(
        [&] { table.project(dense, 0, columns, x.data(), shared_inputs, sum.data(), sum.data(), columns); },
        [&] {
            for (int m = 0; m < shared_inputs; ++m) product(sparse, x[m], sum.data() + static_cast<size_t>(m) * columns);
        });
}

}  // namespace egru::engine
