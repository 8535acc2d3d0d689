#include "engine/packed.hpp"

#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace egru::engine {
namespace {

constexpr size_t line = 64;
constexpr size_t huge = size_t{2} << 20;

uint16_t to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // round to nearest, ties to even
}

// The position of column i in a block of 32 bfloat16 values, and in a block of 64 interleaved int8 values.
int bfloat16_position(int i) { return i < 16 ? 2 * i : 2 * (i - 16) + 1; }
int int8_position(int i) { return 16 * (i % 16 / 4) + 4 * (i / 16) + i % 4; }

}  // namespace

int dense_position(WeightFormat format, bool interleaved, int column) {
    if (format == WeightFormat::bfloat16) return column / 32 * 32 + bfloat16_position(column % 32);
    if (format == WeightFormat::int8 && interleaved) return column / 64 * 64 + int8_position(column % 64);
    return column;
}

WeightFormat parse_weight_format(const char* name) {
    if (std::strcmp(name, "float32") == 0) return WeightFormat::float32;
    if (std::strcmp(name, "bfloat16") == 0) return WeightFormat::bfloat16;
    if (std::strcmp(name, "int8") == 0) return WeightFormat::int8;
    throw std::invalid_argument("weights must be float32, bfloat16 or int8, got " + std::string(name));
}

void* allocate(size_t bytes, bool untouched) {
    const size_t unit = bytes >= huge && !untouched ? huge : line;
    const size_t padded = (bytes + line + unit - 1) / unit * unit;  // one extra line: kernels may read past the end
    void* p = allocate_aligned(unit, padded, unit == huge);
    if (p == nullptr) throw std::bad_alloc();
    if (!untouched) std::memset(p, 0, padded);
    return p;
}

PackedRows::PackedRows(WeightFormat format, bool interleaved, const float* source, int inputs,
                       const std::vector<Block>& blocks)
    : format_(format), inputs_(inputs) {
    for (const Block& block : blocks) columns_ += block.padded;
    const size_t element = format == WeightFormat::float32 ? 4 : format == WeightFormat::bfloat16 ? 2 : 1;
    // With an odd number of cache lines per row, a column of successive rows spreads over all sets of a cache.
    stride_ = (columns_ * element + line - 1) / line * line;
    if (stride_ / line % 2 == 0) stride_ += line;
    bytes_ = Buffer<unsigned char>(stride_ * static_cast<size_t>(inputs));
    if (format == WeightFormat::int8) scale_ = Buffer<float>(static_cast<size_t>(columns_));

    int first = 0;
    for (const Block& block : blocks) {
        for (int i = 0; i < block.width; ++i) {
            const float* weights = source + static_cast<size_t>(block.row + i) * inputs;
            const int column = first + i, position = dense_position(format, interleaved, column);
            float scale = 1;
            if (format == WeightFormat::int8) {
                float largest = 0;
                for (int k = 0; k < inputs; ++k) largest = std::fmax(largest, std::fabs(weights[k]));
                scale = largest > 0 ? largest / 127.0f : 1.0f;
                scale_[column] = scale;
            }
            for (int k = 0; k < inputs; ++k) {
                unsigned char* row = bytes_.data() + static_cast<size_t>(k) * stride_;
                if (format == WeightFormat::float32)
                    reinterpret_cast<float*>(row)[position] = weights[k];
                else if (format == WeightFormat::bfloat16)
                    reinterpret_cast<uint16_t*>(row)[position] = to_bfloat16(weights[k]);
                else
                    reinterpret_cast<int8_t*>(row)[position] = static_cast<int8_t>(std::nearbyint(weights[k] / scale));
            }
        }
        first += block.padded;
    }
}

Rows PackedRows::view() const {
    return Rows{format_, bytes_.data(), stride_, inputs_, columns_, scale_.size() ? scale_.data() : nullptr, 0, nullptr, nullptr, nullptr};
}

}  // namespace egru::engine
