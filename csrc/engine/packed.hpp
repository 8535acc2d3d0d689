// Aligned memory, and weight matrices packed for the streaming engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/memory.hpp"
#include "engine/kernels.hpp"

namespace egru::engine {

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// Allocate memory aligned to cache lines. It is zeroed, and large allocations use huge pages if the system has them.
// If `untouched`, it is neither: pages that are never written then take no memory. Throws std::bad_alloc.
void* allocate(size_t bytes, bool untouched = false);

template <class T>
class Buffer {
public:
    Buffer() = default;
    explicit Buffer(size_t count, bool untouched = false)
        : data_(static_cast<T*>(allocate(count * sizeof(T), untouched))), size_(count) {}
    T* data() { return data_.get(); }
    const T* data() const { return data_.get(); }
    size_t size() const { return size_; }
    T& operator[](size_t i) { return data_.get()[i]; }
    const T& operator[](size_t i) const { return data_.get()[i]; }

private:
    struct Free {
        void operator()(void* p) const { free_aligned(p); }
    };
    std::unique_ptr<T[], Free> data_;
    size_t size_ = 0;
};

// A block of columns of the packed matrix: `width` rows of an (outputs, inputs) matrix in torch's layout.
struct Block {
    int row;     // first row in the source
    int width;   // number of columns
    int padded;  // number of columns after padding with zeros
};

// The place of a column in a row of the dense layout.
int dense_position(WeightFormat format, bool interleaved, int column);

// Owner of a packed matrix; see `Rows` for the layout.
class PackedRows {
public:
    PackedRows() = default;
    // `source` is (outputs, inputs), row-major. The packed matrix has one row per input and the blocks side by side.
    PackedRows(WeightFormat format, bool interleaved, const float* source, int inputs,
               const std::vector<Block>& blocks);
    Rows view() const;
    size_t bytes() const { return bytes_.size(); }
    // Free the weights, but keep the scales.
    void release() { bytes_ = Buffer<unsigned char>(); }

private:
    WeightFormat format_ = WeightFormat::float32;
    int inputs_ = 0;
    int columns_ = 0;
    size_t stride_ = 0;
    Buffer<unsigned char> bytes_;
    Buffer<float> scale_;
};

}  // namespace egru::engine
