// Aligned memory, and weight matrices packed row by row for the streaming engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "engine/kernels.hpp"

namespace egru::engine {

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// Memory on a cache line; zeroed, and on huge pages where the system has them once it is large, or left untouched so
// that pages nobody writes cost nothing. Throws std::bad_alloc.
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
        void operator()(void* p) const { std::free(p); }
    };
    std::unique_ptr<T[], Free> data_;
    size_t size_ = 0;
};

// Where columns of the packed matrix come from: blocks of `width` rows of a (out, in) matrix as torch keeps it.
struct Block {
    int row;    // first output row in the source
    int width;  // columns taken; padded with zeros to `padded`
    int padded;
};

class PackedRows {
public:
    PackedRows() = default;
    // `source` is (outputs, inputs), row-major: one packed row per input, the blocks side by side.
    PackedRows(Weights kind, bool interleaved, const float* source, int inputs, const std::vector<Block>& blocks);
    Rows view() const;
    size_t bytes() const { return bytes_.size(); }

private:
    Weights kind_ = Weights::float32;
    int inputs_ = 0;
    int columns_ = 0;
    size_t stride_ = 0;
    Buffer<unsigned char> bytes_;
    Buffer<float> scale_;
};

}  // namespace egru::engine
