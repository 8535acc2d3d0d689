#include "engine/packed.hpp"

#include <cmath>
#include <cstring>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace egru::engine {
namespace {

constexpr size_t line = 64;
constexpr size_t huge = size_t{2} << 20;

uint16_t to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
}

// Position of column i within its block of 32 bfloat16 values, or of 64 interleaved int8 values.
int place_bfloat16(int i) { return i < 16 ? 2 * i : 2 * (i - 16) + 1; }
int place_int8(int i) { return 16 * (i % 16 / 4) + 4 * (i / 16) + i % 4; }

}  // namespace

void* allocate(size_t bytes, bool untouched) {
    const size_t unit = bytes >= huge && !untouched ? huge : line;
    const size_t padded = (bytes + line + unit - 1) / unit * unit;  // a line to spare: kernels may read a vector past
    void* p = std::aligned_alloc(unit, padded);
    if (p == nullptr) throw std::bad_alloc();
#ifdef __linux__
    if (unit == huge) madvise(p, padded, MADV_HUGEPAGE);
#endif
    if (!untouched) std::memset(p, 0, padded);
    return p;
}

PackedRows::PackedRows(Weights kind, bool interleaved, const float* source, int inputs,
                       const std::vector<Block>& blocks)
    : kind_(kind), inputs_(inputs) {
    for (const Block& block : blocks) columns_ += block.padded;
    const size_t element = kind == Weights::float32 ? 4 : kind == Weights::bfloat16 ? 2 : 1;
    // An odd number of cache lines: equal columns of successive rows then spread over all sets of a cache.
    stride_ = (columns_ * element + line - 1) / line * line;
    if (stride_ / line % 2 == 0) stride_ += line;
    bytes_ = Buffer<unsigned char>(stride_ * static_cast<size_t>(inputs));
    if (kind == Weights::int8) scale_ = Buffer<float>(static_cast<size_t>(columns_));

    int at = 0;
    for (const Block& block : blocks) {
        for (int i = 0; i < block.width; ++i) {
            const float* weights = source + static_cast<size_t>(block.row + i) * inputs;
            const int column = at + i;
            float scale = 1;
            if (kind == Weights::int8) {
                float largest = 0;
                for (int k = 0; k < inputs; ++k) largest = std::fmax(largest, std::fabs(weights[k]));
                scale = largest > 0 ? largest / 127.0f : 1.0f;
                scale_[column] = scale;
            }
            for (int k = 0; k < inputs; ++k) {
                unsigned char* row = bytes_.data() + static_cast<size_t>(k) * stride_;
                if (kind == Weights::float32) {
                    reinterpret_cast<float*>(row)[column] = weights[k];
                } else if (kind == Weights::bfloat16) {
                    reinterpret_cast<uint16_t*>(row)[column / 32 * 32 + place_bfloat16(column % 32)] =
                        to_bfloat16(weights[k]);
                } else {
                    const int place = interleaved ? column / 64 * 64 + place_int8(column % 64) : column;
                    reinterpret_cast<int8_t*>(row)[place] = static_cast<int8_t>(std::nearbyint(weights[k] / scale));
                }
            }
        }
        at += block.padded;
    }
}

Rows PackedRows::view() const {
    return Rows{kind_, bytes_.data(), stride_, inputs_, columns_, scale_.size() ? scale_.data() : nullptr};
}

}  // namespace egru::engine
