// Operations on NEON vectors that the vector extensions of the compiler lack. Internal linkage: see levels.hpp.
#pragma once

#ifdef EGRU_NEON
#include <arm_neon.h>

#include <cstdint>

namespace egru::EGRU_LEVEL {
namespace {
namespace arm {

// Bit i is set if lane i of `condition` is true. Lanes are all ones or all zeros.
inline uint32_t bits(uint32x4_t condition) {
    const uint32x4_t places = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(condition, places));
}
inline uint32_t bits(uint64x2_t condition) {
    return static_cast<uint32_t>((vgetq_lane_u64(condition, 0) & 1) | (vgetq_lane_u64(condition, 1) & 2));
}

// For each mask of four lanes: the bytes of the lanes in the mask, packed; their numbers, one per byte; their count.
struct Packing {
    alignas(16) uint8_t bytes[16][16];
    uint32_t lanes[16];
    uint8_t count[16];
};
constexpr Packing make_packing() {
    Packing packing{};
    for (int mask = 0; mask < 16; ++mask) {
        int count = 0;
        for (int lane = 0; lane < 4; ++lane) {
            if ((mask >> lane & 1) == 0) continue;
            for (int i = 0; i < 4; ++i) packing.bytes[mask][4 * count + i] = static_cast<uint8_t>(4 * lane + i);
            packing.lanes[mask] |= static_cast<uint32_t>(lane) << (8 * count);
            ++count;
        }
        packing.count[mask] = static_cast<uint8_t>(count);
    }
    return packing;
}
constexpr Packing packing = make_packing();

// The lanes of `v` that are set in `mask`, packed; then any values.
inline uint8x16_t compress(uint8x16_t v, uint32_t mask) { return vqtbl1q_u8(v, vld1q_u8(packing.bytes[mask])); }

}  // namespace arm
}  // namespace
}  // namespace egru::EGRU_LEVEL
#endif
